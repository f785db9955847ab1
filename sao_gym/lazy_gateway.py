"""A gateway that is opened with the first episode that needs it, on a loopback port of its own.

Example:
    lazy = LazyGateway(engine, chat, SystemClock())
    gateway = await lazy.opened()
    await lazy.close()
"""

import asyncio
from typing import Any

from sao_gym.gateway import Gateway
from sao_gym.protocols import Clock, Engine


class LazyGateway:
    """One `Gateway` for everybody who asks. All of it belongs to one event loop."""

    def __init__(self, engine: Engine, chat: Any, clock: Clock) -> None:
        self._engine, self._chat, self._clock = engine, chat, clock
        self._gateway: Gateway | None = None
        self._serving: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._closing = asyncio.Event()

    async def opened(self) -> Gateway:
        """The gateway, serving. Raises ConfigError where it cannot be had."""
        async with self._opening:
            if self._gateway is None:
                gateway = Gateway(self._engine, self._chat, self._clock)
                ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._closing.clear()
                self._serving = asyncio.ensure_future(self._serve(gateway, ready))
                await ready
                self._gateway = gateway
            return self._gateway

    async def _serve(self, gateway: Gateway, ready: "asyncio.Future[None]") -> None:
        """Serve until closed: entered and left by one task, whoever opens and whoever closes."""
        try:
            async with gateway.serving():
                ready.set_result(None)
                await self._closing.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)

    async def close(self) -> None:
        """Serve no more; idempotent."""
        serving, self._serving, self._gateway = self._serving, None, None
        if serving is not None:
            self._closing.set()
            await serving
