"""Failures of every listed kind, a tenth of all episodes: the run goes on, and the ledger's counts close (trap 15)."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sao_gym.budgets import Budgets
from sao_gym.clock import VirtualClock
from sao_gym.core import AgentEnv, Reply
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.errors import DeadlineError, EngineError, GradingError, SandboxError
from sao_gym.ledger import Ledger, LedgerRow, RowStatus
from sao_gym.messages import Message
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Generation, Sampling, Task
from sao_gym.rollout import POISONED, EnvPool, Episode, require_sound, white_box
from sao_gym.stream import Ids, Outcome, Score, StopReason, Trajectory
from sao_gym.tasks.base import ListTaskSet
from sao_gym.tokenizer import train_tokenizer
from sao_gym.trainer.failures import ErrorBudget
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.runtime import EpisodesFailedError, Runtime, RuntimeOptions
from sao_gym.trainer.staleness import Outstanding

OF_ENV = {
    "sandbox": lambda: SandboxError("the container died"),
    "MemoryError": lambda: MemoryError("out of memory"),
    "timeout": lambda: SandboxError("no answer in time", kind="timeout"),
}
OF_JUDGE = {
    "judge_429": lambda: GradingError("429 Too Many Requests", kind="judge_429"),
    "judge_500": lambda: GradingError("500 Internal Server Error", kind="judge_500"),
}
OF_ENGINE = ("engine", "DeadlineError", "lengths", "nan", "positive", "falling")
KINDS = {*OF_ENV, *OF_JUDGE, "engine", "DeadlineError", POISONED}
TASKS = [Task(id=f"t{i}", prompt=f"{i}") for i in range(24)]


class Fate:
    """Which try of which row fails, and how: a tenth of all tries, all kinds alike."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._draw = random.Random(3)
        self.drawn: Counter[str] = Counter()
        self.tries = 0

    def next(self) -> str | None:
        self.tries += 1
        if self._draw.random() >= self._share:
            return None
        kind = self._draw.choice([*OF_ENV, *OF_JUDGE, *OF_ENGINE])
        self.drawn[kind if kind not in ("lengths", "nan", "positive", "falling") else POISONED] += 1
        return kind


class Frail(AgentEnv):
    """Fails as its fate has it; all of it awaits, so that it lives under the virtual clock."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(TASKS)
        self.fate: str | None = None
        self._clock = clock

    async def setup(self, task: Task) -> None: ...

    async def opening(self, task: Task) -> list[Message]:
        return [Message(role="user", content=task.prompt)]

    async def respond(self, message: Message) -> Reply:
        await self._clock.sleep(1.0)
        if self.fate in OF_ENV:
            raise OF_ENV[self.fate]()
        return Reply(is_final=True)

    async def grade(self) -> Score:
        if self.fate in OF_JUDGE:
            raise OF_JUDGE[self.fate]()
        return Score(value=1.0, passed=True)

    async def teardown(self) -> None: ...


class Poisonous(ScriptedEngine):
    """Answers a session of bad fate with what no engine may answer, dies for it, or stalls."""

    fates: dict[str, str | None]

    async def generate(self, token_ids: Ids, sampling: Sampling, session: str | None = None) -> Generation:
        made = await super().generate(token_ids, sampling, session)
        fate = self.fates.get(session or "")
        n = len(made.token_ids)
        if fate == "engine":
            raise EngineError("the engine died")
        if fate == "DeadlineError":
            await self._clock.sleep(100.0)
            raise DeadlineError("waited 100 s for a generation")
        if fate == "lengths":
            return replace(made, logprobs=made.logprobs[:-1])
        if fate == "nan":
            return replace(made, logprobs=np.full(n, math.nan, dtype=np.float32))
        if fate == "positive":
            return replace(made, logprobs=np.full(n, 0.5, dtype=np.float32))
        if fate == "falling":
            return replace(made, versions=np.arange(n, 0, -1, dtype=np.int32))
        return made


class Weights:
    """A made-up publication."""

    names = ()
    weight_hash = "w"

    def tensors(self) -> Any:
        return iter(())


class Injected:
    """A runtime over real episodes of a frail environment and a poisonous engine, under a virtual clock."""

    def __init__(self, share: float, budget: ErrorBudget | None = None, **options: Any) -> None:
        self.clock = VirtualClock()
        self.fate = Fate(share)
        chat = OwnChat(train_tokenizer(["a?"] * 4, vocab_size=268))
        said = [70, 71, chat.stop_token_ids[0]]
        self.engine = Poisonous(lambda prompt: said, latency_s=1.0, clock=self.clock)
        self.engine.fates = {}
        self.pool = EnvPool(lambda: Frail(self.clock), chat, Budgets(max_turns=1))
        self.ledger = Ledger(":memory:")
        self.seen: list[Trajectory] = []
        self.batches: list[Trajectory] = []
        self.budget = budget
        self.lost: Counter[str] = Counter()
        self.runtime = Runtime(
            ledger=self.ledger,
            order=PromptOrder(ListTaskSet("frail", TASKS), seed=0),
            rule=Outstanding(batch_rows=4, max_staleness=2),
            engine_version=lambda: self.engine.version,
            run_episode=self.episode,
            clock=self.clock,
            options=RuntimeOptions(max_in_flight=12, failure_retries=1, **options),
        )

    async def episode(self, row: LedgerRow, task: Task, on_version: Callable[[int], None]) -> Trajectory:
        uid = f"r{row.number}"
        async with self.pool.lease() as env:
            frail: Any = env.unwrapped
            frail.fate = self.engine.fates[uid] = self.fate.next()
            episode = Episode(uid=uid, task=task, env_id="frail", attempt=row.attempt, run_seed=0)
            made = await white_box(
                env, self.engine, episode, sampling=Sampling(max_tokens=8), clock=self.clock, on_version=on_version
            )
        self.seen.append(made)
        if self.budget:
            self.budget.note(made.outcome)
        return made

    async def learn(self, steps: int) -> None:
        self.runtime.start()
        try:
            for step in range(1, steps + 1):
                batch = await self.runtime.next_batch(raises_version=True)
                self.batches += batch.trajectories
                await self.clock.sleep(0.5)
                self.runtime.finish_batch(batch, step)
                await self.engine.publish(Weights(), step)
                self.runtime.changed()
                self.lost += self.runtime.take_losses().rows
        finally:
            await self.runtime.stop()

    async def run(self, steps: int) -> None:
        work = asyncio.ensure_future(self.learn(steps))
        await self.clock.run(work.done)
        await work


async def test_a_tenth_of_all_episodes_fails_in_every_listed_way_and_the_counts_close() -> None:
    world = Injected(share=0.1)
    await world.run(250)
    assert set(world.fate.drawn) == KINDS
    errors = Counter(made.outcome.reason for made in world.seen if made.outcome.is_error)
    finished = {made.uid for made in world.seen}
    assert errors.keys() == KINDS
    assert 0.07 < errors.total() / len(world.seen) < 0.13
    assert world.lost == errors, "every lost try is counted, by its reason"
    assert all(made.score is None for made in world.seen if made.outcome.is_error), "never a reward of 0"
    assert len(world.batches) == 1000
    assert all(not made.outcome.is_error and made.score for made in world.batches), "no error reaches a loss"
    counts = world.ledger.counts()
    dropped = world.ledger.rows(RowStatus.DROPPED)
    outstanding = [row for row in world.ledger.rows() if row.status not in (RowStatus.TRAINED, RowStatus.DROPPED)]
    assert counts[RowStatus.TRAINED] == 1000
    assert len(world.ledger) == 1000 + len(dropped) + len(outstanding), "queued = trained + dropped + outstanding"
    assert {row.number for row in world.ledger.rows()} == set(range(1, len(world.ledger) + 1))
    assert dropped, "some rows failed twice, which is past the retries"
    assert all(row.reason in KINDS for row in dropped)
    assert len({made.uid for made in world.batches}) == 1000
    assert len(finished) <= len(world.ledger)
    assert len(world.engine.ended_sessions) == world.fate.tries, "no session is left behind"


async def test_an_error_budget_ends_the_run_with_its_causes_and_not_before() -> None:
    world = Injected(share=0.3, budget=ErrorBudget(share=0.6, window=32))
    await world.run(50)
    broken = Injected(share=0.9, budget=ErrorBudget(share=0.6, window=32), failures_in_a_row=99)
    with pytest.raises(EpisodesFailedError, match=r"of the last 32 episodes were lost \(poisoned_output \d+ times"):
        await broken.run(50)


async def test_so_many_in_a_row_as_the_run_was_told() -> None:
    world = Injected(share=1.0, failures_in_a_row=3)
    with pytest.raises(EpisodesFailedError, match=r"^3 episodes in a row were lost"):
        await world.run(1)
    assert world.fate.tries < 20


def test_the_budget_judges_the_last_ones_alone() -> None:
    budget = ErrorBudget(share=0.5, window=4)
    lost, well = Outcome.error("sandbox"), Outcome.truncated("turns")
    for outcome in (lost, lost, well, well, lost, well, well):
        budget.note(outcome)
    budget.note(lost)
    budget.note(well)
    budget.note(well)
    budget.note(lost)
    budget.note(lost)
    with pytest.raises(
        EpisodesFailedError, match=r"^3 of the last 4 episodes were lost \(sandbox 2 times, judge_429 1"
    ):
        budget.note(Outcome.error("judge_429"))


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": np.zeros(2, np.float32)},
        {"versions": np.zeros(4, np.int32)},
        {"logprobs": np.array([-1.0, np.nan, -1.0], np.float32)},
        {"logprobs": np.array([-1.0, -np.inf, -1.0], np.float32)},
        {"logprobs": np.array([-1.0, 0.1, -1.0], np.float32)},
        {"versions": np.array([1, 0, 1], np.int32)},
        {"versions": np.array([-1, 0, 1], np.int32)},
        {"token_ids": np.array([1, -2, 3], np.int32)},
        {"temperature": 0.5},
        {"extras": {"routing": np.zeros((2, 3))}},
    ],
)
def test_poisoned_output_is_a_typed_error(change: dict[str, Any]) -> None:

    sound = Generation(
        token_ids=np.array([1, 2, 3], np.int32),
        logprobs=np.array([-1.0, -0.5, 0.0], np.float32),
        versions=np.array([0, 0, 1], np.int32),
        stop=StopReason.STOP,
        temperature=1.0,
    )
    request = Sampling(max_tokens=3)
    require_sound(sound, request)
    with pytest.raises(EngineError, match="the engine answered with") as caught:
        require_sound(replace(sound, **change), request)
    assert caught.value.kind == POISONED
    with pytest.raises(EngineError, match="3 tokens where 2"):
        require_sound(sound, replace(request, max_tokens=2))
