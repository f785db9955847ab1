"""What an episode may still sample, and the budget that it ran into.

Invariants: nothing is cut without a reason; a cut answer ends the episode (trap 19); auxiliary calls are bounded by
number alone and never end it.
"""

from sao_gym.budgets import Budgets, Limit
from sao_gym.gateway.refusals import Refusal
from sao_gym.stream import StopReason, TruncationReason


class Allowance:
    """Counts turns and tokens of one episode. `turn_cap` bounds the tokens of one answer beside the budgets."""

    def __init__(self, budgets: Budgets, *, turn_cap: int, max_auxiliary: int) -> None:
        self._budgets = budgets
        self._per_turn = min(turn_cap, budgets.max_tokens_per_turn or turn_cap)
        self._max_auxiliary = max_auxiliary
        self.turns = 0
        self.auxiliary = 0
        self._used = 0
        self._is_cut = False
        self.truncation: TruncationReason | None = None

    def require(self, *, is_auxiliary: bool) -> None:
        """Raise Refusal where no further call may be answered."""
        if is_auxiliary:
            if self.auxiliary >= self._max_auxiliary:
                raise Refusal.budget(f"{self._max_auxiliary} auxiliary calls")
            return
        if self._is_cut:
            raise Refusal.over(f"an answer was cut ({self.truncation})")
        if self._budgets.max_turns is not None and self.turns >= self._budgets.max_turns:
            self.truncation = TruncationReason.TURNS
            raise Refusal.budget(f"{self._budgets.max_turns} turns")

    def limit(self, *, prompt: int, new: int, asked: int | None, context: int, is_auxiliary: bool) -> Limit:
        """What bounds the answer to a prompt of `prompt` tokens, `new` of which the episode has not seen yet.

        Raises Refusal where nothing is left; an answer of the length that was `asked` for must fit the context.
        """
        wanted = min(self._per_turn, asked or self._per_turn)
        if prompt + (wanted if asked else 1) > context:
            raise self.overflow(prompt=prompt, asked=wanted, context=context, is_auxiliary=is_auxiliary)
        bounds = [Limit(context - prompt, TruncationReason.CONTEXT), Limit(wanted, TruncationReason.TURN_TOKENS)]
        most = self._budgets.max_tokens_per_episode
        if most is not None and not is_auxiliary:
            left = most - self._used - new
            if left < 1:
                self.truncation = TruncationReason.EPISODE_TOKENS
                raise Refusal.budget(f"{most} tokens")
            bounds.insert(0, Limit(left, TruncationReason.EPISODE_TOKENS))
        return min(bounds, key=lambda limit: limit.max_tokens)

    def overflow(self, *, prompt: int, asked: int, context: int, is_auxiliary: bool) -> Refusal:
        """The refusal of a call that does not fit the context."""
        if not is_auxiliary:
            self.truncation = TruncationReason.CONTEXT
        return Refusal.context(prompt=prompt, asked=asked, limit=context)

    def begin(self, new: int, *, is_auxiliary: bool) -> None:
        """Set a call's turn and its `new` tokens aside."""
        if is_auxiliary:
            self.auxiliary += 1
        else:
            self.turns += 1
            self._used += new

    def give_back(self, new: int, *, is_auxiliary: bool) -> None:
        """Undo `begin`: the call was not answered."""
        if is_auxiliary:
            self.auxiliary -= 1
        else:
            self.turns -= 1
            self._used -= new

    def answered(self, n: int, stop: StopReason, limit: Limit) -> None:
        """Take note of an answer of `n` tokens."""
        self._used += n
        if stop is StopReason.ABORT:
            self._cut(TruncationReason.WALL_CLOCK)
        elif stop is StopReason.LENGTH:
            self._cut(limit.reason if n >= limit.max_tokens else TruncationReason.TURN_TOKENS)
        elif not self._is_cut:
            self.truncation = None

    def _cut(self, reason: TruncationReason) -> None:
        if not self._is_cut:
            self._is_cut, self.truncation = True, reason
