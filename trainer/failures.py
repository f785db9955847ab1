"""The error budget by share: how many of the last episodes may be lost to infrastructure before a run ends.

One lost episode is a matter of a retry. Too large a share of the last ones says that the environment, its sandbox, the
judge or the engine is broken, and that going on would train on what happens to be left. (What is lost in a row, the
runtime counts.)

Example:
    budget = ErrorBudget(share=0.5, window=64)
    budget.note(trajectory.outcome)
"""

from collections import Counter, deque

from sao_gym.errors import NoFeedbackError
from sao_gym.stream import Outcome
from sao_gym.trainer.runtime import EpisodesFailedError


class ErrorBudget:
    """Counts ends of episodes; `share` is judged over the last `window` of them, once so many have ended."""

    def __init__(self, *, share: float, window: int) -> None:
        self._share = share
        self._last: deque[str | None] = deque(maxlen=window)

    def note(self, outcome: Outcome) -> None:
        """An episode ended. Raises EpisodesFailedError when the budget is spent, naming the causes by frequency."""
        is_failure = outcome.is_error and outcome.reason != NoFeedbackError.kind
        self._last.append((outcome.reason or "error") if is_failure else None)
        causes = Counter(lost for lost in self._last if lost)
        if len(self._last) < (self._last.maxlen or 0) or causes.total() <= self._share * len(self._last):
            return
        named = ", ".join(f"{cause} {count} times" for cause, count in causes.most_common(3))
        raise EpisodesFailedError(
            f"{causes.total()} of the last {len(self._last)} episodes were lost ({named}), which is more than "
            f"rollout.failure_share = {self._share:g}: see the warnings above, mend what is broken, and go on with --resume"
        )
