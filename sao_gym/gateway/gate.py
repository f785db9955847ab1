"""Who may sample now: at most so many calls at a time, and none while weights are published.

Invariants: a call waits in the order of its arrival; whoever entered leaves; nobody waits without a deadline.

Example:
    gate = Gate(SystemClock(), max_running=32)
    async with gate.hold():  # calls wait
        await engine.publish(source, version)
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from sao_gym.gateway.refusals import Refusal
from sao_gym.protocols import Clock


class Gate:
    """Lets calls in. Past `max_waiting`, or after `wait_s` of waiting, a call is refused until later."""

    def __init__(
        self,
        clock: Clock,
        *,
        max_running: int | None = None,
        max_waiting: int = 1024,
        wait_s: float = 120.0,
        retry_after_s: float = 5.0,
    ) -> None:
        self._clock = clock
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._wait_s = wait_s
        self._retry_after_s = retry_after_s
        self._running = 0
        self._held = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def running(self) -> int:
        """Calls inside."""
        return self._running

    @property
    def waiting(self) -> int:
        """Calls before the gate."""
        return len(self._queue)

    @property
    def is_held(self) -> bool:
        """Whether no call is let in."""
        return self._held > 0

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Let nobody in meanwhile; calls inside go on."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            self._let_in()

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """Be inside. Raises Refusal where it would take too long."""
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        if self._has_room and not self._queue:
            self._running += 1
            return
        if len(self._queue) >= self._max_waiting:
            raise Refusal.busy(self._retry_after_s)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        alarm = asyncio.ensure_future(self._clock.sleep(self._wait_s))
        self._queue.append(turn)
        try:
            await asyncio.wait({turn, alarm}, return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                raise Refusal.busy(self._retry_after_s)
        except BaseException:
            if turn.done():
                self._leave()  # let in and cancelled at one time
            else:
                turn.cancel()
                with suppress(ValueError):
                    self._queue.remove(turn)
            raise
        finally:
            alarm.cancel()

    def _leave(self) -> None:
        self._running -= 1
        self._let_in()

    @property
    def _has_room(self) -> bool:
        return not self._held and (self._max_running is None or self._running < self._max_running)

    def _let_in(self) -> None:
        while self._queue and self._has_room:
            turn = self._queue.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)
