"""One request, read and checked, in a form that all protocols share.

Example:
    >>> read_options({"temperature": 0.2, "top_p": 1}, ("temperature", "top_p"))
    {'temperature': 0.2, 'top_p': 1}
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sao_gym.gateway.refusals import Refusal
from sao_gym.messages import ToolSpec
from sao_gym.openai_format import tool_from_openai

Record = Mapping[str, Any]
MAX_STOPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked for. `records` and `tools` have OpenAI's form; `prompt` is that of a raw completion.

    `sampling` is what the agent wanted: it is recorded, the run's own is in force. `max_tokens` None leaves the length
    to the budgets. The first `n_instructions` records hold for this request alone.
    """

    records: tuple[Record, ...] = ()
    tools: tuple[Record, ...] = ()
    prompt: str | tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model: str = "policy"
    is_streamed: bool = False
    with_usage: bool = False
    with_logprobs: bool = False
    calls_as_text: bool = False
    n_instructions: int = 0
    is_auxiliary: bool = False

    @property
    def offered(self) -> tuple[ToolSpec, ...]:
        """The tools in our form. Raises ConfigError for what is none."""
        return tuple(tool_from_openai(tool) for tool in self.tools)


def read_object(value: Any, name: str) -> Record:
    """`value` as an object."""
    if not isinstance(value, Mapping):
        raise Refusal.malformed(f"{name} must be an object, got {_kind(value)}", name)
    return value


def read_list(body: Record, name: str, *, needed: bool = False) -> Sequence[Any]:
    """A list of the body; absent and null are an empty one, unless it is `needed`."""
    value = body.get(name)
    if value is None and not needed:
        return ()
    if not isinstance(value, list) or (needed and not value):
        raise Refusal.malformed(f"{name} must be a list{' that holds something' * needed}, got {_kind(value)}", name)
    return value


def read_flag(body: Record, name: str) -> bool:
    """A boolean of the body, false where it is absent or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refusal.malformed(f"{name} must be true or false, got {_kind(value)}", name)
    return bool(value)


def read_text(body: Record, name: str, default: str = "") -> str:
    """A text of the body."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise Refusal.malformed(f"{name} must be text, got {_kind(value)}", name)
    return default if value is None else value


def read_count(body: Record, name: str) -> int | None:
    """A whole number of at least 1, None where it is absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refusal.malformed(f"{name} must be a whole number of at least 1, got {_shown(value)}", name)
    return value


def read_limit(body: Record, names: Sequence[str]) -> int | None:
    """The smallest of several limits (case GW-01)."""
    return min((n for n in (read_count(body, name) for name in names) if n is not None), default=None)


def read_stops(body: Record, name: str) -> tuple[str, ...]:
    """Stop strings: one, several or none."""
    value = body.get(name)
    found = [value] if isinstance(value, str) else value
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(stop, str) for stop in found):
        raise Refusal.malformed(f"{name} must be a text or a list of texts", name)
    if len(found) > MAX_STOPS:
        raise Refusal.malformed(f"{name} holds {len(found)} texts; at most {MAX_STOPS} are looked for", name)
    return tuple(stop for stop in found if stop)


def require_one(body: Record, *names: str) -> None:
    """Refuse more than one answer to a request: each call is one node of the tree."""
    for name in names:
        if read_count(body, name) not in (None, 1):
            raise Refusal.unsupported(f"{name} must be 1: one answer is sampled for each request", name)


def read_options(body: Record, names: Sequence[str]) -> dict[str, Any]:
    """The options of the body that are to be recorded. Raises Refusal where a number is none."""
    found = {name: body[name] for name in names if body.get(name) is not None}
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        value = found.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise Refusal.malformed(f"{name} must be a number, got {_shown(value)}", name)
    return found


def _kind(value: Any) -> str:
    return "null" if value is None else "an empty list" if value == [] else type(value).__name__


def _shown(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, bool | int | float) else _kind(value)
