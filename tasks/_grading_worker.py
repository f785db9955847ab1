r"""The grading worker: a process that knows math-verify and forks a child for each question.

The child has limits that end it also inside big-integer arithmetic, where no signal handler runs: CPU
and wall-clock time by timers whose signals are left at their default, memory by RLIMIT_AS. A child that is ended
so, or that breaks, leaves the verdict "undecided". It answers one line of JSON on stdin with one on stdout:

    {"gold": "\\frac12", "answer": "1/2", "cpu_s": 1.5, "wall_s": 20, "memory_bytes": 1000000000}  ->  "equal"
"""

import json
import os
import resource
import signal
import sys
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """What a worker says about two answers."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


_EXIT_CODES = {Verdict.EQUAL: 10, Verdict.DIFFERENT: 11, Verdict.UNDECIDED: 12}
_VERDICTS = {code: verdict for verdict, code in _EXIT_CODES.items()}


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


def judge(question: dict[str, Any]) -> Verdict:
    """The verdict on one question, in the process that calls."""
    from sao_gym.tasks._equality import is_equal

    try:
        equal = is_equal(question["gold"], question["answer"])
    except (MemoryError, RecursionError):
        return Verdict.UNDECIDED
    except Exception:  # the library fails on much that a policy may write; that is no match
        return Verdict.DIFFERENT
    return Verdict.EQUAL if equal else Verdict.DIFFERENT


def judge_in_child(question: dict[str, Any]) -> Verdict:
    """The verdict on one question, in a child with limits."""
    pid = os.fork()
    if pid == 0:
        code = _EXIT_CODES[Verdict.UNDECIDED]
        try:
            set_limits(question["cpu_s"], question["wall_s"], question["memory_bytes"])
            code = _EXIT_CODES[judge(question)]
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return _VERDICTS.get(status, Verdict.UNDECIDED)


def main() -> None:
    """Answer questions until stdin ends."""
    from sao_gym.tasks._equality import quiet, warm_up

    quiet()
    warm_up()
    for line in sys.stdin:
        verdict = judge_in_child(json.loads(line))
        sys.stdout.write(json.dumps(verdict) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
