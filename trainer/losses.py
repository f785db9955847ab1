"""Losses on the action-token axis: pure functions of log-probs, advantages and values.

Axes: A action tokens of one micro-batch, R rows. Invariants:
- a loss is a sum of per-token terms times `token_weights`, whose denominator is the *global* batch's: adding the
  losses of all micro-batches and ranks gives the loss of the whole, however it was cut (docs/paper.md row 4).
- a rejected or stale token has weight and gradient exactly 0 and stays in the denominator (rows 3, 18, 19).
- the bounds are compared in log space in float32, and only kept tokens are exponentiated: no inf * 0.
- a batch of which nothing is kept, or that is empty, gives a 0 that hangs on the graph and the same fields.

Example:
    >>> logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    >>> objective = PolicyObjective(kind="dis", eps_low=0.3, eps_high=5.0)
    >>> out = policy_loss(objective, logprobs, behavior_logprobs=torch.tensor([-1.0, -9.0]),
    ...                   advantages=torch.ones(2), token_weights=torch.full((2,), 0.5))
    >>> out.weight.tolist(), round(out.loss.item(), 3)
    ([1.0, 0.0], 0.5)
"""

import math
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sao_gym.errors import ConfigError, InvariantError

PolicyLossKind = Literal["dis", "ppo", "cispo", "icepop", "trm"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]

KINDS: tuple[PolicyLossKind, ...] = ("dis", "ppo", "cispo", "icepop", "trm")
# PPO's unclipped side has no upper bound of its own: e^20 keeps it finite in float32 and changes no sane ratio.
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """Which policy loss, and its bounds: offsets, so that (1 - eps_low, 1 + eps_high) is kept.

    `eps_low` None means no lower bound (cispo). `clip_low`, `clip_high` are icepop's inner PPO clip. `delta_max`,
    `delta_avg` bound a row's divergence in trm. `detach_ratio` false is the ablation of dis and trm.
    """

    kind: PolicyLossKind = "dis"
    eps_low: float | None = 0.3
    eps_high: float = 5.0
    detach_ratio: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.28
    delta_max: float = 0.05
    delta_avg: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"policy loss is one of {', '.join(KINDS)}, got {self.kind!r}")
        if self.eps_low is None and self.kind != "cispo":
            raise ConfigError(f"policy loss {self.kind} needs a lower bound: give eps_low a number")
        bounds = (self.eps_low or 0.0, self.eps_high, self.clip_low, self.clip_high, self.delta_max)
        if min(*bounds, self.delta_avg or 0.0) < 0:
            raise ConfigError("eps, clip and delta are offsets from 1 and from 0: none may be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAccount:
    """Where a batch's action tokens went; adds up over micro-batches and ranks."""

    kept: int = 0
    rejected_low: int = 0
    rejected_high: int = 0
    stale_masked: int = 0

    def __add__(self, other: "TokenAccount") -> "TokenAccount":
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return TokenAccount(**sums)

    @property
    def total(self) -> int:
        """All action tokens."""
        return self.kept + self.rejected_low + self.rejected_high + self.stale_masked

    def fraction(self, part: Literal["kept", "rejected_low", "rejected_high", "stale_masked"]) -> float:
        """Share of all action tokens, 0 for an empty batch."""
        return int(getattr(self, part)) / self.total if self.total else 0.0


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PolicyLoss:
    """A policy loss and what became of each token.

    `loss` is a scalar on the graph. `weight` [A] is the factor on the advantage in the token's gradient, 0 where
    the token was left out. The four masks [A] are disjoint and cover every token; a stale token is only stale.
    """

    loss: Tensor
    weight: Tensor
    log_ratio: Tensor
    kept: Tensor
    rejected_low: Tensor
    rejected_high: Tensor
    stale_masked: Tensor

    @property
    def account(self) -> TokenAccount:
        """The four masks, counted."""
        return TokenAccount(
            kept=int(self.kept.sum()),
            rejected_low=int(self.rejected_low.sum()),
            rejected_high=int(self.rejected_high.sum()),
            stale_masked=int(self.stale_masked.sum()),
        )


def is_in_band(log_ratio: Tensor, eps_low: float, eps_high: float, *, strict: bool = True) -> Tensor:
    """Whether 1 - eps_low < ratio < 1 + eps_high [A], decided in log space in float32; NaN is outside.

    `strict` false keeps the end points (icepop).
    """
    low = float(np.float32(math.log(1.0 - eps_low))) if eps_low < 1.0 else -math.inf
    high = float(np.float32(math.log1p(eps_high)))
    x = log_ratio.detach().float()
    inside = (x > low) & (x < high) if strict else (x >= low) & (x <= high)
    return inside & torch.isfinite(x)


def dis_weights(log_ratio: Tensor, eps_low: float, eps_high: float) -> Tensor:
    """f(rho) = rho where 1 - eps_low < rho < 1 + eps_high, else 0 [A]; it carries the gradient of rho.

    Both sides are masked whatever the advantage's sign. Non-finite ratios give 0. Source: arXiv 2607.07508 eq. 3.
    """
    return _exp_where(is_in_band(log_ratio, eps_low, eps_high), log_ratio)


def token_weights(
    row: Tensor, row_lengths: Tensor, *, denominator: float, aggregation: Aggregation = "token_mean"
) -> Tensor:
    """Weight of each token's term in the loss [A].

    `row` [A] names each token's row and `row_lengths` [R] counts a row's action tokens in the whole batch.
    `denominator` is global: the batch's action tokens for `token_mean`, its rows for the other two.
    """
    if denominator <= 0 and row.numel():
        raise InvariantError(f"{row.numel()} action tokens in a batch whose global count is {denominator}")
    if aggregation == "seq_mean_token_mean":
        return 1.0 / (row_lengths.double()[row] * denominator)
    if aggregation not in ("token_mean", "seq_mean_token_sum"):
        raise InvariantError(f"aggregation {aggregation!r} is unknown")
    return torch.full(row.shape, 1.0 / max(denominator, 1e-300), dtype=torch.float64, device=row.device)


def policy_loss(
    objective: PolicyObjective,
    logprobs: Tensor,
    *,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    token_weights: Tensor,
    reference_logprobs: Tensor | None = None,
    stale: Tensor | None = None,
    row: Tensor | None = None,
) -> PolicyLoss:
    """The policy loss to minimise: sum over tokens of token_weights * term. All arguments [A].

    dis: -sg(f(rho)) A logpi. ppo: -min(rho A, clip(rho) A). cispo: -sg(min(rho, 1 + eps_high)) A logpi.
    icepop: -f(pi_reference / pi_behavior) min(r A, clip(r) A), r = pi / pi_reference, end points kept. trm:
    -sg(rho) A logpi on rows whose k3 = rho - 1 - log rho stays within delta_max (and delta_avg on average); it
    needs `row` and all tokens of a row in one call. rho = pi / pi_reference; the reference is the behaviour policy
    unless `reference_logprobs` is given (icepop: the current policy, its ratio then 1). `stale` marks tokens that
    are left out for their age. Sources: arXiv 2607.07508 eq. 3, 2503.14476 (clip-higher), 2506.13585 (CISPO),
    2510.18855 (IcePop), 2512.23075 (trust-region masking); docs/paper.md rows 1 to 4 and 19.
    """
    logp = logprobs if logprobs.dtype == torch.float64 else logprobs.float()
    behavior = behavior_logprobs.to(logp.dtype)
    if objective.kind == "icepop":
        reference = logp.detach() if reference_logprobs is None else reference_logprobs.to(logp.dtype)
    else:
        reference = behavior if reference_logprobs is None else reference_logprobs.to(logp.dtype)
    log_ratio = logp - reference.detach()
    watched = reference.detach() - behavior if objective.kind == "icepop" else log_ratio
    age = torch.zeros_like(log_ratio, dtype=torch.bool) if stale is None else stale.bool()
    a = advantages.to(logp.dtype).detach()
    keep = _keep(objective, watched.detach(), a, row) & torch.isfinite(log_ratio.detach()) & ~age
    terms, weight = _terms(objective, keep, logp, log_ratio, watched, a)
    dropped = ~keep & ~age
    low = watched.detach() <= 0
    return PolicyLoss(
        loss=(terms.masked_fill(age, 0.0) * token_weights.to(terms.dtype)).sum(),
        weight=weight.detach(),
        log_ratio=watched.detach(),
        kept=keep,
        rejected_low=dropped & low,
        rejected_high=dropped & ~low,
        stale_masked=age,
    )


def value_loss(values: Tensor, returns: Tensor, token_weights: Tensor) -> Tensor:
    """Squared error to the return, sum over tokens of token_weights * (V - R)^2 (scalar). All arguments [A].

    No clip, no half, coefficient 1. Source: arXiv 2607.07508; docs/paper.md row 9.
    """
    error = values.float() - returns.float() if values.dtype != torch.float64 else values - returns
    return (error.square() * token_weights.to(error.dtype)).sum()


def _exp_where(keep: Tensor, log_ratio: Tensor) -> Tensor:
    x = log_ratio if log_ratio.dtype == torch.float64 else log_ratio.float()
    return torch.where(keep, torch.where(keep, x, 0.0).exp(), 0.0)


def _keep(objective: PolicyObjective, log_ratio: Tensor, advantages: Tensor, row: Tensor | None) -> Tensor:
    """Tokens that carry a gradient [A]."""
    low = 1.0 if objective.eps_low is None else objective.eps_low
    high = objective.eps_high
    if objective.kind == "cispo":
        return ~torch.isnan(log_ratio)
    if objective.kind == "trm":
        return _kept_rows(objective, log_ratio, row)
    if objective.kind == "ppo":
        floor = math.log(1.0 - low) if low < 1.0 else -math.inf
        above = (log_ratio >= floor) & (log_ratio <= _MAX_LOG_RATIO)
        return torch.where(advantages >= 0, log_ratio <= math.log1p(high), above)
    return is_in_band(log_ratio, low, high, strict=objective.kind == "dis")


def _kept_rows(objective: PolicyObjective, log_ratio: Tensor, row: Tensor | None) -> Tensor:
    if row is None:
        raise InvariantError("trm masks whole rows: it needs the row of each token")
    k3 = log_ratio.exp() - 1.0 - log_ratio
    k3 = torch.where(torch.isfinite(k3), k3, torch.inf)
    n_rows = int(row.max()) + 1 if row.numel() else 0
    worst = k3.new_zeros(n_rows).scatter_reduce(0, row, k3, "amax")
    kept = worst <= objective.delta_max
    if objective.delta_avg is not None:
        count = k3.new_zeros(n_rows).index_add(0, row, torch.ones_like(k3)).clamp(min=1.0)
        kept &= k3.new_zeros(n_rows).index_add(0, row, k3) / count <= objective.delta_avg
    return kept[row]


def _terms(
    objective: PolicyObjective,
    keep: Tensor,
    logp: Tensor,
    log_ratio: Tensor,
    watched: Tensor,
    advantages: Tensor,
) -> tuple[Tensor, Tensor]:
    """(loss term on the graph, weight) of each token [A]."""
    kept_logp = torch.where(keep, logp, 0.0)
    if objective.kind == "ppo":
        low, high = 1.0 - (objective.eps_low or 0.0), 1.0 + objective.eps_high
        surrogate, ratio = _clipped(log_ratio, advantages, low, high)
        return -surrogate, torch.where(keep, ratio, 0.0)
    if objective.kind == "icepop":
        factor = _exp_where(keep, watched)
        surrogate, ratio = _clipped(log_ratio, advantages, 1.0 - objective.clip_low, 1.0 + objective.clip_high)
        return -factor * torch.where(keep, surrogate, 0.0), factor * ratio
    weight = _exp_where(keep, log_ratio.clamp(max=_MAX_LOG_RATIO) if objective.kind == "cispo" else log_ratio)
    if objective.kind == "cispo":
        floor = 1.0 - objective.eps_low if objective.eps_low is not None else 0.0
        weight = torch.where(keep, weight.clamp(floor, 1.0 + objective.eps_high), 0.0)
    used = weight.detach() if objective.detach_ratio or objective.kind == "cispo" else weight
    return -used * advantages * kept_logp, weight


def _clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(rA, clip(r)A), and r where that has a gradient; non-finite ratios stay out of the graph."""
    finite = torch.isfinite(log_ratio.detach())
    ratio = torch.where(finite, log_ratio, 0.0).clamp(max=_MAX_LOG_RATIO).exp()
    plain, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
    surrogate = torch.where(finite, torch.minimum(plain, clipped), 0.0)
    return surrogate, torch.where(plain <= clipped, ratio, 0.0)


@dataclass(frozen=True, slots=True)
class ExplainedVariance:
    """Moments of returns and errors that add up over micro-batches and ranks; `value` is read once, at the end.

    EV = 1 - Var(R - V) / Var(R) over all action tokens of the batch. Averages of per-micro-batch EVs are another
    number, and a wrong one.
    """

    count: float = 0.0
    sum_returns: float = 0.0
    sum_squared_returns: float = 0.0
    sum_errors: float = 0.0
    sum_squared_errors: float = 0.0

    @classmethod
    def of(cls, returns: npt.ArrayLike | Tensor, values: npt.ArrayLike | Tensor) -> "ExplainedVariance":
        """Moments of one part of a batch; both arguments [A]."""
        r, v = _float64(returns), _float64(values)
        if r.shape != v.shape:
            raise InvariantError(f"{r.shape} returns against {v.shape} values")
        e = r - v
        return cls(float(r.size), float(r.sum()), float(r @ r), float(e.sum()), float(e @ e))

    def __add__(self, other: "ExplainedVariance") -> "ExplainedVariance":
        return ExplainedVariance(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def value(self) -> float | None:
        """The explained variance, None where it is not defined: constant returns, or no tokens."""
        if not self.count:
            return None
        mean_square = self.sum_squared_returns / self.count
        variance = mean_square - (self.sum_returns / self.count) ** 2
        if variance <= 1e-12 * mean_square:
            return None
        return 1.0 - (self.sum_squared_errors / self.count - (self.sum_errors / self.count) ** 2) / variance


def ratio_quantiles(log_ratio: Tensor, q: tuple[float, ...] = (0.5, 0.99)) -> tuple[float | None, ...]:
    """Quantiles of the importance ratio over finite log-ratios [A], None without any."""
    x = _float64(log_ratio)
    x = x[np.isfinite(x)]
    if not x.size:
        return (None,) * len(q)
    return tuple(float(value) for value in np.exp(np.minimum(np.quantile(x, q), 700.0)))


def effective_sample_size(weight: Tensor) -> float | None:
    """(sum w)^2 / (n sum w^2) of the applied weights [A]: 1 where all are equal, 0 where none is kept, None if empty."""
    w = _float64(weight)
    if not w.size:
        return None
    squares = float(w @ w)
    return float(w.sum()) ** 2 / (w.size * squares) if squares else 0.0


def _float64(x: npt.ArrayLike | Tensor) -> npt.NDArray[np.float64]:
    if isinstance(x, Tensor):
        return x.detach().to("cpu", torch.float64).numpy()
    return np.asarray(x, dtype=np.float64)
