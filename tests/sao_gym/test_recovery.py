"""Recovery after a shift: known curves, what never recovers, and what must not matter."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.errors import ConfigError
from sao_gym.recovery import BatchSuccess, Recovery, read_batches, recoveries, spoken


def series(phase: int, *successes: float, rows: int = 10) -> list[BatchSuccess]:
    return [BatchSuccess(rows=rows, phase=phase, success=success) for success in successes]


FIRST = series(0, *[1.0] * 4)


def test_a_step_is_seen_when_the_window_is_over_it() -> None:
    after = series(1, *[0.0] * 3, *[0.8] * 9)
    (found,) = recoveries([*FIRST, *after], window=20)
    assert found == Recovery(phase=1, plateau=pytest.approx(0.8), rows=50, at_least=120)
    (narrow,) = recoveries([*FIRST, *after], window=10)
    assert narrow.rows == 40


def test_a_straight_line() -> None:
    """Success 0.05, 0.10, ... 1.00: the last quarter has mean 0.9, and 90 % of that, 0.81, is reached by the 17th batch."""
    (found,) = recoveries([*FIRST, *series(1, *[i / 20 for i in range(1, 21)])], window=1)
    assert (found.plateau, found.rows) == (pytest.approx(0.9), 170)


def test_what_never_succeeds_is_censored() -> None:
    (none,) = recoveries([*FIRST, *series(1, *[0.0] * 5)], window=10)
    assert none == Recovery(phase=1, plateau=0.0, rows=None, at_least=50)
    assert "was not reached in 50 rows" in spoken(none)


def test_each_shift_has_its_own_and_a_run_without_one_has_none() -> None:
    found = recoveries([*FIRST, *series(1, 0.0, *[1.0] * 7), *series(2, 0.0, 0.0, *[0.5] * 8)], window=10)
    assert [(one.phase, one.rows) for one in found] == [(1, 20), (2, 30)]
    assert recoveries(FIRST) == ()
    assert recoveries([]) == ()


@given(
    successes=st.lists(st.floats(0, 1), min_size=1, max_size=30),
    window=st.integers(1, 400),
    share=st.floats(0.05, 1),
    rows=st.integers(1, 64),
)
def test_what_holds_of_every_curve(successes: list[float], window: int, share: float, rows: int) -> None:
    (found,) = recoveries([*FIRST, *series(1, *successes, rows=rows)], window=window, share=share)
    assert min(successes) - 1e-9 <= found.plateau <= max(successes) + 1e-9
    assert found.at_least == rows * len(successes)
    if found.rows is not None:
        assert found.plateau > 0
        assert rows <= found.rows <= found.at_least
        assert found.rows >= min(window, found.at_least)
        easier = recoveries([*FIRST, *series(1, *successes, rows=rows)], window=window, share=share / 2)[0]
        assert easier.rows is not None
        assert easier.rows <= found.rows


@given(st.lists(st.floats(0.01, 0.5), min_size=1, max_size=20))
def test_a_scale_changes_nothing(successes: list[float]) -> None:
    plain = recoveries([*FIRST, *series(1, *successes)], window=30)[0].rows
    doubled = recoveries([*FIRST, *series(1, *[2 * success for success in successes])], window=30)[0].rows
    assert plain == doubled


@pytest.mark.parametrize("given", [{"window": 0}, {"share": 0.0}, {"share": 1.1}, {"tail": 0.0}, {"share": math.nan}])
def test_settings_that_mean_nothing(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        recoveries(FIRST, **given)


def test_batches_are_read_from_metrics() -> None:
    lines = [
        {"event": "evaluation"},
        {"rows": 8, "signals": {}},
        {"rows": 8, "signals": {"phase": 0.4, "on_target": 0.25}},
        {"rows": 8, "signals": {"phase": 0.6, "on_target": 0.5}},
    ]
    assert read_batches(lines) == [
        BatchSuccess(rows=8, phase=0, success=0.25),
        BatchSuccess(rows=8, phase=1, success=0.5),
    ]
