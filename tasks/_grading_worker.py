r"""The grading server: one process that knows algebra and forks a child for each question.

A child has limits that end it also inside big-integer arithmetic, where no signal handler runs: CPU and wall-clock
time by timers whose signals are left at their default, memory by RLIMIT_AS. A child that is ended so, or that breaks,
leaves the verdict "undecided". Children that need more than a moment go on at a lower priority and only few at a
time (`LEVELS`), so that ordinary questions never wait for them. Questions and answers are lines of JSON:

    {"id": 3, "gold": "\\frac12", "answer": "1/2", "cpu_s": 1.5, "wall_s": 20, "memory_bytes": 1000000000}
    {"id": 3, "verdict": "equal", "method": "symbolic"}
"""

import contextlib
import gc
import json
import os
import resource
import select
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao_gym.tasks._equality import Finding, Verdict, find, quiet, warm_up
from sao_gym.tasks._latex import TooLargeError


@dataclass(frozen=True, slots=True)
class Level:
    """Children that have used at least so much CPU time: how many run at once, and how nice they are."""

    from_cpu_s: float
    at_most: int
    niceness: int


LEVELS = (Level(0.0, 12, 1), Level(0.05, 3, 2), Level(0.2, min(os.cpu_count() or 1, 4), 3))
"""An ordinary question ends at the first level, so it never waits for the slow ones."""
TICK_S = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")
_METHODS = ("spelling", "table", "symbolic", "none", "undecided")
_FINDINGS = {
    10 + number: Finding(verdict, method)
    for number, (verdict, method) in enumerate((v, m) for v in Verdict for m in _METHODS)
}
_CODES = {finding: code for code, finding in _FINDINGS.items()}
LIMIT_REACHED = Finding(Verdict.UNDECIDED, "limit")


@dataclass(slots=True)
class Child:
    """A question under way."""

    question: dict[str, Any]
    started: float
    level: int
    waits_for: int | None = None
    """The level that has no room yet: the child is being ended, and its question waits."""


def set_limits(cpu_s: float, wall_s: float, memory_bytes: int) -> None:
    """Bound this process; each bound ends it."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for timer, number, seconds in (
        (signal.ITIMER_PROF, signal.SIGPROF, cpu_s),
        (signal.ITIMER_REAL, signal.SIGALRM, wall_s),
    ):
        signal.signal(number, signal.SIG_DFL)
        signal.setitimer(timer, seconds)


def judge(question: dict[str, Any]) -> Finding:
    """What the rules say on one question, in the process that calls."""
    try:
        return find(question["gold"], question["answer"])
    except (MemoryError, RecursionError, TooLargeError):
        return LIMIT_REACHED
    except Exception:  # algebra fails on much that a policy may write; no rule decided then
        return Finding(Verdict.UNDECIDED, "undecided")


def fork_child(question: dict[str, Any], niceness: int) -> int:
    """Start a child that answers by its exit code."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.nice(niceness)
        set_limits(question["cpu_s"], question["wall_s"], question["memory_bytes"])
        code = _CODES.get(judge(question), 1)
    finally:
        os._exit(code)


def cpu_seconds(pid: int, started: float) -> float:
    """CPU time that a process has used, or the time since it started where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):
        return time.monotonic() - started


class Server:
    """Questions that wait, children that run, and the rules by which they start and end."""

    def __init__(self) -> None:
        self.waiting: tuple[deque[dict[str, Any]], ...] = tuple(deque() for _ in LEVELS)
        self.children: dict[int, Child] = {}

    def has_room(self, level: int) -> bool:
        """Whether one more child may run at a level."""
        return sum(child.level == level for child in self.children.values()) < LEVELS[level].at_most

    def start(self) -> None:
        """Start children where there is room."""
        for level, questions in enumerate(self.waiting):
            while questions and self.has_room(level):
                question = questions.popleft()
                pid = fork_child(question, LEVELS[level].niceness)
                self.children[pid] = Child(question, time.monotonic(), level)

    def sort(self) -> None:
        """Move children that have used their time to the next level, or end them and let them wait for it."""
        for pid, child in list(self.children.items()):
            level = child.level + 1
            if child.waits_for is not None or level == len(LEVELS):
                continue
            if cpu_seconds(pid, child.started) < LEVELS[level].from_cpu_s:
                continue
            if self.has_room(level):
                child.level = level
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, pid, LEVELS[level].niceness)
            else:
                os.kill(pid, signal.SIGKILL)
                child.waits_for = level

    def reap(self) -> list[dict[str, Any]]:
        """Answers of the children that have ended by themselves or at a limit."""
        answers = []
        for pid, child in list(self.children.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            del self.children[pid]
            code = os.waitstatus_to_exitcode(status)
            if child.waits_for is not None and code == -signal.SIGKILL:
                self.waiting[child.waits_for].append(child.question)
                continue
            finding = _FINDINGS.get(code, LIMIT_REACHED)
            answers.append({"id": child.question["id"], "verdict": finding.verdict, "method": finding.method})
        return answers

    def close(self) -> None:
        """End every child."""
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        for pid in self.children:
            os.waitpid(pid, 0)


def serve() -> None:
    """Answer questions until stdin ends; children under way are ended with it."""
    server, buffer = Server(), b""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([0, woken], [], [], TICK_S if server.children else None)
        if woken in ready:
            os.read(woken, 4096)
        if 0 in ready:
            data = os.read(0, 1 << 20)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            server.waiting[0].extend(json.loads(line) for line in lines)
        for answer in server.reap():
            os.write(1, json.dumps(answer).encode() + b"\n")
        server.sort()
        server.start()
    server.close()


def main() -> None:
    """Warm up, then serve."""
    quiet()
    warm_up()
    gc.freeze()  # children share what stands here
    serve()


if __name__ == "__main__":
    main()
