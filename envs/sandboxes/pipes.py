"""Pipes to and from a process, on an event loop and without threads: whole writes, and reads that can be slowed down."""

import asyncio
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress

READ_BYTES = 262144
SHORTEST_PAUSE_S = 0.001


def wide_pipe() -> tuple[int, int]:
    """A pipe (reading end, writing end) that holds more than the usual 64 KiB, where the system grants it."""
    ends = os.pipe()
    with suppress(OSError):
        fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, READ_BYTES)
    return ends


class PipeWriter:
    """Our end of a process's stdin; `fd` becomes this object's own."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._is_closed = False

    async def send(self, data: bytes) -> None:
        """Write all of `data`. Raises OSError if the other side is gone."""
        view = memoryview(data)
        while view:
            if self._is_closed:
                raise BrokenPipeError("closed on this side")
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                await self._wait()

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        free: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self._fd, _resolve, free)
        try:
            await free
        finally:
            if not self._is_closed:
                loop.remove_writer(self._fd)

    def close(self) -> None:
        """Close; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            asyncio.get_running_loop().remove_writer(self._fd)
            os.close(self._fd)


class PipeReader:
    """Hands what comes out of a pipe to `take`, which says how long (s) to leave the next bytes where they are."""

    def __init__(self, fd: int, take: Callable[[bytes], float], end: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._take = take
        self._end = end
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            self._end()
            return
        pause_s = self._take(data)
        if pause_s >= SHORTEST_PAUSE_S and not self._is_closed:
            self._loop.remove_reader(self._fd)
            self._loop.call_later(pause_s, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._fd, self._read)

    def close(self) -> None:
        """Close; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            with suppress(RuntimeError):  # the loop may be closed
                self._loop.remove_reader(self._fd)
            os.close(self._fd)


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
