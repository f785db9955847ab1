"""How sure a figure is: intervals for success rates, pass@k, and two result sets compared on the same tasks.

Invariant: what cannot be computed is None with a reason, never 0 or 1. Samples of one task are not independent, so
every interval here treats the task as the unit that was drawn.

Example:
    >>> interval = wilson_interval(8, 10)
    >>> round(interval.low, 3), round(interval.high, 3)
    (0.49, 0.943)
    >>> pass_at_k(2, 1, 5).reason
    'pass@5 needs at least 5 scored samples of a task, there are 2'
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from sao_gym.errors import ConfigError

Samples = Mapping[str, Sequence[float]]
"""Task id to the values of its samples, one or more each."""
_EXACT_FLIPS = 14


@dataclass(frozen=True, slots=True)
class Interval:
    """Two ends between which the true value lies with probability `level`, as far as the method's assumptions hold."""

    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK:
    """Estimate that at least one of k samples passes, None with a `reason` where it is undefined.

    Computed over `n_tasks` tasks; `n_left_out` had too few scored samples.
    """

    k: int
    value: float | None
    n_tasks: int
    n_left_out: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Second result set minus first, over the tasks of both. `p_value` is two-sided, under "the order is chance"."""

    n_tasks: int
    difference: float
    interval: Interval
    p_value: float
    n_better: int
    n_worse: int


def wilson_interval(successes: float, n: float, level: float = 0.95) -> Interval:
    """Score interval of a proportion (Wilson 1927). Fractional counts are effective ones; n = 0 says nothing: [0, 1]."""
    if not 0 <= successes <= n:
        raise ConfigError(f"an interval needs 0 <= successes <= n, got {successes} of {n}")
    if n == 0:
        return Interval(0.0, 1.0, level)
    z = _quantile(level)
    p = successes / n
    scale = 1 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z / scale * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # at the ends the two terms are equal in exact arithmetic
    low = 0.0 if successes == 0 else max(centre - half, 0.0)
    high = 1.0 if successes == n else min(centre + half, 1.0)
    return Interval(low, high, level)


def clustered_interval(passed: Samples, level: float = 0.95) -> Interval:
    """Interval of the share of samples that passed (values 0 or 1), where the samples of one task hang together.

    Wilson's interval at the effective sample size p (1-p) / v, with v the task-clustered variance of the share (Kish
    1965): exactly Wilson's with one sample per task. Where all samples agree, v says nothing and each task counts once.
    """
    groups = _groups(passed)
    sizes, sums = _sizes_and_sums(groups)
    n, p = float(sizes.sum()), float(sums.sum() / sizes.sum())
    variance = float(((sums - p * sizes) ** 2).sum()) / n**2
    n_tasks = float(len(groups))
    effective = min(p * (1 - p) / variance, n) if variance > 0 else n_tasks
    return wilson_interval(p * effective, effective, level)


def bootstrap_interval(values: Samples, level: float = 0.95, *, seed: int = 0, resamples: int = 4000) -> Interval:
    """Percentile interval of the mean over all samples, drawing whole tasks again; for scores of any kind.

    Too narrow below some ten tasks, and a point where all values are equal; for 0/1 use `clustered_interval`.
    """
    sizes, sums = _sizes_and_sums(_groups(values))
    picks = np.random.default_rng(seed).integers(len(sizes), size=(resamples, len(sizes)))
    return _percentiles(sums[picks].sum(axis=1) / sizes[picks].sum(axis=1), level)


def pass_at_k(n: int, c: int, k: int) -> PassAtK:
    """Unbiased 1 - C(n-c, k) / C(n, k) for one task with c of n scored samples right (Chen et al. 2021, eq. 1).

    Undefined for k > n: fewer samples cannot say what k would have done. Raises ConfigError on impossible counts.
    """
    if not 0 <= c <= n or k < 1:
        raise ConfigError(f"pass@k needs 0 <= c <= n and k >= 1, got n={n}, c={c}, k={k}")
    if k > n:
        reason = f"pass@{k} needs at least {k} scored samples of a task, there are {n}"
        return PassAtK(k=k, value=None, n_tasks=0, n_left_out=1, reason=reason)
    return PassAtK(k=k, value=1 - math.comb(n - c, k) / math.comb(n, k), n_tasks=1, n_left_out=0)


def mean_pass_at_k(counts: Mapping[str, tuple[int, int]], k: int) -> PassAtK:
    """Mean of pass@k over tasks, given (n scored, c right) of each; says how many tasks it leaves out and why."""
    each = [pass_at_k(n, c, k) for n, c in counts.values()]
    known = [one.value for one in each if one.value is not None]
    left_out = len(each) - len(known)
    reason = f"{left_out} of {len(each)} tasks have fewer than {k} scored samples" if left_out else ""
    if not each:
        reason = "there are no tasks"
    value = sum(known) / len(known) if known else None
    return PassAtK(k=k, value=value, n_tasks=len(known), n_left_out=left_out, reason=reason)


def compare_paired(
    first: Samples, second: Samples, level: float = 0.95, *, seed: int = 0, resamples: int = 4000
) -> Comparison:
    """Compare two result sets task by task: mean difference of the task means, bootstrap over tasks, sign-flip test.

    Only tasks of both sets count. With one 0/1 sample per task the test is McNemar's exact one. Raises ConfigError
    without a task in common.
    """
    shared = [task for task in first if task in second]
    if not shared:
        raise ConfigError("the two result sets have no task in common; compare runs over the same tasks")
    differences = np.array([float(np.mean(second[task])) - float(np.mean(first[task])) for task in shared])
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(shared), size=(resamples, len(shared)))
    return Comparison(
        n_tasks=len(shared),
        difference=float(differences.mean()),
        interval=_percentiles(differences[picks].mean(axis=1), level),
        p_value=_sign_flip_p(differences, rng, resamples),
        n_better=int((differences > 0).sum()),
        n_worse=int((differences < 0).sum()),
    )


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


def _groups(values: Samples) -> list[npt.NDArray[np.float64]]:
    groups = [np.asarray(samples, dtype=np.float64) for samples in values.values() if len(samples)]
    if not groups:
        raise ConfigError("an interval needs at least one sample, got none")
    return groups


def _sizes_and_sums(
    groups: Sequence[npt.NDArray[np.float64]],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    return np.array([float(len(group)) for group in groups]), np.array([float(group.sum()) for group in groups])


def _percentiles(draws: npt.NDArray[np.float64], level: float) -> Interval:
    _quantile(level)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level)


def _quantile(level: float) -> float:
    if not 0 < level < 1:
        raise ConfigError(f"a level lies between 0 and 1, got {level}")
    return NormalDist().inv_cdf((1 + level) / 2)
