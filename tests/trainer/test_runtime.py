"""The asynchronous runtime under a virtual clock: traps 12 and 24, the two gates, failures, order, deadlines.

Episodes, learner and engine are plain callables with given durations; `World` keeps its own account of who is
outstanding and at which version, and checks the rule's invariant after every event by arithmetic of its own.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from sao_gym.clock import VirtualClock
from sao_gym.errors import DeadlineError, InvariantError, UserError
from sao_gym.ledger import Ledger, LedgerRow, RowStatus
from sao_gym.protocols import Task
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.tasks.base import ListTaskSet
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.runtime import Batch, EpisodesFailedError, Runtime, RuntimeOptions
from sao_gym.trainer.staleness import Outstanding, RowState

TOKENS = 4
SLOW = "t0"


def tasks(count: int) -> ListTaskSet:
    return ListTaskSet("made up", [Task(id=f"t{i}", prompt="?") for i in range(count)])


def record(row: LedgerRow, versions: list[int], outcome: Outcome, score: float | None = 1.0) -> Trajectory:
    segments = [Segment.observation([1, 2])]
    if versions:
        ids = list(range(len(versions)))
        segments.append(
            Segment.action(ids, logprobs=[-1.0] * len(ids), versions=versions, temperature=1.0, stop=StopReason.STOP)
        )
    stream = TokenStream(segments=tuple(segments))
    made = Trajectory(
        uid=f"r{row.number}", task_id=row.task_id, env_id="e", attempt=row.attempt, streams=(stream,), outcome=outcome
    )
    return made if score is None or outcome.is_error else made.scored(Score(value=score, passed=score > 0))


@dataclass
class World:
    """A made-up machine around a real `Runtime`. `seconds`, `lag_s`, `learn_s` and `end` draw what happens."""

    batch: int = 4
    m: int = 2
    pool: int = 24
    seconds: Callable[[LedgerRow], float] = lambda row: 1.0
    lag_s: Callable[[], float] = lambda: 0.1
    learn_s: Callable[[], float] = lambda: 1.0
    end: Callable[[LedgerRow], Outcome] = lambda row: Outcome.terminated()
    critic_only: int = 0
    group: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=lambda: Ledger(":memory:"))

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.engine = 0
        self.first: dict[int, int] = {}
        self.outstanding: dict[int, str] = {}
        self.running: set[int] = set()
        self.group_of: dict[int, int] = {}
        self.training: tuple[int, ...] = ()
        self.batches: list[Batch] = []
        self.log: list[tuple[int, int]] = []
        self.lost: Counter[str] = Counter()
        self.lost_tokens: Counter[str] = Counter()
        self.most = 0
        self.runtime = Runtime(
            ledger=self.ledger,
            order=PromptOrder(tasks(self.pool), seed=7),
            rule=Outstanding(batch_rows=self.batch, max_staleness=self.m),
            engine_version=lambda: self.engine,
            run_episode=self.episode,
            clock=self.clock,
            options=RuntimeOptions(
                **{"max_in_flight": 64, "stale_grace_s": 5.0, "group_size": self.group, **self.options}
            ),
        )

    async def episode(self, row: LedgerRow, task: Task, on_version: Callable[[int], None]) -> Trajectory:
        """`TOKENS` tokens, evenly over its seconds; each keeps the version that the engine had then."""
        assert task.id == row.task_id
        assert row.number not in self.running, "one try of a row at a time"
        self.forget_dropped()
        self.group_of[row.number] = row.number if row.group is None else row.group
        others = {t for n, t in self.outstanding.items() if self.group_of.get(n, n) != self.group_of[row.number]}
        assert task.id not in others, "no prompt twice among outstanding rows or groups"
        self.log.append((row.number, row.attempt))
        self.outstanding[row.number] = task.id
        self.running.add(row.number)
        self.first.pop(row.number, None)
        on_version(self.engine)
        versions: list[int] = []
        try:
            for _ in range(TOKENS):
                await self.clock.sleep(self.seconds(row) / TOKENS)
                versions.append(self.engine)
                self.first.setdefault(row.number, self.engine)
                on_version(versions[0])
                self.check()
            outcome = self.end(row)
        except asyncio.CancelledError:
            for _ in range(5):  # taking an environment down takes a while
                await asyncio.sleep(0)
            del self.outstanding[row.number]
            raise
        finally:
            self.running.remove(row.number)
        if outcome.is_error:
            self.first.pop(row.number)
            if row.group is None:
                del self.outstanding[row.number]
        return record(row, versions, outcome)

    def check(self) -> None:
        """I(V) of docs/runtime.md, over all rows that this account holds outstanding."""
        rule, version = self.runtime.rule, self.runtime.rule.version
        known = {row.number: row for row in rule.rows()}
        held = [number for number in self.outstanding if number in known]  # others were dropped, on their way down
        oldest: dict[int, int] = {}
        for number in held:
            group, first = self.group_of.get(number, number), self.first.get(number, self.engine)
            oldest[group] = min(first, oldest.get(group, first))
        firsts = []
        for number in held:
            first = oldest[self.group_of.get(number, number)]
            firsts.append(max(first, version - self.m) if known[number].is_let_past else first)
        assert all(first >= version - self.m for first in firsts), (version, firsts)
        for k in range(self.m + 1):
            assert sum(first <= version - self.m + k for first in firsts) <= (k + 1) * self.batch, (version, firsts)
        assert set(self.training) <= set(known), "rows in training are outstanding"
        self.most = max(self.most, len(firsts))

    def forget_dropped(self) -> None:
        """Rows of a dropped group leave this account when nothing of them runs."""
        known = {row.number for row in self.runtime.rule.rows()}
        self.outstanding = {n: t for n, t in self.outstanding.items() if n in known or n in self.running}

    async def publish(self, version: int) -> None:
        await self.clock.sleep(self.lag_s())
        self.engine = version
        self.runtime.changed()
        self.check()

    async def learn(self, steps: int) -> None:
        """The training loop in small: publication runs beside the wait for the next batch."""
        publication: asyncio.Task[None] | None = None
        self.runtime.start()
        for step in range(1, steps + 1):
            raises = step > self.critic_only
            batch = await self.runtime.next_batch(raises_version=raises)
            self.batches.append(batch)
            self.training = batch.numbers
            self.check()
            await self.clock.sleep(self.learn_s())
            if publication:
                await publication
                publication = None
            self.training = ()
            for number in batch.numbers:
                del self.outstanding[number]
            self.runtime.finish_batch(batch, step)
            if raises:
                publication = asyncio.ensure_future(self.publish(batch.version + 1))
            self.take_losses()
            self.check()
        if publication:
            await publication

    async def run(self, steps: int) -> "World":
        learning = asyncio.ensure_future(self.learn(steps))
        try:
            await self.clock.run(learning.done)
            assert learning.done(), f"dead lock after {len(self.batches)} batches"
            await learning
        finally:
            learning.cancel()
            await self.stop()
        return self

    async def stop(self) -> None:
        """Stop in the middle."""
        await self.runtime.stop()
        self.take_losses()

    def take_losses(self) -> None:
        losses = self.losses_seen = self.runtime.take_losses()
        self.lost += losses.rows
        self.lost_tokens += losses.tokens

    # What came of it

    def ages(self) -> list[int]:
        """Staleness of every token that was handed to the learner."""
        return [
            int(batch.version - version)
            for batch in self.batches
            for trajectory in batch.trajectories
            for version in versions_of(trajectory)
        ]

    def trained(self, task_id: str) -> int:
        return sum(t.task_id == task_id for batch in self.batches for t in batch.trajectories)


def slow_one(row: LedgerRow) -> float:
    return 50.0 if row.task_id == SLOW else 1.0


def versions_of(trajectory: Trajectory) -> list[int]:
    return [int(version) for version in trajectory.streams[0].versions]


# -- trap 12


@pytest.mark.parametrize(("on_stale", "grace"), [("wait", 0.0), ("mask", 3.0), ("mask", 0.0), ("drop", 60.0)], ids=str)
async def test_trap_12a_a_slow_task_is_trained_and_nothing_is_too_old(on_stale: str, grace: float) -> None:
    world = await World(seconds=slow_one, options={"on_stale": on_stale, "stale_grace_s": grace}).run(120)
    admitted = [number for number, _ in world.log if world.ledger.row(number).task_id == SLOW]
    ended = [n for n in admitted if world.ledger.row(n).status in (RowStatus.TRAINED, RowStatus.READY)]
    assert world.trained(SLOW) >= 2
    assert len(admitted) - len(ended) <= 1, "only the one still running may be missing: survival is 1"
    assert world.trained(SLOW) >= len(ended) - 1
    ages = world.ages()
    if on_stale == "mask":
        too_old = sum(age > world.m for age in ages)
        assert 0 < too_old <= TOKENS * world.trained(SLOW), "tokens of slow rows alone, to be given weight 0"
        assert world.clock.now() < 200, "the learner did not stand still for 50 s a time"
    else:
        assert max(ages) <= world.m
    assert not world.lost


async def test_trap_12a_drop_frees_the_gate_and_runs_the_same_attempt_again() -> None:
    world = await World(seconds=slow_one, options={"on_stale": "drop", "stale_grace_s": 2.0}).run(60)
    assert max(world.ages()) <= world.m
    assert world.lost["stale"] >= 2
    tries = [(n, a) for n, a in world.log if world.ledger.row(n).task_id == SLOW]
    assert tries[0] == tries[1], "the row comes back under its own number and attempt"
    assert world.ledger.row(tries[0][0]).reason == "stale"
    assert world.ledger.row(tries[0][0]).failures == 0, "the gate's doing is no failure of the episode"


async def test_trap_12b_rows_in_training_are_counted() -> None:
    """A learner so slow that everything else would be admitted meanwhile: the simple count lets the age grow."""
    world = await World(batch=3, m=1, pool=30, learn_s=lambda: 20.0).run(15)
    assert max(world.ages()) == 1, "the lag is used, and not passed"
    assert world.most <= (world.m + 1) * world.batch


@pytest.mark.parametrize("m", [0, 1, 4])
async def test_trap_12c_an_engine_that_lags_the_learner(m: int) -> None:
    lags = iter([8.0, 0.1, 30.0, 2.0] * 20)
    world = await World(m=m, pool=30, lag_s=lambda: next(lags), learn_s=lambda: 0.5).run(30)
    ages = world.ages()
    assert max(ages) <= m
    if m:
        assert max(ages) >= 1


async def test_a_lagging_engine_and_a_slow_task_at_once() -> None:
    world = World(seconds=slow_one, lag_s=lambda: 6.0, options={"on_stale": "wait"})
    await world.run(60)
    assert max(world.ages()) <= world.m
    assert world.trained(SLOW) >= 1


def test_a_second_engine_that_lags_the_first_while_a_batch_is_in_training() -> None:
    """The batch was sampled by the newer engine, new rows would be by the older: ADMIT also asks for I(V+1) without it."""
    rule = Outstanding(batch_rows=2, max_staleness=2, version=2)
    for number in (1, 2):
        rule.admit(number)
        rule.set_ready(number, 2)
    rule.start_step([1, 2], raises_version=True)
    for number in (3, 4):
        assert rule.can_admit(1)
        rule.admit(number)
        rule.set_first_version(number, 1)
    assert rule.is_bounded(1, at_version=2, extra=1), "I(V) alone would allow a third"
    assert not rule.can_admit(1)
    assert rule.can_admit(2)
    rule.finish_step()
    assert rule.is_bounded(1, at_version=3)


async def random_world(seed: int, group: int = 1) -> World:
    draw = random.Random(seed)
    batch = draw.randint(1, 4) * group
    scale = draw.choice([0.2, 1.0, 5.0])
    failing = draw.choice([0.0, 0.05, 0.1])

    def end(row: LedgerRow) -> Outcome:
        return Outcome.error("engine") if draw.random() < failing else Outcome.terminated()

    world = World(
        batch=batch,
        m=seed % 5,
        pool=draw.choice([batch, batch + 1, 3 * batch, 12 * batch]),
        seconds=lambda row: draw.lognormvariate(0.0, 1.2) * (30 if draw.random() < 0.03 else 1),
        lag_s=lambda: draw.choice([0.0, 0.1, 1.0, 10.0]) * scale,
        learn_s=lambda: draw.uniform(0.0, 2.0) * scale,
        end=end,
        critic_only=draw.choice([0, 0, 3]),
        group=group,
        options={
            "on_stale": draw.choice(["wait", "mask", "drop"]),
            "stale_grace_s": draw.choice([0.0, 2.0, 20.0]),
            "max_in_flight": draw.choice([batch, 4 * batch, 64]),
            "failure_retries": 50 if group == 1 else draw.choice([0, 1, 50]),
        },
    )
    steps = 20 if group == 1 else 10
    await world.run(steps)
    rows = [number for b in world.batches for number in b.numbers]
    assert len(set(rows)) == len(rows) == steps * batch, "a row is trained once"
    assert all(list(b.numbers) == sorted(b.numbers) for b in world.batches)
    for b in world.batches:
        assert [t.uid for t in b.trajectories] == [f"r{number}" for number in b.numbers]
        assert len({t.task_id for t in b.trajectories}) == batch // group, "distinct prompts in a batch"
        assert set(Counter(world.group_of[n] for n in b.numbers).values()) == {group}, "whole groups"
        assert len({(t.task_id, t.attempt) for t in b.trajectories}) == batch, "members of a group differ"
    ages = world.ages()
    assert min(ages) >= 0
    if world.options["on_stale"] != "mask":
        assert max(ages) <= world.m
    return world


@pytest.mark.parametrize("seed", range(100))
async def test_random_worlds_keep_the_rule_and_go_on(seed: int) -> None:
    await random_world(seed)


@pytest.mark.parametrize("seed", range(45))
async def test_random_worlds_of_groups_keep_the_rule_and_go_on(seed: int) -> None:
    await random_world(seed, group=2 + seed // 5 % 3)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
async def test_many_more_random_worlds(block: int) -> None:
    for seed in range(1000 + 100 * block, 1100 + 100 * block):
        await random_world(seed)
        await random_world(seed, group=2 + seed // 5 % 3)


async def test_m_0_is_lock_step() -> None:
    draw = random.Random(3)
    world = await World(m=0, pool=40, seconds=lambda row: draw.uniform(0.1, 9.0), lag_s=lambda: 2.0).run(20)
    assert set(world.ages()) == {0}
    assert [b.version for b in world.batches] == list(range(20))
    numbers = [number for b in world.batches for number in b.numbers]
    assert numbers == list(range(1, len(numbers) + 1)), "batch after batch in ledger order"


async def test_critic_only_batches_raise_no_version() -> None:
    world = await World(critic_only=5, options={"on_stale": "wait"}).run(12)
    assert [b.version for b in world.batches] == [0] * 6 + list(range(1, 7))
    assert [b.raises_version for b in world.batches] == [False] * 5 + [True] * 7
    assert max(world.ages()) <= world.m


# -- pools


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("m", [0, 3])
async def test_a_small_pool_goes_through_epoch_after_epoch(extra: int, m: int) -> None:
    """A pool of exactly B prompts, and of a few more: no dead lock where one epoch's end waits for the next one."""
    world = await World(batch=4, m=m, pool=4 + extra, seconds=lambda row: 1.0 + row.number % 3).run(25)
    assert all(len({t.task_id for t in b.trajectories}) == 4 for b in world.batches)
    attempts = Counter((t.task_id, t.attempt) for b in world.batches for t in b.trajectories)
    assert max(attempts.values()) == 1
    assert {t for t, _ in attempts} == {f"t{i}" for i in range(4 + extra)}


async def test_a_batch_may_be_smaller_or_larger_than_what_runs_at_once() -> None:
    world = await World(batch=6, pool=40, options={"max_in_flight": 2}).run(5)
    assert len(world.batches) == 5
    assert world.most <= 6 * 3


# -- failures


async def test_a_lost_episode_is_run_again_with_its_attempt_then_given_up() -> None:
    broken = "t3"
    world = World(
        end=lambda row: Outcome.error("sandbox") if row.task_id == broken else Outcome.terminated(),
        options={"failure_retries": 2},
    )
    await world.run(10)
    rows = [row for row in world.ledger.rows() if row.task_id == broken]
    given_up = rows[0]
    assert (given_up.status, given_up.reason, given_up.failures) == (RowStatus.DROPPED, "sandbox", 2)
    tries = Counter(world.log)
    assert tries[(given_up.number, given_up.attempt)] == 3, "once, and two more tries of the same attempt"
    assert world.trained(broken) == 0
    running = sum(row.status is RowStatus.RUNNING for row in rows)
    assert world.lost["sandbox"] == sum(tries[(row.number, row.attempt)] for row in rows) - running
    assert world.lost_tokens["sandbox"] == TOKENS * world.lost["sandbox"], "sampled tokens of lost rows are counted"


async def test_episode_after_episode_lost_ends_the_run_with_a_sentence() -> None:
    world = World(end=lambda row: Outcome.error("sandbox"), options={"failure_retries": 100})
    with pytest.raises(
        EpisodesFailedError, match=r"8 episodes in a row were lost, the last one to 'sandbox'.*--resume"
    ):
        await world.run(3)
    assert issubclass(EpisodesFailedError, UserError)


@pytest.mark.parametrize("error", [UserError("no sandbox here"), InvariantError("a bug")])
async def test_what_an_episode_raises_ends_the_wait(error: Exception) -> None:
    def fail(row: LedgerRow) -> Outcome:
        raise error

    world = World(end=fail)
    with pytest.raises(type(error), match=str(error)):
        await world.run(1)


async def test_rows_that_cannot_be_trained_are_dropped_with_their_reason_and_tokens() -> None:
    world = World(end=lambda row: Outcome.truncated("turns") if row.number == 2 else Outcome.terminated())
    world.runtime._options = RuntimeOptions(drop_truncated=True)
    plain = world.episode

    async def odd(row: LedgerRow, task: Task, on_version: Callable[[int], None]) -> Trajectory:
        ended = await plain(row, task, on_version)
        if row.number in (1, 2, 3):
            world.outstanding.pop(row.number)
        if row.number == 1:
            return record(row, versions_of(ended), Outcome.terminated(), score=None)
        return record(row, [], Outcome.terminated()) if row.number == 3 else ended

    world.runtime._run_episode = odd
    await world.run(3)
    assert world.lost == {"unscored": 1, "truncated_turns": 1, "no_action_tokens": 1}
    assert world.lost_tokens == {"unscored": TOKENS, "truncated_turns": TOKENS}
    assert [world.ledger.row(n).status for n in (1, 2, 3)] == [RowStatus.DROPPED] * 3


# -- groups


async def test_a_group_waits_for_its_last_row_and_the_barrier_is_measured() -> None:
    """Members start together; one takes 9 s, the others 1 s: 8 s from the first ready row to the last."""
    world = World(batch=4, group=4, m=0, pool=4, seconds=lambda row: 9.0 if row.attempt % 4 == 3 else 1.0)
    await world.run(3)
    assert [b.group_wait_s for b in world.batches] == pytest.approx([8.0] * 3)
    assert [t.attempt for t in world.batches[0].trajectories] == [0, 1, 2, 3]
    alone = await World(m=0).run(2)
    assert [b.group_wait_s for b in alone.batches] == [None, None]


async def test_a_lost_row_is_run_again_in_its_group_whose_other_rows_stay() -> None:
    tries: Counter[int] = Counter()

    def end(row: LedgerRow) -> Outcome:
        tries[row.number] += 1
        return Outcome.error("sandbox") if row.number == 2 and tries[2] <= 2 else Outcome.terminated()

    world = await World(batch=4, group=2, end=end, m=1, options={"on_stale": "wait"}).run(3)
    assert tries[2] == 3
    assert tries[1] == 1
    assert world.lost == {"sandbox": 2}
    first = next(b for b in world.batches if 2 in b.numbers)
    assert 1 in first.numbers
    assert first.group_wait_s == 1.0, "mean over two groups: two more tries of a second, and none"


async def test_past_its_retries_a_row_takes_its_group_with_it() -> None:
    world = World(
        batch=4,
        group=2,
        seconds=lambda row: 3.0 if row.number == 3 else 1.0,
        end=lambda row: Outcome.error("sandbox") if row.number in (2, 4) else Outcome.terminated(),
        options={"failure_retries": 1},
    )
    await world.run(3)
    assert [(world.ledger.row(n).status, world.ledger.row(n).reason) for n in (1, 2, 3, 4)] == [
        (RowStatus.DROPPED, "group_dropped"),
        (RowStatus.DROPPED, "sandbox"),
        (RowStatus.DROPPED, "group_dropped"),
        (RowStatus.DROPPED, "sandbox"),
    ]
    assert world.lost == {"sandbox": 4, "group_dropped": 2}
    assert world.lost_tokens["group_dropped"] == TOKENS, "row 1 was ready, row 3 still ran"
    assert 3 in {n for n, _ in world.log}
    assert {n for b in world.batches for n in b.numbers}.isdisjoint({1, 2, 3, 4})
    survival = world.losses_seen.survival.table()
    assert survival["tokens"]["unfinished"] == [0, 1]
    assert survival["turns"]["1"] == [12, 3]
    assert survival["env"] == {"e": [12, 3]}


@pytest.mark.parametrize("on_stale", ["mask", "drop"])
async def test_the_gate_acts_on_whole_groups(on_stale: str) -> None:
    slow = lambda row: 30.0 if row.task_id == SLOW and row.attempt % 2 else 1.0  # noqa: E731
    world = await World(batch=4, group=2, seconds=slow, options={"on_stale": on_stale, "stale_grace_s": 2.0}).run(50)
    too_old = [t for b in world.batches for t in b.trajectories if b.version - min(versions_of(t)) > world.m]
    if on_stale == "mask":
        assert {t.task_id for t in too_old} == {SLOW}
        assert {t.attempt % 2 for t in too_old} == {0, 1}, "the quick row of the group waited for the slow one"
    else:
        assert not too_old
        assert world.lost["stale"] >= 2
        assert world.lost["stale"] % 2 == 0
        assert world.lost_tokens["stale"] == TOKENS * world.lost["stale"] // 2, "of the ready row of each group"
        tries = Counter(n for n, _ in world.log if world.ledger.row(n).task_id == SLOW)
        first_group = sorted(tries)[:2]
        assert tries[first_group[0]] == tries[first_group[1]] >= 2, "queued again whole"


async def test_a_half_ready_group_of_an_earlier_process_is_finished_first() -> None:
    ledger = Ledger(":memory:")
    order = PromptOrder(tasks(24), seed=7)
    for n in range(2):
        row, _ = ledger.enqueue_group(order[n][0].id, (0, 1))
        ledger.set_ready(row.number, record(row, [0, 0], Outcome.terminated()))
    world = World(ledger=ledger, batch=4, group=2)
    world.outstanding = {row.number: row.task_id for row in ledger.rows(RowStatus.READY)}
    world.group_of = {row.number: row.group or 0 for row in ledger.rows()}
    world.first = dict.fromkeys(world.outstanding, 0)
    await world.run(2)
    assert world.batches[0].numbers == (1, 2, 3, 4)
    assert [n for n, _ in world.log][:2] == [2, 4], "only the missing rows ran"
    assert len(set(world.batches[1].numbers)) == 4


# -- waits


async def test_trap_24_a_wait_ends_and_says_what_it_waited_for() -> None:
    world = World(seconds=lambda row: 1e9, options={"deadline_s": 30.0})
    with pytest.raises(DeadlineError, match=r"waited 30 s for 4 ready rows: 0 ready, 12 running, learner at version 0"):
        await world.run(1)
    assert world.clock.now() == 30.0


async def test_trap_24_a_gate_that_stays_shut_is_named() -> None:
    world = World(m=0, batch=1, pool=4, seconds=lambda row: 1.0, lag_s=lambda: 1e9, options={"deadline_s": 30.0})
    with pytest.raises(DeadlineError, match=r"learner at version 1, engine at 0"):
        await world.run(2)


async def test_trap_24_the_gate_held_shut_by_a_running_row() -> None:
    world = World(
        m=1,
        batch=1,
        pool=6,
        seconds=lambda row: 1e9 if row.number == 2 else 1.0,
        options={"on_stale": "wait", "deadline_s": 40.0},
    )
    with pytest.raises(DeadlineError, match=r"waited 40 s for the staleness gate to open: 1 ready, 1 running"):
        await world.run(5)


# -- the end, and a second process


async def test_stop_ends_what_runs_and_leaves_it_to_be_run_again() -> None:
    world = World(seconds=lambda row: 100.0)
    world.runtime.start()
    await world.clock.run(lambda: world.clock.now() > 30)
    assert world.runtime.in_flight == 12
    await world.stop()
    assert world.runtime.in_flight == 0
    assert world.ledger.counts() == {RowStatus.RUNNING: 12}


async def test_ready_rows_of_an_earlier_process_are_trained_first() -> None:
    ledger = Ledger(":memory:")
    order = PromptOrder(tasks(24), seed=7)
    for n in range(4):
        row = ledger.enqueue(order[n][0].id, order[n][1])
        ledger.set_ready(row.number, record(row, [0, 0], Outcome.terminated()))
    world = World(ledger=ledger)
    world.outstanding = {row.number: row.task_id for row in ledger.rows()}
    world.first = dict.fromkeys(world.outstanding, 0)
    await world.run(2)
    assert world.batches[0].numbers == (1, 2, 3, 4)
    assert world.batches[0].wait_s == 0.0
    assert world.runtime.rule.rows(RowState.TRAINING) == []
