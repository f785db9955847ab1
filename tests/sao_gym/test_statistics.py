"""Intervals against scipy's and by coverage, pass@k against counting."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, t

from sao_gym.errors import ConfigError
from sao_gym.statistics import (
    Interval,
    bootstrap_interval,
    clustered_interval,
    mean_pass_at_k,
    pass_at_k,
    two_level_interval,
    wilson_interval,
)


@pytest.mark.parametrize("level", [0.8, 0.95, 0.99])
@pytest.mark.parametrize(("k", "n"), [(0, 10), (8, 10), (10, 10), (1, 1), (137, 512), (0, 1)])
def test_wilson_is_scipys(k: int, n: int, level: float) -> None:
    known = binomtest(k, n).proportion_ci(confidence_level=level, method="wilson")
    interval = wilson_interval(k, n, level)
    assert (interval.low, interval.high) == pytest.approx((known.low, known.high), abs=1e-12)


def test_wilson_known_and_empty() -> None:
    # 8 of 10 at 95 %, as in any table of score intervals
    assert wilson_interval(8, 10).low == pytest.approx(0.4902, abs=1e-4)
    assert wilson_interval(8, 10).high == pytest.approx(0.9433, abs=1e-4)
    assert wilson_interval(0, 0) == Interval(0.0, 1.0)
    with pytest.raises(ConfigError, match="successes"):
        wilson_interval(3, 2)
    with pytest.raises(ConfigError, match="level"):
        wilson_interval(1, 2, level=95)


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_one_sample_per_task_is_wilson(passed: list[bool]) -> None:
    one_each = {str(i): [float(value)] for i, value in enumerate(passed)}
    clustered, plain = clustered_interval(one_each), wilson_interval(sum(passed), len(passed))
    assert (clustered.low, clustered.high) == pytest.approx((plain.low, plain.high), abs=1e-9)


def test_clusters_widen() -> None:
    """Four samples that always agree are one observation, not four."""
    agree = {str(i): [float(i % 2)] * 4 for i in range(20)}
    single = {str(i): [float(i % 2)] for i in range(20)}
    widened = clustered_interval(agree)
    one_each, share = clustered_interval(single), (t.ppf(0.975, 79) / t.ppf(0.975, 19)) ** 2
    assert widened.low < one_each.low
    assert widened.high > one_each.high
    effective = 80 * (19 / 79) * share  # their variance is known from 20 tasks, not 80 samples
    assert widened.low == pytest.approx(wilson_interval(effective / 2, effective).low)
    # all passed: the spread is 0, and still 5 tasks prove no more than 5 tasks can
    assert clustered_interval({str(i): [1.0] * 100 for i in range(5)}) == wilson_interval(5, 5)
    # samples that differ inside each task by design never count for more than they are
    assert clustered_interval({str(i): [0.0, 1.0] for i in range(5)}).low == pytest.approx(wilson_interval(2.5, 5).low)


@pytest.mark.parametrize(("a", "b", "n"), [(0.5, 0.5, 4), (0.3, 2.7, 16), (4.5, 0.5, 16)])
def test_clustered_coverage(a: float, b: float, n: int) -> None:
    """Tasks with their own success rates, several samples each: the truth lies inside about 95 % of the time.

    Mixed, hard and nearly solved benchmarks; benchmarks/interval_coverage.py has all of it.
    """
    rng = np.random.default_rng(0)
    truth, hits, naive, runs = a / (a + b), 0, 0, 600
    for _ in range(runs):
        rates = rng.beta(a, b, size=40)
        draws = (rng.random((40, n)) < rates[:, None]).astype(float)
        interval = clustered_interval({str(i): draws[i].tolist() for i in range(40)})
        plain = wilson_interval(float(draws.sum()), draws.size)
        hits += interval.low <= truth <= interval.high
        naive += plain.low <= truth <= plain.high
    assert 0.92 <= hits / runs <= 0.98
    assert naive / runs < 0.85


def test_bootstrap() -> None:
    rng = np.random.default_rng(1)
    values = {str(i): rng.normal(2.0, 1.0, size=3).tolist() for i in range(200)}
    mean = float(np.mean(list(values.values())))
    error = float(np.std([np.mean(each) for each in values.values()], ddof=1)) / math.sqrt(200)
    interval = bootstrap_interval(values)
    assert (interval.low, interval.high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.02)
    assert bootstrap_interval(values) == interval, "the same seed draws the same"
    assert bootstrap_interval(values, seed=1) != interval
    with pytest.raises(ConfigError, match="at least one sample"):
        bootstrap_interval({"a": []})


def test_two_levels_draw_tasks_and_samples() -> None:
    """Its variance is that of the task means, and once more the noise within tasks over m n."""
    rng = np.random.default_rng(2)
    rows = rng.normal(0.0, 1.0, size=(60, 1)) + rng.normal(0.0, 2.0, size=(60, 4))
    interval = two_level_interval({str(i): row.tolist() for i, row in enumerate(rows)}, resamples=20_000)
    between, within = rows.mean(axis=1).var(), rows.var(axis=1).mean() / 4
    half = 1.96 * math.sqrt((between + within) / 60)
    assert (interval.low, interval.high) == pytest.approx((rows.mean() - half, rows.mean() + half), abs=0.03)


@pytest.mark.parametrize("shift", [0.0, 1e-9])
def test_two_levels_of_zeros_and_ones_are_those_of_any_numbers(shift: float) -> None:
    """0/1 samples are drawn again by another road; uneven sizes, in several blocks."""
    rng = np.random.default_rng(3)
    rows = {str(i): (rng.random(1 + i % 7) < 0.6).astype(float).tolist() for i in range(50)}
    plain = two_level_interval(rows, resamples=30_000)
    other = two_level_interval({task: [x + shift for x in row] for task, row in rows.items()}, resamples=30_000)
    assert (other.low, other.high) == pytest.approx((plain.low, plain.high), abs=0.004)
    assert two_level_interval(rows, resamples=30_000) == plain, "the same seed draws the same"


def test_two_levels_where_there_is_little_to_draw() -> None:
    single = {str(i): [float(i % 3 == 0)] for i in range(30)}
    one_level = bootstrap_interval(single)
    assert two_level_interval(single) == one_level, "n = 1: there is nothing to draw within a task"
    assert two_level_interval({str(i): [1.0] * 4 for i in range(5)}) == Interval(1.0, 1.0)
    alone = two_level_interval({"a": [0.0] * 8 + [1.0] * 8})
    assert (alone.low, alone.high) == pytest.approx((0.25, 0.75), abs=0.07), "one task: its samples alone"
    with pytest.raises(ConfigError, match="at least one sample"):
        two_level_interval({})


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (2, 0, 5, None),
        (2, 1, 5, None),
        (4, 0, 4, 0.0),
        (4, 4, 4, 1.0),
        (16, 3, 1, 3 / 16),
        (16, 3, 8, 1 - math.comb(13, 8) / math.comb(16, 8)),
        (0, 0, 1, None),
    ],
)
def test_pass_at_k(n: int, c: int, k: int, value: float | None) -> None:
    """Case EV-01: undefined is None with a reason, never 1."""
    result = pass_at_k(n, c, k)
    assert result.value == (None if value is None else pytest.approx(value))
    assert bool(result.reason) == (value is None)
    assert (result.n_tasks, result.n_left_out) == ((0, 1) if value is None else (1, 0))


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets(nck: tuple[int, int, int]) -> None:
    n, c, k = nck
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k).value == pytest.approx(sum(any(subset) for subset in subsets) / len(subsets))


def test_mean_pass_at_k_says_over_how_many() -> None:
    """Case EV-01: 3 problems, k = 4, errors leave 4, 4 and 2 samples."""
    counts = {"a": (4, 4), "b": (4, 0), "c": (2, 2)}
    result = mean_pass_at_k(counts, 4)
    assert (result.value, result.n_tasks, result.n_left_out) == (0.5, 2, 1)
    assert result.reason == "1 of 3 tasks have fewer than 4 scored samples"
    assert mean_pass_at_k(counts, 1).value == pytest.approx(2 / 3)
    assert mean_pass_at_k({"a": (1, 1)}, 10).value is None
    assert mean_pass_at_k({}, 1).value is None
    with pytest.raises(ConfigError, match="0 <= c <= n"):
        pass_at_k(2, 3, 1)
