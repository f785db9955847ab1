"""Sandboxes that are started ahead of demand, a bounded number side by side, and looked at before they are taken.

Invariant: a sandbox that was started is on a shelf, in the hands of who took it, being ended, or ended. Who waits for
one gets the next that starts, whoever asked for it first.

Example:
    stock = Stock(backend, PoolSettings(warm=2), SystemClock(), Tally(), free_disk)
    box = await stock.take(SandboxSpec())
    await stock.end(box)
    await stock.close()
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from sao_gym.envs.sandboxes.backends import Backend
from sao_gym.envs.sandboxes.finish import finish
from sao_gym.envs.sandboxes.pool_records import PoolSettings, Tally
from sao_gym.envs.sandboxes.spec import SandboxSpec, ShellSandbox
from sao_gym.errors import DeadlineError, SandboxDiskError, SandboxError
from sao_gym.protocols import Clock

LATELY, OFTEN = 32, 3
"""Of the last so many that were taken, a spec must have been so many to be started ahead of demand."""
CLOSED = "this pool of sandboxes is closed"
Result = TypeVar("Result")


async def within(work: Awaitable[Result], seconds: float, clock: Clock) -> Result:
    """Await `work`. Raises DeadlineError after `seconds` of `clock`, and cancels it then."""
    task: asyncio.Future[Result] = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.sleep(seconds))
    both: set[asyncio.Future[Any]] = {task, timer}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise DeadlineError(f"nothing within {seconds:g} s")
    finally:
        timer.cancel()
        task.cancel()


@dataclass(slots=True)
class _Shelf:
    """Sandboxes of one spec: those that stand ready, how many are being started, and who waits for one."""

    name: str
    spec: SandboxSpec
    users: int = 0
    ready: deque[ShellSandbox] = field(default_factory=deque)
    waiting: "deque[asyncio.Future[ShellSandbox]]" = field(default_factory=deque)
    booting: int = 0

    @property
    def spare(self) -> int:
        """Sandboxes, started or being started, that nobody waits for."""
        return len(self.ready) + self.booting - len(self.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether it may be forgotten."""
        return not (self.ready or self.waiting or self.booting or self.users)


class Stock:
    """Shelves of started sandboxes, one for each spec; see `PoolSettings` for what bounds it."""

    def __init__(
        self, backend: Backend, settings: PoolSettings, clock: Clock, tally: Tally, free_disk: Callable[[], int]
    ) -> None:
        self._backend, self._settings, self._clock, self._tally = backend, settings, clock, tally
        self._free_disk = free_disk
        self._boots = asyncio.Semaphore(settings.boots)
        self._asked: deque[str] = deque(maxlen=LATELY)
        self._shelves: dict[str, _Shelf] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._takers = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_closed = False

    @property
    def ready(self) -> int:
        """How many sandboxes stand ready."""
        return sum(len(shelf.ready) for shelf in self._shelves.values())

    def prepare(self, spec: SandboxSpec) -> None:
        """Start ahead of demand for `spec`, now and from now on; those of other specs make room."""
        shelf = self._shelf(spec)
        self._asked += [shelf.name] * OFTEN
        self._refill(shelf)

    async def take(self, spec: SandboxSpec) -> ShellSandbox:
        """A sandbox of `spec` that answers. Raises as `SandboxPool.lease`."""
        shelf = self._shelf(spec)
        shelf.users += 1
        self._takers += 1
        self._idle.clear()
        self._asked.append(shelf.name)
        try:
            return await self._take(shelf)
        finally:
            shelf.users -= 1
            self._takers -= 1
            if not self._takers:
                self._idle.set()

    def check(self) -> None:
        """Raises SandboxError when this stock is closed."""
        if self.is_closed:
            raise SandboxError(CLOSED)

    async def end(self, box: ShellSandbox) -> None:
        """Close a sandbox; one that cannot be closed in time is counted as a leak."""
        try:
            await within(box.close(), self._settings.close_timeout_s, self._clock)
        except Exception:
            self._tally.count(leaks=1)

    async def close(self) -> None:
        """End all that was not taken; who waits gets a SandboxError. Once only."""
        self.is_closed = True
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for shelf in self._shelves.values():
            for turn in shelf.waiting:
                if not turn.done():
                    turn.set_exception(SandboxError(CLOSED))
        await self._idle.wait()
        boxes = [box for shelf in self._shelves.values() for box in shelf.ready]
        self._shelves = {}
        await asyncio.gather(*(self.end(box) for box in boxes), *self._ending)

    # ---- shelves

    def _shelf(self, spec: SandboxSpec) -> _Shelf:
        """The shelf of a spec; a label is one episode's, and a sandbox that waits has none yet."""
        plain = replace(spec, label="", env=dict(sorted(spec.env.items())))
        self._shelves = {name: shelf for name, shelf in self._shelves.items() if not shelf.is_empty}
        return self._shelves.setdefault(repr(plain), _Shelf(repr(plain), plain))

    async def _take(self, shelf: _Shelf) -> ShellSandbox:
        while shelf.ready:
            box = shelf.ready.popleft()
            if await self._is_fit(box):
                self._tally.count(warm_leases=1)
                self._refill(shelf)
                return box
            self.check()
            self._tally.count(replaced=1)
        return await self._next(shelf)

    async def _is_fit(self, box: ShellSandbox) -> bool:
        """Whether a sandbox that stood ready can be handed out; one that cannot is ended."""
        is_fit = False
        try:
            is_fit = await box.is_alive() and not self.is_closed
        finally:
            if not is_fit:
                await finish(self.end(box))
        return is_fit

    async def _next(self, shelf: _Shelf) -> ShellSandbox:
        """The next sandbox that starts."""
        self.check()
        turn: asyncio.Future[ShellSandbox] = asyncio.get_running_loop().create_future()
        shelf.waiting.append(turn)
        while shelf.spare < 0:
            self._start(shelf)
        self._refill(shelf)
        try:
            box = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._put(shelf, turn.result())
            elif turn in shelf.waiting:
                shelf.waiting.remove(turn)
            raise
        if self.is_closed:
            await finish(self.end(box))
            self.check()
        return box

    def _put(self, shelf: _Shelf, box: ShellSandbox) -> None:
        """Give a started sandbox to who waits first, else let it stand ready; what is one too many is ended."""
        while shelf.waiting:
            turn = shelf.waiting.popleft()
            if not turn.done():
                turn.set_result(box)
                return
        shelf.ready.append(box)
        if self.is_closed or self._spare > self._settings.warm:
            self._spawn(self._ending, self.end(shelf.ready.popleft()))

    @property
    def _spare(self) -> int:
        return sum(max(shelf.spare, 0) for shelf in self._shelves.values())

    def _refill(self, shelf: _Shelf) -> None:
        """Start ahead of demand for the spec that was asked for last, if that is asked for often."""
        if self._asked.count(shelf.name) < OFTEN:
            return
        while not self.is_closed and shelf.spare < self._settings.warm:
            if self._spare >= self._settings.warm:
                other = next((each for each in self._shelves.values() if each is not shelf and each.ready), None)
                if other is None:
                    return
                self._spawn(self._ending, self.end(other.ready.popleft()))
            self._start(shelf)

    # ---- starts and ends

    def _start(self, shelf: _Shelf) -> None:
        shelf.booting += 1
        self._spawn(self._starting, self._boot(shelf))

    async def _boot(self, shelf: _Shelf) -> None:
        """Start one sandbox for a shelf; where that fails, who waits first is told."""
        try:
            box = await self._try(shelf.spec)
        except Exception as error:
            shelf.booting -= 1
            while shelf.waiting and shelf.spare < 0:
                turn = shelf.waiting.popleft()
                if not turn.done():
                    turn.set_exception(error)
                    return
            return
        except BaseException:
            shelf.booting -= 1
            raise
        shelf.booting -= 1
        self._put(shelf, box)

    async def _try(self, spec: SandboxSpec) -> ShellSandbox:
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._boots:
                    return await self._started(spec)
            except SandboxDiskError:
                raise
            except SandboxError as error:
                self._tally.count(boot_failures=1)
                if attempt >= self._settings.tries:
                    raise SandboxError(f"no sandbox started in {attempt} tries; the last said: {error}") from error
                await self._clock.sleep(self._settings.backoff_s * 2 ** (attempt - 1))

    async def _started(self, spec: SandboxSpec) -> ShellSandbox:
        free, least = self._free_disk(), self._settings.free_disk_bytes
        if free < least:
            raise SandboxDiskError(
                f"no sandbox is started: {free} bytes are free at {self._settings.disk_folder}, and free_disk_bytes asks "
                f"for {least}; free some, or lower it"
            )
        began = self._clock.now()
        box = await self._backend.start(spec)
        self._tally.count(boots=1, boot_s=self._clock.now() - began)
        return box

    def _spawn(self, tasks: "set[asyncio.Task[None]]", work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
