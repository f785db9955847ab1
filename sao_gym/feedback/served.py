"""An episode that an application talks to, the place in the ledger that it may have, and what is said of it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from sao_gym.gateway import GatewayEpisode
from sao_gym.rollout import Episode


@dataclass(frozen=True, slots=True)
class Feedback:
    """What an application says of an episode: `score` from 0 to 1, and a comment that is kept and not trained on."""

    score: float
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of feedback: whether the policy learns from it, and why if it does not."""

    episode: str
    score: float
    is_for_training: bool
    why: str | None = None


@dataclass(eq=False, slots=True)
class Place:
    """A ledger row that waits for an application. `on_answered` hears its first answer."""

    episode: Episode
    on_version: Callable[[int], None]
    on_answered: Callable[[], None]
    taken: "asyncio.Future[Served]"
    is_ours: bool = True

    def heard(self, version: int) -> None:
        """A version, unless the row was taken back: it may be running again, with a first token of its own."""
        if self.is_ours:
            self.on_version(version)


@dataclass(eq=False, slots=True)
class Served:
    """An episode that an application talks to. `settled` is there once its feedback is in the ledger or the book."""

    id: str
    episode: Episode
    handle: GatewayEpisode
    place: Place | None
    began_at: float
    why: str | None = None
    request: tuple[str, bytes] | None = None
    calls: int = 0
    answers: int = 0
    answered_at: float = 0.0
    feedback: Feedback | None = None
    is_withdrawn: bool = False
    is_lost: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    settled: "asyncio.Future[Receipt]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def is_over(self) -> bool:
        """Whether nothing is waited for, the deadline aside."""
        has_failed = self.handle.session.failure is not None and not self.calls
        return self.feedback is not None or self.is_withdrawn or self.is_lost or has_failed
