"""What an engine's tokens are compared with: the model of each token's version."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sao_gym.protocols import Generation

PROMPT = np.arange(1, 12, dtype=np.int32)


def other(model: Any, seed: int) -> Any:
    """The same model with every parameter moved."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return moved


@torch.no_grad()
def logprobs_of(model: Any, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    whole = torch.tensor(list(ids))
    rows = torch.log_softmax(model(whole[None]).logits[0, :-1].float() / temperature, -1)
    return np.concatenate([[0.0], rows.gather(1, whole[1:, None])[:, 0].numpy()])


def rescored(made: Generation, models: dict[int, Any], temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """The log-prob [n] that the model of each token's version gives it."""
    ids = [*PROMPT.tolist(), *made.token_ids.tolist()]
    found = np.full(len(made.token_ids), np.nan)
    for version in np.unique(made.versions):
        own = made.versions == version
        found[own] = logprobs_of(models[int(version)], ids, temperature)[len(PROMPT) :][own]
    return found


def assert_exact(made: Generation, models: dict[int, Any], temperature: float = 1.0) -> None:
    """Every token is as likely as the model of its version says."""
    np.testing.assert_allclose(made.logprobs, rescored(made, models, temperature), atol=1e-5)
