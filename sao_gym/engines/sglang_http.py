"""HTTP to SGLang servers, on the background loop: many requests in flight, each wait with a deadline.

A server that says no is told apart from one that cannot be reached: the first answer would be the same again, the
second may come from another server.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import msgspec

from sao_gym.errors import ConfigError, DeadlineError, EngineError
from sao_gym.protocols import Clock

T = TypeVar("T")

CONNECT_S = 10.0


class ServerLostError(EngineError):
    """A server that cannot be reached, or that went away in the middle of an answer."""


class ServerRefusedError(EngineError):
    """A server that understood and said no. `status` is that of its answer, 0 where it said so in words."""

    status = 0


async def within(awaitable: Awaitable[T], timeout_s: float, clock: Clock, what: str) -> T:
    """The result of `awaitable`, which is cancelled after `timeout_s` on `clock`: DeadlineError, naming `what`."""
    work = asyncio.ensure_future(awaitable)
    timer = asyncio.ensure_future(clock.sleep(timeout_s))
    try:
        waited: set[asyncio.Future[Any]] = {work, timer}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise DeadlineError(f"waited {timeout_s:g} s for {what}")
        return work.result()
    finally:
        timer.cancel()
        work.cancel()


class Http:
    """One client for all servers. Made and used on one loop."""

    def __init__(self, clock: Clock, api_key: str | None = None) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError("the sglang engine needs aiohttp: pip install 'sao-gym[sglang]'") from error
        self._aiohttp = aiohttp
        self._clock = clock
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,  # servers of a run are reached directly, whatever proxies the machine has
        )

    async def call(self, url: str, body: Any = None, *, timeout_s: float) -> bytes:
        """The answer to a POST of `body` as JSON, or to a GET where there is none.

        Raises ServerLostError, ServerRefusedError, DeadlineError.
        """
        return await within(self._call(url, body), timeout_s, self._clock, f"an answer of {url}")

    async def _call(self, url: str, body: Any) -> bytes:
        try:
            async with self._request(url, body) as response:
                data: bytes = await response.read()
                self._check(url, response.status, data)
                return data
        except (self._aiohttp.ClientError, OSError) as error:
            raise _lost(url, error) from error

    async def events(self, url: str, body: Any) -> AsyncIterator[bytes]:
        """The events of a stream as they come, each the bytes after `data: `. Without a deadline: the caller has one.

        Raises ServerLostError, also where the stream ends before it says so, and ServerRefusedError.
        """
        try:
            async with self._request(url, body) as response:
                if response.status != 200:
                    self._check(url, response.status, await response.read())
                buffer = b""
                async for data in response.content.iter_any():
                    *events, buffer = (buffer + data).split(b"\n\n")
                    for event in events:
                        if event.startswith(b"data: [DONE]"):
                            return
                        if event.startswith(b"data: "):
                            yield event[6:]
        except (self._aiohttp.ClientError, OSError) as error:
            raise _lost(url, error) from error
        raise ServerLostError(f"{url}: the stream ended before its end")

    def _request(self, url: str, body: Any) -> Any:
        if body is None:
            return self._session.get(url)
        return self._session.post(url, data=msgspec.json.encode(body), headers={"Content-Type": "application/json"})

    def _check(self, url: str, status: int, data: bytes) -> None:
        text = data[:500].decode(errors="replace")
        if status in (408, 429) or status >= 500:
            raise ServerLostError(f"{url} answered {status}: {text}")
        if status != 200:
            refusal = ServerRefusedError(f"{url} answered {status}: {text}")
            refusal.status = status
            raise refusal

    async def close(self) -> None:
        """Close every connection."""
        await self._session.close()


def _lost(url: str, error: Exception) -> ServerLostError:
    return ServerLostError(f"{url}: {type(error).__name__} {error}")
