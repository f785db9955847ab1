"""Evaluation: results in order, outcomes kept apart, and every mean with its denominator."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock, VirtualClock
from sao_gym.core import AgentEnv, Reply
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.errors import ConfigError, EngineError, GradingError, SandboxError, SandboxUnavailableError
from sao_gym.evaluation import EpisodeResult, Evaluation, TokenRunner, episode_uid, evaluate, summarize, take
from sao_gym.messages import Message
from sao_gym.own_chat import OwnChat
from sao_gym.paired import compare_paired
from sao_gym.parquet import dumps, loads
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.protocols import Sampling, Task
from sao_gym.stream import Ids, OutcomeStatus, Score, Trajectory

TOKENIZER = byte_tokenizer()
CHAT = OwnChat(TOKENIZER)
TASKS = tuple(Task(id=f"t{i}", prompt=f"Say {i}.", answer=str(i)) for i in range(5))


def ids(text: str) -> list[int]:
    return [*TOKENIZER.encode(text), CHAT.stop_token_ids[0]]


class Say(AgentEnv):
    """The answer is to be said. Some tasks break it on purpose."""

    def __init__(self, faults: dict[str, Exception] | None = None, record: list[str] | None = None) -> None:
        super().__init__(TASKS)
        self.faults = faults or {}
        self.record = record if record is not None else []

    def fail(self, stage: str) -> None:
        if (error := self.faults.get(f"{stage} {self.task.id}")) is not None:
            raise error

    # asynchronous throughout, so that nothing leaves the loop and virtual time suffices
    async def opening(self, task: Task) -> tuple[Message, ...]:
        return (Message.user(task.prompt),)

    async def teardown(self) -> None:
        pass

    async def setup(self, task: Task) -> None:
        self.record.append(f"setup {task.id}")
        self.fail("reset")

    async def respond(self, message: Message) -> Reply:
        await asyncio.sleep(0)
        self.fail("step")
        return Reply(messages=(Message.user("go on"),), is_final=message.content != "more")

    async def grade(self) -> Score:
        self.fail("grade")
        right = self.last_action is not None and self.last_action.content == self.task.answer
        return Score(value=float(right), passed=right, detail="said" if right else "not said")

    async def close_async(self) -> None:
        await super().close_async()
        self.record.append("closed")


def reader(prompt: Ids) -> Sequence[int]:
    """Says the number that the prompt asks for."""
    text = TOKENIZER.decode(prompt)
    return ids(text.rpartition("Say ")[2].partition(".")[0])


def scripted(by_task: dict[int, Sequence[str]], samples: int = 1, **options: Any) -> ScriptedEngine:
    sessions = {
        episode_uid("e", task, attempt): [ids(text) for text in texts]
        for task, texts in by_task.items()
        for attempt in range(samples)
    }
    return ScriptedEngine.from_sessions(sessions, **options)


async def run(engine: ScriptedEngine, faults: dict[str, Exception] | None = None, **changes: Any) -> Evaluation:
    clock = changes.pop("clock", SystemClock())
    parts: dict[str, Any] = {
        "make_env": lambda: Say(faults),
        "chat": CHAT,
        "sampling": Sampling(max_tokens=16),
        "budgets": Budgets(max_turns=4),
        "clock": clock,
    }
    options: dict[str, Any] = {
        "tasks": TASKS,
        "samples": 1,
        "clock": clock,
        "seed": 0,
        "env_id": "say",
        "label": "e",
        "concurrency": 3,
    }
    runner = TokenRunner(engine=engine, **{key: changes.pop(key, value) for key, value in parts.items()})
    return await evaluate(runner=runner, **{**options, **changes})


async def test_results_stand_in_order_and_samples_differ() -> None:
    engine = ScriptedEngine(reader)
    heard: list[tuple[EpisodeResult, int, int]] = []
    evaluation = await run(engine, samples=3, on_result=lambda *given: heard.append(given))
    assert [(r.task_id, r.attempt) for r in evaluation.results] == [(t.id, a) for t in TASKS for a in range(3)]
    assert all(r.passed and r.value == 1.0 and r.text == r.task_id[1:] for r in evaluation.results)
    assert [(done, total) for _, done, total in heard] == [(i, 15) for i in range(1, 16)]
    # trap 25: the same seed gives the same draws, each sample its own
    assert len({r.seed for r in evaluation.results}) == 15
    assert {call.sampling.seed for call in engine.calls} == {r.seed for r in evaluation.results}
    again = await run(ScriptedEngine(reader), samples=3)
    assert [r.seed for r in again.results] == [r.seed for r in evaluation.results]
    assert [r.seed for r in (await run(ScriptedEngine(reader), samples=3, seed=1)).results] != [
        r.seed for r in again.results
    ]
    later = await run(ScriptedEngine(reader), first_attempt=3)
    assert not {r.seed for r in later.results} & {r.seed for r in again.results}


async def test_sessions_are_unique_and_ended() -> None:
    engine = ScriptedEngine(reader)
    await run(engine, samples=2, label=None)
    await run(engine, samples=2, label=None)
    sessions = [call.session for call in engine.calls]
    assert len(set(sessions)) == 20
    assert sorted(engine.ended_sessions) == sorted(str(session) for session in sessions)


async def test_errors_are_not_wrong_answers() -> None:
    """Case EV-04: rewards 1, 1, 0, a reset that raises and a grader that raises."""
    engine = scripted({0: ["0"], 1: ["1"], 2: ["7"], 3: ["3"], 4: ["4"]})
    faults: dict[str, Exception] = {"reset t3": ValueError("no reset"), "grade t4": GradingError("no verdict")}
    kept: list[Trajectory] = []
    evaluation = await run(engine, faults, on_trajectory=kept.append, concurrency=1)
    summary = evaluation.summary
    assert (summary.n_samples, summary.n_scored, summary.n_error, summary.n_passed) == (5, 3, 2, 2)
    assert summary.errors == {"reset: ValueError": 1, "grade: grading": 1}
    assert summary.success == pytest.approx(2 / 3)
    assert summary.value_mean == pytest.approx(2 / 3)
    assert summary.lower_bound == pytest.approx(0.4)
    assert [r.stage for r in evaluation.results] == [None, None, None, "reset", "grade"]
    assert [r.is_scored for r in evaluation.results] == [True, True, True, False, False]
    assert [r.passed for r in evaluation.results[3:]] == [None, None]
    # one environment ran all before: what it still shows is not the failed episode's
    failed = next(one for one in kept if one.task_id == "t3")
    assert (failed.n_tokens, failed.score) == (0, None)
    assert loads(dumps(failed)).outcome == failed.outcome


async def test_where_an_error_arose() -> None:
    faults: dict[str, Exception] = {"step t1": SandboxError("gone"), "step t2": ZeroDivisionError()}
    engine = ScriptedEngine(reader, failures={0: EngineError("down")})
    evaluation = await run(engine, faults, concurrency=1)
    assert [(r.stage, r.reason) for r in evaluation.results[:4]] == [
        ("generate", "engine"),
        ("step", "sandbox"),
        ("step", "ZeroDivisionError"),
        (None, None),
    ]
    assert evaluation.results[1].turns == 1
    assert evaluation.results[1].n_action == len(ids("1"))


async def test_pass_at_k_says_over_how_many_tasks() -> None:
    """Case EV-01: 3 problems, 4 samples each, two of one problem's end in errors."""
    engine = ScriptedEngine(reader, failures={8: EngineError("down"), 9: EngineError("down")})
    summary = (await run(engine, tasks=TASKS[:3], samples=4, concurrency=1)).summary
    table = {one.k: one for one in summary.pass_at_k}
    assert list(table) == [1, 2, 4]
    assert (table[4].value, table[4].n_tasks, table[4].n_left_out) == (1.0, 2, 1)
    assert (table[2].n_tasks, summary.n_scored) == (3, 10)
    greedy = await run(ScriptedEngine(reader), sampling=Sampling(max_tokens=16, temperature=0.0))
    assert [one.k for one in greedy.summary.pass_at_k] == [1], "one greedy sample says nothing of pass@10"


async def test_truncated_is_kept_apart() -> None:
    engine = scripted({0: ["0"], 1: ["more"] * 4, 2: ["2" * 40], 3: ["more", "3"], 4: ["wrong"]})
    evaluation = await run(engine)
    summary = evaluation.summary
    assert [r.outcome for r in evaluation.results] == [
        OutcomeStatus.TERMINATED,
        OutcomeStatus.TRUNCATED,
        OutcomeStatus.TRUNCATED,
        OutcomeStatus.TERMINATED,
        OutcomeStatus.TERMINATED,
    ]
    assert (summary.n_truncated, summary.n_scored, summary.n_passed) == (2, 5, 2)
    assert sorted(summary.truncations.values()) == [1, 1]
    assert [r.turns for r in evaluation.results] == [1, 4, 1, 2, 1]
    assert summary.turns_mean == pytest.approx(9 / 5)


async def test_no_sandbox_ends_all() -> None:
    record: list[str] = []
    faults: dict[str, Exception] = {"reset t2": SandboxUnavailableError("no user namespaces here")}
    engine = ScriptedEngine(reader)
    with pytest.raises(SandboxUnavailableError, match="user namespaces"):
        await run(engine, samples=4, make_env=lambda: Say(faults, record), concurrency=2)
    assert record.count("closed") >= 1
    assert len(engine.calls) < 20
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others


async def test_concurrency_is_bounded_and_environments_serve_again() -> None:
    clock = VirtualClock()
    engine = ScriptedEngine(reader, latency_s=2.0, clock=clock)
    made: list[Say] = []

    def make_env() -> Say:
        made.append(Say())
        return made[-1]

    task = asyncio.ensure_future(run(engine, samples=4, concurrency=5, clock=clock, make_env=make_env))
    await clock.run(task.done)
    assert task.done()
    evaluation = await task
    assert len(made) == 5
    assert evaluation.seconds == 20 / 5 * 2.0
    assert evaluation.summary.success == 1.0


async def test_versions_of_a_live_engine() -> None:
    class Source:
        names: Sequence[str] = ()
        weight_hash = "h"

        def tensors(self) -> Any:
            return iter(())

    engine = ScriptedEngine(reader, version=3)

    async def publish(result: EpisodeResult, done: int, total: int) -> None:
        await engine.publish(Source(), 4)

    pending: list[asyncio.Task[None]] = []

    def on_result(result: EpisodeResult, done: int, total: int) -> None:
        if done == 1:
            pending.append(asyncio.ensure_future(publish(result, done, total)))

    evaluation = await run(engine, on_result=on_result, concurrency=1)
    await asyncio.gather(*pending)
    assert (evaluation.version_first, evaluation.version_last) == (3, 4)
    assert [r.version for r in evaluation.results] == sorted(r.version or 0 for r in evaluation.results)
    assert evaluation.results[0].version == 3
    assert evaluation.results[-1].version == 4


async def test_refusals() -> None:
    engine = ScriptedEngine(reader)
    with pytest.raises(ConfigError, match="no tasks"):
        await run(engine, tasks=())
    with pytest.raises(ConfigError, match="greedy decoding says the same 4 times"):
        await run(engine, samples=4, sampling=Sampling(max_tokens=4, temperature=0.0))
    with pytest.raises(ConfigError, match="at least 1"):
        await run(engine, samples=0)
    assert engine.calls == []


def test_take() -> None:
    assert take(TASKS, 2) == TASKS[:2]
    assert take(TASKS) == take(TASKS, 99) == TASKS
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        take(TASKS, 0)
    with pytest.raises(ConfigError, match="no tasks"):
        take(())

    class Endless:
        name = content_hash = "endless"

        def __len__(self) -> int:
            return 1 << 31

        def __getitem__(self, index: int) -> Task:
            return Task(id=str(index), prompt="")

    with pytest.raises(ConfigError, match="endless"):
        take(Endless())
    assert len(take(Endless(), 7)) == 7


def test_nothing_scored_is_unknown() -> None:
    failed = EpisodeResult(uid="u", task_id="t", attempt=0, outcome=OutcomeStatus.ERROR, reason="engine", stage="step")
    late = EpisodeResult(uid="v", task_id="t", attempt=1, outcome=OutcomeStatus.TERMINATED)
    summary = summarize([failed, late])
    assert (summary.success, summary.interval, summary.value_mean, summary.lower_bound) == (None, None, None, 0.0)
    assert (summary.n_error, summary.n_unscored, summary.n_scored) == (1, 1, 0)
    assert [one.value for one in summary.pass_at_k] == [None, None]


async def test_two_evaluations_compare() -> None:
    before = await run(scripted({i: ["no"] for i in range(5)}))
    after = await run(ScriptedEngine(reader))
    result = compare_paired(before.passed_by_task(), after.passed_by_task())
    assert (result.difference, result.n_better, result.n_tasks) == (1.0, 5, 5)
    assert result.p_value == pytest.approx(2 / 2**5)
    assert np.isfinite([result.interval.low, result.interval.high]).all()
