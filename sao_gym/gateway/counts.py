"""What is counted of a session, and summed over a gateway's episodes.

Example:
    >>> counts = Counts()
    >>> counts.reasons.update(["start", "continued", "history_edited"])
    >>> counts.break_rate
    0.5
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from sao_gym.gateway.reasons import Reason


@dataclass(slots=True)
class Counts:
    """`reasons`: how the trained calls hang on each other; `replays`: calls that got an answer already made.

    `prompt_tokens` sums every call's whole prompt, `stream_tokens` what the streams hold in its place.
    """

    calls: int = 0
    auxiliary_calls: int = 0
    replays: int = 0
    delivered: int = 0
    streams: int = 0
    episodes: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    stream_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    echoes: Counter[str] = field(default_factory=Counter)
    malformed_calls: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    @property
    def breaks(self) -> dict[str, int]:
        """Calls that no stream could go on to, by reason."""
        return {reason: n for reason, n in self.reasons.items() if Reason(reason).is_break}

    @property
    def break_rate(self) -> float:
        """Share of the trained calls, a session's first aside, that broke its history."""
        later = self.reasons.total() - self.reasons[Reason.START]
        return sum(self.breaks.values()) / later if later else 0.0

    @property
    def delivered_fraction(self) -> float:
        """Share of the answers that reached a client which was still there."""
        answered = self.calls + self.auxiliary_calls
        return self.delivered / answered if answered else 1.0

    def add(self, other: "Counts") -> None:
        """Add another session's."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            else:
                setattr(self, item.name, mine + theirs)

    def as_info(self) -> dict[str, Any]:
        """JSON values for a trajectory's info, or for metrics."""
        info: dict[str, Any] = {
            item.name: _plain(value) if isinstance(value := getattr(self, item.name), Counter) else value
            for item in fields(self)
        }
        return {
            **info,
            "breaks": _plain(self.breaks),
            "break_rate": self.break_rate,
            "delivered_fraction": self.delivered_fraction,
        }


def _plain(counted: Mapping[str, int]) -> dict[str, int]:
    return {str(name): n for name, n in counted.items()}
