"""/v1/chat/completions: OpenAI's chat protocol, whole and streamed.

A streamed answer assembles to the whole one: each call's id and name come once, its arguments after them, then an
empty delta with the finish reason, then the usage where it was asked for (case GW-05).
"""

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
    require_one,
)
from sao_gym.gateway.dialect import event
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.session import Session
from sao_gym.gateway.tree import Node
from sao_gym.stream import StopReason

RECORDED = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "max_completion_tokens",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
)
_CHOICES = ("none", "auto", "required")


class ChatCompletions:
    """The dialect."""

    def read(self, body: Mapping[str, Any], session: Session) -> Asked:
        """See `Dialect`. Unknown fields are left alone, as they come and go with each version of a client."""
        require_one(body, "n")
        if body.get("functions"):
            raise Refusal.unsupported("functions is the old form of tools; give tools", "functions")
        options = read_object(body.get("stream_options") or {}, "stream_options")
        return Asked(
            records=tuple(read_object(item, "messages") for item in read_list(body, "messages", needed=True)),
            tools=tuple(read_object(item, "tools") for item in read_list(body, "tools")),
            max_tokens=read_limit(body, ("max_tokens", "max_completion_tokens")),
            stop=read_stops(body, "stop"),
            sampling=read_options(body, RECORDED),
            model=read_text(body, "model", session.settings.model),
            is_streamed=read_flag(body, "stream"),
            with_usage=read_flag(options, "include_usage"),
            with_logprobs=read_flag(body, "logprobs"),
            calls_as_text=_tool_choice(body) == "none",
        )

    def answer(self, node: Node, asked: Asked, session: Session) -> dict[str, Any]:
        """See `Dialect`."""
        choice: dict[str, Any] = {"index": 0, "message": node.shown.record(), "finish_reason": str(node.shown.finish)}
        choice["logprobs"] = {"content": token_logprobs(node, session)} if asked.with_logprobs else None
        return {**_head(node, asked, "chat.completion"), "choices": [choice], "usage": usage(node)}

    def events(self, node: Node, asked: Asked, session: Session) -> Iterator[bytes]:
        """See `Dialect`."""
        head = _head(node, asked, "chat.completion.chunk")
        logprobs = {"content": token_logprobs(node, session)} if asked.with_logprobs else None
        for place, delta in enumerate(_deltas(node)):
            choice = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": None if place else logprobs}
            yield event({**head, "choices": [choice]})
        end = {"index": 0, "delta": {}, "finish_reason": str(node.shown.finish), "logprobs": None}
        yield event({**head, "choices": [end]})
        if asked.with_usage:
            yield event({**head, "choices": [], "usage": usage(node)})
        yield b"data: [DONE]\n\n"

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        """See `Dialect`."""
        return refusal.openai_body()


def _tool_choice(body: Mapping[str, Any]) -> str:
    """What is to be done about tools: `required` and a named tool are recorded and not enforced."""
    choice = body.get("tool_choice") or "auto"
    if isinstance(choice, Mapping):
        return "named"
    if choice not in _CHOICES:
        raise Refusal.malformed(f"tool_choice must be one of {', '.join(_CHOICES)} or an object", "tool_choice")
    return str(choice)


def _head(node: Node, asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{node.index:06d}", "object": kind, "created": 0, "model": asked.model}


def _deltas(node: Node) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant"}
    if node.shown.reasoning:
        yield {"reasoning_content": node.shown.reasoning}
    if node.shown.content:
        yield {"content": node.shown.content}
    for place, call in enumerate(node.shown.calls):
        opening = {"index": place, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
        yield {"tool_calls": [opening]}
        yield {"tool_calls": [{"index": place, "function": {"arguments": call.arguments}}]}


def usage(node: Node) -> dict[str, Any]:
    """Tokens of one call; those of the path before it count as cached."""
    sampled = len(node.generation.token_ids)
    return {
        "prompt_tokens": node.n_prompt,
        "completion_tokens": sampled,
        "total_tokens": node.n_prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": node.parent.n_tokens if node.parent else 0},
    }


def token_logprobs(node: Node, session: Session) -> list[dict[str, Any]]:
    """What was sampled, token by token, less the token that ended the turn; no alternatives are known."""
    sampled = node.generation
    n = len(sampled.token_ids) - (sampled.stop is StopReason.STOP)
    found = []
    for place in range(n):
        text = session.chat.codec.decode(sampled.token_ids[place : place + 1])
        entry = {
            "token": text,
            "logprob": float(sampled.logprobs[place]),
            "bytes": list(text.encode("utf-8", "replace")),
        }
        found.append({**entry, "top_logprobs": []})
    return found
