"""What swebench says of a test log: its own spec, parsers and report, in one process that is started when first needed.

swebench is imported there alone, as a log may be made to be slow to read. The process is killed when it goes silent,
and a new one is asked once more; a log that cannot be read within the limits is a finding about the log, no failure.

Example:
    report = await ask_report(row, log)
    report.resolved, report.passed("FAIL_TO_PASS")
"""

import asyncio
import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sao_gym.errors import ConfigError, GradingError

ANSWER_S = 120.0
CPU_S = 30.0
MEMORY_BYTES = 4 << 30
TRIES = 2
FAIL_TO_PASS, PASS_TO_PASS = "FAIL_TO_PASS", "PASS_TO_PASS"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweReport:
    """swebench's report of one instance.

    `whole` is that report as swebench gives it, JSON values. `statuses` are all tests that its parser found,
    `seen` those that it finds in a witness's account. `is_read` is False where the log could not be read within the limits.
    """

    resolved: bool = False
    whole: Mapping[str, Any] = field(default_factory=dict)
    statuses: Mapping[str, str] = field(default_factory=dict)
    seen: Mapping[str, str] = field(default_factory=dict)
    is_read: bool = True

    def passed(self, kind: str) -> tuple[str, ...]:
        """Tests of FAIL_TO_PASS or PASS_TO_PASS that swebench counts as passed."""
        return tuple(self.whole.get("tests_status", {}).get(kind, {}).get("success", ()))

    @property
    def is_parsed(self) -> bool:
        """Whether swebench found tests in the log."""
        return bool(self.whole.get("patch_successfully_applied"))


class ReportServer:
    """One process that answers one question at a time; its methods block and may be called from any thread."""

    def __init__(self) -> None:
        program = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        program += "from sao_gym.envs._swe_worker import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._asked = 0
        self._buffer = b""

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, question: Mapping[str, Any], timeout_s: float = ANSWER_S) -> Mapping[str, Any]:
        """The answer to one question. Raises GradingError if there is none, ConfigError where swebench is missing."""
        with self._lock:
            self._asked += 1
            line = json.dumps({**question, "id": self._asked}).encode() + b"\n"
            try:
                reply = self._exchange(line, time.monotonic() + timeout_s)
            except (OSError, ValueError) as error:
                self.kill()
                raise GradingError(f"the process that reads test logs ended or broke its protocol ({error})") from error
            if "missing" in reply:
                raise ConfigError(
                    f"grading needs the package swebench ({reply['missing']}); install sao-gym with the extra swe"
                )
            if reply.get("id") != self._asked:
                self.kill()
                raise GradingError("the process that reads test logs answered another question")
        return reply

    def _exchange(self, line: bytes, until: float) -> Mapping[str, Any]:
        send, take = self._process.stdin, self._process.stdout
        if send is None or take is None:
            raise ValueError("no pipes")
        os.set_blocking(send.fileno(), False)
        while line or b"\n" not in self._buffer:
            left = until - time.monotonic()
            readable, writable, _ = select.select([take], [send] if line else [], [], max(left, 0.0))
            if left <= 0:
                raise ValueError("no answer in time")
            if readable:
                data = os.read(take.fileno(), 1 << 20)
                if not data:
                    raise ValueError("it ended")
                self._buffer += data
                if b'"missing"' in self._buffer and self._buffer.endswith(b"\n"):
                    break
            if writable:
                line = line[os.write(send.fileno(), line[: 1 << 16]) :]
        answer, _, self._buffer = self._buffer.partition(b"\n")
        reply = json.loads(answer)
        if not isinstance(reply, dict):
            raise ValueError("no object")
        return reply

    def kill(self) -> None:
        """End it and its children; idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class SharedReports:
    """The process's own server, made when first asked for; a forked child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: ReportServer | None = None
        self._pid = 0

    def get(self) -> ReportServer:
        """A server that can be asked; starting one does not block."""
        with self._lock:
            is_ours = self._server is not None and self._pid == os.getpid()
            if self._server is not None and is_ours and not self._server.is_alive:
                self._forget()
            if self._server is None or not is_ours:
                self._server, self._pid = ReportServer(), os.getpid()
                atexit.register(self._server.kill)
            return self._server

    def _forget(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            atexit.unregister(server.kill)
            server.kill()

    def close(self) -> None:
        """End the server; the next question starts a new one."""
        with self._lock:
            if self._pid == os.getpid():
                self._forget()
            self._server = None

    def ask(self, row: Mapping[str, Any], log: str, seen: str = "", *, cpu_s: float = CPU_S) -> SweReport:
        """What swebench says of a log; `row` are the fields of its TestSpec. Blocks. Raises GradingError if no server says it, ConfigError without swebench."""
        question = {"row": row, "log": log, "seen": seen, "cpu_s": cpu_s, "memory_bytes": MEMORY_BYTES}
        for _ in range(TRIES - 1):
            with contextlib.suppress(GradingError):
                return _read(self.get().ask(question))
        return _read(self.get().ask(question))


def _read(reply: Mapping[str, Any]) -> SweReport:
    if reply.get("limit"):
        return SweReport(is_read=False)
    if "error" in reply:
        raise GradingError(f"swebench could not read a test log ({reply['error']})")
    whole, statuses = reply["report"], reply["statuses"]
    return SweReport(resolved=bool(whole.get("resolved")), whole=whole, statuses=statuses, seen=reply["seen"])


REPORTS = SharedReports()


async def ask_report(row: Mapping[str, Any], log: str, seen: str = "", *, cpu_s: float = CPU_S) -> SweReport:
    """`SharedReports.ask` of this process's own server, beside the event loop."""
    return await asyncio.to_thread(REPORTS.ask, row, log, seen, cpu_s=cpu_s)
