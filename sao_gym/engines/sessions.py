"""What is kept of a session between two of its requests: keys and values of the tokens it has seen.

Invariant: a prefix is handed out once, to the session that made it; the kept tokens never exceed the budget, the
least recently used session goes first.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sao_gym.engines.slots import Prefix


@dataclass(frozen=True, slots=True)
class IdleSession:
    """The tokens of a session, and their keys and values."""

    ids: list[int]
    prefix: Prefix

    def common(self, ids: Sequence[int]) -> int:
        """How many of the first tokens are the same."""
        n = min(len(self.ids), len(ids))
        differs = np.flatnonzero(np.asarray(self.ids[:n]) != np.asarray(ids[:n]))
        return int(differs[0]) if len(differs) else n


class IdleSessions:
    """Idle sessions by name, at most `max_tokens` tokens in all."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._sessions: OrderedDict[str, IdleSession] = OrderedDict()

    @property
    def names(self) -> tuple[str, ...]:
        """Least recently used first."""
        return tuple(self._sessions)

    def keep(self, name: str, session: IdleSession) -> None:
        """Keep a session in place of what was kept under its name."""
        self.take(name)
        self._sessions[name] = session
        self._tokens += len(session.ids)
        while self._tokens > self._max_tokens:
            self.take(next(iter(self._sessions)))

    def take(self, name: str | None) -> IdleSession | None:
        """Remove and return a session, None if nothing is kept of it."""
        session = self._sessions.pop(name, None) if name is not None else None
        if session is not None:
            self._tokens -= len(session.ids)
        return session

    def clear(self) -> None:
        """Forget every session."""
        self._sessions.clear()
        self._tokens = 0
