"""When a failed request is sent again: exponential waits with jitter, what the server asks for, and a budget for all.

Invariant: a request is sent at most `max_retries` times again, and all requests of a run together at most `budget`
times; no wait is longer than `max_wait_s`.

Example:
    >>> rule = RetryRule(max_retries=3, first_wait_s=1.0, max_wait_s=60.0)
    >>> [rule.wait_s(retry, None, draw=1.0) for retry in range(3)], rule.wait_s(0, 300.0, draw=0.0)
    ([1.0, 2.0, 4.0], 60.0)
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from sao_gym.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRule:
    """How often and after how long."""

    max_retries: int = 6
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0
    budget: int = 1000

    def __post_init__(self) -> None:
        if self.max_retries < 0 or self.budget < 0:
            raise ConfigError(f"retries are counted from 0, got {self.max_retries} per request, {self.budget} per run")
        if not 0 < self.first_wait_s <= self.max_wait_s < math.inf:
            raise ConfigError(
                f"waits need 0 < first_wait_s <= max_wait_s, got {self.first_wait_s} and {self.max_wait_s}"
            )

    def wait_s(self, retry: int, asked_s: float | None, *, draw: float) -> float:
        """Seconds before the retry (0 is the first), with `draw` from [0, 1): half of a wait is drawn.

        What the server asks for counts if it is longer, and gets some jitter too: clients told the same time must not
        all come back at once.
        """
        step = min(self.first_wait_s * 2.0 ** min(retry, 60), self.max_wait_s)
        own = step * (0.5 + 0.5 * draw)
        return own if asked_s is None else min(max(asked_s + self.first_wait_s * draw, own), self.max_wait_s)


class RetryBudget:
    """How many retries a run still has."""

    def __init__(self, budget: int) -> None:
        self.left = budget

    def take(self) -> bool:
        """Spend one; False if none is left."""
        if self.left <= 0:
            return False
        self.left -= 1
        return True


def asked_wait_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that an answer's `Retry-After` asks for, None where it does not. A date is read against the answer's own."""
    for name, scale in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            asked = float(headers[name])
        except (KeyError, ValueError):
            continue
        if math.isfinite(asked):
            return max(asked * scale, 0.0)
    try:
        until, now = (parsedate_to_datetime(headers[name]) for name in ("retry-after", "date"))
        return max((until - now).total_seconds(), 0.0)
    except (KeyError, ValueError, TypeError):
        return None
