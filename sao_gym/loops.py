"""One body of code for blocking and asynchronous callers.

A coroutine here touches the outside world only through the `Caller` it is given. With `offload` it waits as
asynchronous code does; with `inline` it never suspends, so `drive` can run it to its end in the calling thread, inside
or outside of an event loop. What is asynchronous by nature (a subprocess, a socket) lives on one background loop per
process, and therefore outlives any loop that its user came with.

Example:
    >>> async def twice(call: Caller, x: int) -> int:
    ...     return 2 * int(await call(abs, x))
    >>> drive(twice(inline, -4)), asyncio.run(twice(offload, -4))
    (8, 8)
"""

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

from sao_gym.errors import InvariantError

T = TypeVar("T")
Caller = Callable[..., Awaitable[Any]]

_starting = threading.Lock()


@cache
def _loop_of(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"sao-gym-loop-{pid}", daemon=True).start()
    return loop


def background_loop() -> asyncio.AbstractEventLoop:
    """This process's loop in a daemon thread; started by the first call, never stopped. A forked child gets its own."""
    with _starting:
        return _loop_of(os.getpid())


def run_blocking(awaitable: Awaitable[T]) -> T:
    """Wait for `awaitable` on the background loop; works inside a running loop, which stands still meanwhile.

    Raises InvariantError on the background loop itself, where waiting would never end.
    """
    loop = background_loop()
    if _running_loop() is loop:
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        raise InvariantError("blocking code must not run on the background loop; await the asynchronous form")
    return asyncio.run_coroutine_threadsafe(_awaited(awaitable), loop).result()


def submit(awaitable: Awaitable[T]) -> Future[T]:
    """Start `awaitable` on the background loop, from any other thread, without waiting for it."""
    return asyncio.run_coroutine_threadsafe(_awaited(awaitable), background_loop())


async def on_background(awaitable: Awaitable[T]) -> T:
    """Await `awaitable` on the background loop, from any loop; cancelling cancels it there."""
    loop = background_loop()
    if _running_loop() is loop:
        return await awaitable
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_awaited(awaitable), loop))


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that was given `inline`, in this thread. Raises InvariantError if it suspends all the same."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    coroutine.close()
    raise InvariantError("a coroutine driven inline awaited something that was not called through its Caller")


async def inline(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in this thread; an asynchronous one is waited for on the background loop.

    What would end more than the call (see `_contained`) is raised as RuntimeError; `offload` does the same.
    """
    result = _called(function, *args, **kwargs)
    return run_blocking(_waited(function, result)) if inspect.isawaitable(result) else result


async def offload(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a blocking function in a worker thread; an asynchronous one is awaited on the caller's loop."""
    if inspect.iscoroutinefunction(function):
        return await _waited(function, function(*args, **kwargs))
    result = await asyncio.to_thread(_called, function, *args, **kwargs)
    return await _waited(function, result) if inspect.isawaitable(result) else result


def _called(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (StopIteration, SystemExit) as error:
        raise _contained(function, error) from error


async def _waited(function: Callable[..., Any], awaitable: Awaitable[Any]) -> Any:
    try:
        return await awaitable
    except SystemExit as error:
        raise _contained(function, error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _contained(function, error) from error


def _contained(function: Callable[..., Any], error: BaseException) -> RuntimeError:
    """`error` as one that fails this call alone.

    A future cannot carry a StopIteration, so that its awaiter would wait for ever; a SystemExit would end the loop and
    every episode on it; a CancelledError that nobody asked for would be taken for the end of the caller.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    return RuntimeError(f"{name} raised {type(error).__name__}({error})")


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
