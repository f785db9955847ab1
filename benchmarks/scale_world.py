"""A made-up machine around the real scheduler: engines, environments and a learner that only take virtual time.

Invariant: admission, ageing, the gate and the batches are `trainer.runtime.Runtime` with its own `Outstanding`,
`PromptOrder` and `Ledger`, unchanged; only what is awaited is a model. Work is shared as on the machine it stands for:
an engine decodes up to `slots` requests side by side, n of them at `token_s + n * each_token_s` seconds a token each;
where engine and learner live in one process, the engine runs at `engine_share` of its speed while the learner works,
and every token sampled meanwhile makes the learner's work longer by `learn_token_s`.

Example:
    >>> load = Load(environments=64, batch=8, median_wait_s=1.0, batches=4)
    >>> result = asyncio.run(World(Machine(engines=1), load).run())
    >>> 0 <= result.staleness_mean <= load.max_staleness
    True
"""

import asyncio
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from waiting_arithmetic import Waits, sigma_of

from sao_gym.clock import VirtualClock
from sao_gym.ledger import Ledger, LedgerRow
from sao_gym.protocols import Task
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.tasks.base import ListTaskSet
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.runtime import Batch, OnStale, Runtime, RuntimeOptions
from sao_gym.trainer.staleness import Outstanding

SLOWEST = 0.05
"""Share of its speed that a learner always keeps."""
SETTLE = 8
"""Rounds of the event loop between two moves of the virtual clock: the longest chain of wake-ups here."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What runs the load. Times in seconds; `lag_s`: mean time until one engine serves a publication."""

    engines: int = 1
    slots: int = 64
    token_s: float = 0.02
    each_token_s: float = 0.0
    lag_s: float = 10.0
    learn_s: float = 100.0
    learn_token_s: float = 0.0
    engine_share: float = 1.0

    @property
    def is_shared(self) -> bool:
        """Whether speeds depend on what else runs."""
        return self.each_token_s > 0 or self.learn_token_s > 0 or self.engine_share < 1


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is run. `tokens` are sampled per episode, over `turns`; `waits`: over how many turns its wait is spread.

    `in_blocks`: waits are drawn as `waiting_arithmetic.py` draws them. `batches` count after `warm_up` others (unset:
    m + 2).
    """

    environments: int = 256
    batch: int = 64
    group_size: int = 1
    max_staleness: int = 4
    on_stale: OnStale = "mask"
    grace_s: float = 5.0
    median_wait_s: float = 30.0
    tail: float = 50.0
    turns: int = 3
    waits: int = 3
    tokens: float = 3000.0
    batches: int = 12
    warm_up: int | None = None
    in_blocks: bool = False
    seed: int = 0

    @property
    def uncounted(self) -> int:
        """Batches before those that count."""
        return self.max_staleness + 2 if self.warm_up is None else self.warm_up


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of it, over the batches after the warm-up. Idle shares are of learner, environments and engine slots.

    `masked_share`: sampled tokens older than m; staleness is over the others, which are trained.
    """

    trajectories_per_s: float
    learner_idle: float
    environments_idle: float
    slots_idle: float
    staleness_mean: float
    staleness_max: int
    masked_share: float


class Processor:
    """Serves up to `slots` jobs side by side, each at `speed` units of work a second; the others wait in line."""

    def __init__(self, clock: VirtualClock, slots: int, on_change: Callable[[], None] = lambda: None) -> None:
        self.slots = slots
        self.busy_slot_s = 0.0
        self._clock, self._on_change = clock, on_change
        self._speed, self._attained, self._at = 1.0, 0.0, 0.0
        self._number = itertools.count()
        self._active: list[tuple[float, int, asyncio.Future[None]]] = []
        self._line: deque[tuple[float, asyncio.Future[None]]] = deque()
        self._alarm: asyncio.Task[None] | None = None

    @property
    def jobs(self) -> int:
        """Jobs here, those in line included."""
        return len(self._active) + len(self._line)

    @property
    def active(self) -> int:
        """Jobs in service."""
        return len(self._active)

    async def work(self, amount: float) -> None:
        """Return when `amount` units of work are done."""
        done = asyncio.get_running_loop().create_future()
        self._line.append((amount, done))
        self._update()
        await done

    def set_speed(self, speed: float) -> None:
        """Units of work a second that each job in service gets from now on."""
        if speed != self._speed:
            self.advance()
            self._speed = speed
            self._rearm()

    def advance(self) -> None:
        """Account for the time since the last change."""
        seconds = self._clock.now() - self._at
        self._at += seconds
        self._attained += seconds * self._speed
        self.busy_slot_s += seconds * len(self._active)

    def _update(self) -> None:
        """Finish what is done, take up what waits in line, and set the alarm for what ends next."""
        self.advance()
        while self._active and self._active[0][0] <= self._attained * (1 + 1e-12) + 1e-9:
            _, _, done = heapq.heappop(self._active)
            if not done.done():
                done.set_result(None)
        while self._line and len(self._active) < self.slots:
            amount, done = self._line.popleft()
            heapq.heappush(self._active, (self._attained + amount, next(self._number), done))
        self._on_change()
        self._rearm()

    def _rearm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None
        if self._active:
            delay = (self._active[0][0] - self._attained) / self._speed
            self._alarm = asyncio.ensure_future(self._ring(delay))

    async def _ring(self, delay: float) -> None:
        await self._clock.sleep(delay)
        self._alarm = None
        self._update()

    def stop(self) -> None:
        """Forget the alarm."""
        if self._alarm is not None:
            self._alarm.cancel()


class World:
    """One load on one machine, under a virtual clock."""

    def __init__(self, machine: Machine, load: Load) -> None:
        self._machine, self._load = machine, load
        self._clock = VirtualClock()
        self._random = random.Random(load.seed)
        self._waits = Waits(load.median_wait_s, load.tail, load.seed)
        on_change = self._share if machine.is_shared else lambda: None
        self._engines = [Processor(self._clock, machine.slots, on_change) for _ in range(machine.engines)]
        self._learner = Processor(self._clock, 1, on_change)
        self._share()
        self._versions = [0] * machine.engines
        self._batches: list[Batch] = []
        self._running, self._running_s, self._at = 0, 0.0, 0.0
        self._waited = 0.0
        self._marks: list[tuple[float, float, float, float]] = []
        pool = 4 * load.batch * (load.max_staleness + 2)
        tasks = ListTaskSet("made up", [Task(id=f"t{i}", prompt="?") for i in range(pool)])
        self._runtime = Runtime(
            ledger=Ledger(":memory:"),
            order=PromptOrder(tasks, seed=load.seed),
            rule=Outstanding(batch_rows=load.batch, max_staleness=load.max_staleness),
            engine_version=lambda: min(self._versions),
            run_episode=self._episode,
            clock=self._clock,
            options=RuntimeOptions(
                group_size=load.group_size,
                max_in_flight=load.environments,
                on_stale=load.on_stale,
                stale_grace_s=load.grace_s,
                deadline_s=1e9,
                check=False,
            ),
        )

    async def run(self) -> Result:
        """Train the warm-up batches, then those that count. Raises RuntimeError for a dead lock."""
        learning = asyncio.ensure_future(self._learn(self._load.uncounted + self._load.batches))
        try:
            await self._clock.run(learning.done, settle=SETTLE)
            if not learning.done():
                raise RuntimeError(f"dead lock after {len(self._batches)} batches of {self._load} on {self._machine}")
            await learning
        finally:
            learning.cancel()
            await self._runtime.stop()
            for processor in (*self._engines, self._learner):
                processor.stop()
        return self._result()

    def _share(self) -> None:
        """Set every speed as the machine says, after any of them took up or ended a job."""
        machine, tokens_per_s = self._machine, 0.0
        share = machine.engine_share if self._learner.active else 1.0
        for engine in self._engines:
            speed = share / (machine.token_s + engine.active * machine.each_token_s)
            engine.set_speed(speed)
            tokens_per_s += engine.active * speed
        self._learner.set_speed(max(SLOWEST, 1.0 - machine.learn_token_s * tokens_per_s))

    async def _episode(self, row: LedgerRow, task: Task, on_version: Callable[[int], None]) -> Trajectory:
        """Its turns on one engine, the lesser used of two, with its wait after the first `waits` of them."""
        load = self._load
        place = min((self._random.randrange(len(self._engines)) for _ in range(2)), key=lambda i: self._engines[i].jobs)
        wait = self._waits.draw() if load.in_blocks else self._wait()
        tokens = self._random.uniform(0.5, 1.5) * load.tokens / load.turns
        versions: list[int] = []
        self._count(+1)
        try:
            on_version(self._versions[place])
            for turn in range(load.turns):
                await self._engines[place].work(tokens)
                versions.append(self._versions[place])
                on_version(versions[0])
                if turn < load.waits:
                    await self._clock.sleep(wait / load.waits)
        finally:
            self._count(-1)
        return recorded(row, versions)

    def _wait(self) -> float:
        return self._load.median_wait_s * math.exp(sigma_of(self._load.tail) * self._random.gauss(0.0, 1.0))

    def _count(self, change: int) -> None:
        self._running_s += self._running * (self._clock.now() - self._at)
        self._at = self._clock.now()
        self._running += change

    async def _learn(self, batches: int) -> None:
        publication: asyncio.Future[None] | None = None
        self._runtime.start()
        for step in range(1, batches + 1):
            batch = await self._runtime.next_batch(raises_version=True)
            self._waited += batch.wait_s
            self._batches.append(batch)
            await self._learner.work(self._machine.learn_s)
            if publication is not None:
                await publication
            self._runtime.finish_batch(batch, step)
            self._runtime.take_losses()
            publication = asyncio.ensure_future(self._publish(batch.version + 1))
            self._mark()
        if publication is not None:
            publication.cancel()

    async def _publish(self, version: int) -> None:
        await asyncio.gather(*(self._load_weights(place, version) for place in range(len(self._engines))))

    async def _load_weights(self, place: int, version: int) -> None:
        await self._clock.sleep(self._machine.lag_s * self._random.uniform(0.5, 1.5))
        oldest = min(self._versions)
        self._versions[place] = version
        if min(self._versions) != oldest:
            self._runtime.changed()

    def _mark(self) -> None:
        self._count(0)
        for engine in self._engines:
            engine.advance()
        slots = sum(engine.busy_slot_s for engine in self._engines)
        self._marks.append((self._clock.now(), self._waited, self._running_s, slots))

    def _result(self) -> Result:
        warm, load = self._load.uncounted, self._load
        seconds, waited, running, slots = (
            last - first for first, last in zip(self._marks[warm - 1], self._marks[-1], strict=True)
        )
        counted = self._batches[warm:]
        ages = np.concatenate([batch.version - t.streams[0].versions for batch in counted for t in batch.trajectories])
        trained = ages[ages <= load.max_staleness]
        return Result(
            trajectories_per_s=len(counted) * load.batch / seconds,
            learner_idle=waited / seconds,
            environments_idle=1.0 - running / seconds / load.environments,
            slots_idle=1.0 - slots / seconds / (self._machine.engines * self._machine.slots),
            staleness_mean=float(trained.mean()) if len(trained) else 0.0,
            staleness_max=int(trained.max()) if len(trained) else 0,
            masked_share=1.0 - len(trained) / len(ages),
        )


def recorded(row: LedgerRow, versions: list[int]) -> Trajectory:
    """A trajectory of one token per turn."""
    action = Segment.action(
        [3] * len(versions), logprobs=[-1.0] * len(versions), versions=versions, temperature=1.0, stop=StopReason.STOP
    )
    stream = TokenStream(segments=(Segment.observation([1, 2]), action))
    made = Trajectory(
        uid=f"r{row.number}",
        task_id=row.task_id,
        env_id="made up",
        attempt=row.attempt,
        streams=(stream,),
        outcome=Outcome.terminated(),
    )
    return made.scored(Score(value=1.0, passed=True))
