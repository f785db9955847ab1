"""An asynchronous context that outlives the call which entered it.

Invariant: one task of its own enters and leaves it, whoever opens and whoever closes.

Example:
    server = HeldOpen(lambda: served(app, port=0))
    address = await server.opened()
    await server.close()
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class HeldOpen(Generic[T]):
    """Holds what `context` makes open until it is closed. All of it belongs to one event loop."""

    def __init__(self, context: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._context = context
        self._holding: asyncio.Task[None] | None = None
        self._given: asyncio.Future[T] | None = None
        self._closing = asyncio.Event()

    async def opened(self) -> T:
        """What the context gives; entered by the first call. Raises what entering raises, and tries again next time."""
        if self._given is None:
            self._closing.clear()
            self._given = asyncio.get_running_loop().create_future()
            self._holding = asyncio.ensure_future(self._hold(self._given))
        try:
            return await asyncio.shield(self._given)
        except Exception:
            self._given = None
            raise

    async def _hold(self, given: "asyncio.Future[T]") -> None:
        try:
            async with self._context() as value:
                given.set_result(value)
                await self._closing.wait()
        except Exception as error:
            if given.done():
                raise
            given.set_exception(error)

    async def close(self) -> None:
        """Leave the context; idempotent."""
        holding, self._holding, self._given = self._holding, None, None
        if holding is not None:
            self._closing.set()
            await holding
