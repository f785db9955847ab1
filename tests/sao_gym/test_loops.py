"""One body of code for blocking and asynchronous callers."""

import asyncio
import threading

import pytest

from sao_gym.errors import InvariantError
from sao_gym.loops import Caller, background_loop, drive, inline, offload, on_background, run_blocking


def name_of_thread() -> str:
    return threading.current_thread().name


async def thread_of_loop() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


async def both(call: Caller) -> tuple[str, str]:
    return await call(name_of_thread), await call(thread_of_loop)


def test_inline_runs_here_and_waits_on_the_background_loop() -> None:
    here, there = drive(both(inline))
    assert here == threading.current_thread().name
    assert there.startswith("sao-gym-loop")


async def test_offload_leaves_the_loop_free_and_awaits_on_it() -> None:
    blocking, awaited = await both(offload)
    assert blocking != threading.current_thread().name
    assert awaited == threading.current_thread().name


async def test_blocking_calls_work_inside_a_running_loop() -> None:
    assert run_blocking(thread_of_loop()).startswith("sao-gym-loop")


async def test_blocking_on_the_background_loop_itself_is_refused() -> None:
    async def wrong() -> None:
        run_blocking(asyncio.sleep(0))

    with pytest.raises(InvariantError, match="background loop"):
        await on_background(wrong())


async def test_cancelling_reaches_the_background_loop() -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def forever() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(on_background(forever()))
    await asyncio.to_thread(started.wait, 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(cancelled.wait, 5)


def test_a_driven_coroutine_must_not_suspend_by_itself() -> None:
    with pytest.raises(InvariantError, match="Caller"):
        drive(asyncio.sleep(0))


def test_the_background_loop_is_one() -> None:
    assert background_loop() is background_loop()
