"""An attached container's standard streams, over a hijacked connection on the event loop.

Docker sends a container's output in frames: one byte that names the stream (1 stdout, 2 stderr), three of padding, a
big-endian uint32 length, and as many bytes. Input goes the other way as it is. A frame that names no stream ends the
connection: nothing after it can be trusted.

Example:
    >>> frames = Frames()
    >>> list(frames.feed(bytes([1, 0, 0, 0, 0, 0, 0, 2]) + b"hi"))
    [(1, b'hi')]
"""

import asyncio
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

LAST_STREAM = 2
_HEADER = struct.Struct(">BxxxI")


class Frames:
    """Takes frames apart, however they are cut into pieces."""

    def __init__(self) -> None:
        self._header = bytearray()
        self._stream = 0
        self._left = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """(stream, bytes) in order, parts of a frame as they come. Raises ValueError on what is no frame."""
        view = memoryview(data)
        while view:
            if self._left == 0:
                view = self._take_header(view)
            if part := bytes(view[: self._left]):
                view = view[len(part) :]
                self._left -= len(part)
                yield self._stream, part

    def _take_header(self, view: memoryview) -> memoryview:
        taken = _HEADER.size - len(self._header)
        self._header += view[:taken]
        if len(self._header) == _HEADER.size:
            self._stream, self._left = _HEADER.unpack(self._header)
            self._header.clear()
            if self._stream > LAST_STREAM:
                raise ValueError(f"a frame of the engine's names stream {self._stream}; expected 0, 1 or 2")
        return view[taken:]


class AttachedStream(asyncio.Protocol):
    """Both ways of one connection; use it from the event loop that opened it.

    `feed(stream, data)` is called for what comes and returns for how many seconds to read no more; `feed_end(reason)`
    once, when the connection is over.
    """

    def __init__(self, feed: Callable[[int, bytes], float], feed_end: Callable[[str], None]) -> None:
        self._feed = feed
        self._feed_end = feed_end
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._is_writable = asyncio.Event()
        self._is_over = asyncio.Event()
        self._is_writable.set()

    async def open(self, connection: socket.socket) -> None:
        """Take over a hijacked connection; `close` closes it."""
        plain = bridged(connection) if isinstance(connection, ssl.SSLSocket) else connection
        plain.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=plain)

    async def send(self, data: bytes) -> None:
        """Send bytes to the container's stdin; waits while the engine takes no more."""
        if self._transport is None or self._is_over.is_set():
            raise ConnectionResetError("the connection to the container is closed")
        self._transport.write(data)
        await self._is_writable.wait()

    async def close(self) -> None:
        """Close the connection; idempotent."""
        if self._transport is not None:
            self._transport.abort()
            await self._is_over.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        try:
            pause_s = sum(self._feed(stream, part) for stream, part in self._frames.feed(data))
        except ValueError as error:
            self._end(str(error))
            return
        if pause_s > 0 and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(pause_s, self._resume)

    def _resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> None:
        """See asyncio: closes the other way too."""

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._end("the container's connection is over" + (f": {error}" if error else ""))

    def _end(self, reason: str) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self._is_writable.set()
            self._feed_end(reason)
        if self._transport is not None:
            self._transport.abort()

    def pause_writing(self) -> None:
        """See asyncio."""
        if not self._is_over.is_set():
            self._is_writable.clear()

    def resume_writing(self) -> None:
        """See asyncio."""
        self._is_writable.set()


def bridged(remote: ssl.SSLSocket) -> socket.socket:
    """A plain socket that stands for one with TLS, which asyncio cannot take over: a thread carries the bytes."""
    ours, theirs = socket.socketpair()
    threading.Thread(target=_carry, args=(remote, theirs), name="docker-bridge", daemon=True).start()
    return ours


def _carry(remote: ssl.SSLSocket, near: socket.socket) -> None:
    with suppress(OSError), remote, near:
        while True:
            ready = [remote] if remote.pending() else select.select([remote, near], [], [])[0]
            if near in ready:
                if not (data := near.recv(65536)):
                    return
                remote.settimeout(None)
                remote.sendall(data)
            if remote in ready:
                remote.settimeout(0)
                with suppress(ssl.SSLWantReadError):  # a record of the protocol's own, without data
                    if not (data := remote.recv(65536)):
                        return
                    near.sendall(data)
