"""A gateway that is opened with the first episode that needs it, on a loopback port of its own.

Example:
    lazy = LazyGateway(engine, chat, SystemClock())
    gateway = await lazy.opened()
    await lazy.close()
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sao_gym.gateway import Gateway
from sao_gym.held_open import HeldOpen
from sao_gym.protocols import Clock, Engine


class LazyGateway(HeldOpen[Gateway]):
    """One `Gateway` for everybody who asks. All of it belongs to one event loop."""

    def __init__(self, engine: Engine, chat: Any, clock: Clock) -> None:
        super().__init__(lambda: _serving(Gateway(engine, chat, clock)))


@asynccontextmanager
async def _serving(gateway: Gateway) -> AsyncIterator[Gateway]:
    async with gateway.serving():
        yield gateway
