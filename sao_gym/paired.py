"""Two result sets on the same tasks: how they differ, and how small a difference these tasks could show.

Invariant: only tasks of both sets count, and a task counts once however many samples it has. What cannot be known is
None with a reason.

Example:
    >>> before = {f"t{i}": [0.0] for i in range(12)}
    >>> after = {f"t{i}": [float(i < 8)] for i in range(12)}
    >>> found = compare_paired(before, after)
    >>> (round(found.difference, 3), found.n_better, found.n_worse, found.p_value)
    (0.667, 8, 0, 0.0078125)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from sao_gym.errors import ConfigError
from sao_gym.statistics import Interval, Samples, percentiles

_EXACT_FLIPS = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedDifference:
    """Second result set minus first, over the tasks of both. `p_value` is two-sided, under "the order is chance"."""

    n_tasks: int
    difference: float
    interval: Interval
    p_value: float
    n_better: int
    n_worse: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Detectable:
    """Smallest true difference that a paired test at `level` finds with probability `power`, None with a `reason`."""

    value: float | None
    n_tasks: int
    level: float
    power: float
    reason: str = ""


def compare_paired(
    first: Samples, second: Samples, level: float = 0.95, *, seed: int = 0, resamples: int = 4000
) -> PairedDifference:
    """Compare two result sets task by task: mean difference of the task means, bootstrap over tasks, sign-flip test.

    Only tasks of both sets count. With one 0/1 sample per task the test is McNemar's exact one. Raises ConfigError
    without a task in common.
    """
    differences = _differences(first, second)
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(differences), size=(resamples, len(differences)))
    return PairedDifference(
        n_tasks=len(differences),
        difference=float(differences.mean()),
        interval=percentiles(differences[picks].mean(axis=1), level),
        p_value=_sign_flip_p(differences, rng, resamples),
        n_better=int((differences > 0).sum()),
        n_worse=int((differences < 0).sum()),
    )


def detectable_difference(
    first: Samples, second: Samples | None = None, *, level: float = 0.95, power: float = 0.8
) -> Detectable:
    """Smallest true difference of success that `compare_paired` finds here with probability `power`.

    With two sets: (t_level + t_power) s / sqrt(m), with s the spread of the differences per task over m tasks and
    Student's quantiles with m - 1 degrees of freedom. With one: for a second run of as many samples whose success rates
    lie equally far off on every task; s^2 is then the mean of 2 p (1-p) / (n-1). One sample per task does not tell its
    noise from the spread between tasks, so such a task counts with both: more than is needed.
    """
    if not 0 < level < 1 or not 0 < power < 1:
        raise ConfigError(f"level and power lie between 0 and 1, got {level} and {power}")
    spread, n_tasks = _one_spread(first) if second is None else _paired_spread(_differences(first, second))
    samples = max(len(values) for side in (first, second or {}) for values in side.values())
    least = math.ceil(1 - math.log2(1 - level))  # so many tasks must move one way before the sign-flip test says so
    if n_tasks < least:
        why = f"with {n_tasks} tasks no difference is significant at {level:.0%}; {least} are needed"
    elif spread == 0:
        why = "every task came out alike, so the spread of differences is unknown"
    else:
        quantiles = stdtrit(n_tasks - 1, (1 + level) / 2) + stdtrit(n_tasks - 1, power)
        value = max(float(quantiles) * spread / math.sqrt(n_tasks), least / n_tasks / samples)
        why = "" if value <= 1 else f"{n_tasks} tasks are too few: not even a difference of 1 would be found"
        if not why:
            return Detectable(value=value, n_tasks=n_tasks, level=level, power=power)
    return Detectable(value=None, n_tasks=n_tasks, level=level, power=power, reason=why)


def _differences(first: Samples, second: Samples) -> npt.NDArray[np.float64]:
    shared = [task for task in first if len(first[task]) and len(second.get(task, ()))]
    if not shared:
        raise ConfigError("the two result sets have no task in common; compare runs over the same tasks")
    return np.array([_mean(second[task]) - _mean(first[task]) for task in shared])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _paired_spread(differences: npt.NDArray[np.float64]) -> tuple[float, int]:
    return float(differences.std(ddof=1)) if len(differences) > 1 else 0.0, len(differences)


def _one_spread(values: Samples) -> tuple[float, int]:
    """Standard deviation of a task's difference between two runs with these success rates, and the tasks it is from."""
    groups = [np.asarray(samples, dtype=np.float64) for samples in values.values() if len(samples)]
    if not groups:
        raise ConfigError("a detectable difference needs at least one sample, got none")
    pooled = float(np.concatenate(groups).var())
    noise = [float(group.var(ddof=1)) / len(group) if len(group) > 1 else pooled for group in groups]
    return math.sqrt(2 * float(np.mean(noise))), len(groups)


def _sign_flip_p(differences: npt.NDArray[np.float64], rng: np.random.Generator, resamples: int) -> float:
    """Share of sign patterns whose sum is at least as far from 0: all patterns for few tasks, random ones for many."""
    moved = differences[differences != 0]
    if not len(moved):
        return 1.0
    observed = abs(float(moved.sum())) - 1e-12
    if len(moved) <= _EXACT_FLIPS:
        patterns = np.arange(1 << len(moved))[:, None] >> np.arange(len(moved)) & 1
        return float((np.abs((1 - 2 * patterns) @ moved) >= observed).mean())
    if np.ptp(np.abs(moved)) < 1e-12:
        return _binomial_p(int((moved > 0).sum()), len(moved))
    signs = rng.integers(0, 2, size=(resamples, len(moved))) * 2 - 1
    hits = int((np.abs(signs @ moved) >= observed).sum())
    return (hits + 1) / (resamples + 1)  # the observed pattern is one of those that could have been drawn


def _binomial_p(k: int, n: int) -> float:
    """Two-sided exact test of k heads in n fair tosses."""
    tail = sum(math.comb(n, i) for i in range(min(k, n - k) + 1))
    return min(1.0, 2 * tail / (1 << n))
