"""What a policy behind an API costs: tokens as the API counts them, requests, retries, money.

Invariant: nothing is guessed. An answer that does not say its tokens is counted as `unmetered`, not as 0 tokens; while
there is one, tokens and cost are lower bounds, and `spoken` says so.

Example:
    >>> meter = Meter(Prices(tokens_in=2.0, tokens_out=8.0))
    >>> meter.sent(is_retry=False)
    >>> meter.answered(TokenCount(prompt=1_000_000, completion=500_000))
    >>> meter.usage.cost, spoken(meter.usage)
    (6.0, '1,000,000 tokens in, 500,000 out, cost 6.00, 1 request')
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from sao_gym.errors import ConfigError
from sao_gym.evaluation_results import Usage

MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices per million tokens, in any currency; `tokens_cached` of prompt tokens read from a cache, None: `tokens_in`."""

    tokens_in: float = 0.0
    tokens_out: float = 0.0
    tokens_cached: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"the price {field.name} must be a number of at least 0, got {value}")

    def cost(self, count: "TokenCount") -> float:
        """What one answer costs."""
        cached = self.tokens_in if self.tokens_cached is None else self.tokens_cached
        fresh = count.prompt - count.cached
        return (fresh * self.tokens_in + count.cached * cached + count.completion * self.tokens_out) / MILLION


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCount:
    """Tokens of one answer; `cached` of the prompt's came from a cache. Reasoning counts as completion."""

    prompt: int
    completion: int
    cached: int = 0

    @property
    def total(self) -> int:
        """Prompt and completion together."""
        return self.prompt + self.completion

    @classmethod
    def read(cls, usage: Any) -> "TokenCount | None":
        """What an answer's `usage` says, None where it does not say both numbers."""
        if not isinstance(usage, Mapping):
            return None
        prompt, completion = _whole(usage.get("prompt_tokens")), _whole(usage.get("completion_tokens"))
        if prompt is None or completion is None:
            return None
        details = usage.get("prompt_tokens_details")
        cached = _whole(details.get("cached_tokens")) if isinstance(details, Mapping) else None
        return cls(prompt=prompt, completion=completion, cached=min(cached or 0, prompt))


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


class Meter:
    """One episode's account as it grows. `failing` is the kind of the failure that a request is being retried after."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.usage = Usage()
        self.failing: str | None = None
        self.waited_s = 0.0

    def sent(self, *, is_retry: bool) -> None:
        """One request left."""
        self.usage = replace(
            self.usage, requests=self.usage.requests + 1, retries=self.usage.retries + (1 if is_retry else 0)
        )

    def answered(self, count: TokenCount | None) -> None:
        """One answer came, with what it says of its tokens."""
        self.failing = None
        usage = self.usage
        if count is None:
            self.usage = replace(usage, unmetered=usage.unmetered + 1)
            return
        self.usage = replace(
            usage,
            prompt_tokens=usage.prompt_tokens + count.prompt,
            completion_tokens=usage.completion_tokens + count.completion,
            cost=usage.cost + self.prices.cost(count),
        )

    def failed(self, kind: str, wait_s: float) -> None:
        """A request failed and is sent again after `wait_s`."""
        self.failing = kind
        self.waited_s += wait_s


def total(usages: Iterable[Usage]) -> Usage:
    """All of them together."""
    given = list(usages)
    return Usage(**{field.name: sum(getattr(usage, field.name) for usage in given) for field in fields(Usage)})


def spoken(usage: Usage) -> str:
    """The usage in a line: `at least` where answers did not say their tokens."""
    least = "at least " if usage.unmetered else ""
    parts = [f"{least}{usage.prompt_tokens:,} tokens in, {usage.completion_tokens:,} out"]
    if usage.cost:
        parts.append(f"cost {least}" + (f"{usage.cost:,.2f}" if usage.cost >= 1 else f"{usage.cost:.2g}"))
    parts.append(_counted(usage.requests, "request", "requests"))
    if usage.retries:
        parts.append(_counted(usage.retries, "retry", "retries"))
    if usage.unmetered:
        parts.append(_counted(usage.unmetered, "answer", "answers") + " without a token count")
    return ", ".join(parts)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count:,} {one if count == 1 else many}"
