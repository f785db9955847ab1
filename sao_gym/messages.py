"""What agents and environments say to each other, before anything is a token.

An observation is a tuple of new `Message`s, an action is one assistant `Message`. Text is derived from sampled
ids and never turned back into them, so a `Message` may lose detail (stripped space, repaired JSON) that the
token stream keeps.

Example:
    >>> Message.user("2+2?").role
    'user'
    >>> call = ToolCall(id="c0", name="python", arguments={"code": "print(2+2)"})
    >>> Message.assistant("Let me compute.", tool_calls=(call,)).tool_calls[0].name
    'python'
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from sao_gym.errors import ConfigError

Role = Literal["system", "user", "assistant", "tool"]


class CallProblem(StrEnum):
    """Why a tool call cannot be run. The first group is found when parsing, the second when dispatching."""

    INVALID_JSON = "invalid_json"
    NOT_AN_OBJECT = "not_an_object"
    MISSING_NAME = "missing_name"
    SEVERAL_OBJECTS = "several_objects"
    DUPLICATE_KEY = "duplicate_key"
    UNCLOSED = "unclosed"

    UNKNOWN_TOOL = "unknown_tool"
    MISSING_ARGUMENT = "missing_argument"
    UNEXPECTED_ARGUMENT = "unexpected_argument"
    WRONG_TYPE = "wrong_type"
    TOO_MANY_CALLS = "too_many_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One request to run a tool. `raw` is the text between the markers as it was sampled.

    With `problem` set the call must not be run: `detail` says in one sentence what was expected.
    """

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    raw: str = ""
    problem: CallProblem | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool as a model is told of it; `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation.

    `is_truncated` marks an assistant message whose generation was cut by a length limit: it is never presented
    as complete, and its tool calls are never run.
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    is_truncated: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise ConfigError(f"the content of a Message must be text, got {type(self.content).__name__}")

    @classmethod
    def system(cls, content: str) -> "Message":
        """Instructions that stand before the conversation."""
        return cls(role="system", content=content)

    @classmethod
    def user(cls, content: str) -> "Message":
        """What the task or a person says."""
        return cls(role="user", content=content)

    @classmethod
    def assistant(cls, content: str = "", *, tool_calls: tuple[ToolCall, ...] = ()) -> "Message":
        """What the policy says."""
        return cls(role="assistant", content=content, tool_calls=tool_calls)

    @classmethod
    def tool(cls, content: str, *, call: ToolCall) -> "Message":
        """The answer to `call`."""
        return cls(role="tool", content=content, tool_call_id=call.id, name=call.name)
