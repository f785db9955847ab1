r"""The local sandbox: Python sessions for a policy, on this machine, without a daemon.

`PythonPool` and `PythonSession` are for asynchronous callers; `SyncPythonPool` and `SyncPythonSession` are their
twins for plain ones, over an event loop in a thread of its own.

Example:
    >>> with SyncPythonPool(size=1) as pool, pool.lease() as session:
    ...     session.run("6 * 7").output
    '42\n'
"""

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

from sao_gym.envs.sandboxes.limits import CellResult, Guarantees, SandboxLimits
from sao_gym.envs.sandboxes.python_session import PythonPool, PythonSession
from sao_gym.errors import SandboxError

__all__ = [
    "CellResult",
    "Guarantees",
    "PythonPool",
    "PythonSession",
    "SandboxLimits",
    "SyncPythonPool",
    "SyncPythonSession",
]

Result = TypeVar("Result")


class SyncPythonSession:
    """Blocking twin of `PythonSession`; call it from any thread but the loop's own."""

    def __init__(self, session: PythonSession, loop: asyncio.AbstractEventLoop) -> None:
        self._session = session
        self._loop = loop

    def run(self, code: str, timeout_s: float | None = None) -> CellResult:
        """Run one cell; see `PythonSession.run`."""
        return wait_for(self._loop, self._session.run(code, timeout_s))

    def close(self) -> None:
        """Give the box back; idempotent, also after the pool has closed."""
        if not self._loop.is_closed():
            wait_for(self._loop, self._session.close())

    def __enter__(self) -> "SyncPythonSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SyncPythonPool:
    """Blocking twin of `PythonPool`, with the same arguments; owns one daemon thread until `close`."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        size: int = 1,
        allow_unsafe: bool = False,
        *,
        preload: tuple[str, ...] = (),
        site_packages: bool = False,
    ) -> None:
        self._pool = PythonPool(limits, size, allow_unsafe, preload=preload, site_packages=site_packages)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="python-sandboxes", daemon=True)
        self._thread.start()

    @property
    def guarantees(self) -> Guarantees:
        """Which promises hold; see `PythonPool.guarantees`."""
        return self._pool.guarantees

    def lease(self) -> SyncPythonSession:
        """Wait for a free box and open a session in it; see `PythonPool.lease`."""
        if self._loop.is_closed():
            raise SandboxError("this pool of sandboxes is closed")
        return SyncPythonSession(wait_for(self._loop, self._pool.lease()), self._loop)

    def close(self) -> None:
        """End every box and the thread; idempotent."""
        if self._loop.is_closed():
            return
        wait_for(self._loop, self._pool.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "SyncPythonPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def wait_for(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` on a loop of another thread; a KeyboardInterrupt here cancels it there."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
