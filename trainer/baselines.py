"""Advantages without a critic: one number per row, from other rows' rewards.

`RowAdvantages` computes them as the configuration asks, from the rows of a whole batch in their order: the order in
which rows enter batches is the order of arrival, so that a recorded run gives the same numbers again.

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

from sao_gym.errors import ConfigError, InvariantError
from sao_gym.trainer.config import WINDOWS, LossConfig

Floats64 = npt.NDArray[np.float64]
StdKind = Literal["population", "sample", "none"]

PROMPT_WINDOW = WINDOWS["running_mean_prompt"]
GLOBAL_WINDOW = WINDOWS["running_mean_global"]


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


class RowAdvantages:
    """One advantage per row of a batch, for every `loss.advantage` but the critic's. Running means live on in it."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        self._mean = RunningMean(config.window or WINDOWS.get(config.advantage, 1))

    def of_batch(self, rewards: Sequence[float], tasks: Sequence[str], groups: Sequence[str]) -> Floats64:
        """Advantages [R] of a batch's rows in their order: score, task and group of each.

        Raises ConfigError where rows of a prompt are to be compared and each prompt has but one.
        """
        kind = self.config.advantage
        if kind in ("group", "leave_one_out"):
            if len(set(groups)) == len(groups):
                raise ConfigError(
                    f"loss.advantage = {kind} compares rows of one prompt, and this batch holds one of each; take "
                    "trajectories that were sampled in groups"
                )
            return (
                group_advantages(rewards, groups, std=self.config.group_std)
                if kind == "group"
                else leave_one_out(rewards, groups)
            )
        if kind == "global_leave_one_out":
            return leave_one_out(rewards)
        keys = tasks if kind == "running_mean_prompt" else [""] * len(tasks)
        return np.array([self._mean.advantage(reward, key) for reward, key in zip(rewards, keys, strict=True)])

    def state(self) -> dict[str, list[float]]:
        """What a checkpoint needs."""
        return self._mean.state()

    def load_state(self, state: Mapping[str, Iterable[float]]) -> None:
        """Go on from the state of a checkpoint."""
        self._mean = RunningMean(self._mean.window, state)
