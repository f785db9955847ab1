"""Waits before retries: they grow, they are bounded, they honour the server, and a run has so many and no more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.errors import ConfigError
from sao_gym.retries import RetryBudget, RetryRule, asked_wait_s

DRAWS = st.floats(0, 1, exclude_max=True)


@given(st.integers(0, 10_000), st.none() | st.floats(0, 1e9), DRAWS)
def test_no_wait_is_longer_than_the_longest_nor_shorter_than_half_a_step(
    retry: int, asked: float | None, draw: float
) -> None:
    rule = RetryRule(first_wait_s=1.0, max_wait_s=60.0)
    wait = rule.wait_s(retry, asked, draw=draw)
    assert min(2.0 ** min(retry, 60), 60.0) / 2 <= wait <= 60.0
    assert asked is None or wait >= min(asked, 60.0)


def test_clients_told_the_same_time_do_not_come_back_at_once() -> None:
    rule = RetryRule(first_wait_s=1.0, max_wait_s=60.0)
    assert rule.wait_s(0, 10.0, draw=0.0) == 10.0
    assert rule.wait_s(0, 10.0, draw=0.5) == 10.5


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT", "date": "Wed, 21 Oct 2015 07:28:00 GMT"}, 30.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:30 GMT"}, None),
        ({"retry-after": "soon", "date": "Wed, 21 Oct 2015 07:28:00 GMT"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
    ],
)
def test_what_a_server_asks_for(headers: dict[str, str], seconds: float | None) -> None:
    assert asked_wait_s(headers) == seconds


def test_a_budget_is_spent_once() -> None:
    budget = RetryBudget(2)
    assert [budget.take() for _ in range(4)] == [True, True, False, False]


@pytest.mark.parametrize("wrong", [{"max_retries": -1}, {"budget": -1}, {"first_wait_s": 0}, {"first_wait_s": 90.0}])
def test_rules_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RetryRule(**wrong)  # type: ignore[arg-type]
