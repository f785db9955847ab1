"""Waiting for another thread, never without a deadline."""

import asyncio
from concurrent.futures import Future
from typing import Any, TypeVar

from sao_gym.errors import DeadlineError
from sao_gym.protocols import Clock

T = TypeVar("T")


async def result_within(future: Future[T], timeout_s: float, clock: Clock, what: str) -> T:
    """The future's result. Cancelling the caller cancels the future.

    Raises DeadlineError, naming `what`, when `timeout_s` have passed on `clock`.
    """
    result = asyncio.wrap_future(future)
    timer = asyncio.ensure_future(clock.sleep(timeout_s))
    try:
        waited: set[asyncio.Future[Any]] = {result, timer}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise DeadlineError(f"waited {timeout_s:g} s for {what}")
        return result.result()
    finally:
        timer.cancel()
        result.cancel()
