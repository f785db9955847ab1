"""The attached stream: frames in any cut, both ways, back-pressure, and what is no frame."""

import asyncio
import socket
import ssl
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.envs.sandboxes.docker_stream import AttachedStream, Frames, bridged


def frame(stream: int, data: bytes) -> bytes:
    return struct.pack(">BxxxI", stream, len(data)) + data


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2]), st.binary(max_size=40))), st.data())
def test_frames_come_apart_the_same_however_they_are_cut(parts: list[tuple[int, bytes]], data: st.DataObject) -> None:
    whole = b"".join(frame(stream, part) for stream, part in parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=10)))
    frames = Frames()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += list(frames.feed(whole[start:end]))
    for number in (0, 1, 2):
        expected = b"".join(part for stream, part in parts if stream == number)
        assert b"".join(part for stream, part in found if stream == number) == expected


class Listener:
    """What a stream handed on."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s = pause_s
        self.got: list[tuple[int, bytes]] = []
        self.reason = ""
        self.changed = asyncio.Event()

    def feed(self, stream: int, data: bytes) -> float:
        self.got.append((stream, data))
        self.changed.set()
        return self.pause_s

    def feed_end(self, reason: str) -> None:
        assert not self.reason
        self.reason = reason
        self.changed.set()

    async def until(self, count: int) -> None:
        while sum(len(data) for _, data in self.got) < count and not self.reason:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 10)


async def attached(listener: Listener) -> tuple[AttachedStream, socket.socket]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(10)
    stream = AttachedStream(listener.feed, listener.feed_end)
    await stream.open(ours)
    return stream, theirs


async def test_bytes_go_both_ways_and_the_end_is_told_once() -> None:
    listener = Listener()
    stream, engine = await attached(listener)
    await stream.send(b"hello")
    assert engine.recv(100) == b"hello"
    engine.sendall(frame(1, b"out") + frame(2, b"err"))
    await listener.until(6)
    assert listener.got == [(1, b"out"), (2, b"err")]
    engine.close()
    await listener.until(99)
    assert listener.reason == "the container's connection is over"
    await stream.close()
    await stream.close()
    with pytest.raises(ConnectionResetError):
        await stream.send(b"more")


async def test_what_is_no_frame_ends_the_connection() -> None:
    listener = Listener()
    stream, engine = await attached(listener)
    engine.sendall(b"HTTP/1.1 500 no")
    await listener.until(99)
    assert listener.reason == "a frame of the engine's names stream 72; expected 0, 1 or 2"
    assert engine.recv(1) == b""
    await stream.close()


async def test_a_sender_waits_while_the_engine_takes_no_more() -> None:
    listener = Listener()
    stream, engine = await attached(listener)
    size = 8 << 20
    sending = asyncio.ensure_future(stream.send(b"x" * size))
    _, pending = await asyncio.wait({sending}, timeout=0.2)
    assert pending
    left = size
    while left:
        left -= len(await asyncio.to_thread(engine.recv, 1 << 20))
    await asyncio.wait_for(sending, 10)
    stuck = asyncio.ensure_future(stream.send(b"x" * size))
    await asyncio.wait({stuck}, timeout=0.1)
    await stream.close()  # nobody is left waiting
    await asyncio.wait_for(stuck, 10)


async def test_reading_pauses_for_as_long_as_it_is_told_to() -> None:
    listener = Listener(pause_s=0.5)
    stream, engine = await attached(listener)
    engine.sendall(frame(1, b"a"))
    await listener.until(1)
    engine.sendall(frame(1, b"b"))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(listener.until(2), 0.2)
    await listener.until(2)
    assert listener.got == [(1, b"a"), (1, b"b")]
    await stream.close()


def test_a_connection_with_tls_is_carried_by_a_plain_socket(tmp_path: Path) -> None:
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "1"]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    subprocess.run([*request, *files], check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "cert", tmp_path / "key")
    client = ssl.create_default_context(cafile=str(tmp_path / "cert"))
    near, far = socket.socketpair()

    async def exchange() -> None:
        served = asyncio.to_thread(server.wrap_socket, far, server_side=True)
        ours = asyncio.to_thread(client.wrap_socket, near, server_hostname="localhost")
        theirs, secured = await asyncio.gather(served, ours)
        theirs.settimeout(10)
        plain = bridged(secured)
        plain.settimeout(10)
        with theirs, plain:
            for data in (b"a", b"b" * 300_000):
                await asyncio.to_thread(plain.sendall, data)
                assert await asyncio.to_thread(receive, theirs, len(data)) == data
                sending = asyncio.ensure_future(asyncio.to_thread(theirs.sendall, data))
                assert await asyncio.to_thread(receive, plain, len(data)) == data
                await sending
            plain.close()
            assert await asyncio.to_thread(theirs.recv, 1) == b""

    asyncio.run(exchange())


def receive(source: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = source.recv(count - len(data))
        assert part, "the connection ended early"
        data += part
    return data
