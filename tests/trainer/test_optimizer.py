"""The optimiser's small parts: schedule, what is listed, norms by kind, size of an update."""

import pytest
import torch
from torch import nn

from sao_gym.trainer.config import OptimizerConfig
from sao_gym.trainer.critic import critic_from_model, freeze
from sao_gym.trainer.optimizer import gradient_norms, lr_multiplier, make_optimizer, set_lr, snapshot, update_size


def test_the_multiplier_rises_by_batches(golden):
    """Case 15."""
    expected = golden("15")["expected"]["critic_lr_multiplier_at_batch"]
    assert [lr_multiplier(batch, 10) for batch in range(12)] == pytest.approx(expected)
    assert lr_multiplier(0, 0) == lr_multiplier(10**6, 0) == 1.0


def test_adamw_has_the_settings_and_only_what_is_trained(make_policy):
    """docs/paper.md row 23 and trap 32: a frozen weight that is not listed cannot decay."""
    critic = critic_from_model(make_policy())
    freeze(critic, "mlp_only")
    config = OptimizerConfig(lr=3e-4, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.2)
    optimizer = make_optimizer(critic, config)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-4, (0.8, 0.9), 1e-6, 0.2)
    assert {id(p) for p in group["params"]} == {id(p) for p in critic.parameters() if p.requires_grad}
    set_lr(optimizer, 1e-5)
    assert group["lr"] == 1e-5


def test_the_defaults_are_those_of_the_decision():
    config = OptimizerConfig()
    assert (config.lr, config.beta1, config.beta2, config.eps) == (1e-6, 0.9, 0.95, 1e-8)
    assert (config.weight_decay, config.grad_clip) == (0.0, 1.0)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(2, 2, bias=False)
        self.self_attn = nn.Linear(2, 1, bias=False)
        self.value_head = nn.Linear(1, 1, bias=False)
        self.idle_mlp = nn.Linear(5, 5)


def test_norms_by_kind_of_module():
    module = Named()
    module.mlp.weight.grad = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    module.self_attn.weight.grad = torch.tensor([[0.0, 12.0]])
    module.value_head.weight.grad = torch.tensor([[84.0]])
    norms = gradient_norms(module.named_parameters())
    assert norms.total == pytest.approx(85.0)
    assert norms.norm == pytest.approx({"mlp": 5.0, "attention": 12.0, "head": 84.0})
    assert norms.rms == pytest.approx({"mlp": 2.5, "attention": 12 / 2**0.5, "head": 84.0})


def test_the_size_of_an_update():
    module = nn.Linear(2, 2, bias=False)
    nn.init.constant_(module.weight, 2.0)
    before = snapshot(module)
    with torch.no_grad():
        module.weight[0, 0] += 1.0
    size = update_size(before, module)
    assert size.relative_norm == pytest.approx(0.25)
    assert size.changed_share == 0.25
    assert before[0][0, 0] == 2.0  # a copy, not a view


def test_an_update_counts_trained_weights_only():
    module = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    module[0].weight.requires_grad_(False)
    before = snapshot(module)
    assert len(before) == 1
    with torch.no_grad():
        module[0].weight += 1.0
    assert update_size(before, module).changed_share == 0.0
