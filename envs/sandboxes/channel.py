r"""The persistent shell channel: the host's end of one long-lived bash inside a sandbox, over any streams of bytes.

Invariant: bytes before a command's mark on a stream are that command's output, and no command can know its mark before
it is written. A command that is over has both its streams read to the mark; nothing has to be waited for, whoever else
holds them. What a background child prints later shows up with the command that then runs, or nowhere.

A backend starts `driver_argv()`, hands what it reads to `feed`, and gives a `send` that writes to the driver's stdin:

    channel = ShellChannel(send, spec.limits, env=spec.env, workdir=spec.workdir)
    ...                                          # reader: channel.feed(STDOUT, data); at the end channel.feed_end("...")
    await channel.open(timeout_s=10.0)
    result = await channel.exec("make test", timeout_s=60.0)
"""

import asyncio
import hashlib
import secrets
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sao_gym.envs.sandboxes.driver import STATE, driver_argv, encode, request
from sao_gym.envs.sandboxes.finish import finish
from sao_gym.envs.sandboxes.output import BoundedOutput
from sao_gym.envs.sandboxes.spec import ShellLimits, check_env
from sao_gym.errors import SandboxError
from sao_gym.protocols import ExecResult

__all__ = ["DATA", "STDERR", "STDOUT", "ShellChannel", "driver_argv"]

STDOUT, STDERR, DATA = 1, 2, 3
"""Streams that come out of the driver. The first two as in Docker's multiplexed frames; DATA only where a backend has it."""
LOOK_S = 1.0
"""How often the driver is asked whether a long command's supervisor is still there."""
KILL_S = 5.0
"""How long the driver may take to end a command, on a crowded machine."""
MOST_S = 60.0
"""The same where bytes still come: an answer stands behind all that a program inside printed before it."""
STORE_S = 60.0
READS = 3
TIMED_OUT, KILLED = 124, 137
"""Exit codes where there is none of the command's own, as timeout(1) and a shell would give them."""
FLOOD_BYTES_PER_S = 32 << 20
CHUNK_BYTES = 8 << 20
INLINE_BYTES = 2048
ARGUMENT_BYTES = 100_000
"""Linux takes at most 128 KiB in one argument; longer commands go through a file."""


@dataclass(slots=True)
class _Mark:
    """One awaited mark: the streams that it has not been seen on yet, and what it said."""

    done: "asyncio.Future[str]"
    missing: set[int]
    payload: str = ""


@dataclass(slots=True)
class _Stream:
    """One stream of the driver: where its bytes go now, and bytes that may be the beginning of a mark."""

    sink: Callable[[bytes], None] | None = None
    carry: bytes = b""

    def put(self, data: bytes) -> None:
        """Hand bytes on; without a sink nobody asked for them."""
        if self.sink is not None and data:
            self.sink(data)


@dataclass(slots=True)
class _Collected:
    """A file's bytes, up to one more than `limit`."""

    limit: int
    data: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        """Take in more bytes."""
        self.data += data[: max(self.limit + 1 - len(self.data), 0)]


class ShellChannel:
    """The host's end. The backend calls `feed` with what it reads and `feed_end` when the streams are over.

    All methods belong to one event loop. `env` is exported over what the driver inherits, `workdir` is where commands
    start. With `data_fd`, the driver's own for it, a third
    stream carries files.
    """

    def __init__(
        self,
        send: Callable[[bytes], Awaitable[None]],
        limits: ShellLimits,
        *,
        env: Mapping[str, str],
        workdir: str,
        data_fd: int | None = None,
        state: str = STATE,
    ) -> None:
        self._send = send
        self._limits = limits
        self._env = dict(env)
        self._workdir = workdir
        self._state = state
        self._data_fd = data_fd
        self._key = secrets.token_hex(16)
        self._streams = {
            number: _Stream() for number in ((STDOUT, STDERR) if data_fd is None else (STDOUT, STDERR, DATA))
        }
        self._marks: dict[bytes, _Mark] = {}
        self._turn = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._failure = ""
        self._fed = 0

    @property
    def is_broken(self) -> bool:
        """Whether the driver is gone or broke the protocol; start another one then."""
        return bool(self._failure)

    # ---- what comes out

    def feed(self, stream: int, data: bytes) -> float:
        """Take bytes of STDOUT, STDERR or DATA, from the loop's own thread; returns how long to pause reading (s)."""
        part = self._streams[stream]
        part.carry += data
        self._fed += len(data)
        while self._take(stream, part):
            pass
        return len(data) / FLOOD_BYTES_PER_S if stream != DATA else 0.0

    def _take(self, stream: int, part: _Stream) -> bool:
        """Pass on bytes up to the next mark, and the mark; false when there is none."""
        places = [(part.carry.find(mark), mark) for mark, state in self._marks.items() if stream in state.missing]
        found = min((place for place in places if place[0] >= 0), default=None)
        if found is None:
            kept = _partial_mark(part.carry, [mark for _, mark in places])
            part.put(part.carry[: len(part.carry) - kept])
            part.carry = part.carry[len(part.carry) - kept :]
            return False
        start, mark = found
        end = part.carry.find(b"\n", start)
        part.put(part.carry[:start])
        part.carry = part.carry[start:]
        if end < 0:
            return False
        payload = part.carry[len(mark) : end - start].decode("ascii", "replace")
        part.carry = part.carry[end - start + 1 :]
        self._arrive(stream, mark, payload)
        return True

    def _arrive(self, stream: int, mark: bytes, payload: str) -> None:
        state = self._marks[mark]
        state.missing.discard(stream)
        state.payload = payload or state.payload
        if not state.missing:
            del self._marks[mark]
            if not state.done.done():
                state.done.set_result(state.payload)

    def feed_end(self, reason: str) -> None:
        """The streams are over: whoever waits gets a SandboxError that says `reason`."""
        self._failure = self._failure or reason
        marks, self._marks = self._marks, {}
        for state in marks.values():
            if not state.done.done():
                state.done.set_exception(SandboxError(self._failure))
                state.done.exception()  # nobody may be waiting

    # ---- what goes in

    async def _ask(self, function: str, *arguments: str, data: bytes = b"") -> "asyncio.Future[str]":
        """Send a request whose first argument is a new mark; returns what the mark will say."""
        self._check()
        number = secrets.token_hex(12)
        state = _Mark(asyncio.get_running_loop().create_future(), set(self._streams))
        self._marks[b"\0" + number.encode() + b":"] = state
        try:
            async with self._sending:
                await self._send(request(self._key, function, number, *arguments) + data)
        except OSError as error:
            self.feed_end(f"a sandbox ended by itself ({error})")
        except BaseException:
            self.feed_end("a request to a sandbox was cut off")
            raise
        return state.done

    def _check(self) -> None:
        if self._failure:
            raise SandboxError(self._failure)

    async def open(self, timeout_s: float) -> None:
        """Wait until the driver answers. Raises SandboxError."""
        with suppress(OSError):
            await self._send(self._key.encode() + b"\0")
        if not await self.ping(timeout_s):
            reason = self._failure or f"a sandbox's shell did not answer within {timeout_s:g} s"
            self.feed_end(reason)
            raise SandboxError(reason)

    async def ping(self, timeout_s: float = 5.0) -> bool:
        """Whether the driver answers, also while a command runs."""
        try:
            answer = await self._ask("look")
            await asyncio.wait_for(answer, timeout_s)
        except (SandboxError, TimeoutError):
            return False
        return True

    # ---- commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `ShellSandbox.exec`. A cancelled call kills its command first. Raises SandboxError."""
        text = command if isinstance(command, str) else f"exec {shlex.join(command)}"
        if "\0" in text:
            return ExecResult(stdout="", stderr="the command holds a NUL, which no program can be given\n", exit_code=2)
        check_env(env or {})
        outputs = {STDOUT: BoundedOutput(self._limits.output_bytes), STDERR: BoundedOutput(self._limits.output_bytes)}
        sinks = {stream: output.add for stream, output in outputs.items()}
        async with self._turn:
            code, timed_out = await self._run(text, sinks, timeout_s, cwd=cwd, env=env, stdin=stdin)
        (stdout, left_out), (stderr, more) = outputs[STDOUT].text(), outputs[STDERR].text()
        return ExecResult(stdout=stdout, stderr=stderr, exit_code=code, timed_out=timed_out, truncated=left_out + more)

    async def read(self, path: str, timeout_s: float = 60.0) -> bytes:
        """Bytes of a file inside. Raises SandboxError if it cannot be read, is too large, or changes meanwhile.

        Without a stream of its own for files, what others print meanwhile would be among the bytes: a checksum tells.
        """
        most = self._limits.file_bytes
        command = f"head -c {most + 1} -- {shlex.quote(path)}"
        if DATA in self._streams:
            data, _ = await self._read(path, f"exec {command}", timeout_s, DATA)
            return data
        for _ in range(READS):
            data, said = await self._read(path, f"{command} && {command} | sha256sum >&2", timeout_s, STDOUT)
            if hashlib.sha256(data).hexdigest() in said:
                return data
        raise SandboxError(f"{path!r} in a sandbox could not be read whole; something inside prints all the time")

    async def _read(self, path: str, command: str, timeout_s: float, stream: int) -> tuple[bytes, str]:
        collected = _Collected(self._limits.file_bytes)
        said = await self._file("read", path, command, timeout_s, {stream: collected.add})
        if len(collected.data) > self._limits.file_bytes:
            raise SandboxError(f"{path!r} in a sandbox is larger than file_bytes = {self._limits.file_bytes}")
        return bytes(collected.data), said

    async def write(self, path: str, data: bytes, timeout_s: float = 60.0) -> None:
        """Write a file inside, with the folders above it. Raises SandboxError if that cannot be done."""
        if len(data) > self._limits.file_bytes:
            raise SandboxError(f"{len(data)} bytes for {path!r} are more than file_bytes = {self._limits.file_bytes}")
        place = shlex.quote(path)
        command = f'p={place}; [[ $p != */* ]] || mkdir -p -- "${{p%/*}}/" && exec cat >"$p"'
        await self._file("written", path, command, timeout_s, {}, data)

    async def _file(
        self,
        verb: str,
        path: str,
        command: str,
        timeout_s: float,
        sinks: dict[int, Callable[[bytes], None]],
        data: bytes = b"",
    ) -> str:
        if not path or "\0" in path:
            raise SandboxError(f"{path!r} names no file in a sandbox")
        complaint = BoundedOutput(1000)
        async with self._turn:
            code, timed_out = await self._run(command, {**sinks, STDERR: complaint.add}, timeout_s, stdin=data)
        text = complaint.text()[0]
        if code or timed_out:
            reason = f"nothing within {timeout_s:g} s" if timed_out else text.strip().rpartition(": ")[2]
            raise SandboxError(f"{path!r} in a sandbox could not be {verb} ({reason or f'exit code {code}'})")
        return text

    async def _run(
        self,
        command: str,
        sinks: Mapping[int, Callable[[bytes], None]],
        timeout_s: float,
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> tuple[int, bool]:
        """(exit code, whether the limit ended it) of one command whose streams go to `sinks`."""
        stored = f"{self._state}/command"
        text = encode(command)
        kind = "text" if len(text) <= INLINE_BYTES else "stored" if len(text) <= ARGUMENT_BYTES else "file"
        if kind != "text":
            await self._store(stored, text)
        if stdin:
            await self._store(f"{self._state}/input", stdin)
        for number, stream in self._streams.items():
            stream.sink = sinks.get(number)
        try:
            over = await self._ask(
                "run",
                cwd or self._workdir,
                "".join(f"export {name}={shlex.quote(value)};" for name, value in {**self._env, **(env or {})}.items()),
                f"{self._state}/input" if stdin else "/dev/null",
                str(self._data_fd if DATA in sinks else STDOUT),
                kind,
                command if kind == "text" else stored,
            )
            return await self._watch(over, timeout_s, sinks[STDERR])
        finally:
            for stream in self._streams.values():
                stream.put(stream.carry)
                stream.sink, stream.carry = None, b""

    async def _watch(
        self, over: "asyncio.Future[str]", timeout_s: float, complain: Callable[[bytes], None]
    ) -> tuple[int, bool]:
        """Wait for the command's mark; look after its supervisor, and end it when its time or its caller is gone."""
        orphaned = asyncio.ensure_future(self._orphaned(over))
        either: set[asyncio.Future[Any]] = {over, orphaned}
        try:
            await asyncio.wait(either, timeout=max(timeout_s, 0.0), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            orphaned.cancel()
            await finish(self._kill(over))
            raise
        if over.done():
            orphaned.cancel()
            return int(over.result()), False
        if orphaned.done():
            complain(b"[the shell that ran this command was killed]\n")
            return KILLED, False
        orphaned.cancel()  # first: answers to it would look like a driver that is about to answer
        await finish(self._kill(over))
        return TIMED_OUT, True

    async def _orphaned(self, over: "asyncio.Future[str]") -> None:
        """Return once the supervisor is gone without a word; what it had said would have come before the answer.

        A driver that does not answer breaks the channel, which is what `over` then says.
        """
        with suppress(SandboxError):
            while not over.done():
                await asyncio.sleep(LOOK_S)
                asked = await finish(self._ask("look"))  # half a request would break the channel
                if await self._answered(asked, "look", KILL_S) == "idle" and not over.done():
                    self._forget(over)
                    return

    async def _kill(self, over: "asyncio.Future[str]") -> None:
        """End the command and all that it started; a driver that cannot is broken."""
        with suppress(SandboxError):
            await self._answer("end", KILL_S)
        self._forget(over)

    async def _answer(self, function: str, timeout_s: float, *arguments: str, data: bytes = b"") -> str:
        """What the driver says to a request. Raises SandboxError."""
        return await self._answered(await self._ask(function, *arguments, data=data), function, timeout_s)

    async def _answered(self, answer: "asyncio.Future[str]", function: str, timeout_s: float) -> str:
        """What the driver says; `timeout_s` of silence break the channel. Raises SandboxError."""
        now = asyncio.get_running_loop().time
        last, heard = now() + max(timeout_s, MOST_S), -1
        while not answer.done() and heard != self._fed and now() < last:
            heard = self._fed
            await asyncio.wait({answer}, timeout=timeout_s)
        if not answer.done():
            self.feed_end(f"a sandbox's shell did not answer '{function}' within {timeout_s:g} s")
        return answer.result()

    def _forget(self, over: "asyncio.Future[str]") -> None:
        self._marks = {mark: state for mark, state in self._marks.items() if state.done is not over}

    async def _store(self, path: str, data: bytes) -> None:
        """Put bytes into a file of the driver's own, piece by piece, so that neither side has to hold up the other."""
        for start in range(0, len(data), CHUNK_BYTES):
            chunk = data[start : start + CHUNK_BYTES]
            how = "more" if start else "new"
            code = await self._answer("put", STORE_S, path, str(len(chunk)), how, data=chunk)
            if code != "0":
                raise SandboxError(f"a sandbox could not take {len(data)} bytes in (is its disk full?)")


def _partial_mark(data: bytes, marks: Sequence[bytes]) -> int:
    """Number of bytes at the end of `data` that may be the beginning of one of `marks`."""
    start = data.rfind(b"\0", max(len(data) - max(map(len, marks), default=0) + 1, 0))
    return len(data) - start if start >= 0 and any(mark.startswith(data[start:]) for mark in marks) else 0
