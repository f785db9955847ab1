"""The environment `feedback`: episodes that an application begins and its users judge (docs/feedback.md).

Invariant: nobody steps it and no agent of ours plays it; a training serves it, everything else refuses it in a sentence.
"""

from collections.abc import Sequence
from typing import NoReturn

from sao_gym.agent_env import AgentEnv
from sao_gym.budgets import Budgets
from sao_gym.errors import ConfigError
from sao_gym.messages import Message
from sao_gym.protocols import Task, TaskSet
from sao_gym.stream import Outcome

HOW = "begin with python -m sao_gym.feedback serve"


class FeedbackEnv(AgentEnv):
    """Holds the places. `serves_applications` tells a training to open a desk."""

    drives_itself = True
    serves_applications = True

    def __init__(self, tasks: TaskSet | Sequence[Task]) -> None:
        super().__init__(tasks)

    def opening(self, task: Task) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"the environment feedback is served to applications and cannot be stepped; {HOW}")

    def respond(self, message: Message) -> NoReturn:
        """Raises ConfigError."""
        self.opening(self.task)

    async def play(self, base_url: str, budgets: Budgets) -> Outcome:
        """Raises ConfigError."""
        self.opening(self.task)
