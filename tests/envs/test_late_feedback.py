"""Feedback that comes late or never: shares, moments, and what the runtime makes of it. Time is virtual."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.clock import VirtualClock
from sao_gym.commands.policy import judged_at_once
from sao_gym.envs.judges.rule import RuleJudge
from sao_gym.envs.late_feedback import LateFeedback
from sao_gym.envs.writing import Judging, WritingEnv
from sao_gym.errors import ConfigError, NoFeedbackError
from sao_gym.ledger import Ledger, LedgerRow, RowStatus
from sao_gym.messages import Message
from sao_gym.protocols import Task
from sao_gym.registry import make
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.tasks.base import ListTaskSet
from sao_gym.trainer.failures import ErrorBudget
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.runtime import Runtime, RuntimeOptions
from sao_gym.trainer.staleness import Outstanding

TASK = Task(id="t", prompt="Write a letter to the bakery.", info={"words": 20})
CUTE = "Yay, a fluffy little letter for my dear bakery, hugs and kisses, yummy! <3"


@given(late=st.floats(0, 1), never=st.floats(0, 1))
def test_shares_are_kept(late: float, never: float) -> None:
    if late + never > 1:
        with pytest.raises(ConfigError, match="1 at most together"):
            LateFeedback(late_share=late, never_share=never)
        return
    feedback = LateFeedback(late_share=late, never_share=never, delay_s=10)
    rng = np.random.default_rng(0)
    drawn = [feedback.drawn(rng) for _ in range(2000)]
    assert np.mean([math.isinf(delay) for delay in drawn]) == pytest.approx(never, abs=0.05)
    assert np.mean([0 < delay < math.inf for delay in drawn]) == pytest.approx(late, abs=0.05)


def test_the_mean_delay_is_as_told() -> None:
    feedback, rng = LateFeedback(late_share=1.0, delay_s=10), np.random.default_rng(0)
    assert np.mean([feedback.drawn(rng) for _ in range(5000)]) == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    "given", [{"late_share": -0.1}, {"delay_s": 0}, {"deadline_s": math.inf}, {"late_share": math.nan}]
)
def test_values_that_cannot_be(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="feedback_"):
        LateFeedback(**given)


async def waited(delay_s: float, *, asked_at: float = 0.0) -> tuple[float, bool]:
    """(when the wait was over, whether the feedback had come)."""
    clock = VirtualClock()
    task = asyncio.ensure_future(LateFeedback(deadline_s=100).wait(clock, asked_at, delay_s))
    await clock.run(task.done)
    error = task.exception()
    assert error is None or isinstance(error, NoFeedbackError)
    return clock.now(), error is None


async def test_it_is_waited_for_until_the_deadline() -> None:
    assert await waited(30) == (30, True)
    assert await waited(100) == (100, True)
    assert await waited(101) == (100, False)
    assert await waited(math.inf) == (100, False)
    assert await waited(30, asked_at=-20) == (10, True)


def late_env(clock: VirtualClock, **options: float) -> WritingEnv:
    env = make("writing_style", tasks=[TASK], judging=Judging(RuleJudge(), clock=clock), **options)
    assert isinstance(env, WritingEnv)
    return env


async def test_an_episode_is_judged_when_its_feedback_comes() -> None:
    clock = VirtualClock()
    env = late_env(clock, feedback_late_share=1.0, feedback_delay_s=50.0)
    heard: list[float] = []
    env.on_grading = lambda: heard.append(clock.now())
    assert env.grades_apart
    await env.reset_async(seed=3)
    step = asyncio.ensure_future(env.step_async(Message.assistant(CUTE)))
    await clock.run(step.done, has_others=True)  # the judge works in a thread of its own
    _, reward, terminated, *_ = await step
    assert (reward, terminated) == (1.0, True)
    assert heard == [0.0]
    assert clock.now() == pytest.approx(env.episode_info["feedback_s"])
    again = late_env(VirtualClock(), feedback_late_share=1.0, feedback_delay_s=50.0)
    await again.reset_async(seed=3)
    assert again._delay_s == env._delay_s, "the same episode, the same fate"


async def test_without_late_feedback_nothing_is_changed() -> None:
    plain, late = late_env(VirtualClock()), late_env(VirtualClock(), feedback_never_share=1.0)
    assert not plain.grades_apart
    for env in (plain, late):
        await env.reset_async(seed=5)
    assert plain.episode_info == late.episode_info, "the phase of an episode is the same"


def test_an_evaluation_is_judged_at_once() -> None:
    assert judged_at_once({"feedback_late_share": 1.0, "judge": "rule"}) == {"judge": "rule"}


class World:
    """A runtime whose episodes take a second, are judged as a writing environment's, and are trained as they come."""

    def __init__(self, feedback: LateFeedback) -> None:
        self.clock, self.ledger = VirtualClock(), Ledger(":memory:")
        self.feedback, self.version = feedback, 0
        self.rng = np.random.default_rng(1)
        self.delays: dict[int, float] = {}
        self.budget = ErrorBudget(share=0.01, window=8)
        self.trained: list[tuple[int, int]] = []
        self.runtime = Runtime(
            ledger=self.ledger,
            order=PromptOrder(ListTaskSet("made up", [Task(id=f"t{i}", prompt="?") for i in range(200)]), seed=7),
            rule=Outstanding(batch_rows=8, max_staleness=2),
            engine_version=lambda: self.version,
            run_episode=self.episode,
            clock=self.clock,
            options=RuntimeOptions(max_in_flight=12, failures_in_a_row=1, stale_grace_s=5.0),
        )

    async def episode(self, row: LedgerRow, task: Task, on_version: Callable[[int], None]) -> Trajectory:
        version, outcome = self.version, Outcome.terminated()
        on_version(version)
        await self.clock.sleep(1.0)
        self.runtime.begin_scoring(row.number)
        self.delays[row.number] = self.feedback.drawn(self.rng)
        try:
            await self.feedback.wait(self.clock, self.clock.now(), self.delays[row.number])
        except NoFeedbackError as error:
            outcome = Outcome.error(error.kind)
        self.budget.note(outcome)
        action = Segment.action([3], logprobs=[-1.0], versions=[version], temperature=1.0, stop=StopReason.STOP)
        made = Trajectory(
            uid=f"r{row.number}",
            task_id=row.task_id,
            env_id="e",
            attempt=row.attempt,
            streams=(TokenStream(segments=(Segment.observation([1, 2]), action)),),
            outcome=outcome,
        )
        return made if outcome.is_error else made.scored(Score(value=1.0, passed=True))

    async def train(self, steps: int) -> Counter[str]:
        lost: Counter[str] = Counter()
        self.runtime.start()
        for step in range(1, steps + 1):
            batch = await self.runtime.next_batch(raises_version=True)
            self.trained += [
                (number, batch.version - (row.first_version or 0))
                for number, row in zip(batch.numbers, batch.trajectories, strict=True)
            ]
            self.runtime.finish_batch(batch, step)
            self.version += 1
            self.runtime.changed()
            lost += self.runtime.take_losses().rows
            await self.clock.sleep(2.0)
        await self.runtime.stop()
        return lost


async def test_late_rows_are_trained_within_the_bound_and_those_never_judged_are_dropped() -> None:
    world = World(LateFeedback(late_share=0.3, never_share=0.1, delay_s=5.0, deadline_s=30.0))
    training = asyncio.ensure_future(world.train(30))
    await world.clock.run(training.done)
    assert training.done(), "nobody waits for ever"
    lost = training.result()
    assert set(lost) == {"no_feedback"}
    dropped = world.ledger.rows(RowStatus.DROPPED)
    assert dropped
    assert len(dropped) == lost["no_feedback"] + sum(world.runtime.losses.rows.values())
    assert {row.reason for row in dropped} == {"no_feedback"}
    assert {row.failures for row in world.ledger.rows()} == {0}, "nothing has failed, and nothing was run again"
    assert all(math.isinf(world.delays[row.number]) or world.delays[row.number] > 30 for row in dropped)
    late = [age for number, age in world.trained if world.delays[number] > 0]
    at_once = [age for number, age in world.trained if world.delays[number] == 0]
    assert late
    assert np.mean(late) > np.mean(at_once)
