"""Messages in the form that chat templates and renderers take, with every string guarded (trap 20)."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from sao_gym.errors import ModelError
from sao_gym.messages import Message, ToolCall
from sao_gym.stream import Ids
from sao_gym.text_codec import TextCodec

QUESTION = Message.user(".")
"""What stands before an assistant turn that is rendered for its own sake."""


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


def check_written(message: Message, ids: Sequence[int], codec: TextCodec) -> None:
    """Raise ModelError if `ids` leave out what `message` says: a policy would learn to be silent there."""
    text = _letters(codec.decode([index for index in ids if index not in codec.control_ids]))
    parts = [("content", message.content), ("reasoning", message.reasoning or "")]
    parts += [("call of the tool " + repr(call.name), call.name) for call in message.tool_calls if not _is_unread(call)]
    for what, part in parts:
        if _letters(codec.decode(codec.plain(part))) not in text:
            raise ModelError(f"this chat family does not print the {what} of an assistant turn; use kind 'own'")


def _letters(text: str) -> str:
    return "".join(text.split())


def written_turn(
    message: Message,
    opening: Sequence[int],
    render: Callable[[Sequence[Message]], Sequence[int]],
    stops: Collection[int],
) -> Ids:
    """What a policy would have sampled to say `message` after `opening` (the prompt of `QUESTION`), stop included.

    A family without a closing token ends its turn with the token that opens the next one. Raises ModelError if what
    the family prints does not begin with the opening.
    """
    answer = Message.tool(".", call=message.tool_calls[0]) if message.tool_calls else QUESTION
    for following in ((), (answer,)):
        ids = [int(index) for index in render([QUESTION, message, *following])]
        said = ids[len(opening) :]
        if ids[: len(opening)] != list(opening):
            raise ModelError("this chat family prints this turn otherwise than a policy would begin it; use kind 'own'")
        end = next((position for position, index in enumerate(said) if index in stops), None)
        if end is not None:
            return np.asarray(said[: end + 1], dtype=np.int32)
    raise ModelError("this chat family prints no token that ends an assistant turn; use kind 'own'")
