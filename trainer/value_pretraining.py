"""Value pretraining: fit a critic to what a fixed policy's episodes really earned (docs/paper.md row 14).

Targets are Monte-Carlo returns (lambda = 1), nothing is frozen, and the fit ends when explained variance on episodes
that it never saw stops rising. Invariant: the split is by trajectory, for two tokens of one episode share its return.

Example:
    fitted = pretrain_values(critic, trajectories, ValuePretrainingConfig(max_epochs=5), seed=0)
    print(fitted.explained_variance)  # on held-out episodes: before, and after each epoch
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from sao_gym.config import setting
from sao_gym.errors import ConfigError
from sao_gym.stream import Trajectory
from sao_gym.trainer.actor import Inputs
from sao_gym.trainer.attention import use_packed_attention
from sao_gym.trainer.batch import Packed, micro_batches, pack
from sao_gym.trainer.config import LossConfig, OptimizerConfig
from sao_gym.trainer.critic import Critic, switch_off_dropout
from sao_gym.trainer.estimation import critic_targets, estimation_units
from sao_gym.trainer.imitation import row_order
from sao_gym.trainer.losses import ExplainedVariance, value_loss
from sao_gym.trainer.optimizer import lr_multiplier, make_optimizer, set_lr


@dataclass(frozen=True, kw_only=True)
class ValuePretrainingConfig(OptimizerConfig):
    """How the critic is fitted."""

    lr: float = setting(5e-6, help="learning rate", source="paper", alias="lr")
    lr_warmup_steps: int = setting(10, help="steps over which the learning rate rises to lr")
    batch_size: int = setting(64, help="episodes per step", alias="batch-size")
    max_epochs: int = setting(10, help="most passes over the episodes", alias="max-epochs")
    patience: int = setting(2, help="epochs without a better explained variance before the fit ends")
    min_gain: float = setting(0.005, help="rise of explained variance that counts as better")
    heldout_share: float = setting(0.2, help="share of episodes kept aside to measure on")
    micro_batch_tokens: int = setting(16384, help="packed tokens of one forward pass; changes no result")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.batch_size, self.max_epochs, self.patience, self.micro_batch_tokens) < 1:
            raise ConfigError("batch_size, max_epochs, patience and micro_batch_tokens must be at least 1")
        if not 0.0 < self.heldout_share < 1.0:
            raise ConfigError(f"heldout_share = {self.heldout_share}: give a number between 0 and 1")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Explained variance on held-out episodes before the fit and after each epoch (None: all earned the same).

    The critic has the weights of epoch `best`, 0 for none at all.
    """

    explained_variance: tuple[float | None, ...]
    best: int
    trained: int
    heldout: int


def split_rows(rows: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers to fit and to hold out, each at least one. Raises ConfigError below two rows."""
    if rows < 2:
        raise ConfigError(f"a critic needs at least 2 whole episodes, one to fit and one to measure on; got {rows}")
    order = np.random.default_rng([seed, 4]).permutation(rows).tolist()
    held = min(max(round(rows * share), 1), rows - 1)
    return sorted(order[held:]), sorted(order[:held])


def pretrain_values(
    critic: Critic, trajectories: Sequence[Trajectory], config: ValuePretrainingConfig, *, seed: int
) -> Fitted:
    """Fit `critic` in place, with nothing frozen, and leave it with its best weights."""
    use_packed_attention(critic.backbone)
    switch_off_dropout(critic.backbone)
    critic.requires_grad_(True).train()
    fit, held = split_rows(len(trajectories), config.heldout_share, seed)
    seen, unseen = [trajectories[row] for row in fit], [trajectories[row] for row in held]
    steps = math.ceil(len(seen) / config.batch_size)
    order = row_order(len(seen), batch_size=config.batch_size, steps=steps * config.max_epochs, seed=seed)
    optimizer = make_optimizer(critic, config)
    curve = [heldout_explained_variance(critic, unseen, config)]
    best, weights, taken = 0, copy.deepcopy(critic.state_dict()), 0
    for epoch in range(1, config.max_epochs + 1):
        for _ in range(steps):
            set_lr(optimizer, config.lr * lr_multiplier(taken, config.lr_warmup_steps))
            _step(critic, [seen[row] for row in next(order)], optimizer, config)
            taken += 1
        curve.append(heldout_explained_variance(critic, unseen, config))
        if _is_better(curve[epoch], curve[best], config.min_gain):
            best, weights = epoch, copy.deepcopy(critic.state_dict())
        elif epoch - best >= config.patience:
            break
    critic.load_state_dict(weights)
    return Fitted(tuple(curve), best, len(seen), len(unseen))


def _is_better(new: float | None, old: float | None, gain: float) -> bool:
    return new is not None and (old is None or new > old + gain)


@torch.no_grad()
def heldout_explained_variance(
    critic: Critic, trajectories: Sequence[Trajectory], config: ValuePretrainingConfig
) -> float | None:
    """Explained variance over all action tokens of `trajectories`, None where it is not defined."""
    total = ExplainedVariance()
    for packed in _cut(trajectories, config.micro_batch_tokens):
        total += ExplainedVariance.of(monte_carlo_returns(packed), _values(critic, packed))
    return total.value


def monte_carlo_returns(packed: Packed) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What each action token's episode went on to earn [A]: lambda = 1, no bootstrap, no discount."""
    loss = LossConfig()
    return critic_targets(packed, estimation_units(packed, np.zeros(packed.n_rows), loss), loss)


def _step(
    critic: Critic, rows: Sequence[Trajectory], optimizer: torch.optim.Optimizer, config: ValuePretrainingConfig
) -> None:
    tokens = sum(trajectory.n_action for trajectory in rows)
    for packed in _cut(rows, config.micro_batch_tokens):
        values = _values(critic, packed)
        returns = torch.as_tensor(monte_carlo_returns(packed), device=values.device)
        torch.autograd.backward(value_loss(values, returns, torch.full_like(values, 1.0 / tokens)))
    if config.grad_clip is not None:
        nn.utils.clip_grad_norm_(critic.parameters(), config.grad_clip)
    optimizer.step()
    optimizer.zero_grad()


def _values(critic: Critic, packed: Packed) -> Tensor:
    inputs = Inputs.of(packed, critic.value_head.weight.device)
    values: Tensor = critic(inputs, inputs.state_index)
    return values


def _cut(trajectories: Sequence[Trajectory], max_tokens: int) -> list[Packed]:
    sizes = [trajectory.n_tokens for trajectory in trajectories]
    return [pack([trajectories[row] for row in rows]) for rows in micro_batches(sizes, max_tokens)[0]]
