"""The learner's weights by the names that a server loads, and the checksums that the server will then tell.

Two steps lie between a learner's parameter and a server's: transformers keeps some layers in another form than its
checkpoints (a mixture's experts in one tensor), and SGLang fuses what a checkpoint keeps apart (q, k and v; gate and
up; experts). The first step is transformers' own, the same that writes a checkpoint; the second is stated here, for
servers that hold every parameter whole and unquantised on a CPU. There a checksum is eight bytes of SHA-256.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sao_gym.errors import ConfigError
from sao_gym.protocols import WeightSource

_FUSED = (
    (re.compile(r"\.(q|k|v)_proj\."), ".qkv_proj.", ("q", "k", "v")),
    (re.compile(r"(?<!experts)\.(gate|up)_proj\."), ".gate_up_proj.", ("gate", "up")),
)
_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")


class CheckpointNames:
    """Gives a source's tensors the names of a checkpoint of `model`, of which only the shape is kept."""

    def __init__(self, model: Any) -> None:
        self._model = _shape_of(model)

    def named(self, source: WeightSource) -> list[tuple[str, Tensor]]:
        """(name, contiguous tensor) pairs in the order of their names."""
        try:
            from transformers.core_model_loading import revert_weight_conversion
        except ImportError as error:
            raise ConfigError(
                "this transformers cannot tell a checkpoint's names (revert_weight_conversion); take the version that "
                "constraints.txt names"
            ) from error
        tensors = revert_weight_conversion(self._model, dict(source.tensors()))
        return sorted((name, tensor.detach().contiguous()) for name, tensor in tensors.items())


def _shape_of(model: Any) -> Any:
    """A model of the same configuration without any memory for weights."""
    with torch.device("meta"):
        return type(model)(model.config)


def checksums(named: Iterable[tuple[str, Tensor]], *, vocab_padding: int = 64) -> dict[str, str]:
    """Checksum of each parameter as an unsharded server holds it, by the server's name."""
    return {name: _digest(parts) for name, parts in _fused(dict(named), vocab_padding)}


def _fused(tensors: Mapping[str, Tensor], vocab_padding: int) -> Iterator[tuple[str, list[Tensor]]]:
    """(server's name, the pieces that lie one after the other in its memory)."""
    groups: dict[str, dict[tuple[int, int], Tensor]] = {}
    for name, tensor in tensors.items():
        target, place = _target(name)
        groups.setdefault(target, {})[place] = tensor
    for target, pieces in groups.items():
        ordered = [pieces[place] for place in sorted(pieces)]
        if target.endswith(("embed_tokens.weight", "lm_head.weight")):
            ordered += _padding(ordered[0], vocab_padding)
        yield target, ordered


def _target(name: str) -> tuple[str, tuple[int, int]]:
    if match := _EXPERT.search(name):
        expert, kind = int(match[1]), match[2]
        fused = "w2_weight" if kind == "down" else "w13_weight"
        return f"{name[: match.start()]}.experts.{fused}", (expert, int(kind == "up"))
    for pattern, fused, kinds in _FUSED:
        if match := pattern.search(name):
            return pattern.sub(fused, name), (0, kinds.index(match[1]))
    return name, (0, 0)


def _padding(tensor: Tensor, multiple: int) -> list[Tensor]:
    missing = -tensor.shape[0] % multiple
    return [tensor.new_zeros(missing, *tensor.shape[1:])] if missing else []


def _digest(parts: Iterable[Tensor]) -> str:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()[:16]


def first_difference(expected: Mapping[str, str], found: Mapping[str, str]) -> str | None:
    """The first of the server's parameters that is not what was sent, None if there is none.

    A name that is on one side alone counts as different, but for a tied head, which a server may list or not.
    """
    for name, value in found.items():
        if expected.get(name, value if name == "lm_head.weight" else None) != value:
            return name
    return next((name for name in expected if name not in found), None)
