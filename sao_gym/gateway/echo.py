"""What a client sends back, normalised: two spellings of one message have one key.

Content parts are joined and white space around the text goes; null, "" and absent content are one; arguments count by
their values, whatever the order of keys; reasoning and names do not count. Call ids are kept beside the key.

Example:
    >>> parts = {"role": "user", "content": [{"type": "text", "text": "hi "}]}
    >>> hear(parts).key == hear({"role": "user", "content": "hi"}).key
    True
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sao_gym.errors import ConfigError

Record = Mapping[str, Any]
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_sorted_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")


class EchoKind(StrEnum):
    """How an assistant turn was recognised when it came back."""

    EXACT = "exact"
    CALL_ID = "call_id"
    POSITION = "position"


@dataclass(frozen=True, slots=True)
class Heard:
    """One message of a request: 16 bytes for what it says, its role and the ids of its calls."""

    key: bytes
    role: str
    call_ids: tuple[str, ...] = ()

    @property
    def is_assistant(self) -> bool:
        """Whether the policy is said to have said it."""
        return self.role == "assistant"


def hear(record: Record) -> Heard:
    """The key of a message in OpenAI's form. Raises ConfigError where it has another shape."""
    if not isinstance(record, Mapping):
        raise ConfigError(f"a message must be an object with a role, got {type(record).__name__}")
    given = record.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise ConfigError(f"message role must be one of {sorted(_ROLES)}, got {given!r}")
    calls = _calls(record) if role == "assistant" else []
    answers = record.get("tool_call_id") if role == "tool" else None
    said = [role, content_text(record).strip(), "" if answers is None else str(answers)]
    for _, name, arguments in calls:
        said += [str(name), arguments]
    return Heard(_key(said), role, tuple(call_id for call_id, _, _ in calls))


def _key(texts: Sequence[str]) -> bytes:
    made = hashlib.blake2b(digest_size=16)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        made.update(len(raw).to_bytes(8, "big"))
        made.update(raw)
    return made.digest()


class Hearing:
    """`hear` for requests that repeat what was sent before: what stands where it stood is not read again."""

    def __init__(self) -> None:
        self._records: Sequence[Record] = ()
        self._heard: tuple[Heard, ...] = ()
        self._tools: Sequence[Record] = ()
        self._tools_key = tools_key(())

    def messages(self, records: Sequence[Record]) -> tuple[Heard, ...]:
        """The key of each message. Raises ConfigError."""
        same = 0
        for ours, theirs in zip(records, self._records, strict=False):
            if ours != theirs:
                break
            same += 1
        heard = (*self._heard[:same], *(hear(record) for record in records[same:]))
        self._records, self._heard = records, heard
        return heard

    def tools(self, tools: Sequence[Record]) -> bytes:
        """The key of a list of tools."""
        if tools != self._tools:
            self._tools, self._tools_key = tools, tools_key(tools)
        return self._tools_key


def content_text(record: Record) -> str:
    """The text of a message's content: parts joined, reasoning left out. Raises ConfigError for parts without text."""
    value = record.get("content")
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, Sequence):
        raise ConfigError(f"message content must be text, text parts or null, got {type(value).__name__}")
    return "".join(_part(part) for part in value)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _THOUGHTS:
        return ""
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise ConfigError(f"only text parts can be read, got a part of type {kind!r}")
    return text


def canonical(arguments: Any) -> str:
    """Arguments of a call with keys in order; text that is no JSON as it stands."""
    if arguments is None or arguments == "":
        return "{}"
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return _sorted_json(value)
    except (ValueError, TypeError, RecursionError):
        return str(arguments).strip()


def tools_key(tools: Sequence[Record]) -> bytes:
    """One key for a list of tools, whatever its order and the order of keys in it."""
    if not tools:
        return b""
    return _key(sorted(_sorted_json(tool) for tool in tools))


def _calls(record: Record) -> list[tuple[str, Any, str]]:
    given = record.get("tool_calls")
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"tool_calls must be a list, got {type(given).__name__}")
    found = []
    for index, call in enumerate(given):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ConfigError(f"tool call {index} must be an object with a function")
        found.append((str(call.get("id") or ""), function.get("name"), canonical(function.get("arguments"))))
    return found
