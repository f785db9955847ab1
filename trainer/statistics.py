"""What one training step measured, in a form that adds up over micro-batches and ranks.

Only sums, moments and samples are kept until the end: averages of averages are another number (docs/paper.md row 4).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sao_gym.trainer.batch import Packed
from sao_gym.trainer.critic import ModuleKind
from sao_gym.trainer.losses import (
    ExplainedVariance,
    PolicyLoss,
    TokenAccount,
    effective_sample_size,
    ratio_quantiles,
)
from sao_gym.trainer.optimizer import GradientNorms, UpdateSize
from sao_gym.trainer.parity import TokenPairs

Floats64 = npt.NDArray[np.float64]
_SUMMED = (
    "rows",
    "account",
    "before_passes",
    "after_passes",
    "value_loss",
    "policy_loss",
    "entropy_sum",
    "advantage_sum",
    "rejected_of_positive",
    "rejected_of_negative",
    "n_action",
    "lag_0",
)


def _no_samples() -> Floats64:
    return np.zeros(0)


@dataclass(kw_only=True)
class StepStatistics:
    """Sums over the action tokens of a batch. Losses are already divided by the global denominator."""

    rows: int = 0
    has_critic: bool = True
    account: TokenAccount = field(default_factory=TokenAccount)
    before_passes: ExplainedVariance = field(default_factory=ExplainedVariance)
    after_passes: ExplainedVariance = field(default_factory=ExplainedVariance)
    value_loss: float = 0.0
    policy_loss: float = 0.0
    entropy_sum: float = 0.0
    advantage_sum: float = 0.0
    rejected_of_positive: int = 0
    rejected_of_negative: int = 0
    n_action: int = 0
    lag_0: TokenPairs = field(default_factory=TokenPairs.none)
    account_by_update: tuple[TokenAccount, ...] = ()
    log_ratios: Floats64 = field(default_factory=_no_samples)
    weights: Floats64 = field(default_factory=_no_samples)
    critic_updates: int = 0
    actor_updates: int = 0
    skipped_actor_steps: int = 0
    critic_gradient: GradientNorms | None = None
    actor_gradient: GradientNorms | None = None
    actor_update: UpdateSize | None = None
    critic_s: float = 0.0
    actor_s: float = 0.0

    def add_estimates(self, values: Floats64, targets: Floats64, advantages: Floats64) -> None:
        """Values before the passes, returns and advantages of one micro-batch, all [A]."""
        self.before_passes += ExplainedVariance.of(targets, values)
        self.advantage_sum += float(advantages.sum())
        self.n_action += len(advantages)

    def add_parity(self, packed: Packed, version: int, logprobs: Tensor) -> None:
        """Log-probs [A] before the first update, of which those of tokens that `version` itself sampled are kept."""
        own = packed.versions == version
        positions = packed.position_ids[packed.state_index[own]] + 1
        learner = logprobs.detach().double().cpu().numpy()[own]
        self.lag_0 += TokenPairs(packed.behavior_logprobs[own], learner, positions)

    def add_policy(self, loss: PolicyLoss, entropy: Tensor, advantages: Tensor, world: int) -> None:
        """One micro-batch of the actor; its loss was multiplied by the number of ranks."""
        self.account += loss.account
        self.policy_loss += float(loss.loss.detach()) / world
        self.entropy_sum += float(entropy.sum())
        rejected = loss.rejected_low | loss.rejected_high
        self.rejected_of_positive += int((rejected & (advantages > 0)).sum())
        self.rejected_of_negative += int((rejected & (advantages < 0)).sum())
        self.log_ratios = np.concatenate([self.log_ratios, loss.log_ratio.double().cpu().numpy()])
        self.weights = np.concatenate([self.weights, loss.weight.double().cpu().numpy()])

    @classmethod
    def total(cls, parts: list["StepStatistics"]) -> "StepStatistics":
        """The statistics of all ranks as one. Gradients and updates are the same on every rank."""
        both = cls(**{name: getattr(parts[0], name) for name in cls.__dataclass_fields__})
        for part in parts[1:]:
            for name in _SUMMED:
                setattr(both, name, getattr(both, name) + getattr(part, name))
            pairs = zip(both.account_by_update, part.account_by_update, strict=True)
            both.account_by_update = tuple(one + other for one, other in pairs)
            both.log_ratios = np.concatenate([both.log_ratios, part.log_ratios])
            both.weights = np.concatenate([both.weights, part.weights])
        return both

    def metrics(self) -> dict[str, Any]:
        """The learner's part of a line of metrics.jsonl: always the same keys, null where a figure is not defined."""
        trained = self.actor_updates + self.skipped_actor_steps > 0
        p50, p99 = ratio_quantiles(torch.from_numpy(self.log_ratios))
        figures: dict[str, Any] = {
            "ev_pre": self.before_passes.value,
            "ev_post": self.after_passes.value,
            "value_loss": self.value_loss if self.has_critic else None,
            "policy_loss": self.policy_loss if trained else None,
            "entropy": self.entropy_sum / self.account.total if self.account.total else None,
            "advantage_mean": self.advantage_sum / self.n_action if self.n_action else None,
            "tokens_kept": self.account.kept,
            "tokens_rejected_low": self.account.rejected_low,
            "tokens_rejected_high": self.account.rejected_high,
            "stale_masked": self.account.stale_masked,
            "dis_reject_low": self.account.fraction("rejected_low") if trained else None,
            "dis_reject_high": self.account.fraction("rejected_high") if trained else None,
            "rejected_share_by_update": [
                account.fraction("rejected_low") + account.fraction("rejected_high")
                for account in self.account_by_update
            ],
            "rejected_of_positive": self.rejected_of_positive,
            "rejected_of_negative": self.rejected_of_negative,
            "ratio_p50": p50,
            "ratio_p99": p99,
            "ess": effective_sample_size(torch.from_numpy(self.weights)),
            "critic_updates": self.critic_updates if self.has_critic else None,
            "actor_updates": self.actor_updates,
            "actor_steps_skipped": self.skipped_actor_steps,
            "time_critic_s": self.critic_s if self.has_critic else None,
            "time_actor_s": self.actor_s,
        }
        for name, gradient in (("actor", self.actor_gradient), ("critic", self.critic_gradient)):
            figures[f"{name}_grad_norm"] = gradient.total if gradient else None
            for kind in ModuleKind:
                figures[f"{name}_grad_norm_{kind}"] = gradient.norm.get(kind) if gradient else None
                figures[f"{name}_grad_rms_{kind}"] = gradient.rms.get(kind) if gradient else None
        figures["update_relative_norm"] = self.actor_update.relative_norm if self.actor_update else None
        figures["update_changed_share"] = self.actor_update.changed_share if self.actor_update else None
        return figures
