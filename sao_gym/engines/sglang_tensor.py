"""Weights to servers on the same machine: shared memory on a CPU, IPC handles on a GPU, bucket by bucket.

An unrelated process can open shared memory only by name, so tensors are shared by torch's `file_system` strategy; the
default one passes descriptors and would end the server.
"""

import asyncio
import base64
import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch.multiprocessing
from torch import Tensor

from sao_gym.engines.sglang_cargo import Cargo, buckets
from sao_gym.engines.sglang_server import Server

BUCKET_BYTES = 512 << 20
_strategy = threading.Lock()
_shared: Any = torch.multiprocessing


class TensorTransport:
    """Through the memory of this machine."""

    is_joint = False
    is_in_session = True

    def __init__(self, *, timeout_s: float, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes

    async def pack(self, cargo: Cargo) -> None:
        """Nothing: a bucket is made when it is sent."""

    async def deliver(self, cargo: Cargo, servers: Sequence[Server]) -> None:
        """See `Transport.deliver`."""
        await asyncio.gather(*(self._deliver(cargo, server) for server in servers))

    async def _deliver(self, cargo: Cargo, server: Server) -> None:
        ranks = server.facts.tp_size if server.facts else 1
        parts = list(buckets(cargo.named, self._bucket_bytes))
        for index, bucket in enumerate(parts):
            # the copies must live until the server has answered: it opens them by name
            copies = [(name, tensor.clone()) for name, tensor in bucket]
            payload = await asyncio.to_thread(_serialized, copies)
            is_last = index == len(parts) - 1
            await server.control(
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": [payload] * ranks,
                    "flush_cache": False,
                    "abort_all_requests": False,
                    "weight_version": cargo.label if is_last else None,
                },
                timeout_s=self._timeout_s,
            )

    async def unpack(self, cargo: Cargo) -> None:
        """Nothing: each bucket went with its call."""

    async def close(self) -> None:
        """Nothing is held."""


def _serialized(named: list[tuple[str, Tensor]]) -> str:
    with _named_sharing():
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(named)
    return base64.b64encode(buffer.getvalue()).decode()


@contextmanager
def _named_sharing() -> Iterator[None]:
    """Within it, tensors of this process are shared by name."""
    with _strategy:
        before = _shared.get_sharing_strategy()
        _shared.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            _shared.set_sharing_strategy(before)
