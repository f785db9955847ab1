"""Publication to many servers: each one is paused, given the weights, checked, and goes on; all of them or none serve.

    pack -> per server: gate shut, pause -> begin -> deliver -> end -> flush -> checksums -> continue, gate open

Invariants: a server whose weights are not known to be whole samples nothing. One that missed a version is out until it
has caught up. If no server took a version, each is given back the one before, which then goes on serving.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sao_gym.engines.sglang_cargo import Cargo, Transport
from sao_gym.engines.sglang_fleet import Fleet
from sao_gym.engines.sglang_http import ServerRefusedError
from sao_gym.engines.sglang_names import checksums, first_difference
from sao_gym.engines.sglang_server import PauseMode, Server, ServerState
from sao_gym.errors import EngineError
from sao_gym.protocols import Clock

Failures = dict[Server, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPublication:
    """One server's part: how long it stood still, and which check its weights passed (`bytes`, `peers` or `none`)."""

    url: str
    version: int
    seconds: float
    check: str


class FleetPublisher:
    """Publishes to a fleet, one version at a time. `mode` says what becomes of requests in flight."""

    def __init__(self, fleet: Fleet, transport: Transport, clock: Clock, *, mode: PauseMode) -> None:
        self._fleet = fleet
        self._transport = transport
        self._clock = clock
        self._mode = mode
        self._turn = asyncio.Lock()
        self._expected: tuple[str, dict[str, str]] = ("", {})
        self._seen: tuple[str, Sequence[Mapping[str, str]]] = ("", ())
        self.current: Cargo | None = None
        self.history: list[ServerPublication] = []
        self.failures = 0

    async def publish(self, cargo: Cargo) -> None:
        """Give every server that serves a new version. Raises EngineError if none took it; the old one then serves."""
        async with self._turn:
            await self._transport.pack(cargo)
            targets = list(self._fleet.live()) or list(self._fleet.servers)
            failed = await self._reach_all(cargo, targets)
            self.failures += len(failed)
            is_taken = len(failed) < len(targets)
            if is_taken:
                self.current = cargo
            if failed:
                await self._catch_up(failed)
            if not is_taken:
                raise EngineError("; ".join(failed.values()))
            await self._transport.unpack(cargo)

    async def catch_up(self, servers: Iterable[Server]) -> None:
        """Give servers that are out the version that is served. Those that cannot take it stay out."""
        async with self._turn:
            await self._catch_up({server: server.why_out for server in servers if server.state is ServerState.OUT})

    async def _catch_up(self, failed: Failures) -> None:
        for server, why in failed.items():
            again = {server: why} if self.current is None else await self._reach(self.current, [server])
            if again:
                server.take_out(again[server])

    async def _reach_all(self, cargo: Cargo, servers: Sequence[Server]) -> Failures:
        if self._transport.is_joint:
            return await self._reach(cargo, servers)
        failures: Failures = {}
        for part in await asyncio.gather(*(self._reach(cargo, [server]) for server in servers)):
            failures |= part
        return failures

    async def _reach(self, cargo: Cargo, servers: Sequence[Server]) -> Failures:
        """Publish to these together; whoever failed stays paused, its gate shut."""
        failures: Failures = {}
        started = self._clock.now()
        for server in servers:
            server.close_gate()
        try:
            ready = await _each(servers, lambda server: server.pause(self._mode), failures)
            if self._transport.is_in_session:
                ready = await _each(ready, _begin, failures)
            await self._deliver(cargo, ready, failures)
            if self._transport.is_in_session:
                await _each(ready, lambda server: server.control("/end_weight_update", {}), failures)
            whole = [server for server in ready if server not in failures]
            if self._mode != "in_place":
                whole = await _each(whole, lambda server: server.control("/flush_cache", {}), failures)
            checks: dict[Server, str] = {}
            whole = await _each(whole, lambda server: self._verify(cargo, server, checks), failures)
            whole = await _each(whole, Server.resume, failures)
        except BaseException:
            for server in servers:
                server.take_out(f"the publication of version {cargo.version} to it was broken off")
            raise
        for server in whole:
            server.open_gate(cargo.label, cargo.version)
            seconds = self._clock.now() - started
            self.history.append(
                ServerPublication(url=server.url, version=cargo.version, seconds=seconds, check=checks[server])
            )
        self._fleet.changed()
        return failures

    async def _deliver(self, cargo: Cargo, servers: Sequence[Server], failures: Failures) -> None:
        if not servers:
            return
        try:
            await self._transport.deliver(cargo, servers)
        except (EngineError, TimeoutError) as error:
            failures.update(dict.fromkeys(servers, f"version {cargo.version} was not delivered: {error}"))

    async def _verify(self, cargo: Cargo, server: Server, checks: dict[Server, str]) -> None:
        """Raises EngineError naming the first parameter that differs from what was sent, or from another server's."""
        try:
            found = await server.checksums()
        except ServerRefusedError:
            found = []
        if not found:
            checks[server] = "none"
            return
        if _holds_all(server, cargo):
            checks[server] = "bytes"
            if self._expected[0] != cargo.label:
                self._expected = (cargo.label, await asyncio.to_thread(checksums, cargo.named))
            wanted: Sequence[Mapping[str, str]] = [self._expected[1]]
        else:
            checks[server] = "peers"
            if self._seen[0] != cargo.label:
                self._seen = (cargo.label, found)
            wanted = self._seen[1]
        for expected, rank in zip(wanted, found, strict=False):
            if name := first_difference(expected, rank):
                raise EngineError(
                    f"{server.url} does not hold what was sent: {name} differs in version {cargo.version}"
                )


def _holds_all(server: Server, cargo: Cargo) -> bool:
    """Whether the server keeps each parameter whole, as it was sent, and hashes it in a way that can be done here."""
    facts = server.facts
    if facts is None or facts.device != "cpu" or facts.quantization:
        return False
    sent = {str(tensor.dtype).removeprefix("torch.") for _, tensor in cargo.named if tensor.is_floating_point()}
    return facts.tp_size == facts.dp_size == facts.pp_size == 1 and sent == {facts.dtype}


async def _begin(server: Server) -> None:
    """Open a session; one that a dead trainer left open is closed first."""
    try:
        await server.control("/begin_weight_update", {})
    except ServerRefusedError as error:
        if "already open" not in str(error):
            raise
        await server.control("/end_weight_update", {})
        await server.control("/begin_weight_update", {})


async def _each(
    servers: Sequence[Server], act: Callable[[Server], Awaitable[None]], failures: Failures
) -> list[Server]:
    """Those for which `act` succeeded; the others are noted with the reason."""
    results = await asyncio.gather(*(act(server) for server in servers), return_exceptions=True)
    done = []
    for server, result in zip(servers, results, strict=True):
        if result is None:
            done.append(server)
        elif isinstance(result, EngineError | TimeoutError):
            failures.setdefault(server, str(result))
        else:
            raise result
    return done
