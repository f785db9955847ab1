"""Messages in the form that chat templates and renderers take, with every string guarded (trap 20)."""

from typing import Any

from sao_gym.messages import Message, ToolCall
from sao_gym.text_codec import TextCodec


def guarded_record(message: Message, codec: TextCodec) -> dict[str, Any]:
    """A message as templates want it: content a string, arguments a mapping, every string guarded.

    A call that could not be read has no arguments to show, so its text stands in the content.
    """
    unread = [call.raw for call in message.tool_calls if _is_unread(call)]
    content = "\n".join([message.content, *unread]) if unread else message.content
    record: dict[str, Any] = {"role": message.role, "content": codec.guard(content)}
    if message.reasoning is not None:
        record["reasoning_content"] = codec.guard(message.reasoning)
    calls = [_call_record(call, codec) for call in message.tool_calls if not _is_unread(call)]
    if calls:
        record["tool_calls"] = calls
    for key, value in (("tool_call_id", message.tool_call_id), ("name", message.name)):
        if value is not None:
            record[key] = codec.guard(value)
    return record


def _is_unread(call: ToolCall) -> bool:
    return call.problem is not None and bool(call.raw)


def _call_record(call: ToolCall, codec: TextCodec) -> dict[str, Any]:
    function = {"name": codec.guard(call.name), "arguments": codec.guard_all(call.arguments)}
    return {"type": "function", "id": codec.guard(call.id), "function": function}
