"""Feedback that comes late, or never: what a product's thumb does, and a judge behind an interface does not.

Invariant: whether and how late an episode's feedback comes follows from the episode's own random numbers. What does not come
by the deadline is `NoFeedbackError`: the row is dropped, never trained and never 0, and nothing has failed.

Example:
    >>> late = LateFeedback(late_share=0.3, never_share=0.1, delay_s=60, deadline_s=600)
    >>> late.drawn(np.random.default_rng(0)) >= 0
    True
"""

import math
from dataclasses import dataclass

import numpy as np

from sao_gym.errors import ConfigError, NoFeedbackError
from sao_gym.protocols import Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class LateFeedback:
    """Shares of episodes whose feedback is late (by an exponential time of mean `delay_s`) or never comes; the rest at once."""

    late_share: float = 0.0
    never_share: float = 0.0
    delay_s: float = 60.0
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        shares = (self.late_share, self.never_share)
        if not all(0 <= share <= 1 for share in shares) or sum(shares) > 1:
            raise ConfigError(
                f"feedback_late_share and feedback_never_share are shares from 0 to 1, 1 at most together; got {shares}"
            )
        for name in ("delay_s", "deadline_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"feedback_{name} must be above 0, got {getattr(self, name)}")

    @property
    def is_on(self) -> bool:
        """Whether any feedback is not there at once."""
        return self.late_share + self.never_share > 0

    def drawn(self, rng: np.random.Generator) -> float:
        """Seconds until the feedback of one episode: 0 at once, infinite never."""
        chance, delay = float(rng.random()), float(rng.exponential(self.delay_s))
        if chance < self.never_share:
            return math.inf
        return delay if chance < self.never_share + self.late_share else 0.0

    async def wait(self, clock: Clock, asked_at: float, delay_s: float) -> None:
        """Return once feedback that was asked for at `asked_at` has come. Raises NoFeedbackError at the deadline."""
        due = asked_at + min(delay_s, self.deadline_s)
        if due > clock.now():
            await clock.sleep(due - clock.now())
        if delay_s > self.deadline_s:
            raise NoFeedbackError(f"no feedback came within {self.deadline_s:g} s")
