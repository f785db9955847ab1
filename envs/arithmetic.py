r"""Arithmetic: chains of operations that a small model gets right only through the `python` tool.

The score is 1 if the last `\boxed{}` of the final message holds the right integer, else 0.

Example:
    >>> grade_integer("481", r"so \boxed{0481}").value, grade_integer("481", "481").value
    (1.0, 0.0)
"""

import re
from collections.abc import Sequence

from sao_gym.core import AnswerGrader
from sao_gym.envs.python_tool import PythonSource, PythonToolEnv
from sao_gym.protocols import Task, TaskSet
from sao_gym.stream import Score

_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_INTEGER = re.compile(r"([+-]?)0*([0-9]+)")


def grade_integer(gold: str, response: str) -> Score:
    r"""Whether the last `\boxed{}` of `response` holds the integer `gold`; spaces and leading zeros do not count."""
    boxes = _BOX.findall(response)
    if not boxes:
        return Score(value=0.0, passed=False, detail="no boxed answer", grader_version="integer-1", method="none")
    given, wanted = _canonical(boxes[-1]), _canonical(gold)
    passed = given is not None and given == wanted
    detail = "right" if passed else f"expected {gold}, got {boxes[-1][:40]!r}"
    return Score(value=float(passed), passed=passed, detail=detail, grader_version="integer-1", method="integer")


class ArithmeticEnv(PythonToolEnv):
    r"""Compute, with a `python` tool, and answer with `\boxed{}`. At most `max_turns` turns."""

    def __init__(
        self,
        tasks: TaskSet | Sequence[Task],
        *,
        grader: AnswerGrader = grade_integer,
        max_turns: int | None = 8,
        system_prompt: str = "",
        sandboxes: PythonSource | None = None,
        allow_unsafe: bool = False,
        blank_tool_results: bool = False,
    ) -> None:
        super().__init__(
            tasks,
            grader=grader,
            max_turns=max_turns,
            system_prompt=system_prompt,
            sandboxes=sandboxes,
            allow_unsafe=allow_unsafe,
            blank_tool_results=blank_tool_results,
        )


def _canonical(text: str) -> str | None:
    """An integer without plus sign and leading zeros, None if `text` is none. Compared as text: of any length."""
    match = _INTEGER.fullmatch(text.strip())
    if match is None:
        return None
    sign = "-" if match[1] == "-" and match[2] != "0" else ""
    return sign + match[2]
