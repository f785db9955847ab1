"""Weights over a process group of trainer (rank 0) and servers: broadcasts, bucket by bucket, over any network.

The group is plain torch: a TCP rendezvous and a group beside the default one, which servers join by HTTP. It is made
again whenever it shall hold other servers than before.
"""

import asyncio
import itertools
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from sao_gym.engines.sglang_cargo import Cargo, buckets
from sao_gym.engines.sglang_server import Server
from sao_gym.errors import EngineError

BUCKET_BYTES = 512 << 20
JOIN_S = 60.0
"""How long members, all of which have just answered, may take to find each other."""
BREAK_S = 5.0
"""How long members of a group may take to notice that it is broken."""


class GroupTransport:
    """By broadcasts. `host` is this machine's name as servers see it; `backend` is gloo (CPU) or nccl (GPU)."""

    is_joint = True
    is_in_session = True

    def __init__(
        self, host: str, *, name: str, backend: str, timeout_s: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._host = host
        self._name = name
        self._backend = backend
        self._timeout_s = timeout_s
        self._bucket_bytes = bucket_bytes
        self._count = itertools.count()
        self._members: tuple[Server, ...] = ()
        self._group: Any = None
        self._group_name = ""

    async def pack(self, cargo: Cargo) -> None:
        """Nothing: tensors are sent from where they are."""

    async def deliver(self, cargo: Cargo, servers: Sequence[Server]) -> None:
        """See `Transport.deliver`. After a failure the group is given up, since no rank knows where the others are."""
        try:
            if tuple(servers) != self._members:
                await self._join(servers)
            parts = list(buckets(cargo.named, self._bucket_bytes))
            for index, bucket in enumerate(parts):
                await self._send(bucket, cargo.label if index == len(parts) - 1 else None)
        except (RuntimeError, OSError) as error:
            await self._leave()
            raise EngineError(f"the broadcast of {cargo.label} failed: {error}") from error
        except BaseException:
            await self._leave()
            raise

    async def _send(self, bucket: Sequence[tuple[str, Tensor]], label: str | None) -> None:
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group_name,
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": label,
        }
        sends = [
            server.control("/update_weights_from_distributed", body, timeout_s=self._timeout_s)
            for server in self._members
        ]
        tasks = [asyncio.ensure_future(each) for each in (*sends, self._send_own([tensor for _, tensor in bucket]))]
        _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if waiting:
            await self._break_up(set(waiting))
        failures = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
        if failures:
            raise failures[0]
        if any(task.cancelled() for task in tasks):
            raise EngineError("a server did not notice that the group is broken")

    async def _send_own(self, tensors: Sequence[Tensor]) -> None:
        if why := await asyncio.to_thread(_broadcast, self._group, tensors, self._backend):
            raise EngineError(why)

    async def _break_up(self, waiting: "set[asyncio.Future[Any]]") -> None:
        """Somebody failed: let go of our end, so that the others, who wait for tensors that never come, fail too."""
        await asyncio.wait(waiting, timeout=BREAK_S)  # most of them see it by themselves
        self._let_go()
        _, waiting = await asyncio.wait(waiting, timeout=BREAK_S)
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting, timeout=BREAK_S)

    def _let_go(self) -> None:
        """Close our connections, which torch does once nothing holds the group any more."""
        if self._group is not None:
            torch.distributed.destroy_process_group(self._group)
        self._group = None

    async def _join(self, servers: Sequence[Server]) -> None:
        await self._leave()
        # ranks: the trainer is 0, then each server's tensor-parallel ranks in turn
        sizes = [server.facts.tp_size if server.facts else 1 for server in servers]
        offsets = list(itertools.accumulate(sizes, initial=1))
        world = offsets[-1]
        name = f"{self._name}-{next(self._count)}"
        port = _free_port()
        common = {"master_address": self._host, "master_port": port, "world_size": world, "group_name": name}
        patience_s = min(self._timeout_s, JOIN_S)
        joins = (
            server.control(
                "/init_weights_update_group",
                {**common, "rank_offset": offset, "backend": self._backend},
                timeout_s=patience_s,
            )
            for server, offset in zip(servers, offsets, strict=False)
        )
        own = asyncio.to_thread(_joined, f"tcp://{self._host}:{port}", world, name, self._backend, patience_s)
        self._members, self._group_name = tuple(servers), name
        *_, self._group = await _all(*joins, own)

    async def _leave(self) -> None:
        members, name = self._members, self._group_name
        self._members, self._group_name = (), ""
        if name:
            leaves = (server.control("/destroy_weights_update_group", {"group_name": name}) for server in members)
            await asyncio.gather(*leaves, return_exceptions=True)
        self._let_go()

    async def unpack(self, cargo: Cargo) -> None:
        """Nothing: nothing was made."""

    async def close(self) -> None:
        """Leave the group."""
        await self._leave()


async def _all(*awaitables: Any) -> list[Any]:
    """The results of all, or the first failure once all have ended: none is left running in a group."""
    results = await asyncio.gather(*awaitables, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _joined(url: str, world: int, name: str, backend: str, timeout_s: float) -> Any:
    """A group beside the default one, which accelerate may or may not have made."""
    c10d: Any = torch.distributed.distributed_c10d
    timeout = timedelta(seconds=timeout_s)
    store, _, _ = next(c10d.rendezvous(url, 0, world, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world,
        0,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world)}
    return group


def _broadcast(group: Any, tensors: Sequence[Tensor], backend: str) -> str:
    """Why it failed, in words: an exception's frames would hold the group, and with it the connections, open."""
    try:
        works = [
            torch.distributed.broadcast(
                tensor if backend == "nccl" else tensor.cpu(), src=0, group=group, async_op=True
            )
            for tensor in tensors
        ]
        for work in works:
            work.wait()
    except RuntimeError as error:
        return str(error)
    return ""
