"""Statistics add up over micro-batches and ranks and are read once; their keys are always the same."""

import numpy as np
import pytest
import torch

from sao_gym.trainer.losses import PolicyObjective, policy_loss
from sao_gym.trainer.optimizer import GradientNorms, UpdateSize
from sao_gym.trainer.statistics import StepStatistics


def measured(ids, data, world=1):
    """Statistics of some of the tokens."""
    values, returns, advantages, logp, behavior, entropy = (row[ids] for row in data)
    stats = StepStatistics(rows=len(ids), value_loss=float(len(ids)))
    stats.add_estimates(values, returns, advantages)
    stats.after_passes += type(stats.after_passes).of(returns, 0.5 * values)
    loss = policy_loss(
        PolicyObjective(),
        torch.tensor(logp),
        behavior_logprobs=torch.tensor(behavior),
        advantages=torch.tensor(advantages),
        token_weights=torch.full((len(ids),), world / 20.0),
    )
    stats.add_policy(loss, torch.tensor(entropy), torch.tensor(advantages), world)
    stats.actor_updates = 1
    return stats


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    logp = -rng.random(20) - 0.5
    return [
        rng.normal(size=20),
        rng.normal(size=20) + 3 * (np.arange(20) > 9),
        rng.normal(size=20),
        logp,
        logp - rng.normal(0, 1.2, 20),
        rng.random(20),
    ]


def test_two_ranks_add_up_to_one(data):
    whole = measured(np.arange(20), data)
    halves = [measured(np.arange(0, 7), data, world=2), measured(np.arange(7, 20), data, world=2)]
    both = StepStatistics.total(halves)
    one, two = whole.metrics(), both.metrics()
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert two[name] == (value if value is None else pytest.approx(value, rel=1e-9)), name
    assert both.rows == 20
    assert 0 < one["tokens_kept"] < 20
    assert one["rejected_of_positive"] + one["rejected_of_negative"] == 20 - one["tokens_kept"]
    assert halves[0].rows == 7  # the parts are left as they were
    assert len(halves[0].weights) == 7


def test_explained_variance_is_no_average_of_parts(data):
    """Trap 22: the halves' returns differ in mean, so averages of their figures are another number."""
    values, returns = data[0], data[1]
    expected = 1 - np.var(returns - values) / np.var(returns)
    halves = [measured(np.arange(0, 10), data), measured(np.arange(10, 20), data)]
    total = StepStatistics.total(halves).metrics()["ev_pre"]
    assert total == pytest.approx(expected)
    assert abs(total - np.mean([half.metrics()["ev_pre"] for half in halves])) > 0.1


def test_explained_variance_is_null_where_all_returns_are_equal():
    stats = StepStatistics()
    stats.add_estimates(np.array([0.1, 0.4]), np.ones(2), np.zeros(2))
    assert stats.metrics()["ev_pre"] is None


def test_figures_by_hand():
    stats = StepStatistics(actor_updates=1)
    logp = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    behavior = torch.tensor([-1.0, -0.5, -4.0, -1.0])  # kept, too low, too high, too old
    loss = policy_loss(
        PolicyObjective(),
        logp,
        behavior_logprobs=behavior,
        advantages=torch.tensor([1.0, -1.0, 1.0, 1.0]),
        token_weights=torch.full((4,), 0.25),
        stale=torch.tensor([False, False, False, True]),
    )
    stats.add_policy(loss, torch.full((4,), 0.5), torch.tensor([1.0, -1.0, 1.0, 1.0]), 1)
    stats.add_estimates(np.zeros(4), np.arange(4.0), np.array([1.0, -1.0, 1.0, 1.0]))
    found = stats.metrics()
    assert (found["tokens_kept"], found["stale_masked"]) == (1, 1)
    assert (found["dis_reject_low"], found["dis_reject_high"]) == (0.25, 0.25)
    assert (found["rejected_of_positive"], found["rejected_of_negative"]) == (1, 1)
    assert found["policy_loss"] == pytest.approx(0.25)
    assert found["entropy"] == pytest.approx(0.5)
    assert found["advantage_mean"] == 0.5
    assert found["ess"] == pytest.approx(0.25)


def test_keys_never_change(data):
    """docs/paper.md row 18: a step of the critic alone, a skipped one and a full one write the same keys."""
    full = measured(np.arange(20), data)
    full.actor_gradient = GradientNorms(1.0, {"mlp": 1.0}, {"mlp": 0.1})
    full.critic_gradient = GradientNorms(2.0, {"head": 2.0}, {"head": 0.2})
    full.actor_update = UpdateSize(1e-3, 0.9)
    critic_only = StepStatistics(critic_updates=2)
    assert full.metrics().keys() == critic_only.metrics().keys() == StepStatistics().metrics().keys()
    assert full.metrics()["actor_grad_norm_mlp"] == 1.0
    assert full.metrics()["critic_grad_rms_head"] == 0.2
    assert full.metrics()["actor_grad_norm_head"] is None
    assert critic_only.metrics()["policy_loss"] is None
    assert critic_only.metrics()["dis_reject_low"] is None
