"""/v1/messages: Anthropic's protocol, translated into chat turns and back.

A result marked as an error begins with "Error: ". A call whose arguments are no JSON object is shown with its text
under the key `unreadable`, as the protocol has no other place for it. Thinking is shown, and not read when it comes
back. A last assistant message, which the answer would have to go on from, is not served.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sao_gym.gateway.asked import (
    Asked,
    read_flag,
    read_limit,
    read_list,
    read_object,
    read_options,
    read_stops,
    read_text,
)
from sao_gym.gateway.chat_completions import usage
from sao_gym.gateway.dialect import event
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.session import Session
from sao_gym.gateway.shown import Finish, ShownCall
from sao_gym.gateway.tree import Node
from sao_gym.gateway.turns import BETWEEN, results_first

Record = dict[str, Any]
RECORDED = ("temperature", "top_p", "top_k", "max_tokens", "stop_sequences", "tool_choice", "thinking")
_REASONS = {Finish.STOP: "end_turn", Finish.LENGTH: "max_tokens", Finish.CALLS: "tool_use"}
_THOUGHTS = ("thinking", "redacted_thinking")


class AnthropicMessages:
    """The dialect."""

    def read(self, body: Mapping[str, Any], session: Session) -> Asked:
        """See `Dialect`."""
        system = _texts(body.get("system") or "", "system")
        records: list[Record] = [{"role": "system", "content": system}] if system else []
        for item in read_list(body, "messages", needed=True):
            records += _turn(read_object(item, "messages"))
        if records[-1]["role"] == "assistant":
            raise Refusal.unsupported("the last message is the assistant's: answers are not continued", "messages")
        choice = read_object(body.get("tool_choice") or {}, "tool_choice")
        return Asked(
            records=results_first(records),
            tools=tuple(_tool(item) for item in read_list(body, "tools")),
            max_tokens=read_limit(body, ("max_tokens",)),
            stop=read_stops(body, "stop_sequences"),
            sampling=read_options(body, RECORDED),
            model=read_text(body, "model", session.settings.model),
            is_streamed=read_flag(body, "stream"),
            calls_as_text=choice.get("type") == "none",
        )

    def answer(self, node: Node, asked: Asked, session: Session) -> dict[str, Any]:
        """See `Dialect`."""
        return {
            **_head(node, asked),
            "content": _blocks(node),
            **_ending(node),
            "usage": {**_input(node), "output_tokens": len(node.generation.token_ids)},
        }

    def events(self, node: Node, asked: Asked, session: Session) -> Iterator[bytes]:
        """See `Dialect`."""
        nothing: Record = {"content": [], "stop_reason": None, "stop_sequence": None}
        start = {**_head(node, asked), **nothing, "usage": {**_input(node), "output_tokens": 0}}
        yield event({"type": "message_start", "message": start}, "message_start")
        for place, block in enumerate(_blocks(node)):
            for kind, said in _block_events(block):
                yield event({"type": kind, "index": place, **said}, kind)
        ended = {"delta": _ending(node), "usage": {"output_tokens": len(node.generation.token_ids)}}
        yield event({"type": "message_delta", **ended}, "message_delta")
        yield event({"type": "message_stop"}, "message_stop")

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        """See `Dialect`."""
        return refusal.anthropic_body()


def _turn(message: Mapping[str, Any]) -> list[Record]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise Refusal.malformed(f"role must be 'user' or 'assistant', got {role!r:.60}", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise Refusal.malformed("content must be a text or a list of blocks", "messages")
    blocks = [read_object(block, "messages") for block in content]
    return [_assistant(blocks)] if role == "assistant" else _user(blocks)


def _assistant(blocks: list[Mapping[str, Any]]) -> Record:
    calls = []
    for block in blocks:
        if block.get("type") == "tool_use":
            given = block.get("input")
            function = {"name": block.get("name"), "arguments": json.dumps({} if given is None else given)}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
    said = [block for block in blocks if block.get("type") not in ("tool_use", *_THOUGHTS)]
    record: Record = {"role": "assistant", "content": "".join(_text(block) for block in said)}
    return {**record, "tool_calls": calls} if calls else record


def _user(blocks: list[Mapping[str, Any]]) -> list[Record]:
    records: list[Record] = []
    texts: list[str] = []
    for block in blocks:
        if block.get("type") != "tool_result":
            texts.append(_text(block))
            continue
        content = _texts(block.get("content") or "", "messages")
        said = f"Error: {content}" if block.get("is_error") is True else content
        records.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": said})
    if texts or not records:
        records.append({"role": "user", "content": BETWEEN.join(texts)})
    return records


def _texts(content: Any, name: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal.malformed(f"{name} must be a text or a list of text blocks", name)
    return BETWEEN.join(_text(read_object(block, name)) for block in content)


def _text(block: Mapping[str, Any]) -> str:
    text = block.get("text")
    if block.get("type") != "text" or not isinstance(text, str):
        raise Refusal.unsupported(f"blocks of type {block.get('type')!r:.60} are not served here", "messages")
    return text


def _tool(given: Any) -> Record:
    tool = read_object(given, "tools")
    if "input_schema" not in tool:
        raise Refusal.unsupported("a tool needs a name and an input_schema; built-in tools are not served", "tools")
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}


def _head(node: Node, asked: Asked) -> Record:
    return {"id": f"msg_{node.index:06d}", "type": "message", "role": "assistant", "model": asked.model}


def _input(node: Node) -> Record:
    counted = usage(node)
    cached = counted["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counted["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _ending(node: Node) -> Record:
    stop = node.shown.stop_string
    reason = "stop_sequence" if stop is not None and not node.shown.calls else _REASONS[node.shown.finish]
    return {"stop_reason": reason, "stop_sequence": stop}


def _blocks(node: Node) -> list[Record]:
    shown = node.shown
    blocks: list[Record] = []
    if shown.reasoning:
        blocks.append({"type": "thinking", "thinking": shown.reasoning, "signature": ""})
    if shown.content or not shown.calls:
        blocks.append({"type": "text", "text": shown.content})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _arguments(call)} for call in shown.calls
    ]
    return blocks


def _arguments(call: ShownCall) -> Any:
    try:
        value = json.loads(call.arguments)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"unreadable": call.arguments}


def _block_events(block: Record) -> list[tuple[str, Record]]:
    kind = block["type"]
    if kind == "tool_use":
        empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    elif kind == "thinking":
        empty, delta = {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
    else:
        empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
    return [
        ("content_block_start", {"content_block": empty}),
        ("content_block_delta", {"delta": delta}),
        ("content_block_stop", {}),
    ]
