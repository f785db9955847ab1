"""The grading server of a process, started when first needed and shared by all its threads.

`submit` never blocks; every question is answered within the limits of its child, and a server that goes silent is
killed. What it owed is asked once more of a new one.
"""

import asyncio
import atexit
import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass

from sao_gym.errors import GradingError

STARTUP_S = 60.0
TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingLimits:
    """Bounds of one comparison. CPU time decides on a busy machine too; wall-clock time is the backstop."""

    cpu_s: float = 1.0
    wall_s: float = 20.0
    memory_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True)
class Answer:
    """A verdict ("equal", "different", "undecided") and how it was reached; "limit" is a limit reached."""

    verdict: str
    method: str


class GradingServer:
    """One server process."""

    def __init__(self) -> None:
        program = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        program += "from sao_gym.tasks._grading_worker import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._owed: dict[int, Future[Answer]] = {}
        self._asked = 0
        self._is_open = True
        self._patience_s = 0.0
        self._last_sign = time.monotonic()
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    @property
    def is_open(self) -> bool:
        """Whether questions are still taken."""
        return self._is_open

    def submit(self, gold: str, answer: str, limits: GradingLimits) -> "Future[Answer]":
        """The answer to come; GradingError in it if the server does not give one."""
        future: Future[Answer] = Future()
        with self._lock:
            if not self._is_open:
                future.set_exception(GradingError("the grading server has ended"))
                return future
            if not self._owed:
                self._last_sign = time.monotonic()
            self._asked += 1
            self._owed[self._asked] = future
            self._patience_s = max(self._patience_s, limits.wall_s + STARTUP_S)
            question = {
                "id": self._asked,
                "gold": gold,
                "answer": answer,
                "cpu_s": limits.cpu_s,
                "wall_s": limits.wall_s,
                "memory_bytes": limits.memory_bytes,
            }
            self._lines.put(json.dumps(question).encode() + b"\n")
        return future

    def _write(self) -> None:
        pipe = self._process.stdin
        while pipe is not None and (line := self._lines.get()) is not None:
            try:
                pipe.write(line)
                pipe.flush()
            except (OSError, ValueError):
                return  # the reader sees the end too

    def _read(self) -> None:
        pipe, rest = self._process.stdout, b""
        try:
            while pipe is not None:
                if not select.select([pipe], [], [], 5.0)[0]:
                    if self._owed and time.monotonic() - self._last_sign > self._patience_s:
                        self._process.kill()
                    continue
                data = os.read(pipe.fileno(), 1 << 16)  # not by lines: what a buffer holds, `select` does not see
                if not data:
                    break
                self._last_sign = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._settle(json.loads(line))
        except (OSError, ValueError, KeyError):
            self._process.kill()
        self._fail()

    def _settle(self, reply: dict[str, str]) -> None:
        with self._lock:
            future = self._owed.pop(int(reply["id"]), None)
        if future is not None:
            with contextlib.suppress(InvalidStateError):  # a caller may have given up
                future.set_result(Answer(reply["verdict"], reply["method"]))

    def _fail(self) -> None:
        with self._lock:
            self._is_open = False
            owed, self._owed = self._owed, {}
        for future in owed.values():
            with contextlib.suppress(InvalidStateError):
                future.set_exception(GradingError("the grading server ended or broke its protocol"))

    def close(self) -> None:
        """End the server and its children; questions still owed fail. Idempotent."""
        with self._lock:
            self._is_open = False
        self._lines.put(None)
        self._threads[0].join(1.0)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        self._threads[1].join(10.0)
        if self._process.stdout is not None:
            self._process.stdout.close()


class SharedServer:
    """The process's own server, made when first asked for; a forked child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: GradingServer | None = None
        self._pid = 0

    def get(self) -> GradingServer:
        """A server that takes questions."""
        with self._lock:
            if self._server is not None and self._pid == os.getpid() and not self._server.is_open:
                self._forget().close()
            if self._server is None or self._pid != os.getpid():
                self._server, self._pid = GradingServer(), os.getpid()
                atexit.register(self._server.close)
            return self._server

    def ask(self, gold: str, answer: str, limits: GradingLimits) -> Answer:
        """The answer to a question. Blocks. Raises GradingError if no server gives one."""
        for _ in range(TRIES - 1):
            with contextlib.suppress(GradingError):
                return self.get().submit(gold, answer, limits).result()
        return self.get().submit(gold, answer, limits).result()

    async def ask_async(self, gold: str, answer: str, limits: GradingLimits) -> Answer:
        """Asynchronous twin of `ask`; nothing is held while it waits."""
        for _ in range(TRIES - 1):
            with contextlib.suppress(GradingError):
                return await asyncio.wrap_future(self.get().submit(gold, answer, limits))
        return await asyncio.wrap_future(self.get().submit(gold, answer, limits))

    def _forget(self) -> GradingServer:
        server, self._server = self._server, None
        if server is None:
            raise GradingError("there is no grading server to end")
        atexit.unregister(server.close)
        return server

    def close(self) -> None:
        """End the server; the next question starts a new one."""
        with self._lock:
            if self._server is not None and self._pid == os.getpid():
                self._forget().close()
            self._server = None
