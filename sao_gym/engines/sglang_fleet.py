"""Which server a request goes to: the one of its session where it can, else the least busy; never one that lags.

Invariant: a session's next request goes only to a server at or above the version of the session's last token.
"""

import asyncio
from collections.abc import Iterator, Sequence

from sao_gym.engines.sglang_http import within
from sao_gym.engines.sglang_server import Server, ServerState
from sao_gym.errors import DeadlineError, EngineError
from sao_gym.protocols import Clock


class Fleet:
    """The servers of one engine."""

    def __init__(self, servers: Sequence[Server], clock: Clock, *, wait_s: float) -> None:
        self.servers = tuple(servers)
        self._clock = clock
        self._wait_s = wait_s
        self._homes: dict[str, Server] = {}
        self._floors: dict[str, int] = {}
        self._changed = asyncio.Event()

    def live(self) -> Iterator[Server]:
        """Those that serve."""
        return (server for server in self.servers if server.state is ServerState.LIVE)

    async def choose(self, session: str | None, at_least: int) -> Server:
        """A live server at `at_least` or above. Raises EngineError if none comes back in time."""
        floor = max(at_least, self._floors.get(session or "", -1))
        if (server := self._pick(session, floor)) is not None:
            return server
        try:
            return await within(self._wait(session, floor), self._wait_s, self._clock, "a server")
        except DeadlineError as error:
            states = "; ".join(f"{server.url} {server.state}: {server.why_out}" for server in self.servers)
            raise EngineError(f"no server served version {floor} within {self._wait_s:g} s ({states})") from error

    async def _wait(self, session: str | None, floor: int) -> Server:
        while (server := self._pick(session, floor)) is None:
            self._changed.clear()
            await self._changed.wait()
        return server

    def _pick(self, session: str | None, floor: int) -> Server | None:
        able = [server for server in self.live() if server.version >= floor]
        home = self._homes.get(session) if session else None
        if not able or home in able:
            return home if home in able else None
        server = min(able, key=lambda one: len(one.flights))
        if session:
            self._homes[session] = server
        return server

    def changed(self) -> None:
        """Wake up who waits for a server."""
        self._changed.set()

    def note(self, session: str | None, version: int) -> None:
        """A session holds a token of `version`."""
        if session:
            self._floors[session] = max(version, self._floors.get(session, -1))

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._homes.pop(session, None)
        self._floors.pop(session, None)
