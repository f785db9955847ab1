"""How many parameters a checkpoint holds, read off its files' headers; torch-free.

Example:
    >>> round(known_parameters("Qwen/Qwen3-30B-A3B-Thinking-2507") / 1e9, 1)
    30.5
"""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

HEADER_BYTES = 100_000_000
"""The longest header that the format allows."""


def _qwen3_moe(
    *, vocabulary: int, hidden: int, layers: int, heads: int, kv_heads: int, experts: int, inner: int
) -> int:
    """Parameters of a Qwen3 mixture of experts with heads of 128 and an output of its own."""
    attention = 2 * hidden * heads * 128 + 2 * hidden * kv_heads * 128 + 2 * 128
    layer = attention + experts * 3 * hidden * inner + hidden * experts + 2 * hidden
    return 2 * vocabulary * hidden + layers * layer + hidden


KNOWN: Mapping[str, int] = MappingProxyType(
    {
        "Qwen/Qwen3-30B-A3B-Thinking-2507": _qwen3_moe(
            vocabulary=151936, hidden=2048, layers=48, heads=32, kv_heads=4, experts=128, inner=768
        )
    }
)
"""Checkpoints that presets are for, from their published configurations."""


def known_parameters(name: str | None) -> int | None:
    """Parameters of a checkpoint that a preset is for; None for others."""
    return KNOWN.get(name or "")


def folder_parameters(folder: Path) -> int | None:
    """Parameters of a folder's safetensors files; None where there are none that can be read."""
    counts = [_file_parameters(path) for path in sorted(folder.glob("*.safetensors"))]
    return sum(count for count in counts if count is not None) if counts and None not in counts else None


def _file_parameters(path: Path) -> int | None:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= HEADER_BYTES else None
        return (
            sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__") if header else None
        )
    except (OSError, ValueError, struct.error, LookupError, TypeError, AttributeError):
        return None
