"""Arms compared over seeds: against scipy's own tests, by simulation, and Holm's worked example."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from sao_gym.errors import ConfigError
from sao_gym.over_seeds import compare_seeds, holm, mean_over_seeds

FIGURES = st.dictionaries(st.integers(0, 50), st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=10)


@given(FIGURES)
def test_it_is_the_paired_t_test(figures: dict[int, tuple[float, float]]) -> None:
    first, second = ({seed: pair[side] for seed, pair in figures.items()} for side in (0, 1))
    found = compare_seeds(first, second)
    differences = np.array([second[seed] - first[seed] for seed in first])
    assert found.mean == pytest.approx(differences.mean(), abs=1e-12)
    if differences.std(ddof=1) > 1e-9:
        known = stats.ttest_1samp(differences, 0.0)
        assert found.p == pytest.approx(known.pvalue, abs=1e-9)
        interval = known.confidence_interval()
        assert (found.interval.low, found.interval.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


@given(st.dictionaries(st.integers(0, 50), st.floats(-5, 5), min_size=2, max_size=10))
def test_the_interval_of_one_arm_is_student_s(figures: dict[int, float]) -> None:
    mean, interval = mean_over_seeds(figures)
    values = np.array(list(figures.values()))
    assert mean == pytest.approx(values.mean(), abs=1e-12)
    if values.std(ddof=1) > 1e-9:
        known = stats.ttest_1samp(values, 0.0).confidence_interval()
        assert (interval.low, interval.high) == (pytest.approx(known.low), pytest.approx(known.high))


def test_no_spread_is_no_doubt() -> None:
    for few in ({}, {1: 0.5}, {1: 0.5, 2: math.nan}):
        with pytest.raises(ConfigError, match="two seeds or more"):
            mean_over_seeds(few)
    assert compare_seeds({1: 0.0, 2: 0.0}, {1: 0.5, 2: 0.5}).p == 0.0
    assert compare_seeds({1: 0.0, 2: 0.0}, {1: 0.0, 2: 0.0}).p == 1.0
    assert compare_seeds({1: 0.0, 2: 1.0}, {1: 0.5, 2: 0.7}).is_orientation


def test_the_detectable_difference_is_detected_so_often() -> None:
    """With six seeds: a true difference of that size gives an interval without 0 in about 80 % of studies."""
    rng = np.random.default_rng(0)
    spread = 0.3
    known = spread / 6**0.5 * (stats.t.ppf(0.975, 5) + stats.t.ppf(0.8, 5))
    noise = rng.normal(0, spread, (4000, 6))
    sizes = [compare_seeds(dict.fromkeys(range(6), 0.0), dict(enumerate(row))).detectable for row in noise[:500]]
    assert np.median(sizes) == pytest.approx(known, rel=0.1)
    p = stats.ttest_1samp(noise + known, 0.0, axis=1).pvalue
    assert np.mean(p < 0.05) == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize(
    ("first", "second"),
    [({1: 0.0}, {1: 1.0}), ({1: 0.0, 2: 0.0}, {1: 0.0, 3: 0.0}), ({}, {}), ({1: 0.0, 2: math.nan}, {1: 0.0, 2: 1.0})],
)
def test_what_cannot_be_compared(first: dict[int, float], second: dict[int, float]) -> None:
    with pytest.raises(ConfigError, match="a comparison needs"):
        compare_seeds(first, second)


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx((0.03, 0.06, 0.06, 0.02))
    assert holm([]) == ()
    assert holm([0.9, 0.8]) == (1.0, 1.0)
    with pytest.raises(ConfigError):
        holm([1.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_keeps_the_order_and_lies_between_none_and_bonferroni(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p, q in zip(p_values, adjusted, strict=True):
        assert p <= q <= min(1.0, p * len(p_values)) + 1e-12
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    assert [adjusted[place] for place in order] == sorted(adjusted)
