"""/v1/responses: OpenAI's newer protocol, translated into chat turns and back.

`previous_response_id` continues an answer of the same session. Reasoning items are shown, and not read when they come
back. `instructions` hold for one request, as the protocol says.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sao_gym.gateway.asked import (
    Asked,
    read_flag,
    read_limit,
    read_list,
    read_object,
    read_options,
    read_text,
)
from sao_gym.gateway.chat_completions import usage
from sao_gym.gateway.dialect import event
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.session import Session
from sao_gym.gateway.shown import Finish, ShownCall
from sao_gym.gateway.tree import Node
from sao_gym.gateway.turns import results_first

Record = dict[str, Any]
RECORDED = ("temperature", "top_p", "max_output_tokens", "tool_choice", "parallel_tool_calls", "reasoning", "text")


class Responses:
    """The dialect."""

    def read(self, body: Mapping[str, Any], session: Session) -> Asked:
        """See `Dialect`."""
        instructions = read_text(body, "instructions")
        system = [{"role": "system", "content": instructions}] if instructions else []
        records = [*_earlier(body, session), *_records(body.get("input"))]
        return Asked(
            records=(*system, *results_first(records)),
            n_instructions=len(system),
            tools=tuple(_tool(item) for item in read_list(body, "tools")),
            max_tokens=read_limit(body, ("max_output_tokens",)),
            sampling=read_options(body, RECORDED),
            model=read_text(body, "model", session.settings.model),
            is_streamed=read_flag(body, "stream"),
            calls_as_text=body.get("tool_choice") == "none",
        )

    def answer(self, node: Node, asked: Asked, session: Session) -> dict[str, Any]:
        """See `Dialect`."""
        name = _name(node)
        session.threads[name] = (*asked.records[asked.n_instructions :], node.shown.record())
        is_cut = node.shown.finish is Finish.LENGTH
        counted = usage(node)
        return {
            "id": name,
            "object": "response",
            "created_at": 0,
            "model": asked.model,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "output": [item for item, _ in _items(node)],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": counted["prompt_tokens_details"],
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
        }

    def events(self, node: Node, asked: Asked, session: Session) -> Iterator[bytes]:
        """See `Dialect`."""
        whole = self.answer(node, asked, session)
        begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        said: list[tuple[str, Record]] = [("created", {"response": begun}), ("in_progress", {"response": begun})]
        for place, (item, deltas) in enumerate(_items(node)):
            empty = {**item, **{"content": [] if item["type"] == "message" else None}}
            if item["type"] == "function_call":
                empty = {**item, "arguments": ""}
            said.append(("output_item.added", {"output_index": place, "item": {**empty, "status": "in_progress"}}))
            said += [(kind, {"output_index": place, "item_id": item["id"], **delta}) for kind, delta in deltas]
            said.append(("output_item.done", {"output_index": place, "item": item}))
        said.append((whole["status"], {"response": whole}))
        for number, (kind, delta) in enumerate(said):
            yield event({"type": f"response.{kind}", "sequence_number": number, **delta}, f"response.{kind}")

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        """See `Dialect`."""
        return refusal.openai_body()


def _name(node: Node) -> str:
    return f"resp_{node.index:06d}"


def _earlier(body: Mapping[str, Any], session: Session) -> Sequence[Mapping[str, Any]]:
    name = read_text(body, "previous_response_id")
    if not name:
        return ()
    if name not in session.threads:
        raise Refusal.malformed(f"no response {name[:80]!r} was given in this session", "previous_response_id")
    return session.threads[name]


def _records(given: Any) -> list[Record]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise Refusal.malformed("input must be a text, or a list that holds something", "input")
    records: list[Record] = []
    for item in given:
        _take(records, dict(read_object(item, "input")))
    return records


def _take(records: list[Record], item: Record) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        records.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": str(item.get("call_id") or item.get("id")), "type": "function", "function": function}
        if not records or records[-1]["role"] != "assistant":
            records.append({"role": "assistant", "content": None})
        records[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = item.get("output")
        records.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
    elif kind != "reasoning":
        raise Refusal.unsupported(f"input items of type {str(kind)[:60]!r} are not served", "input")


def _tool(given: Any) -> Record:
    tool = read_object(given, "tools")
    if tool.get("type", "function") != "function":
        raise Refusal.unsupported(f"only tools of type 'function' are served, got {str(tool['type'])[:60]!r}", "tools")
    if "function" in tool:
        return dict(tool)
    named = {name: tool[name] for name in ("name", "description", "parameters") if name in tool}
    return {"type": "function", "function": named}


Deltas = list[tuple[str, Record]]


def _items(node: Node) -> list[tuple[Record, Deltas]]:
    """Each item of the answer, and the events that spell it."""
    shown, name = node.shown, f"{node.index:06d}"
    items: list[tuple[Record, Deltas]] = []
    if shown.reasoning:
        summary = [{"type": "summary_text", "text": shown.reasoning}]
        items.append(({"type": "reasoning", "id": f"rs_{name}", "summary": summary}, []))
    if shown.content or not shown.calls:
        items.append(_message(shown.content, f"msg_{name}", is_cut=shown.finish is Finish.LENGTH))
    items += [_call(call) for call in shown.calls]
    return items


def _message(text: str, name: str, *, is_cut: bool) -> tuple[Record, Deltas]:
    part = {"type": "output_text", "text": text, "annotations": []}
    status = "incomplete" if is_cut else "completed"
    item = {"type": "message", "id": name, "role": "assistant", "status": status, "content": [part]}
    deltas = [
        ("content_part.added", {"content_index": 0, "part": {**part, "text": ""}}),
        ("output_text.delta", {"content_index": 0, "delta": text}),
        ("output_text.done", {"content_index": 0, "text": text}),
        ("content_part.done", {"content_index": 0, "part": part}),
    ]
    return item, deltas


def _call(call: ShownCall) -> tuple[Record, Deltas]:
    item = {"type": "function_call", "id": f"fc_{call.id}", "call_id": call.id, "name": call.name}
    deltas = [
        ("function_call_arguments.delta", {"delta": call.arguments}),
        ("function_call_arguments.done", {"arguments": call.arguments, "name": call.name}),
    ]
    return {**item, "arguments": call.arguments, "status": "completed"}, deltas
