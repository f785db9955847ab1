"""A pool of sandboxes with a shell: started ahead of demand, looked at before they are handed out, never lost.

Invariant: every sandbox that was started is ready, leased, being closed, or closed; `metrics.leaks` counts those whose
closing failed. At most `size` are leased and `warm` more stand ready. No sandbox is handed out twice.

What fails before a command runs (a start, a dead sandbox) is tried again here, a bounded number of times. What fails
while one runs costs the sandbox its state: it is raised as SandboxError, and whoever runs the episode runs it again.

Example:
    pool = SandboxPool(await open_backend("local"), size=8, settings=PoolSettings(warm=2))
    async with await pool.lease(SandboxSpec()) as box:
        print((await box.exec("uname -a")).stdout)
    await pool.close()
"""

import asyncio
import shutil
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from sao_gym.clock import SystemClock
from sao_gym.envs.sandboxes.backends import Backend
from sao_gym.envs.sandboxes.finish import Closing, finish
from sao_gym.envs.sandboxes.lease import Held, Lease
from sao_gym.envs.sandboxes.pool_records import PoolMetrics, PoolSettings, Tally
from sao_gym.envs.sandboxes.spec import SandboxSpec, ShellSandbox
from sao_gym.envs.sandboxes.stock import CLOSED, Stock, within
from sao_gym.errors import ConfigError, DeadlineError, SandboxError
from sao_gym.protocols import Clock


class SandboxPool(Closing):
    """Leases sandboxes of a backend, which it owns; all methods belong to one event loop.

    `free_disk` says how many bytes are free, where the settings' folder is not what to ask.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        size: int,
        settings: PoolSettings | None = None,
        clock: Clock | None = None,
        free_disk: Callable[[], int] | None = None,
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"size of a pool of sandboxes is {size!r}; give a whole number from 1 on")
        self._backend, self._size = backend, size
        self._settings = settings or PoolSettings()
        self._clock = clock or SystemClock()
        self._tally = Tally()
        ask = free_disk or (lambda: shutil.disk_usage(self._settings.disk_folder).free)
        self._stock = Stock(backend, self._settings, self._clock, self._tally, ask)
        self._places = asyncio.Semaphore(size)
        self._held: dict[Held, weakref.ref[Lease]] = {}
        self._queued = 0
        self._ending: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def metrics(self) -> PoolMetrics:
        """What was done until now; running leases included."""
        done = self._tally.done
        return replace(
            done,
            execs=done.execs + sum(held.execs for held in self._held),
            exec_s=done.exec_s + sum(held.exec_s for held in self._held),
            ready=self._stock.ready,
            leased=len(self._held),
            queued=self._queued,
        )

    def prepare(self, spec: SandboxSpec) -> None:
        """Start as many sandboxes of `spec` as the settings keep warm; those of other specs make room."""
        self._stock.check()
        self._stock.prepare(spec)

    async def lease(self, spec: SandboxSpec | None = None) -> Lease:
        """Wait for a free place and take a sandbox that answers.

        Raises ConfigError and SandboxUnavailableError as the backend does; SandboxError where none started in the tries
        that the settings give or none came free in time; SandboxDiskError where the disk is too full to start one.
        """
        self._stock.check()
        began = self._clock.now()
        self._queued += 1
        try:
            await self._take_place()
        finally:
            self._queued -= 1
        try:
            box = await self._stock.take(spec or SandboxSpec())
        except BaseException:
            self._places.release()
            raise
        return self._hold(box, began)

    def _hold(self, box: ShellSandbox, began: float) -> Lease:
        now = self._clock.now()
        held = Held(box=box, clock=self._clock, since=now, seen=now, give_back=self._give_back)
        lease = Lease(held)
        self._held[held] = weakref.ref(lease)
        self._tally.count(leases=1, queue_s=now - began)
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._look())
        return lease

    async def _take_place(self) -> None:
        limit_s = self._settings.queue_timeout_s
        place = asyncio.ensure_future(self._places.acquire())
        try:
            await within(asyncio.shield(place), limit_s, self._clock)
        except BaseException as error:
            place.cancel()
            with suppress(asyncio.CancelledError):
                await place
                self._places.release()
            if isinstance(error, DeadlineError):
                raise SandboxError(
                    f"none of {self._size} sandboxes came free within {limit_s:g} s; raise the pool's size or queue_timeout_s"
                ) from None
            raise
        if self._stock.is_closed:
            self._places.release()
            self._stock.check()

    # ---- leases

    async def _give_back(self, held: Held) -> None:
        await self._over(held, "this sandbox was given back")

    async def _over(self, held: Held, reason: str) -> None:
        if self._held.pop(held, None) is None:
            return
        held.over = reason
        self._tally.count(execs=held.execs, exec_s=held.exec_s)
        try:
            await finish(self._stock.end(held.box))
        finally:
            self._places.release()

    async def _look(self) -> None:
        """Take back what nobody holds any more."""
        while True:
            await self._clock.sleep(self._settings.look_s)
            for held, lease in list(self._held.items()):
                if reason := self._is_overdue(held, lease()):
                    self._tally.count(taken_back=1)
                    task = asyncio.create_task(self._over(held, f"this sandbox was taken back: {reason}"))
                    self._ending.add(task)
                    task.add_done_callback(self._ending.discard)

    def _is_overdue(self, held: Held, lease: Lease | None) -> str:
        """Why a lease ends, empty while it may go on."""
        settings = self._settings
        if lease is None:
            return "its holder is gone"
        if self._clock.now() - held.since >= settings.lease_timeout_s:
            return f"it was held for lease_timeout_s = {settings.lease_timeout_s:g}"
        if held.silence_s() >= settings.silence_timeout_s:
            return f"nothing was heard of its holder for silence_timeout_s = {settings.silence_timeout_s:g}"
        return ""

    # ---- the end

    async def close(self) -> None:
        """End every sandbox, leased ones too, and close the backend; idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await finish(self._closing)

    async def _close(self) -> None:
        self._stock.is_closed = True
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        held = [self._over(held, CLOSED) for held in [*self._held]]
        await asyncio.gather(self._stock.close(), *held, *self._ending)
        await self._backend.close()
