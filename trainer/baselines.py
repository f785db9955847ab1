"""Advantages without a critic: one number per row, from other rows' rewards.

Invariant: a row's own reward never enters a running mean or a leave-one-out baseline (GRPO's group mean is the one
that includes it, as published). Each function is pure; `RunningMean` holds the one piece of state, a window per key.

Example:
    >>> leave_one_out([1.0, 0.0, 0.0, 1.0, 1.0]).tolist()
    [0.5, -0.75, -0.75, 0.5, 0.5]
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from sao_gym.errors import InvariantError

Floats64 = npt.NDArray[np.float64]
StdKind = Literal["population", "sample", "none"]

PROMPT_WINDOW = 8
GLOBAL_WINDOW = 128


class RunningMean:
    """The mean of the last `window` rewards under a key, of those seen before the current one; 0 before any.

    The math arm keys by prompt with a window of 8; the online arm uses one key and a window of 128 (arXiv
    2607.07508; docs/paper.md row 25). Order of arrival defines the window.
    """

    def __init__(self, window: int, state: Mapping[str, Iterable[float]] | None = None) -> None:
        if window < 1:
            raise InvariantError(f"a window holds at least one reward, got {window}")
        self.window = window
        self._seen = {key: deque(map(float, past), maxlen=window) for key, past in (state or {}).items()}

    def advantage(self, reward: float, key: str = "") -> float:
        """The reward less `baseline(key)`; it then joins the window."""
        baseline = self.baseline(key)
        self._seen.setdefault(key, deque(maxlen=self.window)).append(float(reward))
        return float(reward) - baseline

    def baseline(self, key: str = "") -> float:
        """Mean of the window as it stands, 0 where nothing was seen."""
        past = self._seen.get(key)
        return sum(past) / len(past) if past else 0.0

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint needs; give it back as `state`."""
        return {key: list(past) for key, past in self._seen.items()}


def group_advantages(
    rewards: npt.ArrayLike,
    group: Sequence[object] | None = None,
    *,
    std: StdKind = "population",
    eps: float = 1e-6,
) -> Floats64:
    """GRPO: (r - mean of its group) / (deviation of its group + eps), one per row [R].

    `group` [R] names each row's group (None: all rows are one). A group without variance, of one row for instance,
    gets exactly 0. `none` leaves the division out. Source: arXiv 2402.03300; docs/paper.md row 24.
    """
    r, index, count = _grouped(rewards, group)
    centred = r - (np.bincount(index, r) / count)[index]
    squares = np.bincount(index, centred**2)
    flat = (squares <= 1e-24 * np.maximum(1.0, np.bincount(index, r**2)))[index]
    if std == "none":
        return np.where(flat, 0.0, centred)
    if std not in ("population", "sample"):
        raise InvariantError(f"std is population, sample or none, got {std!r}")
    divisor = count if std == "population" else np.maximum(count - 1, 1)
    return np.where(flat, 0.0, centred / (np.sqrt(squares / divisor)[index] + eps))


def leave_one_out(rewards: npt.ArrayLike, group: Sequence[object] | None = None) -> Floats64:
    """Reward less the mean of the other rows of its group, one per row [R]; alone in its group a row has baseline 0.

    With `group` None the baseline is that of the whole batch (the `global_loo` arm). Source: RLOO, arXiv 2402.14740.
    """
    r, index, count = _grouped(rewards, group)
    others = np.maximum(count - 1, 1)[index]
    return r - np.where(count[index] > 1, (np.bincount(index, r)[index] - r) / others, 0.0)


def _grouped(
    rewards: npt.ArrayLike, group: Sequence[object] | None
) -> tuple[Floats64, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    r = np.asarray(rewards, dtype=np.float64)
    names = [0] * r.size if group is None else list(group)
    if r.ndim != 1 or len(names) != r.size:
        raise InvariantError(f"{r.shape} rewards came with {len(names)} group names; give one per row")
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    index = np.array([order[name] for name in names], dtype=np.int64)
    return r, index, np.bincount(index)
