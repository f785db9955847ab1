"""How sure a figure is: intervals for success rates, and pass@k (majority.py: maj@k, paired.py: two result sets).

Invariant: what cannot be computed is None with a reason, never 0 or 1. Samples of one task are not independent, so
every interval here treats the task as the unit that was drawn: it says where the mean over *all tasks of this kind*
lies, not only over those that were asked.

Example:
    >>> interval = wilson_interval(8, 10)
    >>> round(interval.low, 3), round(interval.high, 3)
    (0.49, 0.943)
    >>> pass_at_k(2, 1, 5).reason
    'pass@5 needs at least 5 scored samples of a task, there are 2'
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from sao_gym.errors import ConfigError

Samples = Mapping[str, Sequence[float]]
"""Task id to the values of its samples, one or more each."""
_MOST_DRAWS = 4_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """Two ends between which the true value lies with probability `level`, as far as the method's assumptions hold."""

    low: float
    high: float
    level: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class AtK:
    """An estimate of what k samples of a task are worth, None with a `reason` where it is undefined.

    Computed over `n_tasks` tasks; `n_left_out` had too few scored samples.
    """

    k: int
    value: float | None
    n_tasks: int
    n_left_out: int
    reason: str = ""


PassAtK = AtK


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

    Wilson's interval at the effective sample size n / d, with d the design effect: the clustered variance of the share
    over that of n independent samples (Kish 1965), and the quantile widened for m - 1 degrees of freedom instead of
    n - 1 (Korn and Graubard 1998). Exactly Wilson's with one sample per task. Where all samples agree, or there is one
    task, d is unknown and each task counts once.

    This is the interval to quote. On mixed benchmarks of 30 tasks it and `two_level_interval` hold the truth equally
    often, but where nearly all tasks are solved, or tasks are few, the bootstrap draws too little again and says a
    point where there is no certainty (benchmarks/interval_coverage.py).
    """
    groups = _groups(passed)
    sizes, sums = _sizes_and_sums(groups)
    n, m, p = float(sizes.sum()), len(groups), float(sums.sum() / sizes.sum())
    spread = float(((sums - p * sizes) ** 2).sum())
    effective = float(m)
    if m > 1 and spread > 0:
        variance = spread / n**2 * m / (m - 1)
        effective = min(p * (1 - p) / (n - 1) / variance, 1.0) * n * _fewer_degrees(n, m, level)
    return wilson_interval(p * effective, effective, level)


def _fewer_degrees(n: float, m: int, level: float) -> float:
    """What an effective sample size loses because its variance was estimated from m tasks, not n samples."""
    wide, narrow = (float(stdtrit(count - 1, (1 + level) / 2)) for count in (m, n))
    return (narrow / wide) ** 2


def bootstrap_interval(values: Samples, level: float = 0.95, *, seed: int = 0, resamples: int = 4000) -> Interval:
    """Percentile interval of the mean over all samples, drawing whole tasks again; for scores of any kind.

    Too narrow below some ten tasks, and a point where all values are equal; for 0/1 use `clustered_interval`.
    """
    sizes, sums = _sizes_and_sums(_groups(values))
    picks = np.random.default_rng(seed).integers(len(sizes), size=(resamples, len(sizes)))
    return percentiles(sums[picks].sum(axis=1) / sizes[picks].sum(axis=1), level)


def two_level_interval(values: Samples, level: float = 0.95, *, seed: int = 0, resamples: int = 4000) -> Interval:
    """Percentile interval of the mean over all samples: tasks drawn again, then samples within each drawn task.

    The second draw adds the noise inside a task once more, which the spread between task means holds already: too wide
    where samples of a task differ much and are few. With one sample per task it is `bootstrap_interval`; a single task
    leaves the draw of its samples alone; a point where all values are equal, and far too narrow near that.
    """
    groups = _groups(values)
    rng = np.random.default_rng(seed)
    sizes, _ = _sizes_and_sums(groups)
    means = []
    for picks in _pick_blocks(rng, len(groups), resamples, width=int(sizes.max())):
        means.append(_redrawn_sums(groups, picks, rng).sum(axis=1) / sizes[picks].sum(axis=1))
    return percentiles(np.concatenate(means), level)


def pass_at_k(n: int, c: int, k: int) -> AtK:
    """Unbiased 1 - C(n-c, k) / C(n, k) for one task with c of n scored samples right (Chen et al. 2021, eq. 1).

    Undefined for k > n: fewer samples cannot say what k would have done. Raises ConfigError on impossible counts.
    """
    if not 0 <= c <= n or k < 1:
        raise ConfigError(f"pass@k needs 0 <= c <= n and k >= 1, got n={n}, c={c}, k={k}")
    if k > n:
        reason = f"pass@{k} needs at least {k} scored samples of a task, there are {n}"
        return AtK(k=k, value=None, n_tasks=0, n_left_out=1, reason=reason)
    return AtK(k=k, value=1 - math.comb(n - c, k) / math.comb(n, k), n_tasks=1, n_left_out=0)


def mean_pass_at_k(counts: Mapping[str, tuple[int, int]], k: int) -> AtK:
    """Mean of pass@k over tasks, given (n scored, c right) of each; says how many tasks it leaves out and why."""
    return mean_at_k([pass_at_k(n, c, k) for n, c in counts.values()], k)


def mean_at_k(each: Sequence[AtK], k: int) -> AtK:
    """Mean over the tasks where the estimate is defined; the reason says how many are left out."""
    known = [one.value for one in each if one.value is not None]
    left_out = len(each) - len(known)
    reason = f"{left_out} of {len(each)} tasks have fewer than {k} scored samples" if left_out else ""
    if not each:
        reason = "there are no tasks"
    value = sum(known) / len(known) if known else None
    return AtK(k=k, value=value, n_tasks=len(known), n_left_out=left_out, reason=reason)


def _pick_blocks(rng: np.random.Generator, n_tasks: int, resamples: int, width: int) -> Iterator[npt.NDArray[np.int64]]:
    """Tasks drawn again [block, n_tasks], in blocks of bounded memory, `resamples` rows in all."""
    block = max(1, _MOST_DRAWS // (n_tasks * width))
    for start in range(0, resamples, block):
        yield rng.integers(n_tasks, size=(min(block, resamples - start), n_tasks))


def _redrawn_sums(
    groups: Sequence[npt.NDArray[np.float64]], picks: npt.NDArray[np.int64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Sum of as many draws from each picked task as it has samples; shape of `picks` [R, tasks]."""
    sizes, sums = _sizes_and_sums(groups)
    counts = sizes.astype(np.int64)
    flat = np.concatenate(groups)
    if np.isin(flat, (0.0, 1.0)).all():
        return rng.binomial(counts[picks], (sums / sizes)[picks]).astype(np.float64)
    starts = np.cumsum(counts) - counts
    within = (rng.random((*picks.shape, int(counts.max()))) * sizes[picks][..., None]).astype(np.int64)
    drawn = flat[starts[picks][..., None] + within]
    is_real = np.arange(int(counts.max())) < counts[picks][..., None]
    return np.asarray((drawn * is_real).sum(axis=-1), dtype=np.float64)


def _groups(values: Samples) -> list[npt.NDArray[np.float64]]:
    groups = [np.asarray(samples, dtype=np.float64) for samples in values.values() if len(samples)]
    if not groups:
        raise ConfigError("an interval needs at least one sample, got none")
    return groups


def _sizes_and_sums(
    groups: Sequence[npt.NDArray[np.float64]],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    return np.array([float(len(group)) for group in groups]), np.array([float(group.sum()) for group in groups])


def percentiles(draws: npt.NDArray[np.float64], level: float) -> Interval:
    """Interval between the two quantiles of bootstrap draws [R] that leave out (1 - level) / 2 each."""
    _quantile(level)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), level)


def _quantile(level: float) -> float:
    if not 0 < level < 1:
        raise ConfigError(f"a level lies between 0 and 1, got {level}")
    return NormalDist().inv_cdf((1 + level) / 2)
