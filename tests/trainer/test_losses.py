"""Properties of the losses: traps 10 and 11, the token account, refusals."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.errors import ConfigError, InvariantError
from sao_gym.trainer import losses

KINDS = losses.KINDS


def objective(kind: str, **options: Any) -> losses.PolicyObjective:
    bounds: dict[str, Any] = {"ppo": {"eps_low": 0.2, "eps_high": 0.28}, "trm": {"delta_max": 0.3}}.get(kind, {})
    return losses.PolicyObjective(kind=kind, **(bounds | options))  # type: ignore[arg-type]


def batch(n: int, seed: int = 0) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    behavior = -torch.rand(n, generator=random, dtype=torch.float64) * 3 - 0.1
    return {
        "logprobs": behavior + torch.randn(n, generator=random, dtype=torch.float64),
        "behavior_logprobs": behavior,
        "advantages": torch.randn(n, generator=random, dtype=torch.float64),
        "row": torch.arange(n) // 3,
        "stale": torch.rand(n, generator=random) < 0.2,
    }


def run(kind: str, parts: dict[str, torch.Tensor], weights: torch.Tensor, **options: Any) -> losses.PolicyLoss:
    return losses.policy_loss(objective(kind, **options), **parts, token_weights=weights)


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_weight_times_advantage(kind: str) -> None:
    # trap 10: d loss / d logp = -weight * A * token weight, exactly 0 where a token is out.
    parts = batch(60)
    logp = parts["logprobs"].requires_grad_()
    weights = torch.full((60,), 1 / 60, dtype=torch.float64)
    out = run(kind, parts, weights)
    out.loss.backward()
    want = -out.weight * parts["advantages"] * weights
    torch.testing.assert_close(logp.grad, want)
    assert (logp.grad[~out.kept] == 0).all()
    assert 0 < int(out.kept.sum()) < 60


@pytest.mark.parametrize("detach", [True, False])
def test_dis_gradient_by_finite_differences(detach: bool) -> None:
    # trap 10: with the ratio frozen at its value (detached) or moving along.
    parts = batch(12, seed=3)
    weights = torch.full((12,), 1 / 12, dtype=torch.float64)
    parts["logprobs"].requires_grad_()
    out = run("dis", parts, weights, detach_ratio=detach)
    out.loss.backward()
    got = parts["logprobs"].grad
    step = 1e-6

    def loss_at(logp: torch.Tensor) -> float:
        if not detach:
            return run("dis", parts | {"logprobs": logp}, weights, detach_ratio=False).loss.item()
        return float((-out.weight * parts["advantages"] * logp * weights).sum())

    base = parts["logprobs"].detach()
    for i in range(12):
        nudge = torch.zeros(12, dtype=torch.float64)
        nudge[i] = step
        slope = (loss_at(base + nudge) - loss_at(base - nudge)) / (2 * step)
        assert got[i].item() == pytest.approx(slope, abs=1e-7)


@given(st.floats(-20, 20), st.sampled_from([-1.0, 1.0]))
def test_dis_rejects_both_sides_for_both_signs(log_ratio: float, advantage: float) -> None:
    # trap 10: an out-of-band token has gradient exactly 0, whichever side, whichever sign.
    logp = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    parts = {
        "logprobs": logp,
        "behavior_logprobs": torch.zeros(1, dtype=torch.float64),
        "advantages": torch.tensor([advantage], dtype=torch.float64),
    }
    run("dis", parts, torch.ones(1)).loss.backward()
    ratio = np.exp(log_ratio)
    if abs(ratio - 0.7) > 1e-5 and abs(ratio - 6.0) > 1e-5:
        assert (logp.grad.item() != 0.0) == (0.7 < ratio < 6.0)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]),
    st.permutations(range(6)),
    st.sets(st.integers(1, 5)),
)
def test_cuts_and_order_change_nothing(kind: str, aggregation: Any, order: list[int], cuts: set[int]) -> None:
    # trap 11: micro-batches of whole rows in any order and number, an empty one included.
    parts = batch(18, seed=1)
    lengths = torch.full((6,), 3)
    denominator = 18 if aggregation == "token_mean" else 6

    def weights(row: torch.Tensor) -> torch.Tensor:
        return losses.token_weights(row, lengths, denominator=denominator, aggregation=aggregation)

    whole = parts["logprobs"].clone().requires_grad_()
    out = run(kind, parts | {"logprobs": whole}, weights(parts["row"]))
    out.loss.backward()
    cut = parts["logprobs"].clone().requires_grad_()
    total, account = 0.0, losses.TokenAccount()
    edges = [0, *sorted(cuts), 6, 6]
    for begin, end in pairwise(edges):
        index = torch.tensor([3 * row + i for row in order[begin:end] for i in range(3)], dtype=torch.long)
        piece = {name: (cut if name == "logprobs" else value)[index] for name, value in parts.items()}
        part = run(kind, piece, weights(piece["row"]))
        part.loss.backward()
        total += part.loss.item()
        account += part.account
    assert total == pytest.approx(out.loss.item(), abs=1e-12)
    torch.testing.assert_close(cut.grad, whole.grad)
    assert account == out.account


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_kept_is_a_zero_on_the_graph(kind: str) -> None:
    parts = batch(4)
    parts["logprobs"].requires_grad_()
    parts["stale"] = torch.ones(4, dtype=torch.bool)
    out = run(kind, parts, torch.full((4,), 0.25))
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert parts["logprobs"].grad.tolist() == [0.0] * 4
    assert out.account == losses.TokenAccount(stale_masked=4)
    assert losses.effective_sample_size(out.weight) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_nonfinite_ratios_never_reach_loss_or_gradient(kind: str) -> None:
    logp = torch.tensor([-1.0, -1.0, -1.0, -1.0, -1.0], requires_grad=True)
    behavior = torch.tensor([-1.0, -900.0, float("nan"), float("-inf"), 900.0])
    for sign in (1.0, -1.0):
        logp.grad = None
        parts = {"logprobs": logp, "behavior_logprobs": behavior, "advantages": torch.full((5,), sign)}
        out = run(kind, parts | {"row": torch.arange(5)}, torch.full((5,), 0.2))
        out.loss.backward()
        assert torch.isfinite(out.loss)
        assert torch.isfinite(logp.grad).all()
        assert out.account.total == 5
        assert not bool(out.kept[2])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 30), st.integers(0, 9))
def test_the_account_closes(kind: str, n: int, seed: int) -> None:
    out = run(kind, batch(n, seed), torch.ones(n))
    masks = torch.stack([out.kept, out.rejected_low, out.rejected_high, out.stale_masked]).int()
    assert (masks.sum(0) == 1).all()
    assert out.account.total == n


def test_ppo_clip_acts_against_a_reference_that_differs() -> None:
    parts = {
        "logprobs": torch.tensor([-1.0], requires_grad=True),
        "behavior_logprobs": torch.tensor([-1.0]),
        "advantages": torch.tensor([1.0]),
    }
    assert bool(run("ppo", parts, torch.ones(1)).kept)
    out = run("ppo", parts | {"reference_logprobs": torch.tensor([-2.0])}, torch.ones(1))
    assert (bool(out.kept), bool(out.rejected_high)) == (False, True)


def test_icepop_keeps_its_end_points_and_clips_inside() -> None:
    logp = torch.tensor([0.5, 2.0, 2.1], dtype=torch.float64).log().requires_grad_()
    parts = {
        "logprobs": logp,
        "behavior_logprobs": torch.zeros(3, dtype=torch.float64),
        "advantages": torch.ones(3, dtype=torch.float64),
    }
    out = run("icepop", parts, torch.ones(3), eps_low=0.5, eps_high=1.0)
    out.loss.backward()
    assert out.kept.tolist() == [True, True, False]
    assert logp.grad.tolist() == pytest.approx([-0.5, -2.0, 0.0])
    reference = torch.full((3,), np.log(1.5), dtype=torch.float64)
    inner = run("icepop", parts | {"reference_logprobs": reference}, torch.ones(3), eps_low=0.5, eps_high=1.0)
    assert inner.weight.tolist() == pytest.approx([0.5, 0.0, 0.0])


def test_explained_variance_adds_up_over_parts() -> None:
    rng = np.random.default_rng(0)
    returns = rng.normal(size=50)
    values = returns + rng.normal(size=50) / 2
    want = 1 - np.var(returns - values) / np.var(returns)
    parts = [losses.ExplainedVariance.of(returns[i : i + 10], values[i : i + 10]) for i in range(0, 50, 10)]
    assert sum(parts, losses.ExplainedVariance()).value == pytest.approx(want)
    assert np.mean([part.value for part in parts]) != pytest.approx(want, abs=1e-3)
    assert losses.ExplainedVariance.of(torch.full((3,), 0.1), torch.zeros(3)).value is None


def test_ratio_summaries() -> None:
    log_ratio = torch.tensor([0.0, 0.0, 0.0, float("nan"), 800.0])
    assert losses.ratio_quantiles(log_ratio, (0.5,)) == (1.0,)
    assert losses.ratio_quantiles(torch.tensor([]), (0.5, 0.99)) == (None, None)
    assert losses.effective_sample_size(torch.tensor([2.0, 2.0])) == pytest.approx(1.0)
    assert losses.effective_sample_size(torch.tensor([1.0, 0.0])) == pytest.approx(0.5)
    assert losses.effective_sample_size(torch.tensor([])) is None


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of"):
        losses.PolicyObjective(kind="reinforce")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lower bound"):
        losses.PolicyObjective(eps_low=None)
    with pytest.raises(ConfigError, match="negative"):
        losses.PolicyObjective(eps_high=-0.1)
    with pytest.raises(InvariantError, match="global count"):
        losses.token_weights(torch.zeros(2, dtype=torch.long), torch.tensor([2]), denominator=0)
    with pytest.raises(InvariantError, match="row of each token"):
        run("trm", {name: value for name, value in batch(3).items() if name != "row"}, torch.ones(3))
