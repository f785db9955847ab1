"""An environment whose episodes hold something leased, such as a sandbox, from a source that others may share.

Invariant: what an episode leased goes back when it ends, however it ends; the source is closed only by the environment
that made it.

Example:
    class MyEnv(LeasedEnv):
        def __init__(self, tasks, sandboxes=None):
            super().__init__(tasks)
            self._hold(sandboxes, lambda: SharedSandboxes(1))

        async def _end(self): ...
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from sao_gym.core import ToolEnv
from sao_gym.envs.sandboxes.finish import finish
from sao_gym.loops import on_background, run_blocking


class Source(Protocol):
    """Where leases come from; it lives on the background loop."""

    async def close(self) -> None:
        """End everything; idempotent."""
        ...


class LeasedEnv(ToolEnv):
    """A `ToolEnv` that gives back what an episode leased. A subclass calls `_hold` once and says how to `_end`."""

    _sandboxes: Any
    _owns_sandboxes: bool

    def _hold(self, given: Source | None, make: Callable[[], Source]) -> None:
        """Take the source that was given, or one of this environment's own."""
        self._owns_sandboxes = given is None
        self._sandboxes = make() if given is None else given

    @abstractmethod
    async def _end(self) -> None:
        """Give back what the episode leased, on the background loop; idempotent."""

    async def teardown(self) -> None:
        """Give back what the episode leased."""
        await on_background(finish(self._end()))

    def close(self) -> None:
        """End the episode, and the source if it is this environment's own; idempotent."""
        super().close()
        if self._owns_sandboxes:
            run_blocking(self._sandboxes.close())

    async def close_async(self) -> None:
        """`close` for a caller that has other episodes to go on with."""
        await super().close_async()
        if self._owns_sandboxes:
            await on_background(self._sandboxes.close())
