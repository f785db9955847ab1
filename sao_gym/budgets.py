"""Budgets: everything that may cut an episode, in one object.

Invariant: nothing is cut without a recorded `TruncationReason`; a limit per turn never cuts an episode, and a limit
per episode is never read as one per turn.

Example:
    >>> budgets = Budgets(max_tokens_per_turn=8192, max_tokens_per_episode=100_000)
    >>> budgets.limit(used=50_000, context_length=None).max_tokens
    8192
    >>> budgets.limit(used=99_000, context_length=None)
    Limit(max_tokens=1000, reason=<TruncationReason.EPISODE_TOKENS: 'episode_tokens'>)
"""

from dataclasses import dataclass, fields

from sao_gym.errors import ConfigError
from sao_gym.stream import TruncationReason

NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class Limit:
    """Most tokens that an action may hold, and the budget that cut it if that many did not suffice."""

    max_tokens: int
    reason: TruncationReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Limits of one episode; None is no limit.

    `max_tokens_per_turn` counts the tokens that one action samples; `max_tokens_per_episode` all tokens of the
    episode, prompt and observations included; `max_turns` actions; `wall_clock_s` seconds, kept by the driver.
    """

    max_tokens_per_turn: int | None = None
    max_tokens_per_episode: int | None = None
    max_turns: int | None = None
    wall_clock_s: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = (int, float) if field.name == "wall_clock_s" else (int,)
            if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value != value):
                wanted = "a number" if float in kinds else "a whole number"
                raise ConfigError(f"{field.name} must be {wanted}, or none for no limit; got {value!r}")
            if value is not None and value <= 0:
                raise ConfigError(f"{field.name} must be above 0, or none for no limit; got {value}")

    def limit(self, *, used: int, context_length: int | None) -> Limit:
        """What bounds the next action after `used` tokens; of equal bounds the episode's is named."""
        bounds = [
            (self.max_tokens_per_episode, used, TruncationReason.EPISODE_TOKENS),
            (context_length, used, TruncationReason.CONTEXT),
            (self.max_tokens_per_turn, 0, TruncationReason.TURN_TOKENS),
        ]
        known = [Limit(max(bound - spent, 0), reason) for bound, spent, reason in bounds if bound is not None]
        return min(known, key=lambda limit: limit.max_tokens, default=Limit(NO_LIMIT, TruncationReason.CONTEXT))

    def exhausted(self, *, used: int, context_length: int | None) -> TruncationReason | None:
        """Which limit leaves no room for another token after `used` tokens."""
        if self.max_tokens_per_episode is not None and used >= self.max_tokens_per_episode:
            return TruncationReason.EPISODE_TOKENS
        if context_length is not None and used >= context_length:
            return TruncationReason.CONTEXT
        return None
