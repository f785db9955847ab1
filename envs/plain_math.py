r"""Mathematics without a tool: one answer, its value in `\boxed{}`, graded as `python_math` grades it.

What a policy is worth without code, on the same problems.

Example:
    env = make("math", tasks="problems.jsonl")
    (system, user), info = env.reset(seed=0)
"""

from collections.abc import Sequence

from sao_gym.core import AnswerGrader, ToolEnv
from sao_gym.protocols import Task, TaskSet

SYSTEM_PROMPT = "Solve the problem, and put the final answer alone in \\boxed{}."


class MathEnv(ToolEnv):
    r"""Problems with a final answer, one turn, a grader of the `\boxed{}` answer: without a box it scores 0."""

    def __init__(
        self, tasks: TaskSet | Sequence[Task], *, grader: AnswerGrader, system_prompt: str = SYSTEM_PROMPT
    ) -> None:
        super().__init__(tasks, grader=grader, max_turns=1, system_prompt=system_prompt)
