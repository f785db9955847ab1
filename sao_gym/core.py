"""The core in one import: environments that speak messages, and the wrapper that makes token streams of them.

Example:
    from sao_gym.core import AgentEnv, Reply, ToolEnv, TokenEnv, Budgets
"""

from sao_gym.agent_env import AgentEnv, Reply, with_shares
from sao_gym.budgets import Budgets
from sao_gym.spaces import Generations, Messages, MessageSpace, TokenIds
from sao_gym.token_env import TokenEnv
from sao_gym.tool_env import AnswerGrader, ToolEnv
from sao_gym.tools import Tool

__all__ = [
    "AgentEnv",
    "AnswerGrader",
    "Budgets",
    "Generations",
    "MessageSpace",
    "Messages",
    "Reply",
    "TokenEnv",
    "TokenIds",
    "Tool",
    "ToolEnv",
    "with_shares",
]
