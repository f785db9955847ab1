"""The gateway: an OpenAI-compatible address for each episode, behind which an engine of ours samples.

Invariants: an episode is reached by its secret alone, which is compared in constant time and never logged; what is
sampled under one secret is in that episode's tree and nowhere else.

Example:
    gateway = Gateway(engine, chat, SystemClock())
    async with gateway.serving() as address:
        episode = gateway.open(Episode(...), sampling=Sampling(max_tokens=1024))
        await run_agent(base_url=episode.base_url, api_key=episode.api_key)
        record = await episode.close(Outcome.terminated())
    trajectory = Trajectory(streams=record.streams, outcome=record.outcome, info=record.info, ...)
"""

import hashlib
import hmac
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock
from sao_gym.errors import ConfigError
from sao_gym.gateway.app import key_of, make_app
from sao_gym.gateway.counts import Counts
from sao_gym.gateway.gate import Gate
from sao_gym.gateway.record import EpisodeRecord
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.retry import Retry
from sao_gym.gateway.sampled import TextChat
from sao_gym.gateway.server import Address, served
from sao_gym.gateway.session import Session
from sao_gym.gateway.settings import GatewaySettings
from sao_gym.protocols import Clock, Engine, Sampling
from sao_gym.rollout import Episode
from sao_gym.stream import Outcome, TruncationReason

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

_REMEMBERED = 4096
"""Closed episodes whose late callers are told so; those of older ones are told that the secret is wrong."""


class Gateway:
    """Serves the episodes that are open. Belongs to one event loop."""

    def __init__(
        self, engine: Engine, chat: TextChat, clock: Clock | None = None, settings: GatewaySettings | None = None
    ) -> None:
        self.settings = settings or GatewaySettings()
        self.metrics = Counts()
        self._engine, self._chat = engine, chat
        self._clock = clock or SystemClock()
        self._gate = Gate(
            self._clock,
            max_running=self.settings.max_running,
            max_waiting=self.settings.max_waiting,
            wait_s=self.settings.hold_s,
            retry_after_s=self.settings.retry_after_s,
        )
        self._open: dict[bytes, tuple[str, Session]] = {}
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self._address: Address | None = None

    @cached_property
    def app(self) -> "Starlette":
        """The ASGI application, for a server or for tests without one. Raises ConfigError without starlette."""
        return make_app(_SecretDoor(self))

    @asynccontextmanager
    async def serving(
        self, *, host: str = "127.0.0.1", port: int = 0, uds: str | os.PathLike[str] | None = None, mode: int = 0o600
    ) -> AsyncIterator[Address]:
        """Listen meanwhile, on a loopback port (0: any free one) or a unix socket. Raises ConfigError."""
        async with served(self.app, host=host, port=port, uds=uds, mode=mode) as address:
            before, self._address = self._address, address
            try:
                yield address
            finally:
                self._address = before

    def hold(self) -> AbstractAsyncContextManager[None]:
        """Let no call in meanwhile (a publication, say): calls wait, and are asked to come again after `hold_s`."""
        return self._gate.hold()

    def open(
        self,
        episode: Episode,
        *,
        sampling: Sampling,
        budgets: Budgets | None = None,
        on_version: Callable[[int], None] | None = None,
    ) -> "GatewayEpisode":
        """Give an episode its address. `sampling.max_tokens` is a further cap per turn; its seed is replaced per call.

        `on_version` hears the engine's version when the first token is asked for, and the exact one once it is sampled.
        """
        secret = secrets.token_urlsafe(32)
        session = Session(
            episode,
            engine=self._engine,
            chat=self._chat,
            clock=self._clock,
            gate=self._gate,
            budgets=budgets or Budgets(),
            sampling=sampling,
            settings=self.settings,
            on_version=on_version or (lambda version: None),
        )
        self._open[_digest(secret)] = secret, session
        return GatewayEpisode(self, session, secret)

    def session_of(self, secret: str) -> Session:
        """The open session of a secret. Raises Refusal."""
        digest = _digest(secret)
        known, session = self._open.get(digest, ("", None))
        if session is None:
            raise Refusal.over("it was closed") if digest in self._closed else Refusal.secret()
        if not hmac.compare_digest(known.encode(), secret.encode("utf-8", "replace")):
            raise Refusal.secret()
        return session

    @property
    def context_length(self) -> int:
        """Of the engine."""
        return self._engine.context_length

    @property
    def address(self) -> Address:
        """Where it listens. Raises ConfigError while it is not serving."""
        if self._address is None:
            raise ConfigError("the gateway is not serving; enter `async with gateway.serving()` first")
        return self._address

    async def _close(self, secret: str, session: Session, outcome: Outcome | None) -> EpisodeRecord:
        digest = _digest(secret)
        is_first = self._open.pop(digest, None) is not None
        self._closed[digest] = None
        while len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)
        record = await session.close(outcome)
        if is_first:
            self.metrics.add(session.counts)
        return record


class _SecretDoor:
    """An episode is found by its secret, in the path or as API key."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.settings = gateway.settings

    @property
    def context_length(self) -> int:
        return self._gateway.context_length

    def require_key(self, request: "Request") -> None:
        self._gateway.session_of(_secret(request))

    def find(self, request: "Request", retry: Retry) -> Session:
        return self._gateway.session_of(_secret(request))

    def refused(self, session: Session) -> None:
        """Nothing follows from it."""

    def answered(self, session: Session) -> Mapping[str, str]:
        return {}


def _secret(request: "Request") -> str:
    found = request.path_params.get("secret")
    return str(found) if found else key_of(request)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "replace")).digest()


class GatewayEpisode:
    """One open episode: the address to give to its agent, and its end."""

    def __init__(self, gateway: Gateway, session: Session, secret: str) -> None:
        self._gateway, self._secret = gateway, secret
        self.session = session

    def __repr__(self) -> str:
        return f"GatewayEpisode({self.session.episode.uid!r})"

    @property
    def api_key(self) -> str:
        """The episode's secret: as API key it stands for the path."""
        return self._secret

    @property
    def path(self) -> str:
        """What follows an address of the gateway, also one that a forwarder gives."""
        return f"/s/{self._secret}/v1"

    @property
    def base_url(self) -> str:
        """Base address for OpenAI's clients. Raises ConfigError while the gateway is not serving."""
        return self._gateway.address.url + self.path

    @property
    def auxiliary_url(self) -> str:
        """Base address for calls that are kept and not trained: titles, condensers."""
        return f"{self._gateway.address.url}/s/{self._secret}/auxiliary/v1"

    @property
    def truncation(self) -> TruncationReason | None:
        """The budget that the agent ran into, None if it got what it last asked for."""
        return self.session.truncation

    async def close(self, outcome: Outcome | None = None) -> EpisodeRecord:
        """End it. Calls in flight are cancelled; later ones are refused. Idempotent.

        The record's outcome is an error where the engine failed; what `outcome` says where that is an error of another
        kind than `AGENT_FAILED`; truncated where the agent ran into a budget and got nothing afterwards; else `outcome`,
        by default terminated.
        """
        return await self._gateway._close(self._secret, self.session, outcome)
