"""The asynchronous runtime: episodes on one side, batches on the other, the staleness rule between them.

    prompts --ADMIT--> running --score--> ready --STEP--> in training --> trained
                          |                                    |
                          +-- error: queued again              +-- version + 1, rows leave the outstanding set

What unblocks each: ADMIT waits for rows to leave or for a publication; STEP waits for rows to become ready and for the
gate, which running rows hold shut until they end, are let past (`mask`) or are dropped (`drop`) after a grace time.
Every change wakes both. All of it runs in one event loop; the only time is the clock's.

With `group_size` above 1 a prompt's rows are admitted at once and trained together. A row lost to an error is run again
in its group, whose other rows wait (the barrier: `Batch.group_wait_s`); past its retries the group is dropped.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from sao_gym.errors import DeadlineError, InvariantError, NoFeedbackError, UserError
from sao_gym.ledger import Ledger, LedgerRow, RowStatus
from sao_gym.protocols import Clock, Task
from sao_gym.stream import OutcomeStatus, Trajectory
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.staleness import Outstanding, RowState
from sao_gym.trainer.survival import Survival, SurvivalState

T = TypeVar("T")
OnStale = Literal["wait", "mask", "drop"]
GROUP_DROPPED = "group_dropped"
RunEpisode = Callable[[LedgerRow, Task, Callable[[int], None]], Awaitable[Trajectory]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """What the runtime can be told; the trainer's configuration in the runtime's own words."""

    group_size: int = 1
    max_in_flight: int = 64
    failure_retries: int = 3
    failures_in_a_row: int | None = None
    on_stale: OnStale = "mask"
    stale_grace_s: float = 60.0
    drop_truncated: bool = False
    deadline_s: float = 1800.0
    check: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B rows in ledger order, taken out of the ready buffer. `wait_s`: how long the learner waited for them.

    `group_wait_s`: seconds from the first ready row of a group to its last, mean over groups; None without groups.
    """

    numbers: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]
    version: int
    raises_version: bool
    wait_s: float
    ready_s: tuple[float, ...] = ()
    group_wait_s: float | None = None


@dataclass(slots=True)
class Losses:
    """Rows that ended without being trained since the last batch: rows and sampled tokens by reason.

    `survival` is about all rows since the run began.
    """

    rows: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    survival: Survival = field(default_factory=Survival)


@dataclass(slots=True)
class _Departure:
    """Rows that left O while some of their episodes still end: `running` are those. Then they are queued again, or not."""

    numbers: tuple[int, ...]
    running: set[int]
    requeue: bool


class Runtime:
    """Admits prompts, runs their episodes, ages and hands out batches. Used from one event loop.

    `on_settled` hears a row's number when its episode has ended and the ledger says what became of it.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        order: PromptOrder,
        rule: Outstanding,
        engine_version: Callable[[], int],
        run_episode: RunEpisode,
        clock: Clock,
        options: RuntimeOptions,
        survival: Survival | None = None,
        on_settled: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._ledger = ledger
        self._order = order
        self.rule = rule
        self._engine_version = engine_version
        self._run_episode = run_episode
        self._on_settled = on_settled
        self._clock = clock
        self._options = options
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._scoring: set[int] = set()
        self._task_of: dict[int, str] = {}
        self._ready_at: dict[int, float] = {}
        self._members: dict[int, tuple[int, ...]] = {}
        self._queue: deque[tuple[LedgerRow, ...]] = deque()
        self._again: deque[LedgerRow] = deque()
        self._tasks_by_id: dict[str, Task] = {}
        self._prompts_drawn = len(ledger) // options.group_size
        self._waiters: set[asyncio.Future[None]] = set()
        self._failure: BaseException | None = None
        self._failures_in_a_row = 0
        self._is_open = False
        self._departures: dict[int, _Departure] = {}
        self.trained_rows = ledger.counts().get(RowStatus.TRAINED, 0)
        self.losses = Losses(survival=survival or Survival())
        for group in groups_of(ledger.rows(RowStatus.QUEUED, RowStatus.READY)):
            self._take_up(group)

    def _take_up(self, group: tuple[LedgerRow, ...]) -> None:
        """Rows of an earlier process: a group of which some rows are ready is outstanding, the others run again."""
        if not any(row.status is RowStatus.READY for row in group):
            self._queue.append(group)
            return
        self._enter(group)
        for row in group:
            if row.status is RowStatus.READY:
                self.rule.set_ready(row.number, row.first_version or 0)
            else:
                self._again.append(row)

    # -- what the driver calls

    def start(self) -> None:
        """Begin to admit."""
        self._is_open = True
        self._admit()

    async def stop(self) -> None:
        """Admit no more and cancel what runs; the ledger keeps it as running, to be queued again on a resume."""
        self._is_open = False
        for episode in self._episodes.values():
            episode.cancel()
        await asyncio.gather(*self._episodes.values(), return_exceptions=True)

    def changed(self) -> None:
        """Something that a gate looks at may have changed: a publication, for one."""
        if self._is_open and self._failure is None:
            self._admit()
        if self._options.check and not self.rule.is_bounded(self._engine_version(), at_version=self.rule.version):
            self._failure = self._failure or InvariantError(f"I({self.rule.version}) does not hold: {self.rule.rows()}")
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def next_batch(self, *, raises_version: bool) -> Batch:
        """The next batch, once it is there and the gate is open.

        Raises DeadlineError naming what was waited for, and whatever ended the admission of episodes.
        """
        started = self._clock.now()
        shut_since: float | None = None
        while True:
            if self._failure is not None:
                raise self._failure
            rows = self.rule.oldest_ready()
            if rows and (not raises_version or self.rule.can_step(rows, self._engine_version())):
                return self._take(rows, raises_version, self._clock.now() - started)
            blocking = self.rule.blocking(rows) if rows else []
            shut_since = (shut_since if shut_since is not None else self._clock.now()) if blocking else None
            patience = started + self._options.deadline_s - self._clock.now()
            if patience <= 0:
                raise DeadlineError(self._describe_wait(rows))
            if blocking and self._options.on_stale != "wait":
                grace = (shut_since or 0.0) + self._options.stale_grace_s - self._clock.now()
                if grace <= 0:
                    self._lift(blocking)
                    continue
                patience = min(patience, grace)
            await self._wait(patience)

    def finish_batch(self, batch: Batch, step: int) -> None:
        """The batch is in the weights of `step`; its rows leave the outstanding set."""
        self._ledger.set_trained(batch.numbers, step)
        self.trained_rows += len(batch.numbers)
        self.rule.finish_step()
        for number, trajectory in zip(batch.numbers, batch.trajectories, strict=True):
            self._forget(number)
            self.losses.survival.add(trajectory, is_trained=True)
        self.changed()

    def take_losses(self) -> Losses:
        """Rows lost since the last call."""
        losses, self.losses = self.losses, Losses(survival=self.losses.survival)
        return losses

    def survival_state(self) -> SurvivalState:
        """Who survived so far, for a checkpoint."""
        dropped = self._ledger.counts().get(RowStatus.DROPPED, 0)
        return SurvivalState(table=self.losses.survival.table(), dropped=dropped)

    @property
    def in_flight(self) -> int:
        """Episodes that run now."""
        return len(self._episodes)

    def begin_scoring(self, number: int) -> None:
        """An episode has nothing left but its grade, which needs no agent's place: another one may begin."""
        if number in self._episodes and number not in self._scoring:
            self._scoring.add(number)
            self._ledger.set_status(number, RowStatus.SCORING)
            self.changed()

    # -- STEP

    def _take(self, rows: list[int], raises_version: bool, waited: float) -> Batch:
        numbers = sorted(rows)
        self.rule.start_step(numbers, raises_version=raises_version)
        now = self._clock.now()
        group_wait_s = self._group_wait(numbers)
        batch = Batch(
            numbers=tuple(numbers),
            trajectories=tuple(self._ledger.trajectory(number) for number in numbers),
            version=self.rule.version,
            raises_version=raises_version,
            wait_s=waited,
            ready_s=tuple(now - self._ready_at.pop(number, now) for number in numbers),
            group_wait_s=group_wait_s,
        )
        self.changed()
        return batch

    def _group_wait(self, numbers: list[int]) -> float | None:
        """How long rows of a group waited for its last one. Rows of an earlier process have no time."""
        groups = {self._members[number] for number in numbers if len(self._members[number]) > 1}
        times = [[self._ready_at[n] for n in group if n in self._ready_at] for group in groups]
        waits = [max(ready) - min(ready) for ready in times if ready]
        return sum(waits) / len(waits) if waits else None

    def _lift(self, blocking: list[int]) -> None:
        """The grace time is over for rows that hold the gate shut."""
        for number in blocking:
            if self._options.on_stale == "mask":
                self.rule.let_past(number)
            elif number in self._members and number not in self._departures:
                self._release(self._members[number], requeue=True)

    def _release(self, numbers: tuple[int, ...], *, requeue: bool, but: int | None = None) -> None:
        """Take rows out of O at once. `but` is the one whose episode has ended.

        They are queued again only when their episodes have ended too: the next try has the same uid.
        """
        running = {number for number in numbers if number in self._episodes and number != but}
        departure = _Departure(numbers, running, requeue)
        self._again = deque(row for row in self._again if row.number not in numbers)
        for number in numbers:
            self.rule.remove(number)
            self._ready_at.pop(number, None)
        for number in running:
            self._departures[number] = departure
            self._episodes[number].cancel()
        if not running:
            self._part(departure)

    def _part(self, departure: _Departure) -> None:
        """The last episode of rows that left O has ended."""
        if departure.requeue:
            for number in departure.numbers:
                self._count_loss(self._ledger.row(number), "stale")
            self._ledger.requeue_group(departure.numbers, reason="stale")
            self._queue.appendleft(tuple(self._ledger.row(number) for number in departure.numbers))
        for number in departure.numbers:
            self._forget(number)

    def _count_loss(self, row: LedgerRow, reason: str) -> None:
        """One row less. What a row that was ready had sampled is counted; a running one's length is not known."""
        self.losses.rows[reason] += 1
        ended = self._ledger.trajectory(row.number) if row.status is RowStatus.READY else None
        self.losses.survival.add(ended, is_trained=False)
        if ended is not None:
            self.losses.tokens[reason] += ended.n_action

    def _describe_wait(self, rows: list[int]) -> str:
        ready, running = len(self.rule.rows(RowState.READY)), len(self._episodes)
        what = "the staleness gate to open" if rows else f"{self.rule.batch_rows} ready rows"
        return (
            f"waited {self._options.deadline_s:g} s for {what}: {ready} ready, {running} running, "
            f"learner at version {self.rule.version}, engine at {self._engine_version()}"
        )

    async def _wait(self, seconds: float) -> None:
        """Until something changes, at most `seconds`."""
        changed = asyncio.get_running_loop().create_future()
        self._waiters.add(changed)
        alarm = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({changed, alarm}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            alarm.cancel()
            self._waiters.discard(changed)

    # -- ADMIT

    def _admit(self) -> None:
        size = self._options.group_size
        while self._again and self._room() >= 1:
            self._launch(self._again.popleft())
        while self._room() >= size and self.rule.can_admit(self._engine_version(), size):
            group = self._next_group()
            if group is None:
                return
            self._enter(group)
            for row in group:
                self._launch(row)

    def _room(self) -> int:
        """How many more episodes may run: those that are scored beside the others hold no place, up to as many again."""
        limit, running = self._options.max_in_flight, len(self._episodes)
        return min(limit - (running - len(self._scoring)), 2 * limit - running)

    def _enter(self, group: tuple[LedgerRow, ...]) -> None:
        numbers = tuple(row.number for row in group)
        for row in group:
            self.rule.admit(row.number, row.group)
            self._task_of[row.number] = row.task_id
            self._members[row.number] = numbers

    def _forget(self, number: int) -> None:
        self._task_of.pop(number, None)
        self._members.pop(number, None)

    def _launch(self, row: LedgerRow) -> None:
        self._ledger.set_status(row.number, RowStatus.RUNNING)
        self._episodes[row.number] = asyncio.ensure_future(self._run(row))

    def _next_group(self) -> tuple[LedgerRow, ...] | None:
        """Rows of the first prompt in order of which no other row is outstanding; None if every prompt is."""
        outstanding = set(self._task_of.values())
        for index, group in enumerate(self._queue):
            if group[0].task_id not in outstanding:
                del self._queue[index]
                return group
        size = self._options.group_size
        while len(outstanding) < len(self._order.tasks):
            task, epoch = self._order[self._prompts_drawn]
            group = self._ledger.enqueue_group(task.id, range(epoch * size, (epoch + 1) * size))
            self._prompts_drawn += 1
            self._tasks_by_id[task.id] = task
            if task.id not in outstanding:
                return group
            self._queue.append(group)
        return None

    def _find_task(self, row: LedgerRow) -> Task:
        if row.task_id not in self._tasks_by_id:
            self._tasks_by_id[row.task_id] = self._order.find(row.task_id)
        return self._tasks_by_id[row.task_id]

    async def _run(self, row: LedgerRow) -> None:
        def on_version(version: int) -> None:
            self.rule.set_first_version(row.number, version)

        try:
            trajectory = await self._run_episode(row, self._find_task(row), on_version)
            if row.number not in self._departures:
                self._settle(row, trajectory)
        except asyncio.CancelledError:
            if row.number not in self._departures:
                raise
        except BaseException as error:  # whatever an episode raises must end the run, not vanish with its task
            self._failure = self._failure or error
        finally:
            self._episodes.pop(row.number, None)
            self._scoring.discard(row.number)
            departure = self._departures.pop(row.number, None)
            if departure:
                departure.running.discard(row.number)
                if not departure.running:
                    self._part(departure)
            self._on_settled(row.number)
            self.changed()

    def _settle(self, row: LedgerRow, trajectory: Trajectory) -> None:
        """An episode ended: ready, or lost with its reason."""
        reason = self._unusable(trajectory)
        if reason is None:
            self._failures_in_a_row = 0
            first = trajectory.first_version
            if first is None:
                raise InvariantError(f"row {row.number} became ready without a sampled token")
            self._ledger.set_ready(row.number, trajectory)
            self.rule.set_ready(row.number, first)
            self._ready_at[row.number] = self._clock.now()
            return
        failed = trajectory.outcome.status is OutcomeStatus.ERROR and reason != NoFeedbackError.kind
        self.losses.tokens[reason] += trajectory.n_action
        if failed:
            self._count_failure(reason)
        self.losses.rows[reason] += 1
        if failed and row.failures < self._options.failure_retries:
            self._run_again(row, reason)
            return
        self.losses.survival.add(trajectory, is_trained=False)
        self._drop(row, reason)

    def _unusable(self, trajectory: Trajectory) -> str | None:
        if trajectory.outcome.is_error:
            return trajectory.outcome.reason or "error"
        if trajectory.score is None:
            return "unscored"
        if not trajectory.n_action:
            return "no_action_tokens"
        if self._options.drop_truncated and trajectory.outcome.is_truncated:
            return f"truncated_{trajectory.outcome.reason}"
        return None

    def _run_again(self, row: LedgerRow, reason: str) -> None:
        """The same attempt once more: in its group at once, by itself through the gate."""
        self._ledger.requeue(row.number, reason=reason, failed=True)
        if row.group is not None:
            self.rule.restart(row.number)
            self._again.append(self._ledger.row(row.number))
            return
        self.rule.remove(row.number)
        self._forget(row.number)
        self._queue.appendleft((self._ledger.row(row.number),))

    def _drop(self, row: LedgerRow, reason: str) -> None:
        """The row will never be trained, and so its group cannot be."""
        members = self._members[row.number]
        others = [number for number in members if number != row.number]
        for number in others:
            self._count_loss(self._ledger.row(number), GROUP_DROPPED)
        self._ledger.drop_group({row.number: reason, **dict.fromkeys(others, GROUP_DROPPED)})
        self._release(members, requeue=False, but=row.number)

    def _count_failure(self, reason: str) -> None:
        self._failures_in_a_row += 1
        limit = self._options.failures_in_a_row or max(8, 2 * self.rule.batch_rows)
        if self._failures_in_a_row >= limit:
            raise EpisodesFailedError(
                f"{limit} episodes in a row were lost, the last one to {reason!r}; the environment or its sandbox is "
                "broken: see the warnings above, mend it, and go on with --resume"
            )


class EpisodesFailedError(UserError):
    """Episode after episode was lost to infrastructure."""


def groups_of(rows: Iterable[LedgerRow]) -> list[tuple[LedgerRow, ...]]:
    """Rows in ledger order, gathered into their groups; a row without one stands alone."""
    groups: dict[int, list[LedgerRow]] = {}
    for row in rows:
        groups.setdefault(row.number if row.group is None else row.group, []).append(row)
    return [tuple(group) for group in groups.values()]
