"""Tokens and money: as the API counts them, unknown where it does not, and sums that close."""

from typing import Any

import pytest

from sao_gym.errors import ConfigError
from sao_gym.evaluation import Usage
from sao_gym.usage import Meter, Prices, TokenCount, spoken, total


@pytest.mark.parametrize(
    ("usage", "count"),
    [
        ({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}, TokenCount(prompt=3, completion=4)),
        (
            {"prompt_tokens": 3, "completion_tokens": 0, "prompt_tokens_details": {"cached_tokens": 2}},
            TokenCount(prompt=3, completion=0, cached=2),
        ),
        (
            {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": None},
            TokenCount(prompt=3, completion=4),
        ),
        ({"prompt_tokens": 3}, None),
        ({"prompt_tokens": 3, "completion_tokens": None}, None),
        ({"prompt_tokens": "3", "completion_tokens": 4}, None),
        ({"prompt_tokens": True, "completion_tokens": 4}, None),
        ({"prompt_tokens": -1, "completion_tokens": 4}, None),
        ({}, None),
        (None, None),
        ([], None),
    ],
)
def test_tokens_are_read_or_unknown(usage: Any, count: TokenCount | None) -> None:
    assert TokenCount.read(usage) == count


def test_cached_tokens_have_a_price_of_their_own() -> None:
    count = TokenCount(prompt=1_000_000, completion=500_000, cached=400_000)
    assert Prices(tokens_in=10.0, tokens_out=20.0).cost(count) == 10.0 + 10.0
    assert Prices(tokens_in=10.0, tokens_out=20.0, tokens_cached=1.0).cost(count) == pytest.approx(6.0 + 0.4 + 10.0)


def test_a_meter_counts_every_request_and_guesses_nothing() -> None:
    meter = Meter(Prices(tokens_out=1e6))
    for is_retry in (False, True, True):
        meter.sent(is_retry=is_retry)
    meter.failed("rate_limited", 2.0)
    assert (meter.failing, meter.waited_s) == ("rate_limited", 2.0)
    meter.answered(TokenCount(prompt=7, completion=2))
    meter.answered(None)
    assert meter.failing is None
    assert meter.usage == Usage(prompt_tokens=7, completion_tokens=2, requests=3, retries=2, cost=2.0, unmetered=1)


def test_totals_add_up_and_say_where_they_are_lower_bounds() -> None:
    one = Usage(prompt_tokens=1000, completion_tokens=2, requests=3, retries=1, cost=0.5)
    assert total([one, one, Usage()]) == Usage(prompt_tokens=2000, completion_tokens=4, requests=6, retries=2, cost=1.0)
    assert total([]) == Usage()
    assert spoken(one) == "1,000 tokens in, 2 out, cost 0.5, 3 requests, 1 retry"
    least = spoken(Usage(prompt_tokens=1, requests=2, cost=0.5, unmetered=1))
    assert least == ("at least 1 tokens in, 0 out, cost at least 0.5, 2 requests, 1 answer without a token count")


@pytest.mark.parametrize("wrong", [{"tokens_in": -1.0}, {"tokens_out": float("nan")}, {"tokens_cached": float("inf")}])
def test_prices_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Prices(**wrong)
