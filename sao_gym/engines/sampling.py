"""How a token is drawn: an inverse CDF in float64 over the softmax of logits / temperature, and its log-prob.

Invariants:
- the recorded log-prob is that of the distribution that was sampled, truncation by top-k and top-p included.
- a request's i-th token uses the i-th number of its own counter-based stream, so company and order change nothing.

Shape suffixes: `N` rows, `V` vocabulary.

Example:
    >>> draws = Draws(seed=7)
    >>> logits_NV = torch.zeros(1, 4)
    >>> ids, logprobs = sample(logits_NV, [Sampling(max_tokens=1)], [draws[0]])
    >>> logprobs.tolist()
    [-1.3862943649291992]
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sao_gym.protocols import Sampling

BLOCK = 64


class Draws:
    """The uniform numbers of one request, by token position: Philox keyed by its seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed % 2**64))
        self._numbers: list[float] = []

    def __getitem__(self, position: int) -> float:
        while len(self._numbers) <= position:
            self._numbers.extend(self._generator.random(BLOCK).tolist())
        return self._numbers[position]


def sample(logits_NV: Tensor, samplings: Sequence[Sampling], uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """One token id [N] int64 and its log-prob [N] float32 per row; a greedy row has log-prob 0.

    `uniforms` are in [0, 1). A row with non-finite logits comes back with a non-finite log-prob.
    """
    greedy = [sampling.temperature == 0.0 for sampling in samplings]
    temperatures = [1.0 if is_greedy else s.temperature for s, is_greedy in zip(samplings, greedy, strict=True)]
    logprobs_NV = scaled_logprobs(logits_NV, temperatures)
    for row, sampling in enumerate(samplings):
        if not greedy[row] and (sampling.top_k > 0 or sampling.top_p < 1.0):
            logprobs_NV[row] = truncated(logprobs_NV[row], sampling.top_k, sampling.top_p)
    ids = _inverse_cdf(logprobs_NV, uniforms)
    logprobs = logprobs_NV.gather(1, ids[:, None])[:, 0]
    if any(greedy):
        rows = torch.tensor(greedy, device=ids.device)
        best = logprobs_NV.argmax(dim=-1)
        ids = torch.where(rows, best, ids)
        # the maximum times zero: 0 where logits are sound, not finite where they are not
        logprobs = torch.where(rows, logprobs_NV.gather(1, best[:, None])[:, 0].abs() * 0.0, logprobs)
    return ids, logprobs


def scaled_logprobs(logits_NV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """The log-softmax of logits / temperature, in float32 [N, V]."""
    logits_NV = logits_NV.float()
    if any(temperature != 1.0 for temperature in temperatures):
        logits_NV = logits_NV / torch.tensor(temperatures, device=logits_NV.device)[:, None]
    return torch.log_softmax(logits_NV, dim=-1)


def _inverse_cdf(logprobs_NV: Tensor, uniforms: Sequence[float]) -> Tensor:
    cdf_NV = logprobs_NV.double().exp_().cumsum_(dim=-1)
    total = cdf_NV[:, -1]
    points = torch.tensor(uniforms, dtype=torch.float64, device=cdf_NV.device) * total
    # u * total may round up to the total, where no token has mass
    points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cdf_NV, points[:, None], right=True)[:, 0]
    return ids.clamp_(max=cdf_NV.shape[1] - 1)


def truncated(logprobs_V: Tensor, top_k: int, top_p: float) -> Tensor:
    """The renormalised log-probs [V] after top-k, then the smallest set of mass >= top-p; the rest is -inf.

    Among equals the lower id goes first.
    """
    ordered, order = logprobs_V.sort(descending=True, stable=True)
    if top_k > 0:
        ordered[top_k:] = -torch.inf
        ordered = torch.log_softmax(ordered, dim=-1)
    if top_p < 1.0:
        mass_before = ordered.double().exp().cumsum(0) - ordered.double().exp()
        is_out = mass_before >= top_p
        is_out[0] = False
        ordered = torch.log_softmax(ordered.masked_fill(is_out, -torch.inf), dim=-1)
    return torch.empty_like(ordered).index_copy_(0, order, ordered)
