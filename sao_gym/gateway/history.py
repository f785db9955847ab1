"""The messages of a request as the chat family is to write them.

A result is given the id and the name that the policy itself knows of its call, whatever was minted for the client;
results that follow a call directly stand in the order of the calls (case GW-07). A family that takes system messages
at the beginning alone gets those at the beginning as one, and later ones as user turns.

Example:
    >>> call = {"id": "a", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    >>> said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "1"}]
    >>> read_messages(said, {})[1].name
    'run'
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sao_gym.gateway.echo import content_text
from sao_gym.messages import Message, ToolCall
from sao_gym.openai_format import message_from_openai

Record = Mapping[str, Any]


def read_messages(records: Sequence[Record], minted: Mapping[str, ToolCall]) -> list[Message]:
    """The messages, `minted` being the calls that were shown under ids of ours. Raises ConfigError."""
    calls: dict[str, ToolCall] = {}
    messages = []
    for record in records:
        message = message_from_openai({**record, "content": content_text(record)})
        calls.update((call.id, call) for call in message.tool_calls)
        messages.append(_known(message, minted, calls))
    return messages


def _known(message: Message, minted: Mapping[str, ToolCall], calls: Mapping[str, ToolCall]) -> Message:
    """`message` with the policy's own ids in it."""
    if message.role == "assistant":
        return replace(message, tool_calls=tuple(_own(call, minted) for call in message.tool_calls))
    if message.role != "tool" or message.tool_call_id is None:
        return message
    call = calls.get(message.tool_call_id)
    sampled = minted.get(message.tool_call_id)
    if sampled is not None:
        return replace(message, tool_call_id=sampled.id, name=message.name or sampled.name or None)
    return replace(message, name=message.name or call.name) if call is not None else message


def _own(call: ToolCall, minted: Mapping[str, ToolCall]) -> ToolCall:
    sampled = minted.get(call.id)
    return call if sampled is None else replace(call, id=sampled.id)


def in_call_order(records: Sequence[Record], call_ids: Sequence[str]) -> list[Record]:
    """`records` with the results at their beginning in the order of `call_ids`; results of other calls come last."""
    places = {call_id: place for place, call_id in enumerate(call_ids)}
    n = next((i for i, record in enumerate(records) if record.get("role") != "tool"), len(records))
    results = sorted(records[:n], key=lambda record: places.get(str(record.get("tool_call_id")), len(places)))
    return [*results, *records[n:]]


def all_in_call_order(records: Sequence[Record]) -> list[Record]:
    """`in_call_order` after every assistant turn of a whole conversation."""
    turns: list[list[Record]] = [[]]
    calls: list[list[str]] = [[]]
    for record in records:
        if record.get("role") == "assistant":
            turns.append([])
            calls.append([str(call.get("id")) for call in record.get("tool_calls") or ()])
        turns[-1].append(record)
    ordered = [turn[:1] + in_call_order(turn[1:], ids) for turn, ids in zip(turns[1:], calls[1:], strict=True)]
    return [*turns[0], *(record for turn in ordered for record in turn)]


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """The same for a family that takes one system message, at the beginning."""
    n = next((i for i, message in enumerate(messages) if message.role != "system"), len(messages))
    head = "\n\n".join(message.content for message in messages[:n])
    rest = [replace(m, role="user") if m.role == "system" else m for m in messages[n:]]
    return [*([Message.system(head)] if n else []), *rest]
