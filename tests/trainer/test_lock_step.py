"""`max_staleness = 0` is the synchronous algorithm, bit by bit: a plain loop written here gives the same weights."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sao_gym.budgets import Budgets
from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.commands.composition import load_trainee
from sao_gym.commands.train import main
from sao_gym.config import resolve
from sao_gym.engines.local import LocalEngine
from sao_gym.engines.scripted import Completion, ScriptedEngine
from sao_gym.ledger import Ledger, LedgerRow
from sao_gym.loops import run_blocking
from sao_gym.models import copy_model
from sao_gym.protocols import Engine, Sampling, Task
from sao_gym.rollout import EnvPool, Episode, white_box
from sao_gym.runfolder import RunFolder
from sao_gym.stream import Floats, Ids, Trajectory
from sao_gym.tasks.base import ListTaskSet
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.events import EventLog
from sao_gym.trainer.files import row_uid
from sao_gym.trainer.learner import Learner
from sao_gym.trainer.loop import Parts, Training
from sao_gym.trainer.plan import make_plan
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.publish import make_probe
from sao_gym.trainer.runtime import Runtime, RuntimeOptions
from sao_gym.trainer.staleness import Outstanding

STEPS = 6
BATCH = 4


def config_of(crash: ModuleType, model: Path) -> TrainConfig:
    words = [*crash.words(model, 0, is_lock_step=True), "--steps", str(STEPS)]
    return resolve(TrainConfig, overrides=words).config


class PlainLoop:
    """Sample B episodes one after another, learn, publish, again: the algorithm without a runtime."""

    def __init__(self, crash: ModuleType, config: TrainConfig, make_engine: Callable[[Learner], Engine]) -> None:
        trainee = load_trainee(config, None, SystemClock())
        self.config, self.learner = config, trainee.learner
        self.engine = make_engine(self.learner)
        chat = make_chat(trainee.tokenizer, "auto", describe_tools=None)
        tasks = crash.Parity().tasks
        self.order = PromptOrder(ListTaskSet("parity", list(tasks)), config.seed)
        self.pool = EnvPool(crash.Parity, chat, Budgets(max_tokens_per_turn=6), context_length=128)
        self.drawn = 0
        self.left_over: list[tuple[int, Task, int]] = []

    def prompts(self) -> list[tuple[int, Task, int]]:
        """The next B prompts, all different: one that a batch has already comes first in the next."""
        chosen: list[tuple[int, Task, int]] = []
        waiting, self.left_over = self.left_over, []
        while len(chosen) < BATCH:
            if waiting:
                number, task, attempt = waiting.pop(0)
            else:
                task, attempt = self.order[self.drawn]
                self.drawn += 1
                number = self.drawn
            is_new = task.id not in {other.id for _, other, _ in chosen}
            (chosen if is_new else self.left_over).append((number, task, attempt))
        self.left_over += waiting
        return sorted(chosen, key=lambda prompt: prompt[0])

    async def episode(self, number: int, task: Task, attempt: int) -> Trajectory:
        episode = Episode(uid=row_uid(number), task=task, env_id="parity", attempt=attempt, run_seed=self.config.seed)
        async with self.pool.lease() as env:
            return await white_box(env, self.engine, episode, sampling=Sampling(max_tokens=128), clock=SystemClock())

    def run(self) -> list[str]:
        """The hash of the weights after each step."""
        hashes, version = [], 0
        for step in range(STEPS):
            rows = [run_blocking(self.episode(*prompt)) for prompt in self.prompts()]
            trains_actor = step >= self.config.critic.only_steps
            plan = make_plan(
                rows,
                self.config,
                batch=step,
                actor_batches=version,
                version=version,
                trains_actor=trains_actor,
            )
            self.learner.step(plan)
            source = self.learner.weights()
            hashes.append(source.weight_hash)
            if trains_actor:
                version += 1
                run_blocking(self.engine.publish(source, version))
        return hashes


def test_with_the_local_engine_in_deterministic_mode(crash: ModuleType, tiny_model: Path, tmp_path: Path) -> None:
    def engine(learner: Learner) -> Engine:
        return LocalEngine(copy_model(learner.model), context_length=128, deterministic=True, threads=1)

    loop = PlainLoop(crash, config_of(crash, tiny_model), engine)
    plain = loop.run()
    run_blocking(loop.engine.close())
    given = crash.words(tiny_model, 0, is_lock_step=True)
    assert main([*given, "--steps", str(STEPS), "--out", str(tmp_path / "r")]) == 0
    records = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [record["weight_hash"] for record in records] == plain
    assert len(set(plain)) == STEPS, "every step but the critic's own moved the weights"
    assert all(record["staleness_max"] == 0 for record in records)


class Echo(ScriptedEngine):
    """Says ids that depend on the prompt alone, and scores as the learner does: publications are believed."""

    def __init__(self, learner: Learner, latency_s: float = 0.0) -> None:
        def say(prompt: Ids) -> Completion:
            rng = np.random.default_rng([int(token_id) for token_id in prompt])
            n = int(rng.integers(1, 7))
            return Completion([int(i) for i in rng.integers(5, 100, n)], [-5.6] * n)

        super().__init__(say, context_length=128, latency_s=lambda n: latency_s * (7 - n))
        self._learner = learner

    async def score(self, token_ids: Ids, temperature: float = 1.0) -> Floats:
        """The learner's own log-probs."""
        return make_probe(self._learner.bare_actor, token_ids).logprobs


@pytest.mark.parametrize("latency_s", [0.0, 0.002])
def test_with_the_scripted_engine(crash: ModuleType, tiny_model: Path, tmp_path: Path, latency_s: float) -> None:
    """Also where rows end in another order than they began in."""
    config = config_of(crash, tiny_model)
    plain = PlainLoop(crash, config, Echo).run()
    assert trained_by_the_runtime(crash, config, tmp_path, latency_s) == plain
    assert len(set(plain)) == STEPS


def trained_by_the_runtime(crash: ModuleType, config: TrainConfig, folder: Path, latency_s: float) -> list[str]:
    clock = SystemClock()
    trainee = load_trainee(config, None, clock)
    engine = Echo(trainee.learner, latency_s)
    chat = make_chat(trainee.tokenizer, "auto", describe_tools=None)
    pool = EnvPool(crash.Parity, chat, Budgets(max_tokens_per_turn=6), context_length=128)

    async def run_episode(row: LedgerRow, task: Task, on_version: Any) -> Trajectory:
        episode = Episode(
            uid=row_uid(row.number), task=task, env_id="parity", attempt=row.attempt, run_seed=config.seed
        )
        async with pool.lease() as env:
            return await white_box(
                env, engine, episode, sampling=Sampling(max_tokens=128), clock=clock, on_version=on_version
            )

    ledger = Ledger(":memory:")
    runtime = Runtime(
        ledger=ledger,
        order=PromptOrder(ListTaskSet("parity", list(crash.Parity().tasks)), config.seed),
        rule=Outstanding(batch_rows=BATCH, max_staleness=0),
        engine_version=lambda: engine.version,
        run_episode=run_episode,
        clock=clock,
        options=RuntimeOptions(deadline_s=60.0),
    )
    lines: list[dict[str, Any]] = []
    with RunFolder.create(folder / "run") as run:
        parts = Parts(
            config=config,
            folder=run,
            ledger=ledger,
            learner=trainee.learner,
            engine=engine,
            runtime=runtime,
            clock=clock,
            tokenizer=trainee.tokenizer,
            events=EventLog(clock),
        )
        Training(parts, trainee.state, on_step=lines.append).run()
    ledger.close()
    return [line["weight_hash"] for line in lines]
