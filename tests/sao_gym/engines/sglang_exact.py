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


def assert_exact(made: Generation, models: dict[int, Any], temperature: float = 1.0) -> None:
    """Every token is as likely as the model of its version says."""
    ids = [*PROMPT.tolist(), *made.token_ids.tolist()]
    by_version = {
        version: logprobs_of(model, ids, temperature)[len(PROMPT) :]
        for version, model in models.items()
        if version in made.versions
    }
    expected = [by_version[int(version)][index] for index, version in enumerate(made.versions)]
    np.testing.assert_allclose(made.logprobs, expected, atol=1e-5)
