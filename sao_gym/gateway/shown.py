"""What an agent is shown of a generation: derived from the sampled ids, never the other way round.

A truncated generation shows no calls: a cut one must not look complete (case GW-01). A call that could not be read is
passed on as the policy wrote it, so that the agent answers with its own error; it never looks better than it is.

Example:
    >>> call = ToolCall(id="call_0", name="run", arguments={"b": 1})
    >>> show(Message.assistant("x", tool_calls=(call,)), index=3, cut=False).record()["tool_calls"][0]["id"]
    'call_0003_0'
"""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sao_gym.messages import CallProblem, Message, ToolCall

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')
_SURROGATES = re.compile("[\ud800-\udfff]")
NAMELESS = "unreadable_call"


class Finish(StrEnum):
    """Why an answer ended, as chat completions say it."""

    STOP = "stop"
    LENGTH = "length"
    CALLS = "tool_calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """A call under the id that was minted for it; `arguments` is text, `sampled` the call as it was parsed."""

    id: str
    name: str
    arguments: str
    sampled: ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One answer. `stop_string` is the one that ended it, where one did."""

    content: str
    reasoning: str | None
    calls: tuple[ShownCall, ...]
    finish: Finish
    stop_string: str | None = None

    def record(self) -> dict[str, Any]:
        """The message in OpenAI's form."""
        record: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            record["reasoning_content"] = self.reasoning
        if self.calls:
            record["content"] = self.content or None
            record["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return record


def show(message: Message, *, index: int, cut: bool, stop_string: str | None = None, as_text: bool = False) -> Shown:
    """What the agent sees of the session's call number `index`. `as_text`: calls were not wanted and are text."""
    content, reasoning = _before(message.content, stop_string), message.reasoning
    if as_text and message.tool_calls:
        content = "\n".join(filter(None, [content, *(call.raw for call in message.tool_calls)]))
    calls: tuple[ShownCall, ...] = ()
    if not cut and not as_text:
        calls = tuple(_call(call, f"call_{index:04d}_{place}") for place, call in enumerate(message.tool_calls))
    finish = Finish.LENGTH if cut else Finish.CALLS if calls else Finish.STOP
    return Shown(
        content=_clean(content),
        reasoning=None if reasoning is None else _clean(_before(reasoning, stop_string)),
        calls=calls,
        finish=finish,
        stop_string=stop_string,
    )


def show_text(text: str, *, cut: bool, stop_string: str | None) -> Shown:
    """A raw completion."""
    text = text.partition(stop_string)[0] if stop_string else text
    finish = Finish.LENGTH if cut else Finish.STOP
    return Shown(content=_clean(text), reasoning=None, calls=(), finish=finish, stop_string=stop_string)


def _before(text: str, stop_string: str | None) -> str:
    return text.partition(stop_string)[0].rstrip() if stop_string else text


def _call(call: ToolCall, minted: str) -> ShownCall:
    if call.problem is None:
        text = json.dumps(dict(call.arguments), ensure_ascii=False)
        return ShownCall(id=minted, name=_clean(call.name), arguments=_clean(text), sampled=call)
    name, text = _as_written(call)
    return ShownCall(id=minted, name=_clean(name), arguments=_clean(text), sampled=call)


def _as_written(call: ToolCall) -> tuple[str, str]:
    """(name, text of the arguments) of a call that could not be read."""
    found = _NAME.search(call.raw)
    name = call.name or (found.group(1) if found else NAMELESS)
    if call.problem is CallProblem.UNCLOSED:
        return name, "<tool_call>" + call.raw  # may be sound JSON, which an agent would run
    try:
        value = json.loads(call.raw)
    except (ValueError, RecursionError):
        return name, call.raw
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return name, call.raw
    arguments = value.get("arguments", {})
    return value["name"] or name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _clean(text: str) -> str:
    return _SURROGATES.sub("\ufffd", text)
