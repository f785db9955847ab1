"""A context that one task enters and leaves, whoever opens and closes it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sao_gym.held_open import HeldOpen


class Door:
    """Notes which task enters and leaves; `breaks` on entering, so often."""

    def __init__(self, breaks: int = 0) -> None:
        self.breaks = breaks
        self.entered: list[asyncio.Task[None] | None] = []
        self.left: list[asyncio.Task[None] | None] = []

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[int]:
        self.entered.append(asyncio.current_task())
        if len(self.entered) <= self.breaks:
            raise OSError("taken")
        try:
            yield len(self.entered)
        finally:
            self.left.append(asyncio.current_task())


async def test_it_is_entered_once_and_left_by_the_same_task() -> None:
    door = Door()
    held = HeldOpen(door)
    assert await asyncio.gather(held.opened(), held.opened()) == [1, 1]
    assert door.entered[0] is not asyncio.current_task()
    await asyncio.create_task(held.close())
    assert door.left == door.entered
    await held.close()
    assert await held.opened() == 2
    await held.close()


async def test_a_context_that_cannot_be_entered_is_tried_again() -> None:
    held = HeldOpen(Door(breaks=1))
    with pytest.raises(OSError, match="taken"):
        await held.opened()
    assert await held.opened() == 2
    await held.close()


async def test_somebody_who_gives_up_waiting_closes_nothing() -> None:
    door = Door()
    held = HeldOpen(door)
    waiting = asyncio.ensure_future(held.opened())
    await asyncio.sleep(0)
    waiting.cancel()
    assert await held.opened() == 1
    assert door.left == []
    await held.close()
