"""A policy's weights packed for servers, and the promise of whoever carries them there.

The order of a publication is `pack` (servers go on sampling), then `deliver` (they are paused), then `unpack`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sao_gym.engines.sglang_server import Server


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Cargo:
    """One version's weights by a checkpoint's names. `label` is what servers call the version."""

    version: int
    label: str
    weight_hash: str
    named: Sequence[tuple[str, Tensor]]


class Transport(Protocol):
    """How weights get to servers. One delivery at a time."""

    @property
    def is_joint(self) -> bool:
        """Whether all servers must take part at once; else each is paused for its own delivery alone."""
        ...

    @property
    def is_in_session(self) -> bool:
        """Whether the delivery must lie between begin_weight_update and end_weight_update."""
        ...

    async def pack(self, cargo: Cargo) -> None:
        """Make ready what can be made ready while servers sample. Raises EngineError."""
        ...

    async def deliver(self, cargo: Cargo, servers: Sequence[Server]) -> None:
        """Give the weights to paused servers, the label with the last of them. Raises EngineError, DeadlineError."""
        ...

    async def unpack(self, cargo: Cargo) -> None:
        """Free what `pack` made and no server needs any more."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


def buckets(named: Sequence[tuple[str, Tensor]], size_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors in order, in lists of at most `size_bytes`; a larger tensor travels alone. Never an empty list."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in named:
        if bucket and filled + tensor.nbytes > size_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += tensor.nbytes
    if bucket:
        yield bucket
