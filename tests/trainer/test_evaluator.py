"""Evaluation beside training: pinned weights, one at a time, nothing of it reaches the training."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from sao_gym.clock import SystemClock
from sao_gym.commands.heldout import Heldout
from sao_gym.commands.train import main
from sao_gym.engines.local import LocalEngine
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.errors import EngineError, InvariantError
from sao_gym.evaluation import EpisodeResult, Evaluation
from sao_gym.loops import run_blocking
from sao_gym.models import copy_model, tiny_qwen3
from sao_gym.protocols import Engine, Sampling
from sao_gym.stream import OutcomeStatus
from sao_gym.trainer import loop
from sao_gym.trainer.checkpoint import RunState
from sao_gym.trainer.evaluator import STOPPED, Evaluated, Evaluator
from sao_gym.trainer.events import EventLog
from sao_gym.weights import ModuleWeights

STEPS = 6
PROMPT = torch.arange(5, 10).numpy().astype("int32")


class Gate:
    """Samples one token before it opens and one after: an evaluation that lasts as long as a test wants."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.was_cancelled = False

    async def __call__(self, engine: Engine) -> Evaluation:
        first = engine.version
        results = [await self.sampled(engine, 0)]
        self.has_begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        results.append(await self.sampled(engine, 1))
        return Evaluation(
            results=tuple(results), samples=2, seconds=1.0, version_first=first, version_last=engine.version
        )

    async def sampled(self, engine: Engine, attempt: int) -> EpisodeResult:
        made = await engine.generate(PROMPT, Sampling(max_tokens=1, seed=attempt))
        version = int(made.versions[0])
        return EpisodeResult(
            uid=str(attempt), task_id="t", attempt=attempt, outcome=OutcomeStatus.TERMINATED, version=version, value=1.0
        )

    def begun(self) -> None:
        run_blocking(asyncio.wait_for(self.has_begun.wait(), 60))

    def open(self) -> None:
        async def set_it() -> None:
            self.may_end.set()

        run_blocking(set_it())


def model_of(seed: int) -> Any:
    return tiny_qwen3(vocab_size=48, layers=1, hidden=32, heads=2, kv_heads=1, context_length=64, seed=seed)


class World:
    """A live engine that training publishes to, a copy, and an evaluator over one of the two."""

    def __init__(self, *, is_pinned: bool) -> None:
        self.models = [model_of(seed) for seed in range(4)]
        self.live, self.copy = (LocalEngine(copy_model(self.models[0]), threads=1) for _ in range(2))
        self.gate = Gate()
        self.events = EventLog(SystemClock())
        self.reported: list[Evaluated] = []
        self.evaluator = Evaluator(
            engine=self.copy if is_pinned else self.live,
            is_pinned=is_pinned,
            evaluate=lambda engine: self.gate(engine),
            every=1,
            clock=SystemClock(),
            events=self.events,
            report=self.reported.append,
        )

    def weights(self, version: int) -> ModuleWeights:
        return ModuleWeights(self.models[version])

    def state(self, version: int) -> RunState:
        return RunState(step=version, version=version, weight_hash=self.weights(version).weight_hash)

    def trained(self, version: int) -> None:
        """A step of training: the live engine serves new weights, and an evaluation is due."""
        run_blocking(self.live.publish(self.weights(version), version))
        if self.evaluator.claim(version):
            self.evaluator.begin(self.state(version), lambda: self.weights(version))

    def close(self) -> None:
        self.evaluator.cancel()
        for engine in (self.live, self.copy):
            run_blocking(engine.close())


@pytest.fixture
def world() -> Any:
    made: list[World] = []

    def make(*, is_pinned: bool = True) -> World:
        made.append(World(is_pinned=is_pinned))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_pinned_weights_are_one_version_while_the_live_engine_goes_on(world: Callable[..., World]) -> None:
    one = world()
    one.trained(1)
    one.gate.begun()
    one.trained(2)
    one.trained(3)
    assert one.live.version == 3
    assert one.reported == []
    one.gate.open()
    one.evaluator.finish()
    (found,) = one.reported
    assert found.evaluation is not None
    assert [result.version for result in found.evaluation.results] == [1, 1]
    assert (found.step, found.is_mixed, found.skipped) == (1, False, 2)
    assert found.weight_hash == one.weights(1).weight_hash != one.weights(3).weight_hash
    assert run_blocking(one.copy.health()).weight_hash == found.weight_hash


def test_the_live_engine_says_that_versions_are_mixed(world: Callable[..., World]) -> None:
    one = world(is_pinned=False)
    one.trained(1)
    one.gate.begun()
    one.trained(2)
    one.gate.open()
    one.evaluator.finish()
    (found,) = one.reported
    assert found.evaluation is not None
    assert [result.version for result in found.evaluation.results] == [1, 2]
    assert (found.evaluation.version_first, found.evaluation.version_last) == (1, 2)
    assert found.is_mixed
    assert found.weight_hash is None


def test_the_next_one_that_is_due_after_the_end_is_evaluated_with_its_own_weights(world: Callable[..., World]) -> None:
    one = world()
    for version in (1, 3):
        one.gate = Gate()
        one.trained(version)
        one.gate.open()
        one.evaluator.finish()
    assert [(found.step, found.weight_hash) for found in one.reported] == [
        (version, one.weights(version).weight_hash) for version in (1, 3)
    ]
    kinds = one.events.take().to_pylist()
    assert [(event["kind"], event["step"], event["version"]) for event in kinds] == [
        ("evaluation", 1, 1),
        ("evaluation", 3, 3),
    ]


def test_a_step_is_evaluated_once() -> None:
    engine = ScriptedEngine(lambda prompt: [1])
    evaluator = Evaluator(
        engine=engine,
        is_pinned=True,
        evaluate=Gate(),
        every=5,
        clock=SystemClock(),
        events=EventLog(SystemClock()),
        report=print,
        done={10},
    )
    assert [step for step in range(21) if evaluator.claim(step)] == [5, 15, 20]


def test_cancelled_it_is_gone_before_the_call_returns_and_is_said(world: Callable[..., World]) -> None:
    one = world()
    one.trained(1)
    one.gate.begun()
    one.evaluator.cancel()
    assert one.gate.was_cancelled
    assert one.reported == [Evaluated(step=1, error=STOPPED)]
    one.evaluator.cancel()
    assert len(one.reported) == 1
    assert not one.evaluator.is_running


def test_a_stop_wakes_who_waits_for_the_end(world: Callable[..., World]) -> None:
    one = world()
    one.trained(1)
    one.gate.begun()
    one.evaluator.request_stop()
    one.evaluator.finish()
    assert [found.error for found in one.reported] == [STOPPED]


def test_a_failure_of_the_evaluation_is_reported_and_training_goes_on(world: Callable[..., World]) -> None:
    one = world()

    async def broken(engine: Engine) -> Evaluation:
        raise EngineError("the sandbox is gone")

    one.gate = broken  # type: ignore[assignment]
    one.trained(1)
    one.evaluator.finish()
    assert one.reported == [Evaluated(step=1, error="the sandbox is gone")]
    one.gate = Gate()
    one.gate.open()
    one.trained(2)
    one.evaluator.finish()
    assert one.reported[-1].weight_hash == one.weights(2).weight_hash


def test_other_weights_than_those_of_the_step_are_a_broken_promise(world: Callable[..., World]) -> None:
    one = world()
    one.evaluator.begin(one.state(1), lambda: one.weights(2))
    with pytest.raises(InvariantError, match=r"holds the weights .* those of step 1 are"):
        one.evaluator.finish()


def test_a_copy_that_moves_on_during_an_evaluation_is_a_broken_promise(world: Callable[..., World]) -> None:
    one = world()
    one.trained(1)
    one.gate.begun()
    run_blocking(one.copy.publish(one.weights(2), 2))
    one.gate.open()
    with pytest.raises(InvariantError, match="version 1 was pinned"):
        one.evaluator.finish()


# -- in a run


OTHER = """
from sao_gym.core import AgentEnv, Reply
from sao_gym.protocols import Task
from sao_gym.stream import Score


class Other(AgentEnv):
    def __init__(self) -> None:
        super().__init__([Task(id=f"h{i}", prompt=f"{i}+{i}?") for i in range(3)])

    def respond(self, message):
        return Reply(is_final=True)

    def grade(self):
        passed = len(self.last_action.content) % 2 == 0
        return Score(value=float(passed), passed=passed)
"""


@pytest.fixture
def other(tmp_path: Path) -> str:
    """An environment that nobody trains on."""
    path = tmp_path / "other.py"
    path.write_text(OTHER)
    return f"{path}:Other"


@pytest.fixture
def words(crash: ModuleType, tiny_model: Path) -> Callable[..., list[str]]:
    def given(*more: str, is_lock_step: bool = True) -> list[str]:
        made = crash.words(tiny_model, 0, is_lock_step=is_lock_step)
        return [*made, "--steps", str(STEPS), "--trackers", "none", *more]

    return given


def lines(run: Path, *, evaluations: bool) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if ("event" in record) is evaluations]


def evaluating(bench: str, *more: str) -> list[str]:
    return ["--evaluation.every", "2", "--evaluation.episodes", "6", "--evaluation.bench", bench, *more]


@pytest.mark.parametrize("weights", ["copy", "live"])
def test_training_has_the_same_weights_with_and_without(
    weights: str, words: Callable[..., list[str]], other: str, tmp_path: Path
) -> None:
    plain, beside = tmp_path / "plain", tmp_path / "beside"
    assert main(words("--out", str(plain))) == 0
    assert main(words("--out", str(beside), *evaluating(other, "--evaluation.weights", weights))) == 0
    hashes = [[record["weight_hash"] for record in lines(run, evaluations=False)] for run in (plain, beside)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == STEPS
    found = lines(beside, evaluations=True)
    assert found[0]["step"] == 2
    assert found[-1]["step"] == STEPS, "the last step is never skipped"
    assert sum(1 + record["heldout_skipped"] for record in found) == STEPS // 2
    for record in found:
        own = next(line for line in lines(beside, evaluations=False) if line["step"] == record["step"])
        if weights == "copy":
            versions = record["heldout_version_first"], record["heldout_version_last"]
            assert versions == (own["policy_version"],) * 2
            assert record["heldout_weight_hash"] == own["weight_hash"]
        assert (record["episodes"], record["heldout_samples"]) == (6, 6)
        assert record["heldout_low"] <= record["heldout_success"] <= record["heldout_high"]
        samples = [json.loads(line) for line in (beside / "evaluations" / f"step_{record['step']:06d}.jsonl").open()]
        assert [sample["task_id"] for sample in samples] == ["h0", "h0", "h1", "h1", "h2", "h2"]
        assert sum(bool(sample["passed"]) for sample in samples) / 6 == record["heldout_success"]


def test_rollouts_and_learner_go_on_meanwhile(
    words: Callable[..., list[str]], other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation of step 2 is held open until step 5 is trained; its samples are of step 2 all the same."""
    run = tmp_path / "run"
    plain, record = Heldout.run, loop.Training._record
    trained = asyncio.Event()

    async def held(self: Heldout, engine: Engine, *, greedy: bool) -> Evaluation:
        await asyncio.wait_for(trained.wait(), 120)
        return await plain(self, engine, greedy=greedy)

    def recorded(self: loop.Training, *args: Any) -> None:
        record(self, *args)
        if self.state.step == 5:
            run_blocking(set_it())

    async def set_it() -> None:
        trained.set()

    monkeypatch.setattr(Heldout, "run", held)
    monkeypatch.setattr(loop.Training, "_record", recorded)
    assert main(words("--out", str(run), *evaluating(other), is_lock_step=False)) == 0
    first = lines(run, evaluations=True)[0]
    assert (first["step"], first["heldout_version_first"], first["heldout_version_last"]) == (2, 1, 1)
    assert first["heldout_skipped"] == 1
    events = pq.read_table(run / "events.parquet").to_pylist()
    end = next(event for event in events if event["kind"] == "evaluation" and event["step"] == 2)
    during = [event for event in events if end["time_s"] - end["seconds"] < event["time_s"] < end["time_s"]]
    assert {event["step"] for event in during if event["kind"] == "trained"} >= {3, 4, 5}
    assert {"admission", "completion", "publication"} <= {event["kind"] for event in during}
    assert all(record["staleness_max"] <= 4 for record in lines(run, evaluations=False))


def test_a_resumed_run_makes_up_for_the_evaluation_of_its_step_and_repeats_none(
    words: Callable[..., list[str]], other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM's way: the evaluation of step 4 is broken off, step 4 gets the checkpoint, the resume evaluates it."""
    run = tmp_path / "run"
    plain, begin = Heldout.run, Evaluator.begin
    trainings: list[loop.Training] = []
    started = loop.Training.run

    async def endless(self: Heldout, engine: Engine, *, greedy: bool) -> Evaluation:
        if engine.version >= 3:
            await asyncio.Event().wait()
        return await plain(self, engine, greedy=greedy)

    def noted(self: loop.Training) -> RunState:
        trainings.append(self)
        return started(self)

    def begun(self: Evaluator, state: RunState, weights: Any) -> None:
        begin(self, state, weights)
        if state.step == 2:
            self.finish()
        if state.step == 4:
            trainings[0].request_stop()

    given = words("--out", str(run), *evaluating(other, "--checkpoint.every", "2"))
    with monkeypatch.context() as patch:
        patch.setattr(Heldout, "run", endless)
        patch.setattr(loop.Training, "run", noted)
        patch.setattr(Evaluator, "begin", begun)
        assert main(given) == 0
    broken = lines(run, evaluations=True)
    assert [(record["step"], record.get("heldout_error")) for record in broken] == [(2, None), (4, STOPPED)]
    assert main(["--resume", str(run)]) == 0
    steps = [record["step"] for record in lines(run, evaluations=True) if "heldout_success" in record]
    assert steps[:2] == [2, 4]
    assert len(steps) == len(set(steps))
    assert [record["step"] for record in lines(run, evaluations=False)] == list(range(1, STEPS + 1))
    before = (run / "metrics.jsonl").read_text()
    assert main(["--resume", str(run)]) == 0
    assert (run / "metrics.jsonl").read_text() == before, "a finished run has had them all"
