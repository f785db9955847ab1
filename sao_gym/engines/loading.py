"""New weights into a live model: all of them, verified, or none.

Invariant: after `load_weights` returns, the model's own hash is the source's; after it raises, the model holds the
bytes it held before.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sao_gym.errors import EngineError
from sao_gym.protocols import WeightSource
from sao_gym.weights import module_tensors, weight_hash


@torch.no_grad()
def load_weights(model: nn.Module, source: WeightSource) -> str:
    """Copy every tensor of `source` into `model` and return the hash of what arrived.

    Raises EngineError if names, shapes or types differ or a weight is not a number (nothing was copied then), if the
    source fails on the way, or if the hash of what arrived is not the source's (the old weights are put back).
    """
    own = dict(module_tensors(model))
    before: dict[str, Tensor] = {}
    try:
        _check_names(own, source)
        before = {name: tensor.clone() for name, tensor in own.items()}
        tensors = list(source.tensors())
        _check_tensors(own, tensors)
        for name, tensor in tensors:
            own[name].copy_(tensor)
        arrived, sent = weight_hash(module_tensors(model)), source.weight_hash
        if arrived != sent:
            raise EngineError(f"weights arrived with hash {arrived}, {sent} was sent; the old ones serve on")
    except BaseException as error:
        for name, tensor in before.items():
            own[name].copy_(tensor)
        if isinstance(error, EngineError) or not isinstance(error, Exception):
            raise
        raise EngineError(f"publication broke off ({error}); the old weights serve on") from error
    return arrived


def _check_names(own: dict[str, Tensor], source: WeightSource) -> None:
    sent = list(source.names)
    if sorted(sent) == sorted(own):
        return
    missing, foreign = sorted(own.keys() - set(sent)), sorted(set(sent) - own.keys())
    named = f"missing {missing[:3]}, unknown {foreign[:3]}" if missing or foreign else "a name comes twice"
    raise EngineError(f"{len(sent)} tensors were published to a model of {len(own)}: {named}; nothing was copied")


def _check_tensors(own: dict[str, Tensor], tensors: list[tuple[str, Any]]) -> None:
    if sorted(name for name, _ in tensors) != sorted(own):
        raise EngineError("a weight source sent other tensors than it names; nothing was copied")
    for name, tensor in tensors:
        expected = own[name]
        if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
            raise EngineError(
                f"{name} was published as {tensor.dtype} {tuple(tensor.shape)}, the engine holds {expected.dtype} "
                f"{tuple(expected.shape)}; nothing was copied"
            )
        if tensor.is_floating_point() and bool(torch.isnan(tensor).any()):
            raise EngineError(f"{name} was published with values that are not numbers; nothing was copied")
