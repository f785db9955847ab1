"""AdamW on float32 master weights, with schedules that count batches and not passes (traps 27, 31, 32)."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sao_gym.trainer.config import OptimizerConfig
from sao_gym.trainer.critic import module_kind


def lr_multiplier(batch: int, warmup_batches: int) -> float:
    """Factor on the learning rate at batch 0, 1, ...: (batch + 1) / warmup up to 1. All passes of a batch share it."""
    return min(1.0, (batch + 1) / warmup_batches) if warmup_batches else 1.0


def make_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the parameters that are trained; frozen ones are not even listed."""
    return torch.optim.AdamW(
        [parameter for parameter in module.parameters() if parameter.requires_grad],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group this learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@dataclass(frozen=True, slots=True)
class GradientNorms:
    """Gradient before clipping: its norm, and per kind of module the norm and the root mean square per parameter."""

    total: float = 0.0
    norm: dict[str, float] = field(default_factory=dict)
    rms: dict[str, float] = field(default_factory=dict)


def gradient_norms(named: Iterable[tuple[str, nn.Parameter]]) -> GradientNorms:
    """Norms of the gradients that are there, by `module_kind`."""
    squares: dict[str, Tensor] = {}
    counts: dict[str, int] = defaultdict(int)
    for name, parameter in named:
        if parameter.grad is None:
            continue
        kind = module_kind(name).value
        square = parameter.grad.detach().float().square().sum()
        squares[kind] = squares[kind] + square if kind in squares else square
        counts[kind] += parameter.numel()
    values = {kind: float(square) for kind, square in squares.items()}
    return GradientNorms(
        total=sum(values.values()) ** 0.5,
        norm={kind: value**0.5 for kind, value in values.items()},
        rms={kind: (value / counts[kind]) ** 0.5 for kind, value in values.items()},
    )


@dataclass(frozen=True, slots=True)
class UpdateSize:
    """How far one optimiser step went: |new - old| / |old|, and the share of master weights that changed at all."""

    relative_norm: float
    changed_share: float


def snapshot(module: nn.Module) -> list[Tensor]:
    """Copies of the trained parameters, for `update_size`."""
    return [parameter.detach().clone() for parameter in module.parameters() if parameter.requires_grad]


def update_size(before: list[Tensor], module: nn.Module) -> UpdateSize:
    """Compare the trained parameters with a snapshot of them."""
    after = [parameter.detach() for parameter in module.parameters() if parameter.requires_grad]
    moved = sum(float((new - old).float().square().sum()) for new, old in zip(after, before, strict=True))
    size = sum(float(old.float().square().sum()) for old in before)
    changed = sum(int((new != old).sum()) for new, old in zip(after, before, strict=True))
    count = sum(old.numel() for old in before)
    return UpdateSize((moved / size) ** 0.5 if size else 0.0, changed / count if count else 0.0)
