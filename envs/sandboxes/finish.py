"""Work that must come to its end even when whoever waits for it is cancelled: closing, killing, giving back."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from typing import Self, TypeVar

T = TypeVar("T")


async def finish(work: Awaitable[T]) -> T:
    """Await `work` to its end and return what it returns; a cancellation that arrives meanwhile is passed on afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


class Closing(ABC):
    """Something to be closed at the end, also by `async with`."""

    @abstractmethod
    async def close(self) -> None:
        """Give everything back; idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()
