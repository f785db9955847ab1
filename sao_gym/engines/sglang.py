"""The engine for GPUs and clusters: SGLang servers over HTTP.

What DESIGN's engine promises holds here too: ids and log-probs as sampled, a policy version per token, requests that go
on through a publication. Beyond that: a server that dies takes only its own requests with it, and those go on elsewhere
from the tokens whose version is known.

Example:
    engine = SGLangEngine(["http://127.0.0.1:30000"], model, DiskTransport(folder, timeout_s=600))
    await engine.start(ModuleWeights(model), version=0)
    generation = await engine.generate(prompt_ids, Sampling(max_tokens=64, stop_token_ids=(2,)), "episode-1")
    await engine.publish(ModuleWeights(learner), version=1)
    await engine.close()
"""

import asyncio
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np

from sao_gym.clock import SystemClock
from sao_gym.engines.local import EngineDeadlines
from sao_gym.engines.sglang_answer import UNPUBLISHED, Answer, Tokens, read_chunk, routed_rows, scored_tokens
from sao_gym.engines.sglang_cargo import Cargo, Transport
from sao_gym.engines.sglang_fleet import Fleet
from sao_gym.engines.sglang_http import Http, ServerLostError
from sao_gym.engines.sglang_names import CheckpointNames
from sao_gym.engines.sglang_publish import FleetPublisher, ServerPublication
from sao_gym.engines.sglang_request import check_sampling, checked_ids, generate_body, is_temperature, score_body
from sao_gym.engines.sglang_router import servers_behind
from sao_gym.engines.sglang_server import Flight, PauseMode, Server, ServerState
from sao_gym.engines.waiting import result_within
from sao_gym.errors import ConfigError, EngineError
from sao_gym.loops import submit
from sao_gym.protocols import Clock, EngineHealth, Generation, Sampling, WeightSource
from sao_gym.stream import Floats, Ids, StopReason

T = TypeVar("T")

MONITOR_S = 5.0
READY_S = 30.0
MISSED = 3
"""So many times in a row a server may fail to answer before it is out."""
FRUITLESS = 20
"""A request that was sent so often without a new token is given up."""
RETRY_S = 0.2


@dataclass(slots=True)
class SGLangCounts:
    """What happened to requests so far. `redone` tokens were sampled again, their version being unknown."""

    requests: int = 0
    lost: int = 0
    resumed: int = 0
    redone: int = 0
    cached_tokens: int = 0
    fed_tokens: int = 0


@dataclass(eq=False, slots=True)
class _Request:
    """One generation on its way, over as many answers as it takes."""

    prompt: list[int]
    sampling: Sampling
    session: str | None
    limit: int
    got: Tokens = field(default_factory=lambda: Tokens([], [], []))
    experts: list[Any] = field(default_factory=list)
    is_abort_asked: bool = False

    @property
    def left(self) -> int:
        return self.limit - len(self.got.ids)

    @property
    def stop(self) -> StopReason | None:
        """The ids alone decide: a server may know other stop ids, and its own limit."""
        if self.got.ids and self.got.ids[-1] in self.sampling.stop_token_ids:
            return StopReason.STOP
        if self.left <= 0:
            return StopReason.LENGTH
        return StopReason.ABORT if self.is_abort_asked else None


class SGLangEngine:
    """An `Engine` over the servers at `urls`, or behind routers there. `model` gives shapes and names, not weights.

    `mode`: at a publication keep keys and values ("in_place"), compute them again ("retract"), or have requests come
    back and send them again ("abort"). Raises ConfigError for settings that cannot be used.
    """

    def __init__(
        self,
        urls: Sequence[str],
        model: Any,
        transport: Transport,
        *,
        context_length: int | None = None,
        mode: PauseMode = "in_place",
        clock: Clock | None = None,
        deadlines: EngineDeadlines | None = None,
        api_key: str | None = None,
        server_wait_s: float = 300.0,
    ) -> None:
        if not urls:
            raise ConfigError("the sglang engine has no servers: give their URLs, or let it start some")
        self._urls = tuple(urls)
        self._vocab_size = int(model.config.vocab_size)
        self._layers = int(getattr(model.config, "num_hidden_layers", 0))
        self._top_k = int(getattr(model.config, "num_experts_per_tok", 0) or 0)
        self._names = CheckpointNames(model)
        self._transport = transport
        self._context_length = context_length or 0
        self._mode = mode
        self._clock = clock or SystemClock()
        self._deadlines = deadlines or EngineDeadlines()
        self._api_key = api_key
        self._server_wait_s = server_wait_s
        self._run = secrets.token_hex(4)
        self._versions: dict[str, int] = {}
        self._version = -1
        self._requests: set[_Request] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._suspects: set[Server] = set()
        self._http: Http | None = None
        self._fleet: Fleet | None = None
        self._publisher: FleetPublisher | None = None
        self.counts = SGLangCounts()

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self, source: WeightSource, version: int) -> None:
        """Reach every server and publish `source` to them.

        Raises ConfigError for servers that cannot be used, EngineError if none took the weights.
        """
        what = f"the servers {', '.join(self._urls)} to take version {version}"
        await self._run_within(self._start(source, version), self._deadlines.publish_s, what)

    async def _start(self, source: WeightSource, version: int) -> None:
        self._http = Http(self._clock, self._api_key)
        urls = [found for url in self._urls for found in await servers_behind(url, self._http)]
        servers = [Server(url, self._http) for url in dict.fromkeys(urls)]
        for server in servers:
            await self._admit(server)
        self._fleet = Fleet(servers, self._clock, wait_s=self._server_wait_s)
        self._publisher = FleetPublisher(self._fleet, self._transport, self._clock, mode=self._mode)
        await self._publish(source, version)
        self._keep(self._monitor())

    async def _admit(self, server: Server) -> None:
        facts = await server.ask_facts()
        name = f"{server.url} (SGLang {facts.version})"
        if facts.preferred_sampling_params:
            raise ConfigError(
                f"{name} has preferred sampling params {facts.preferred_sampling_params}: training samples from the whole "
                "distribution; start the server without them"
            )
        if facts.dp_size != 1:
            raise ConfigError(
                f"{name} runs {facts.dp_size} data-parallel replicas, which take no weights: start as many servers"
            )
        longest = facts.max_req_input_len - 1  # the server's own limit is exclusive
        if self._context_length > longest:
            raise ConfigError(
                f"a context of {self._context_length} tokens was asked for; {name} takes prompts of at most {longest}"
            )
        self._context_length = self._context_length or longest

    @property
    def _servers(self) -> Fleet:
        if self._fleet is None:
            raise EngineError("the sglang engine was not started, or is closed")
        return self._fleet

    @property
    def version(self) -> int:
        """The version that all servers that serve hold."""
        return self._version

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and completion together, that one request may hold."""
        return self._context_length

    @property
    def publications(self) -> tuple[ServerPublication, ...]:
        """Every publication to every server so far."""
        return tuple(self._publisher.history) if self._publisher else ()

    def counters(self) -> Mapping[str, float]:
        """Totals so far, and how many servers serve now."""
        publisher, fleet = self._publisher, self._fleet
        return {
            **asdict(self.counts),
            "publications_failed": publisher.failures if publisher else 0,
            "servers_taken_out": sum(server.times_out for server in fleet.servers) if fleet else 0,
            "servers_in_service": sum(server.state is not ServerState.OUT for server in fleet.servers) if fleet else 0,
        }

    # -- sampling -----------------------------------------------------------------------------------------------------

    async def generate(self, token_ids: Ids, sampling: Sampling, session: str | None = None) -> Generation:
        """Continue `token_ids`, at most to the context length. Cancelling the awaiting task frees the request.

        Calls with one `session` name go to one server while it serves. Raises EngineError, DeadlineError.
        """
        ids = checked_ids(token_ids, self._vocab_size)
        check_sampling(sampling)
        if len(ids) >= self.context_length:
            raise EngineError(f"a prompt of {len(ids)} tokens leaves no room in a context of {self.context_length}")
        limit = min(sampling.max_tokens, self.context_length - len(ids))
        request = _Request(ids, sampling, session, limit)
        what = f"a generation of {limit} tokens after {len(ids)}, session {session}"
        await self._run_within(self._generate(request), self._deadlines.generate_s, what)
        got, stop = request.got, request.stop
        return Generation(
            token_ids=np.array(got.ids, dtype=np.int32),
            logprobs=np.array(got.logprobs, dtype=np.float32) * np.float32(sampling.temperature != 0.0),
            versions=np.array(got.versions, dtype=np.int32),
            stop=stop or StopReason.LENGTH,
            temperature=sampling.temperature,
            extras={"routed_experts": np.concatenate(request.experts)} if request.experts else {},
        )

    async def _generate(self, request: _Request) -> None:
        self.counts.requests += 1
        self._requests.add(request)
        fruitless = 0
        try:
            while request.stop is None:
                before = len(request.got.ids)
                if await self._send(request):
                    return
                fruitless = 0 if len(request.got.ids) > before else fruitless + 1
                if fruitless == FRUITLESS:
                    raise EngineError(f"a request was sent {FRUITLESS} times without a new token")
                if fruitless and request.stop is None:
                    await self._clock.sleep(RETRY_S * min(fruitless, 10))
        finally:
            self._requests.discard(request)

    async def _send(self, request: _Request) -> bool:
        """Send what is left, once; whether that was the end though neither a stop id nor the limit was reached."""
        floor = request.got.versions[-1] if request.got.versions else -1
        server = await self._servers.choose(request.session, floor)
        answer = Answer(server.label)
        flight = Flight(session=request.session)
        ids = request.prompt + request.got.ids
        wants_experts = bool(server.facts and server.facts.enable_return_routed_experts and self._top_k)
        body = generate_body(
            flight.rid, ids, request.sampling, request.left, salt=server.label, routed_experts=wants_experts
        )
        server.flights.add(flight)
        flight.task = asyncio.ensure_future(self._read(server, body, answer))
        try:
            await asyncio.wait({flight.task})
            is_lost = self._is_lost(flight)
        except asyncio.CancelledError:
            flight.task.cancel()
            self._keep(server.abort(flight.rid))
            raise
        finally:
            server.flights.discard(flight)
        self._take(request, answer, len(ids), wants_experts)
        if answer.is_of_new_server:
            self._take_out_new(server)
            return False
        if is_lost:
            self.counts.lost += 1
            self._keep(server.abort(flight.rid))
            await self._suspect(server)
            return False
        is_length = answer.finish is not None and answer.finish.type == "length"
        return is_length and request.stop is None  # the server's memory ends before the model's context

    def _take_out_new(self, server: Server) -> None:
        """It died and was started again before anybody noticed: out, until the monitor has given it the weights."""
        if server.state is ServerState.LIVE:
            server.take_out("it was started again, and holds no weights of this run")

    async def _suspect(self, server: Server) -> None:
        """Take a server out at once if it broke an answer off and does not answer now; one request asks for all."""
        if server in self._suspects or server.state is not ServerState.LIVE:
            return
        self._suspects.add(server)
        try:
            if not await server.is_ready(READY_S) and server.state is ServerState.LIVE:
                server.take_out("it broke off an answer and does not answer any more")
        finally:
            self._suspects.discard(server)

    def _is_lost(self, flight: Flight) -> bool:
        """Whether the answer broke off. Raises what is no loss."""
        task = flight.task
        if task is None or task.cancelled():
            return True
        error = task.exception()
        if error is None:
            return False
        if not isinstance(error, ServerLostError):
            raise error
        return True

    async def _read(self, server: Server, body: dict[str, Any], answer: Answer) -> None:
        http = self._http
        if http is None:
            raise EngineError("the sglang engine is closed")
        url = f"{server.url}/generate"
        if body["stream"]:
            async for event in http.events(url, body):
                _add(answer, event)
            if answer.finish is None:
                raise ServerLostError(f"{url}: the stream ended before the answer did")
        else:
            _add(answer, await http.call(url, body, timeout_s=self._deadlines.generate_s))

    def _take(self, request: _Request, answer: Answer, prompt_length: int, has_experts: bool) -> None:
        """Append what the answer brought for certain."""
        if answer.is_of_new_server:
            self.counts.redone += len(answer.ids)
            return
        tokens = answer.tokens(self._versions)
        n = len(tokens.ids)
        self.counts.redone += len(answer.ids) - n
        self.counts.resumed += bool(request.got.ids and n)
        self.counts.cached_tokens += answer.cached_tokens
        self.counts.fed_tokens += prompt_length
        got = request.got
        request.got = Tokens(got.ids + tokens.ids, got.logprobs + tokens.logprobs, got.versions + tokens.versions)
        if has_experts and n:
            if answer.routed_experts is None or n != len(answer.ids):
                request.experts = []
            else:
                rows = routed_rows(answer.routed_experts, layers=self._layers, top_k=self._top_k, n=n)
                request.experts.append(rows)
        if tokens.versions:
            self._servers.note(request.session, tokens.versions[-1])

    async def score(self, token_ids: Ids, temperature: float = 1.0) -> Floats:
        """Log-prob of each token given those before it [n] under the engine's version; the first is 0.

        A server scores a prompt at temperature 1 alone. Raises EngineError, DeadlineError.
        """
        ids = checked_ids(token_ids, self._vocab_size)
        if len(ids) > self.context_length or not is_temperature(temperature) or temperature != 1.0:
            raise EngineError(
                f"cannot score {len(ids)} tokens at temperature {temperature}: at most {self.context_length}, and an "
                "SGLang server scores a prompt at temperature 1"
            )
        return await self._run_within(self._score(ids), self._deadlines.score_s, f"scoring {len(ids)} tokens")

    async def _score(self, ids: list[int]) -> Floats:
        for _ in range(FRUITLESS):
            server = await self._servers.choose(None, self._version)
            flight = Flight(session=None)
            label = server.label
            body = score_body(flight.rid, ids, 1.0, label)
            try:
                http = self._http
                if http is None:
                    raise EngineError("the sglang engine is closed")
                data = await http.call(f"{server.url}/generate", body, timeout_s=self._deadlines.score_s)
            except ServerLostError:
                await self._clock.sleep(RETRY_S)
                continue
            chunk = read_chunk(data)
            if chunk.meta_info.weight_version == label == server.label:
                return scored_tokens(chunk, ids, vocab_size=self._vocab_size)
            if chunk.meta_info.weight_version == UNPUBLISHED:
                self._take_out_new(server)
        raise EngineError(f"no server scored {len(ids)} tokens under one version in {FRUITLESS} tries")

    # -- publication --------------------------------------------------------------------------------------------------

    async def publish(self, source: WeightSource, version: int) -> None:
        """Serve `source` as `version` from the next token on; requests in flight go on.

        Raises EngineError if no server took the weights whole; the old version then goes on serving.
        """
        what = f"the publication of version {version}"
        await self._run_within(self._publish(source, version), self._deadlines.publish_s, what)

    async def _publish(self, source: WeightSource, version: int) -> None:
        if self._publisher is None:
            raise EngineError("the sglang engine was not started, or is closed")
        label = f"{self._run}-{version}"
        named = await asyncio.to_thread(self._names.named, source)
        weight_hash = await asyncio.to_thread(lambda: source.weight_hash)
        cargo = Cargo(version=version, label=label, weight_hash=weight_hash, named=named)
        self._versions[label] = version
        await self._publisher.publish(cargo)
        self._version = version

    # -- the rest -----------------------------------------------------------------------------------------------------

    async def abort(self, session: str) -> None:
        """End a session's requests: they return what was sampled so far, with stop reason `abort`."""
        await self._run_within(self._abort(session), self._deadlines.health_s, f"the abort of session {session}")

    async def _abort(self, session: str) -> None:
        for request in self._requests:
            if request.session == session:
                request.is_abort_asked = True
        rids = [(server, f.rid) for server in self._servers.servers for f in server.flights if f.session == session]
        await asyncio.gather(*(server.abort(rid) for server, rid in rids))

    async def end_session(self, session: str) -> None:
        """Forget which server holds what was kept for `session`."""

        async def forget() -> None:
            self._servers.forget(session)

        await self._run_within(forget(), self._deadlines.health_s, f"the end of session {session}")

    async def health(self) -> EngineHealth:
        """Raises EngineError if no server serves."""
        return await self._run_within(self._health(), self._deadlines.health_s, "the engine's health")

    async def _health(self) -> EngineHealth:
        fleet, publisher = self._servers, self._publisher
        ready = [server for server in fleet.live() if await server.is_ready(READY_S)]
        if not ready and all(server.state is not ServerState.PAUSED for server in fleet.servers):
            raise EngineError(
                "; ".join(f"{server.url} is {server.state}: {server.why_out}" for server in fleet.servers)
            )
        running = sum(len(server.flights) for server in fleet.servers)
        current = publisher.current if publisher else None
        return EngineHealth(
            version=self._version,
            running=running,
            waiting=len(self._requests) - running if len(self._requests) > running else 0,
            weight_hash=current.weight_hash if current else "",
        )

    async def _monitor(self) -> None:
        """Take out servers that do not answer, and bring back those that do again."""
        missed: dict[Server, int] = {}
        while self._fleet is not None:
            await self._clock.sleep(MONITOR_S)
            for server in self._fleet.servers:
                if server.state is ServerState.PAUSED:
                    continue
                is_ready = await server.is_ready(READY_S)
                missed[server] = 0 if is_ready else missed.get(server, 0) + 1
                if server.state is ServerState.LIVE and missed[server] >= MISSED:
                    server.take_out("it does not answer")
                elif server.state is ServerState.OUT and is_ready and self._publisher:
                    await self._publisher.catch_up([server])

    async def close(self) -> None:
        """Let go of the servers; requests in flight fail with EngineError. Idempotent."""
        await self._run_within(self._close(), self._deadlines.health_s, "the end of the engine")

    async def _close(self) -> None:
        fleet, http = self._fleet, self._http
        self._fleet = self._http = self._publisher = None
        tasks = [task for task in self._background if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in fleet.servers if fleet else ():
            server.take_out("the engine was closed")
        if http is not None:
            await self._transport.close()
            await http.close()

    def _keep(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run beside everything else until it ends or the engine is closed."""
        task = asyncio.ensure_future(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _run_within(self, coroutine: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        return await result_within(submit(coroutine), timeout_s, self._clock, what)


def _add(answer: Answer, data: bytes) -> None:
    """Take a chunk, or say what went wrong in its place."""
    chunk = read_chunk(data)
    if chunk.error is not None:
        failure = chunk.error
        text = failure if isinstance(failure, str) else f"{failure.code}: {failure.message}"
        raise (ServerLostError if not isinstance(failure, str) and (failure.code or 0) >= 500 else EngineError)(text)
    answer.add(chunk)
