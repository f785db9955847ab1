"""Paired comparison against exact tests and by false alarms, the smallest detectable difference by simulated power."""

import numpy as np
import pytest
from scipy.stats import binomtest

from sao_gym.errors import ConfigError
from sao_gym.paired import compare_paired, detectable_difference


def test_paired_is_mcnemars() -> None:
    """One 0/1 sample per task, 9 better and 2 worse of 40: the exact binomial test of 2 in 11."""
    before = {str(i): [float(i < 20)] for i in range(40)}
    after = {str(i): [float(2 <= i < 29)] for i in range(40)}
    result = compare_paired(before, after)
    assert (result.n_tasks, result.n_better, result.n_worse) == (40, 9, 2)
    assert result.difference == pytest.approx(7 / 40)
    assert result.p_value == pytest.approx(binomtest(2, 11).pvalue)
    assert result.interval.low < 7 / 40 < result.interval.high
    back = compare_paired(after, before)
    assert back.difference == pytest.approx(-7 / 40)
    assert back.p_value == pytest.approx(result.p_value)


def test_paired_with_many_tasks() -> None:
    before = {str(i): [0.0] for i in range(60)}
    after = {str(i): [float(i < 40)] for i in range(60)}
    result = compare_paired(before, after)
    assert result.p_value == pytest.approx(binomtest(0, 40).pvalue)
    rng = np.random.default_rng(0)
    noise = {str(i): rng.normal(size=3).tolist() for i in range(60)}
    more = {task: [value + 1.5 for value in values] for task, values in noise.items()}
    assert compare_paired(noise, more).p_value < 0.01
    assert compare_paired(noise, noise).p_value == 1.0
    extra = {**noise, "only here": [9.0]}
    assert compare_paired(noise, extra).n_tasks == 60
    with pytest.raises(ConfigError, match="no task in common"):
        compare_paired(noise, {"x": [1.0]})


def test_paired_false_alarms() -> None:
    """Where nothing differs, about 5 % of comparisons say p < 0.05."""
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(300):
        rates = rng.random(30)
        first, second = ((rng.random((30, 2)) < rates[:, None]).astype(float) for _ in range(2))
        pair = [{str(i): rows[i].tolist() for i in range(30)} for rows in (first, second)]
        alarms += compare_paired(*pair, resamples=400).p_value < 0.05
    assert alarms / 300 < 0.08


def test_tasks_without_a_scored_sample_on_a_side_do_not_count() -> None:
    result = compare_paired({"a": [0.0], "b": [], "c": [1.0]}, {"a": [1.0], "b": [1.0], "d": [1.0]})
    assert (result.n_tasks, result.difference) == (1, 1.0)
    with pytest.raises(ConfigError, match="no task in common"):
        compare_paired({"a": [1.0], "b": []}, {"b": [1.0]})


def two_runs(rng: np.random.Generator, shift: float, tasks: int, n: int) -> list[dict[str, list[float]]]:
    """Success rates between 0.2 and 0.6 in the first run, `shift` higher in the second."""
    rates = 0.2 + 0.4 * rng.random(tasks)
    draws = [(rng.random((tasks, n)) < (rates + by)[:, None]).astype(float) for by in (0.0, shift)]
    return [{str(i): rows[i].tolist() for i in range(tasks)} for rows in draws]


@pytest.mark.parametrize(("tasks", "n"), [(60, 4), (30, 16), (200, 1)])
def test_the_detectable_difference_is_detected_four_times_in_five(tasks: int, n: int) -> None:
    rng = np.random.default_rng(tasks)
    told = [detectable_difference(*two_runs(rng, 0.15, tasks, n)).value or 0.0 for _ in range(40)]
    shift = float(np.mean(told))
    runs = [compare_paired(*two_runs(rng, shift, tasks, n), resamples=800) for _ in range(300)]
    assert 0.72 <= np.mean([run.p_value < 0.05 for run in runs]) <= 0.88
    smaller = [compare_paired(*two_runs(rng, shift / 2, tasks, n), resamples=800) for _ in range(200)]
    assert np.mean([run.p_value < 0.05 for run in smaller]) < 0.5


def test_one_run_tells_what_a_second_like_it_could_show() -> None:
    """With several samples a task it agrees with what two runs say; with one it is an upper bound."""
    rng = np.random.default_rng(5)
    first, second = two_runs(rng, 0.0, 400, 8)
    alone, both = detectable_difference(first).value, detectable_difference(first, second).value
    assert alone is not None
    assert alone == pytest.approx(both, rel=0.1)
    single = {task: values[:1] for task, values in first.items()}
    other = {task: values[:1] for task, values in second.items()}
    upper, paired = detectable_difference(single).value, detectable_difference(single, other).value
    assert upper is not None
    assert paired is not None
    assert upper > 0.95 * paired
    half = detectable_difference({task: values[:2] for task, values in first.items()}).value
    assert half == pytest.approx(2 * alone, rel=0.1), "a quarter of the samples: twice the difference"


def test_more_power_and_more_certainty_need_more() -> None:
    first, second = two_runs(np.random.default_rng(6), 0.1, 60, 4)
    usual = detectable_difference(first, second).value
    assert usual is not None
    assert (detectable_difference(first, second, power=0.95).value or 0) > usual
    assert (detectable_difference(first, second, level=0.99).value or 0) > usual
    with pytest.raises(ConfigError, match="between 0 and 1"):
        detectable_difference(first, power=1.0)


def test_what_cannot_be_shown_says_why() -> None:
    few = detectable_difference({str(i): [0.0, 1.0] for i in range(5)})
    assert (few.value, few.n_tasks) == (None, 5)
    assert few.reason == "with 5 tasks no difference is significant at 95%; 6 are needed"
    same = {str(i): [1.0] * 4 for i in range(30)}
    assert detectable_difference(same).reason == "every task came out alike, so the spread of differences is unknown"
    assert detectable_difference(same, same).value is None
    wild = detectable_difference({str(i): [float(i % 2)] for i in range(6)})
    assert wild.reason == "6 tasks are too few: not even a difference of 1 would be found"
    with pytest.raises(ConfigError, match="at least one sample"):
        detectable_difference({"a": []})


def test_a_difference_below_the_tests_own_grain_is_not_promised() -> None:
    """One sample a task, one task of 40 moved: six must move one way before the exact test says so."""
    before = {str(i): [float(i < 20)] for i in range(40)}
    after = {**before, "0": [0.0]}
    assert detectable_difference(before, after).value == pytest.approx(6 / 40)
    moved = {**before, **{str(20 + i): [1.0] for i in range(6)}}
    assert compare_paired(before, moved).p_value < 0.05
    assert compare_paired(before, {**moved, "25": [0.0]}).p_value > 0.05
