"""Messages in the form of OpenAI's chat API, in and out.

Six ways to send one conversation (arguments as object or as JSON string; content null, empty or absent) give one
`Message` (case TC-05). Content parts are joined, keys keep their order, letters stay letters.

Example:
    >>> message_from_openai({"role": "user", "content": [{"type": "text", "text": "hi"}]}).content
    'hi'
    >>> message_to_openai(Message.user("hi"))
    {'role': 'user', 'content': 'hi'}
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from sao_gym.errors import ConfigError
from sao_gym.messages import Message, Role, ToolCall, ToolSpec
from sao_gym.tool_calls import checked_call

_ROLES: Mapping[str, Role] = {**{role: role for role in get_args(Role)}, "developer": "system"}


def message_from_openai(record: Mapping[str, Any]) -> Message:
    """The message that an OpenAI client sent. Raises ConfigError where role, content or a call has another shape.

    Arguments that are no JSON object become a call with its problem, so that a policy's mistake can be sent back.
    """
    if not isinstance(record, Mapping):
        raise ConfigError(f"a message must be an object with a role, got {type(record).__name__}")
    if record.get("function_call"):
        raise ConfigError("function_call is the old form of a tool call; give tool_calls")
    role = _ROLES.get(str(record.get("role")))
    if role is None:
        raise ConfigError(f"message role must be one of {sorted(_ROLES)}, got {record.get('role')!r}")
    return Message(
        role=role,
        content=_content(record.get("content")),
        reasoning=_text(record, "reasoning_content") or _text(record, "reasoning"),
        tool_calls=_calls(record.get("tool_calls")),
        tool_call_id=_text(record, "tool_call_id"),
        name=_text(record, "name"),
    )


def message_to_openai(message: Message) -> dict[str, Any]:
    """The message as an OpenAI client reads it; a call that could not be read carries its text as it was written."""
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        record["reasoning_content"] = message.reasoning
    if message.tool_calls:
        record["content"] = message.content or None
        record["tool_calls"] = [_call_to_openai(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        record["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        record["name"] = message.name
    return record


def tool_to_openai(tool: ToolSpec) -> dict[str, Any]:
    """A tool as OpenAI's API and most chat templates want it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def tool_from_openai(record: Mapping[str, Any]) -> ToolSpec:
    """A tool that an OpenAI client offers. Raises ConfigError where it is no named function."""
    function = record.get("function", record) if isinstance(record, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"a tool must be a function with a name, got {record!r}")
    description = function.get("description") or ""
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(description, str) or not isinstance(parameters, Mapping):
        raise ConfigError(f"tool {function['name']!r} needs text as description and a JSON schema as parameters")
    return ToolSpec(name=function["name"], description=description, parameters=parameters)


def _text(record: Mapping[str, Any], key: str) -> str | None:
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{key} must be a string or null, got {type(value).__name__}")
    return value


def _content(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, Sequence):
        raise ConfigError(f"message content must be text, text parts or null, got {type(value).__name__}")
    return "".join(_part(part) for part in value)


def _part(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ConfigError(f"only text parts can be read, got {part!r}")
    return text


def _calls(given: Any) -> tuple[ToolCall, ...]:
    if given is not None and not isinstance(given, list | tuple):
        raise ConfigError(f"tool_calls must be a list, got {type(given).__name__}")
    return tuple(_call(item, index) for index, item in enumerate(given or ()))


def _call(record: Any, index: int) -> ToolCall:
    function = record.get("function") if isinstance(record, Mapping) else None
    if not isinstance(function, Mapping):
        raise ConfigError(f"tool call {index} must be an object with a function, got {record!r}")
    name, arguments = function.get("name"), function.get("arguments")
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    raw = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {shown or "{}"}}}'
    given = {} if arguments in (None, "") else arguments
    return checked_call(name, given, raw, str(record.get("id") or f"call_{index}"))


def _call_to_openai(call: ToolCall) -> dict[str, Any]:
    is_unread = call.problem is not None and call.raw
    text = call.raw if is_unread else json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": text}}
