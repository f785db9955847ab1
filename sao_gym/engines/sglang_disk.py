"""Weights over a folder that trainer and servers share: safetensors, written apart and renamed when whole.

A version's folder holds all shards; those whose tensors are the bytes of the version before are hard links to its
files, and a server that holds that version is given a folder of the changed ones alone. The newest two versions stay.
"""

import asyncio
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from sao_gym.engines.sglang_cargo import Cargo, buckets
from sao_gym.engines.sglang_server import Server
from sao_gym.errors import EngineError

SHARD_BYTES = 1 << 30
KEPT = 2


class DiskTransport:
    """Through `folder`, which every server sees under the same path."""

    is_joint = False
    is_in_session = False

    def __init__(self, folder: Path, *, timeout_s: float, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder.resolve()
        self._timeout_s = timeout_s
        self._shard_bytes = shard_bytes
        self._labels: list[str] = []
        self._digests: dict[str, dict[str, str]] = {}
        self._before: dict[str, str] = {}

    async def pack(self, cargo: Cargo) -> None:
        """Write the folder. Raises EngineError if the disk does not take it."""
        if cargo.label in self._labels:
            return
        try:
            await asyncio.to_thread(self._write, cargo)
        except OSError as error:
            raise EngineError(f"{self._folder} took no weights: {error}") from error

    def _write(self, cargo: Cargo) -> None:
        before = self._labels[-1] if self._labels else None
        known = self._digests.get(before, {}) if before else {}
        draft, final = self._folder / f".draft-{cargo.label}", self._folder / cargo.label
        for stale in (draft, final):
            shutil.rmtree(stale, ignore_errors=True)
        (draft / "changed").mkdir(parents=True)
        digests = {}
        for index, shard in enumerate(buckets(cargo.named, self._shard_bytes)):
            name = f"shard-{index:05d}.safetensors"
            digests[name] = _digest(shard)
            if before and known.get(name) == digests[name]:
                os.link(self._folder / before / name, draft / name)
                continue
            _save(shard, draft / name)
            os.link(draft / name, draft / "changed" / name)
        _sync(draft)
        draft.rename(final)
        _sync(self._folder)
        self._labels.append(cargo.label)
        self._digests[cargo.label] = digests
        if before:
            self._before[cargo.label] = before

    async def deliver(self, cargo: Cargo, servers: Sequence[Server]) -> None:
        """See `Transport.deliver`."""
        await asyncio.gather(*(self._deliver(cargo, server) for server in servers))

    async def _deliver(self, cargo: Cargo, server: Server) -> None:
        folder = self._folder / cargo.label
        changed = folder / "changed"
        if server.label and server.label == self._before.get(cargo.label) and any(changed.iterdir()):
            folder = changed
        body = {"model_path": str(folder), "weight_version": cargo.label, "flush_cache": False}
        await server.control(
            "/update_weights_from_disk", {**body, "abort_all_requests": False}, timeout_s=self._timeout_s
        )

    async def unpack(self, cargo: Cargo) -> None:
        """Remove all but the newest folders."""
        while len(self._labels) > KEPT:
            label = self._labels.pop(0)
            self._digests.pop(label, None)
            self._before.pop(label, None)
            await asyncio.to_thread(shutil.rmtree, self._folder / label, True)

    async def close(self) -> None:
        """Remove every folder that was written here."""
        for label in self._labels:
            await asyncio.to_thread(shutil.rmtree, self._folder / label, True)
        self._labels.clear()


def _digest(shard: Sequence[tuple[str, Tensor]]) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for name, tensor in shard:
        hasher.update(f"{name}\x1f{tuple(tensor.shape)}\x1f{tensor.dtype}\x1e".encode())
        hasher.update(_bytes(tensor))
    return hasher.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _save(shard: Sequence[tuple[str, Tensor]], path: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in shard}, path, metadata={"format": "pt"})
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
