"""A policy's weights on their way from the learner to an engine, and the hash that proves that they arrived.

Invariant: two models with the same names, shapes, dtypes and bytes have the same hash, in whatever order their
tensors are listed; a tensor that is shared under several names (tied embeddings) travels and counts once.

Example:
    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> source = ModuleWeights(layer)
    >>> source.names
    ('weight', 'bias')
    >>> source.weight_hash == weight_hash(module_tensors(layer))
    True
"""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor, nn


def module_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, tensor) of every parameter, then of every buffer that a checkpoint would hold, each shared tensor once."""
    persistent = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in module.named_modules()
        for name in child._buffers
        if name not in child._non_persistent_buffers_set
    }
    buffers = [(name, buffer) for name, buffer in module.named_buffers() if name in persistent]
    return [*module.named_parameters(), *buffers]


def weight_hash(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hash over names, shapes, dtypes and bytes, 32 hex digits, independent of the order.

    Of several names for one tensor the first listed counts.
    """
    seen: set[tuple[object, ...]] = set()
    lines = []
    for name, tensor in named_tensors:
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        lines.append(f"{name}\x1f{tuple(tensor.shape)}\x1f{tensor.dtype}\x1f{_digest(tensor)}")
    return hashlib.blake2b("\x1e".join(sorted(lines)).encode(), digest_size=16).hexdigest()


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()


class ModuleWeights:
    """A `WeightSource`: the weights a module had when this was made; training on does not change them.

    `dtype` is that of the engine that will serve them; floating tensors are cast to it. None keeps each as it is.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        with torch.no_grad():
            self._tensors = [(name, _snapshot(tensor, dtype)) for name, tensor in module_tensors(module)]

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, each shared tensor once, in the module's order."""
        return tuple(name for name, _ in self._tensors)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) pairs in the order of `names`."""
        return iter(self._tensors)

    @cached_property
    def weight_hash(self) -> str:
        """`weight_hash` of the tensors as they travel."""
        return weight_hash(self._tensors)


def _snapshot(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(target, copy=True)
