"""An API's answer as a message: what the policy said, why it stopped, what it cost.

Invariant: whatever the body holds, it is an `Answer` or a `BadAnswerError`; a call that the policy wrote badly is part
of an answer, with its problem, and `echo` holds the turn as it came, to be sent back with the conversation.

Example:
    >>> body = b'{"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}], "model": "m-1"}'
    >>> answer = read_answer(json.loads(body), turn=0)
    >>> answer.message.content, answer.finish.value, answer.tokens
    ('4', 'stop', None)
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sao_gym.errors import ConfigError
from sao_gym.messages import Message
from sao_gym.openai_format import message_from_openai
from sao_gym.tool_calls import cut
from sao_gym.usage import TokenCount

_LENGTH = ("length", "max_tokens", "model_length", "max_output_tokens")
_FILTER = ("content_filter", "safety", "refusal", "sensitive")
_FAILED = ("error", "abort", "network_error")
_ECHOED = ("content", "tool_calls", "refusal")
_REASONING = ("reasoning_content", "reasoning", "reasoning_details")
_OPEN, _CLOSE = "<think>", "</think>"


class BadAnswerError(ValueError):
    """A body that holds no answer."""


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    FILTER = "filter"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One turn from an API. `message` is what it says, `echo` the same for the next request; `tokens` None: not told."""

    message: Message
    echo: Mapping[str, Any]
    finish: Finish
    tokens: TokenCount | None
    model: str | None = None
    fingerprint: str | None = None


def read_answer(record: Any, *, turn: int) -> Answer:
    """The first choice of a chat completion. Calls without an id of their own are named after `turn`. Raises BadAnswerError."""
    choices = record.get("choices") if isinstance(record, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], Mapping) else {}
    said = choice.get("message")
    if not isinstance(said, Mapping):
        raise BadAnswerError("the answer holds no message")
    if said.get("function_call") and not said.get("tool_calls"):
        raise BadAnswerError("the answer calls a tool by function_call, which is the old form of tool_calls")
    calls = _with_ids(said.get("tool_calls"), turn)
    finish = _finish(choice.get("finish_reason"))
    try:
        message = message_from_openai(_plain(said, calls))
    except ConfigError as error:
        raise BadAnswerError(str(error)) from error
    return Answer(
        message=cut(message) if finish is Finish.LENGTH else message,
        echo=_echo({**said, "tool_calls": calls}),
        finish=finish,
        tokens=TokenCount.read(record.get("usage")),
        model=_text(record.get("model")),
        fingerprint=_text(record.get("system_fingerprint")),
    )


def without_reasoning(echo: Mapping[str, Any]) -> dict[str, Any]:
    """The turn as it is sent back where the API does not want earlier reasoning."""
    return {name: value for name, value in echo.items() if name not in _REASONING}


def has_unreadable_arguments(echo: Mapping[str, Any]) -> bool:
    """Whether a call of the turn has arguments that are no JSON object: some servers refuse to read these again."""
    return any(not _is_object(call["function"].get("arguments")) for call in echo.get("tool_calls") or ())


def with_readable_arguments(echo: Mapping[str, Any]) -> dict[str, Any]:
    """The turn with such arguments as the text of one, so that every server can read it."""
    if not has_unreadable_arguments(echo):
        return dict(echo)
    return {**echo, "tool_calls": [_readable(call) for call in echo["tool_calls"]]}


def _readable(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if _is_object(arguments):
        return dict(call)
    return {**call, "function": {**call["function"], "arguments": json.dumps({"unreadable": arguments})}}


def _is_object(arguments: Any) -> bool:
    try:
        return isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
    except (ValueError, RecursionError):
        return False


def _plain(said: Mapping[str, Any], calls: list[Any]) -> dict[str, Any]:
    """The message in the form that `message_from_openai` reads: text as content, text as reasoning."""
    content, thought = _parts(said.get("content"))
    reasoning = next((said[name] for name in _REASONING[:2] if isinstance(said.get(name), str)), None) or thought
    if reasoning is None:
        reasoning, content = _split(content)
    if not content and not calls and isinstance(said.get("refusal"), str):
        content = said["refusal"]
    return {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls}


def _parts(content: Any) -> tuple[Any, str | None]:
    """Content parts as text, with the parts that are reasoning apart."""
    if not isinstance(content, list):
        return content, None
    thoughts = [part for part in content if isinstance(part, Mapping) and part.get("type") in ("thinking", "reasoning")]
    texts = [part.get("text") or part.get("thinking") or "" for part in thoughts]
    joined = "".join(text if isinstance(text, str) else _parts_text(text) for text in texts)
    return [part for part in content if part not in thoughts], joined or None


def _parts_text(parts: Any) -> str:
    found = [part.get("text") for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    return "".join(text for text in found if isinstance(text, str))


def _split(content: Any) -> tuple[str | None, Any]:
    """Reasoning that a server left in the text, apart from it; it may have been opened by the template, or not closed."""
    if not isinstance(content, str) or (_CLOSE not in content and not content.lstrip().startswith(_OPEN)):
        return None, content
    before, _, after = content.partition(_CLOSE)
    return before.strip().removeprefix(_OPEN).strip(), after.strip()


def _with_ids(calls: Any, turn: int) -> list[Any]:
    """The calls, each with an id of its own."""
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise BadAnswerError(f"tool_calls must be a list, got {type(calls).__name__}")
    named: list[Any] = []
    taken: set[str] = set()
    for index, call in enumerate(calls):
        if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
            raise BadAnswerError("a tool call of the answer is no object with a function")
        given = call.get("id")
        own = given if isinstance(given, str) and given and given not in taken else f"call{turn:03d}{index:02d}"
        taken.add(own)
        named.append({"type": "function", **call, "id": own})
    return named


def _echo(said: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: said[name] for name in (*_ECHOED, *_REASONING) if said.get(name) not in (None, [], "")}
    kept.setdefault("content", None if "tool_calls" in kept else "")
    return {"role": "assistant", **kept}


def _finish(reason: Any) -> Finish:
    known = str(reason).lower()
    if known in _LENGTH:
        return Finish.LENGTH
    if known in _FILTER:
        return Finish.FILTER
    return Finish.FAILED if known in _FAILED else Finish.STOP


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
