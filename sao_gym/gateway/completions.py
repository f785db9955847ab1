"""/v1/completions: raw text or ids, continued.

A prompt that begins with the text of an earlier completion (prompt and answer) keeps its ids. Control tokens that the
client spells in a prompt are control tokens: here the client is the template, and has to guard what it puts in.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from sao_gym.gateway.asked import (
    Asked,
    read_flag,
    read_limit,
    read_object,
    read_options,
    read_stops,
    read_text,
    require_one,
)
from sao_gym.gateway.chat_completions import RECORDED, token_logprobs, usage
from sao_gym.gateway.dialect import event
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.session import Session
from sao_gym.gateway.shown import Finish
from sao_gym.gateway.tree import Node


class Completions:
    """The dialect."""

    def read(self, body: Mapping[str, Any], session: Session) -> Asked:
        """See `Dialect`."""
        require_one(body, "n", "best_of")
        for name in ("echo", "suffix"):
            if body.get(name):
                raise Refusal.unsupported(f"{name} is not served", name)
        options = read_object(body.get("stream_options") or {}, "stream_options")
        return Asked(
            prompt=_prompt(body.get("prompt")),
            max_tokens=read_limit(body, ("max_tokens",)),
            stop=read_stops(body, "stop"),
            sampling=read_options(body, RECORDED),
            model=read_text(body, "model", session.settings.model),
            is_streamed=read_flag(body, "stream"),
            with_usage=read_flag(options, "include_usage"),
            with_logprobs=body.get("logprobs") not in (None, False),
        )

    def answer(self, node: Node, asked: Asked, session: Session) -> dict[str, Any]:
        """See `Dialect`."""
        choice = _choice(node.shown.content, node.shown.finish, _logprobs(node, asked, session))
        return {**_head(node, asked), "choices": [choice], "usage": usage(node)}

    def events(self, node: Node, asked: Asked, session: Session) -> Iterator[bytes]:
        """See `Dialect`."""
        head = _head(node, asked)
        if node.shown.content:
            yield event({**head, "choices": [_choice(node.shown.content, None, _logprobs(node, asked, session))]})
        yield event({**head, "choices": [_choice("", node.shown.finish, None)]})
        if asked.with_usage:
            yield event({**head, "choices": [], "usage": usage(node)})
        yield b"data: [DONE]\n\n"

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        """See `Dialect`."""
        return refusal.openai_body()


def _prompt(value: Any) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return tuple(value)
    raise Refusal.malformed("prompt must be one text, or one list of token ids", "prompt")


def _head(node: Node, asked: Asked) -> dict[str, Any]:
    return {"id": f"cmpl-{node.index:06d}", "object": "text_completion", "created": 0, "model": asked.model}


def _choice(text: str, finish: Finish | None, logprobs: Any) -> dict[str, Any]:
    reason = None if finish is None else str(finish)
    return {"index": 0, "text": text, "finish_reason": reason, "logprobs": logprobs}


def _logprobs(node: Node, asked: Asked, session: Session) -> dict[str, Any] | None:
    if not asked.with_logprobs:
        return None
    found = token_logprobs(node, session)
    return {
        "tokens": [entry["token"] for entry in found],
        "token_logprobs": [entry["logprob"] for entry in found],
        "top_logprobs": None,
        "text_offset": None,
    }
