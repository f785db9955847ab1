"""Time as a part that is handed in: the runtime knows no other source of time and no other sleep.

`VirtualClock` makes hours of asynchronous scheduling run in milliseconds: when every task of the loop waits on the
clock, time jumps to the next one due.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable


class SystemClock:
    """The machine's own monotonic clock, in seconds."""

    def now(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Give way to other tasks for `seconds`."""
        await asyncio.sleep(seconds)


class VirtualClock:
    """A clock that moves only when `run` finds nothing else to do. Sleepers due at one time wake in order of call."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        """Virtual seconds since the clock was made."""
        return self._now

    async def sleep(self, seconds: float) -> None:
        """Wait until the clock has been moved past `seconds` from now."""
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(seconds, 0.0), next(self._order), future))
        await future

    async def run(self, until: Callable[[], bool], *, settle: int = 20, has_others: bool = False) -> None:
        """Move time from sleeper to sleeper until `until()` holds.

        Between two moves the loop is given `settle` rounds, so that chains of wake-ups run out. Returns early, with
        `until()` false, if nothing sleeps any more: the program under test is dead-locked. `has_others` says that threads or
        sockets work on it too, which are then waited for as long as it takes.
        """
        while True:
            for _ in range(settle):
                await asyncio.sleep(0)
            if until():
                return
            while self._sleepers and self._sleepers[0][2].done():
                heapq.heappop(self._sleepers)
            if not self._sleepers:
                if not has_others:
                    return
                await asyncio.sleep(0.001)
                continue
            due, _, future = heapq.heappop(self._sleepers)
            self._now = max(self._now, due)
            future.set_result(None)
