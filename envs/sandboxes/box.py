"""One box as the host sees it: a process, a socket, and frames over it.

Whatever goes wrong on this side (broken frame, silence, cancelled in the middle of a frame) marks the box as broken;
a broken box is never used again, only closed. The box ends when its socket closes, and by signal if it does not.
"""

import asyncio
import json
import os
import shutil
import socket
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sao_gym.envs.sandboxes.bubblewrap import (
    ENVIRONMENT,
    HINT,
    BoxPlan,
    bubblewrap_command,
    unsafe_command,
    walled_command,
)
from sao_gym.errors import SandboxError, SandboxUnavailableError

RESET_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 5.0
_LENGTHS = struct.Struct(">II")


class MissingModuleError(SandboxUnavailableError):
    """A module to preload is not there; no weaker sandbox would have it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer of the program inside."""

    header: Mapping[str, Any]
    body: bytes


class Box:
    """A started box. Make one with `await Box.start(plan)`; use it from the event loop that started it."""

    def __init__(self, process: "subprocess.Popen[bytes]", channel: socket.socket, work: str | None) -> None:
        self._process = process
        self._channel = channel
        self._work = work
        self._received = bytearray()
        self._calls = 0
        self._pending: asyncio.Future[Reply] | None = None
        self.is_broken = False

    @classmethod
    async def start(cls, plan: BoxPlan) -> "Box":
        """Start a box and wait until it answers.

        Raises SandboxUnavailableError if this machine does not allow it, SandboxError if it does not answer in time.
        """
        ours, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as complaints:
            try:
                with theirs:  # closed here, so that the end of the box is the end of the channel
                    box = cls._spawn(plan, ours, theirs, complaints.fileno())
                await box._wait_until_ready(plan, complaints.fileno())
            except BaseException:
                ours.close()
                raise
        return box

    @classmethod
    def _spawn(cls, plan: BoxPlan, ours: socket.socket, theirs: socket.socket, complaints: int) -> "Box":
        ours.setblocking(False)
        work = None if plan.isolated else tempfile.mkdtemp(prefix="sao-gym-box-")
        try:
            if work is None:
                with bubblewrap_command(plan) as (argv, fds):
                    process = _spawn(argv, theirs, complaints, fds, "/")
            else:
                command = walled_command(plan, work) if plan.walled else unsafe_command(plan, work)
                process = _spawn(command, theirs, complaints, (), work)
        except OSError as error:
            if work is not None:
                shutil.rmtree(work, ignore_errors=True)
            raise SandboxUnavailableError(f"the sandbox could not be started: {error}. {HINT}") from error
        return cls(process, ours, work)

    async def _wait_until_ready(self, plan: BoxPlan, complaints: int) -> None:
        try:
            await asyncio.wait_for(self._receive(), plan.limits.startup_timeout_s)
        except TimeoutError:
            await self.close()
            raise SandboxError(
                f"a sandbox did not start within {plan.limits.startup_timeout_s:g} s; "
                "raise startup_timeout_s or run fewer at once"
            ) from None
        except SandboxError:
            await self.close()
            text = os.pread(complaints, 4000, 0).decode("utf-8", "replace").strip()
            last = text.splitlines()[-1] if text else "it said nothing"
            if "Error: No module named" in text or "ImportError" in text:
                raise MissingModuleError(
                    f"a module to preload could not be imported in the sandbox ({last}); install it, and say "
                    "site_packages=True if it is not in the standard library"
                ) from None
            raise SandboxUnavailableError(f"the sandbox could not be started ({last}). {HINT}") from None
        except BaseException:
            await self.close()
            raise

    async def call(self, header: Mapping[str, Any], body: bytes = b"", *, timeout_s: float) -> Reply:
        """Send one request and wait for its answer, at most `timeout_s`.

        Raises SandboxError if the box is gone, silent or not making sense. A cancelled call leaves the box usable
        for `reset` alone, and broken if the request was only half sent.
        """
        self._calls += 1
        self._pending = asyncio.ensure_future(self._exchange({**header, "id": self._calls}, body))
        try:
            return await asyncio.wait_for(self._pending, timeout_s)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise SandboxError("a sandbox was closed while a cell ran in it") from None
        except TimeoutError:
            self.is_broken = True
            raise SandboxError(f"a sandbox did not answer '{header['op']}' within {timeout_s:g} s") from None
        except (OSError, ValueError, KeyError) as error:
            self.is_broken = True
            raise SandboxError(f"a sandbox ended or broke its protocol ({error})") from error

    async def abandon(self) -> None:
        """Give up on the call under way, if there is one: who waits for it gets a SandboxError."""
        if self._pending is not None and not self._pending.done():
            self._pending.cancel()
            await asyncio.wait({self._pending})

    async def _exchange(self, header: Mapping[str, Any], body: bytes) -> Reply:
        text = json.dumps(header).encode()
        was_broken, self.is_broken = self.is_broken, True  # until the request is out as a whole
        await asyncio.get_running_loop().sock_sendall(self._channel, _LENGTHS.pack(len(text), len(body)) + text + body)
        self.is_broken = was_broken
        while True:
            reply = await self._receive()
            if reply.header["id"] == header["id"]:  # answers to cancelled calls are passed over
                return reply

    async def _receive(self) -> Reply:
        await self._fill(_LENGTHS.size)
        header_size, body_size = _LENGTHS.unpack_from(self._received)
        end = _LENGTHS.size + header_size + body_size
        await self._fill(end)
        header_end = _LENGTHS.size + header_size
        header = json.loads(bytes(self._received[_LENGTHS.size : header_end]))
        body = bytes(self._received[header_end:end])
        del self._received[:end]
        return Reply(header, body)

    async def _fill(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        while len(self._received) < count:
            try:
                data = await loop.sock_recv(self._channel, 65536)
            except OSError:
                data = b""
            if not data:
                self.is_broken = True
                raise SandboxError("a sandbox ended by itself")
            self._received += data

    async def reset(self) -> bool:
        """End what runs inside and empty its folders; false if the box is not as good as new."""
        await self.abandon()
        if self.is_broken:
            return False
        try:
            reply = await self.call({"op": "reset"}, timeout_s=RESET_TIMEOUT_S)
        except SandboxError:
            return False
        return bool(reply.header["status"] == "clean")

    async def close(self) -> None:
        """End the box and everything inside; idempotent."""
        self.is_broken = True
        await self.abandon()
        self._channel.close()
        try:
            if not await wait_exit(self._process, EXIT_TIMEOUT_S):
                self._process.kill()
                await wait_exit(self._process, EXIT_TIMEOUT_S)
        except asyncio.CancelledError:
            self._process.kill()
            self._process.wait()
            raise
        finally:
            if self._work is not None:
                shutil.rmtree(self._work, ignore_errors=True)


async def wait_exit(process: "subprocess.Popen[bytes]", timeout_s: float) -> bool:
    """Wait for a process without a thread: a pidfd becomes readable when it ends."""
    if process.poll() is not None:
        return True
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    pidfd = os.pidfd_open(process.pid)
    try:
        loop.add_reader(pidfd, _resolve, ended)
        with suppress(TimeoutError):
            await asyncio.wait_for(ended, timeout_s)
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return process.poll() is not None


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


def _spawn(
    argv: Sequence[str], channel: socket.socket, complaints: int, fds: Sequence[int], folder: str
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        argv,
        stdin=channel.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=complaints,
        pass_fds=fds,
        env=ENVIRONMENT,
        cwd=folder,
        start_new_session=True,
    )
