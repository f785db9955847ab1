"""What a policy wrote, read without ever raising: reasoning, content and tool calls, each call sound or with its problem.

A call is one JSON object `{"name": ..., "arguments": {...}}` between two markers. Decisions (case TC-01, trap 21):
arguments given as a JSON *string* that holds an object are repaired, once (the sampled ids stay as they are);
`arguments` absent means no arguments; a key given twice, at any depth, is an error; NaN, infinities and raw line
breaks inside strings are not JSON. Calls count only after the reasoning: a draft inside it is text (case TC-03), and
reasoning that never closes hides all that follows. A message cut by a length limit has no call that may run.

Example:
    >>> read_call('{"name": "python", "arguments": {"code": "1"}}', "call_0").arguments
    {'code': '1'}
    >>> read_call('{"name": "python", "arguments": [1]}', "call_0").problem.value
    'not_an_object'
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from sao_gym.messages import CallProblem, Message, ToolCall

_SHAPE = '{"name": <tool>, "arguments": {...}}'
_DETAILS = {
    CallProblem.INVALID_JSON: f"a tool call must be one valid JSON object of the form {_SHAPE}",
    CallProblem.NOT_AN_OBJECT: f"a tool call and its arguments must be JSON objects: {_SHAPE}",
    CallProblem.MISSING_NAME: f"a tool call must name its tool by a string: {_SHAPE}",
    CallProblem.SEVERAL_OBJECTS: "a tool-call block must hold one JSON object; open a block for each call",
    CallProblem.DUPLICATE_KEY: "a key stands twice in one object of the tool call; give each key once",
    CallProblem.UNCLOSED: "the tool-call block was opened but not closed",
}
_MAX_DEPTH = 64
_CUT = "the message was cut by a length limit, so its tool calls are not run"


class Mark(Enum):
    """A marker in what was sampled; `spelled` pieces carry its text."""

    THINK_OPEN = "think_open"
    THINK_CLOSE = "think_close"
    CALL_OPEN = "call_open"
    CALL_CLOSE = "call_close"


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of text, or one marker and how it is spelled."""

    text: str
    mark: Mark | None = None


class _DuplicateKeyError(ValueError):
    """A key stands twice in one object."""


def read_call(raw: str, call_id: str) -> ToolCall:
    """The call that the text between two markers says."""
    try:
        value = _load(raw)
    except _DuplicateKeyError:
        return problem_call(CallProblem.DUPLICATE_KEY, raw, call_id)
    except (ValueError, RecursionError):
        several = _starts_with_value_and_more(raw)
        return problem_call(CallProblem.SEVERAL_OBJECTS if several else CallProblem.INVALID_JSON, raw, call_id)
    if not isinstance(value, dict):
        return problem_call(CallProblem.NOT_AN_OBJECT, raw, call_id)
    return checked_call(value.get("name"), value.get("arguments", {}), raw, call_id)


def checked_call(name: Any, arguments: Any, raw: str, call_id: str) -> ToolCall:
    """A call from values that some parser found, checked again: name a string, arguments an object.

    Arguments may be a JSON string that holds an object.
    """
    if not isinstance(name, str) or not name.strip():
        return problem_call(CallProblem.MISSING_NAME, raw, call_id)
    if isinstance(arguments, str):
        try:
            arguments = _load(arguments)
        except _DuplicateKeyError:
            return problem_call(CallProblem.DUPLICATE_KEY, raw, call_id, name)
        except (ValueError, RecursionError):
            return problem_call(CallProblem.INVALID_JSON, raw, call_id, name)
    if not isinstance(arguments, Mapping):
        return problem_call(CallProblem.NOT_AN_OBJECT, raw, call_id, name)
    try:
        _check_writable(dict(arguments))
    except (ValueError, TypeError, RecursionError):
        return problem_call(CallProblem.INVALID_JSON, raw, call_id, name)
    return ToolCall(id=call_id, name=name, arguments=arguments, raw=raw)


def problem_call(problem: CallProblem, raw: str, call_id: str, name: str = "") -> ToolCall:
    """A call that must not be run, with the sentence that says what was expected."""
    return ToolCall(id=call_id, name=name, raw=raw, problem=problem, detail=_DETAILS[problem])


def read_message(pieces: Iterable[Piece], *, is_truncated: bool = False) -> Message:
    """The assistant message that pieces say, in one pass; call ids are `call_0`, `call_1`, ..."""
    reader = _Reader()
    for piece in pieces:
        reader.take(piece)
    return reader.finish(is_truncated)


def cut(message: Message) -> Message:
    """`message` as one that a length limit ended: none of its calls may run."""
    calls = tuple(
        call if call.problem else replace(call, problem=CallProblem.UNCLOSED, detail=_CUT)
        for call in message.tool_calls
    )
    return replace(message, tool_calls=calls, is_truncated=True)


class _Reader:
    """Where the scan stands: in content, in reasoning, or in a call."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.has_reasoning = False
        self.calls: list[ToolCall] = []
        self.body: list[str] | None = None
        self.since_start: list[str] = []
        self.is_thinking = False

    def take(self, piece: Piece) -> None:
        self.since_start.append(piece.text)
        if self.is_thinking:
            self._think(piece)
        elif piece.mark is Mark.THINK_CLOSE and not self.has_reasoning:
            self._close_unopened()
        elif self.body is not None:
            self._call(piece, self.body)
        elif piece.mark is Mark.THINK_OPEN:
            self.is_thinking = self.has_reasoning = True
        elif piece.mark is Mark.CALL_OPEN:
            self.body = []
        else:
            self.content.append(piece.text)

    def _think(self, piece: Piece) -> None:
        if piece.mark is Mark.THINK_CLOSE:
            self.is_thinking = False
        else:
            self.reasoning.append(piece.text)

    def _close_unopened(self) -> None:
        # The template may have opened the reasoning in the prompt: all that came before was reasoning. Only the first
        # time: once there was reasoning, another close takes back no call and no answer.
        self.reasoning = self.since_start[:-1]
        self.has_reasoning = True
        self.content, self.calls, self.body = [], [], None

    def _call(self, piece: Piece, body: list[str]) -> None:
        if piece.mark is Mark.CALL_CLOSE:
            self.calls.append(read_call("".join(body), self._next_id()))
            self.body = None
        elif piece.mark is Mark.CALL_OPEN:
            self._leave_open(body)
            self.body = []
        else:
            body.append(piece.text)

    def _leave_open(self, body: list[str]) -> None:
        self.calls.append(problem_call(CallProblem.UNCLOSED, "".join(body), self._next_id()))

    def _next_id(self) -> str:
        return f"call_{len(self.calls)}"

    def finish(self, is_truncated: bool) -> Message:
        if self.body is not None:
            self._leave_open(self.body)
        message = Message(
            role="assistant",
            content="".join(self.content).strip(),
            reasoning="".join(self.reasoning).strip() if self.has_reasoning else None,
            tool_calls=tuple(self.calls),
        )
        return cut(message) if is_truncated else message


def _load(text: str) -> Any:
    """Strict JSON that can be written again: finite, no deeper than `_MAX_DEPTH`, no half of a surrogate pair."""
    value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite_float)
    _check_writable(value)
    return value


def _check_writable(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [child for items in inner for child in items if isinstance(child, dict | list)]
        if not level:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            return
    raise ValueError(f"JSON is nested deeper than {_MAX_DEPTH} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _DuplicateKeyError("a key stands twice")
    return found


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value


def _starts_with_value_and_more(text: str) -> bool:
    """Whether `text` is one JSON object followed by the beginning of another."""
    stripped = text.strip()
    try:
        value, end = json.JSONDecoder().raw_decode(stripped)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and stripped[end:].lstrip().startswith("{")
