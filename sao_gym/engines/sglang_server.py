"""One SGLang server as its client knows it: what it serves, which requests are there, and its control calls.

Invariant: `label` and `version` change only between `close_gate` and `open_gate`, while the server samples nothing and
no request is sent to it; so a request's version at its sending is known.
"""

import asyncio
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import msgspec

from sao_gym.engines.sglang_http import Http, ServerLostError, ServerRefusedError
from sao_gym.errors import EngineError

PauseMode = Literal["in_place", "retract", "abort"]
CONTROL_S = 60.0


class ServerState(StrEnum):
    """`live` serves, `paused` is being published to, `out` serves nothing until it has caught up."""

    LIVE = "live"
    PAUSED = "paused"
    OUT = "out"


@dataclass(eq=False, slots=True)
class Flight:
    """A request that was sent. `is_abort_asked` tells an abort that the engine's user asked for from another."""

    session: str | None
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    is_abort_asked: bool = False
    is_lost: bool = False
    task: asyncio.Task[None] | None = None


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says about itself."""

    version: str
    max_req_input_len: int
    incremental_streaming_output: bool = False
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    device: str = ""
    dtype: str = ""
    quantization: str | None = None
    preferred_sampling_params: Any = None
    enable_return_routed_experts: bool = False
    enable_deterministic_inference: bool = False
    max_total_num_tokens: int = 0


class _Checksums(msgspec.Struct):
    checksums: dict[str, str]


class _Checked(msgspec.Struct):
    success: bool = True
    message: str = ""
    ranks: list[_Checksums] = []
    per_engine_checksum: str = ""


class _Done(msgspec.Struct):
    success: bool = True
    message: str = ""


class Server:
    """A server at `url`. It is out until it has been published to."""

    def __init__(self, url: str, http: Http) -> None:
        self.url = url.rstrip("/")
        self.state = ServerState.OUT
        self.version = -1
        self.label = ""
        self.flights: set[Flight] = set()
        self.facts: ServerFacts | None = None
        self.why_out = "it has not been published to yet"
        self.times_out = 0
        self._http = http

    async def ask_facts(self) -> ServerFacts:
        """What the server is. Raises EngineError for one that this client cannot use."""
        data = await self._http.call(f"{self.url}/server_info", timeout_s=CONTROL_S)
        try:
            self.facts = msgspec.json.decode(data, type=ServerFacts)
        except msgspec.MsgspecError as error:
            raise EngineError(f"{self.url} is no SGLang server that this client knows: {error}") from error
        return self.facts

    async def is_ready(self, timeout_s: float) -> bool:
        """Whether the server answers and takes requests."""
        try:
            await self._http.call(f"{self.url}/ready", timeout_s=timeout_s)
        except (EngineError, TimeoutError):
            return False
        return True

    async def control(self, path: str, body: Any, *, timeout_s: float = CONTROL_S) -> None:
        """A control call. Raises ServerRefusedError also where the server says in words that it failed."""
        data = await self._http.call(f"{self.url}{path}", body, timeout_s=timeout_s)
        if data.startswith(b"{"):
            done = msgspec.json.decode(data, type=_Done)
            if not done.success:
                raise ServerRefusedError(f"{self.url}{path} failed: {done.message}")

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling. Requests stay (`in_place`, `retract`), or come back with what they have (`abort`)."""
        await self.control("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on sampling."""
        await self.control("/continue_generation", {})

    async def checksums(self) -> list[dict[str, str]]:
        """For each rank, its parameters' checksums by the server's own names."""
        data = await self._http.call(f"{self.url}/weights_checker", {"action": "checksum"}, timeout_s=CONTROL_S)
        return [rank.checksums for rank in msgspec.json.decode(data, type=_Checked).ranks]

    async def abort(self, rid: str) -> None:
        """End a request if it is still there; never raises for a server that is gone."""
        try:
            await self.control("/abort_request", {"rid": rid})
        except (ServerLostError, TimeoutError):
            return

    def close_gate(self) -> None:
        """From now on no request is sent to it."""
        self.state = ServerState.PAUSED

    def open_gate(self, label: str, version: int) -> None:
        """It serves `version`, which it calls `label`."""
        self.label, self.version = label, version
        self.state = ServerState.LIVE

    def take_out(self, why: str) -> None:
        """It serves nothing any more; its requests are lost, and go on elsewhere."""
        self.times_out += self.state is not ServerState.OUT
        self.state, self.why_out = ServerState.OUT, why
        for flight in list(self.flights):
            if flight.task is not None and not flight.task.done():
                flight.is_lost = True
                flight.task.cancel()
