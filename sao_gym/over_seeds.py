"""Two ways of training compared over the same seeds: mean difference, how sure, and what could have been found at all.

The unit is the seed: both arms start from the same policy with it, so differences are taken seed by seed. Sources: Student's
paired t interval; Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6 (1979).

Example:
    >>> found = compare_seeds({1: 0.5, 2: 0.6, 3: 0.4}, {1: 0.7, 2: 0.7, 3: 0.6})
    >>> round(found.mean, 3), found.n
    (0.167, 3)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr, stdtrit

from sao_gym.errors import ConfigError
from sao_gym.statistics import Interval

LEAST_SEEDS = 6
"""Below it a t interval leans too much on differences being normal: such a comparison is for orientation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedDifference:
    """The second arm less the first over `n` seeds; `p` is two-sided; `detectable` would be found in `power` of studies."""

    n: int
    mean: float
    interval: Interval
    p: float
    detectable: float
    power: float = 0.8

    @property
    def is_orientation(self) -> bool:
        """Whether there are too few seeds for more than that."""
        return self.n < LEAST_SEEDS


def mean_over_seeds(figures: Mapping[int, float], *, level: float = 0.95) -> tuple[float, Interval]:
    """Mean of one arm over its seeds, with a t interval. Raises ConfigError for fewer than two, or figures not finite."""
    values = np.array([figures[seed] for seed in sorted(figures)], dtype=np.float64)
    if len(values) < 2 or not np.isfinite(values).all():
        raise ConfigError(f"an interval over seeds needs finite figures of two seeds or more, got {dict(figures)}")
    mean, half = float(values.mean()), float(stdtrit(len(values) - 1, 0.5 + level / 2)) * _error(values)
    return mean, Interval(mean - half, mean + half, level)


def compare_seeds(
    first: Mapping[int, float], second: Mapping[int, float], *, level: float = 0.95, power: float = 0.8
) -> SeedDifference:
    """Seed to figure, of two arms. Raises ConfigError unless they have two seeds or more, the same ones, and finite figures."""
    if first.keys() != second.keys() or len(first) < 2:
        raise ConfigError(
            f"a comparison needs two seeds or more, the same for both arms; got {sorted(first)} and {sorted(second)}"
        )
    differences = np.array([second[seed] - first[seed] for seed in sorted(first)], dtype=np.float64)
    if not np.isfinite(differences).all():
        raise ConfigError("a comparison needs finite figures of every seed: leave out a measure that some run has not")
    n, mean, error = len(differences), float(differences.mean()), _error(differences)
    quantile = float(stdtrit(n - 1, 0.5 + level / 2))
    p = 2 * float(stdtr(n - 1, -abs(mean) / error)) if error else float(mean == 0)
    return SeedDifference(
        n=n,
        mean=mean,
        interval=Interval(mean - quantile * error, mean + quantile * error, level),
        p=p,
        detectable=(quantile + float(stdtrit(n - 1, power))) * error,
        power=power,
    )


def _error(values: npt.NDArray[np.float64]) -> float:
    """Standard error of their mean."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """p-values of one family of comparisons, each adjusted so that all together err at the level. Raises ConfigError."""
    if not all(math.isfinite(p) and 0 <= p <= 1 for p in p_values):
        raise ConfigError(f"p-values lie from 0 to 1, got {list(p_values)}")
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return tuple(adjusted)
