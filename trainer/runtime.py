"""The asynchronous runtime: episodes on one side, batches on the other, the staleness rule between them.

    prompts --ADMIT--> running --score--> ready --STEP--> in training --> trained
                          |                                    |
                          +-- error: queued again              +-- version + 1, rows leave the outstanding set

What unblocks each: ADMIT waits for rows to leave or for a publication; STEP waits for rows to become ready and for the
gate, which running rows hold shut until they end, are let past (`mask`) or are dropped (`drop`) after a grace time.
Every change wakes both. All of it runs in one event loop; the only time is the clock's.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from sao_gym.errors import DeadlineError, InvariantError, UserError
from sao_gym.ledger import Ledger, LedgerRow, RowStatus
from sao_gym.protocols import Clock, Task
from sao_gym.stream import OutcomeStatus, Trajectory
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.staleness import Outstanding, RowState

T = TypeVar("T")
OnStale = Literal["wait", "mask", "drop"]
RunEpisode = Callable[[LedgerRow, Task, Callable[[int], None]], Awaitable[Trajectory]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeOptions:
    """What the runtime can be told; the trainer's configuration in the runtime's own words."""

    max_in_flight: int = 64
    failure_retries: int = 3
    on_stale: OnStale = "mask"
    stale_grace_s: float = 60.0
    drop_truncated: bool = False
    deadline_s: float = 1800.0
    check: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B rows in ledger order, taken out of the ready buffer. `wait_s`: how long the learner waited for them."""

    numbers: tuple[int, ...]
    trajectories: tuple[Trajectory, ...]
    version: int
    raises_version: bool
    wait_s: float
    ready_s: tuple[float, ...] = ()


@dataclass(slots=True)
class Losses:
    """Rows that ended without being trained since the last batch: rows and sampled tokens by reason."""

    rows: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)


class Runtime:
    """Admits prompts, runs their episodes, ages and hands out batches. Used from one event loop."""

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
    ) -> None:
        self._ledger = ledger
        self._order = order
        self.rule = rule
        self._engine_version = engine_version
        self._run_episode = run_episode
        self._clock = clock
        self._options = options
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._task_of: dict[int, str] = {}
        self._ready_at: dict[int, float] = {}
        self._queue: deque[LedgerRow] = deque(ledger.rows(RowStatus.QUEUED))
        self._tasks_by_id: dict[str, Task] = {}
        self._prompts_drawn = len(ledger)
        self._waiters: set[asyncio.Future[None]] = set()
        self._failure: BaseException | None = None
        self._failures_in_a_row = 0
        self._is_open = False
        self._let_go: set[int] = set()
        self.losses = Losses()
        for row in ledger.rows(RowStatus.READY):
            self.rule.restore(row.number, row.first_version or 0)
            self._task_of[row.number] = row.task_id

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
        self.rule.finish_step()
        for number in batch.numbers:
            self._task_of.pop(number, None)
        self.changed()

    def take_losses(self) -> Losses:
        """Rows lost since the last call."""
        losses, self.losses = self.losses, Losses()
        return losses

    @property
    def in_flight(self) -> int:
        """Episodes that run now."""
        return len(self._episodes)

    # -- STEP

    def _take(self, rows: list[int], raises_version: bool, waited: float) -> Batch:
        numbers = sorted(rows)
        self.rule.start_step(numbers, raises_version=raises_version)
        now = self._clock.now()
        batch = Batch(
            numbers=tuple(numbers),
            trajectories=tuple(self._ledger.trajectory(number) for number in numbers),
            version=self.rule.version,
            raises_version=raises_version,
            wait_s=waited,
            ready_s=tuple(now - self._ready_at.pop(number, now) for number in numbers),
        )
        self.changed()
        return batch

    def _lift(self, blocking: list[int]) -> None:
        """The grace time is over for rows that hold the gate shut."""
        for number in blocking:
            if self._options.on_stale == "mask":
                self.rule.let_past(number)
            else:
                # Out of O at once, but queued again only when its episode has ended: the next try has the same uid.
                self.rule.remove(number)
                self._let_go.add(number)
                self._episodes[number].cancel()

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
        while len(self._episodes) < self._options.max_in_flight and self.rule.can_admit(self._engine_version()):
            row = self._next_row()
            if row is None:
                return
            self.rule.admit(row.number)
            self._task_of[row.number] = row.task_id
            self._ledger.set_status(row.number, RowStatus.RUNNING)
            self._episodes[row.number] = asyncio.ensure_future(self._run(row))

    def _next_row(self) -> LedgerRow | None:
        """The first prompt in order of which no other row is outstanding; None if every prompt is."""
        outstanding = set(self._task_of.values())
        for index, row in enumerate(self._queue):
            if row.task_id not in outstanding:
                del self._queue[index]
                return row
        while len(outstanding) < len(self._order.tasks):
            task, attempt = self._order[self._prompts_drawn]
            row = self._ledger.enqueue(task.id, attempt)
            self._prompts_drawn += 1
            self._tasks_by_id[task.id] = task
            if task.id not in outstanding:
                return row
            self._queue.append(row)
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
            if row.number not in self._let_go:
                self._settle(row, trajectory)
        except asyncio.CancelledError:
            if row.number not in self._let_go:
                raise
        except BaseException as error:  # whatever an episode raises must end the run, not vanish with its task
            self._failure = self._failure or error
        finally:
            self._episodes.pop(row.number, None)
            if row.number in self._let_go:
                self._let_go.remove(row.number)
                self._lose(row.number, "stale", requeue=True)
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
        failed = trajectory.outcome.status is OutcomeStatus.ERROR
        self.losses.tokens[reason] += trajectory.n_action
        if failed:
            self._count_failure(reason)
        self._lose(row.number, reason, requeue=failed and row.failures < self._options.failure_retries, failed=failed)

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

    def _lose(self, number: int, reason: str, *, requeue: bool, failed: bool = False) -> None:
        self.rule.remove(number)
        self._task_of.pop(number, None)
        self.losses.rows[reason] += 1
        if not requeue:
            self._ledger.set_dropped(number, reason)
            return
        self._ledger.requeue(number, reason=reason, failed=failed)
        self._queue.appendleft(self._ledger.row(number))

    def _count_failure(self, reason: str) -> None:
        self._failures_in_a_row += 1
        limit = max(8, 2 * self.rule.batch_rows)
        if self._failures_in_a_row >= limit:
            raise EpisodesFailedError(
                f"{limit} episodes in a row were lost, the last one to {reason!r}; the environment or its sandbox is "
                "broken: see the warnings above, mend it, and go on with --resume"
            )


class EpisodesFailedError(UserError):
    """Episode after episode was lost to infrastructure."""
