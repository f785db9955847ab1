r"""Mathematics with a Python tool: state kept over the turns, at most 50 of them, the answer in `\boxed{}`.

The grader is handed in: `grader(gold, response) -> Score` sees the policy's last message. A last message without a
box has no answer and scores 0, whatever earlier turns said. (SAO, section 4.1: Python-tool mathematics.)

Example:
    env = make("python_math", tasks="problems.jsonl")
    (system, user), info = env.reset(seed=0)
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from sao_gym.core import AnswerGrader
from sao_gym.envs.python_tool import PythonSource, PythonToolEnv, Sandboxes
from sao_gym.errors import ConfigError
from sao_gym.messages import Message
from sao_gym.protocols import Task, TaskSet
from sao_gym.stream import Score

SYSTEM_PROMPT = (
    "Solve the problem. You may call the python tool as often as you need; its variables are kept between calls. "
    "When you are sure, answer without a call and put the final answer alone in \\boxed{}."
)
MAX_TURNS = 50
_BOX = re.compile(r"\\(boxed|[bf]box)(?![a-zA-Z])")


class PythonMathEnv(PythonToolEnv):
    r"""Problems with a final answer, a persistent `python` tool, a grader of the `\boxed{}` answer.

    The sandbox sees the installed packages, so that numpy and sympy are at hand where they are installed.
    """

    def __init__(
        self,
        tasks: TaskSet | Sequence[Task],
        *,
        grader: AnswerGrader | None = None,
        max_turns: int | None = MAX_TURNS,
        system_prompt: str = SYSTEM_PROMPT,
        sandboxes: PythonSource | None = None,
        allow_unsafe: bool = False,
        blank_tool_results: bool = False,
    ) -> None:
        if grader is None:
            raise ConfigError("PythonMathEnv needs a grader(gold, response) -> Score; make('python_math') hands one in")
        super().__init__(
            tasks,
            grader=grader,
            max_turns=max_turns,
            system_prompt=system_prompt,
            sandboxes=sandboxes,
            allow_unsafe=allow_unsafe,
            blank_tool_results=blank_tool_results,
        )

    @classmethod
    def make_sandboxes(cls, size: int, *, allow_unsafe: bool = False) -> Sandboxes:
        """Boxes with the installed packages; the heavy one is imported once per box, not once per episode."""
        preload = ("sympy",) if find_spec("sympy") else ()
        return Sandboxes(size, allow_unsafe=allow_unsafe, site_packages=True, preload=preload)

    @property
    def is_graded_from_record(self) -> bool:
        """The last message and the gold answer decide."""
        return True

    def grade_final(self, message: Message | None) -> Any:
        r"""Score of the last message: 0 without a `\boxed{}`, else the grader's verdict."""
        response = message.content if message else ""
        if not _BOX.search(response):
            return Score(value=0.0, passed=False, detail="no answer: no box in the final turn", method="none")
        return super().grade_final(message)
