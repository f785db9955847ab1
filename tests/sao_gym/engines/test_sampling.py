"""The sampled distribution and its log-probs, against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.engines.sampling import Draws, sample, scaled_logprobs, truncated
from sao_gym.protocols import Sampling

logit_rows = st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=12)


def test_draws_depend_on_seed_and_position_alone() -> None:
    forward, backward = Draws(11), Draws(11)
    numbers = [forward[i] for i in range(200)]
    assert [backward[i] for i in reversed(range(200))] == numbers[::-1]
    assert len({Draws(seed)[0] for seed in range(500)}) == 500
    assert abs(np.mean(numbers) - 0.5) < 0.1


def test_an_even_grid_of_draws_returns_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]])
    n = 20_000
    grid = [(i + 0.5) / n for i in range(n)]
    ids, logprobs = sample(logits.expand(n, -1).clone(), [Sampling(max_tokens=1, temperature=0.7)] * n, grid)
    expected = np.exp(logits[0].numpy() / 0.7) / np.exp(logits[0].numpy() / 0.7).sum()
    np.testing.assert_allclose(np.bincount(ids.numpy(), minlength=4) / n, expected, atol=1e-4)
    np.testing.assert_allclose(logprobs.exp().numpy(), expected[ids.numpy()], rtol=1e-5)


@given(logit_rows, st.floats(0.2, 3.0), st.floats(0, 1, exclude_max=True))
@settings(max_examples=200, deadline=None)
def test_a_draw_is_the_inverse_cdf_and_never_without_mass(row: list[float], temperature: float, u: float) -> None:
    sampling = Sampling(max_tokens=1, temperature=temperature)
    ids, logprobs = sample(torch.tensor([row]), [sampling], [u])
    exact = np.exp(scaled_logprobs(torch.tensor([row]), [temperature])[0].double().numpy())
    cdf = np.cumsum(exact)
    assert exact[ids[0]] > 0
    assert cdf[ids[0]] >= u * cdf[-1] * (1 - 1e-12)
    assert ids[0] == 0 or cdf[ids[0] - 1] <= u * cdf[-1] * (1 + 1e-12)
    np.testing.assert_allclose(logprobs[0], np.log(exact[ids[0]]), rtol=1e-5, atol=1e-6)


def test_the_largest_draw_falls_on_the_last_token_that_has_mass() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf]])
    ids, logprobs = sample(logits, [Sampling(max_tokens=1)], [1 - 2.0**-53])
    assert ids.tolist() == [1]
    assert torch.isfinite(logprobs).all()


@given(logit_rows, st.integers(0, 5), st.floats(0.05, 1.0))
@settings(max_examples=200, deadline=None)
def test_truncation_keeps_the_head_and_renormalises(row: list[float], top_k: int, top_p: float) -> None:
    full = torch.log_softmax(torch.tensor(row), dim=-1)
    cut = truncated(full, top_k, top_p)
    kept = torch.isfinite(cut)
    assert cut.exp().sum().item() == pytest.approx(1.0, abs=1e-5)
    assert kept[full.argmax()]
    if top_k:
        assert kept.sum() <= top_k
    if 0 < kept.sum() < len(row):
        assert full[kept].min() >= full[~kept].max()
    if not top_k:
        assert full.exp()[kept].sum() >= top_p - 1e-5


def test_recorded_logprobs_are_those_of_the_truncated_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    ids, logprobs = sample(logits.clone(), [Sampling(max_tokens=1, top_p=0.7)], [0.9])
    assert ids.tolist() == [1]
    assert logprobs.item() == pytest.approx(np.log(0.3 / 0.8), abs=1e-6)
    ids, logprobs = sample(logits.clone(), [Sampling(max_tokens=1, top_k=1)], [0.9])
    assert (ids.tolist(), logprobs.tolist()) == ([0], [0.0])


def test_greedy_rows_beside_sampled_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    samplings = [Sampling(max_tokens=1, temperature=0.0), Sampling(max_tokens=1)]
    ids, logprobs = sample(logits, samplings, [0.001, 0.001])
    assert ids.tolist() == [1, 0]
    assert logprobs[0] == 0.0
    assert logprobs[1] < -3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_show_in_the_logprob(temperature: float) -> None:
    logits = torch.tensor([[0.0, torch.nan]])
    _, logprobs = sample(logits, [Sampling(max_tokens=1, temperature=temperature)], [0.5])
    assert not torch.isfinite(logprobs).any()
