"""A `python` tool whose state is kept over the turns of an episode, for any environment that computes.

Invariant: one session per episode, leased when the first call runs and given back when the episode ends, however it
ends. Sessions live on the background loop, so blocking and asynchronous callers may take turns on one environment.

Example:
    class Sums(PythonToolEnv):
        def grade_final(self, message): ...

    env = Sums(tasks, sandboxes=Sandboxes(size=8))   # eight boxes, shared with other environments
"""

from collections.abc import Sequence
from typing import Any, Protocol

from sao_gym.core import AnswerGrader
from sao_gym.envs.leased import LeasedEnv
from sao_gym.envs.sandboxes.local import CellResult, PythonPool, SandboxLimits
from sao_gym.errors import ConfigError
from sao_gym.loops import on_background, run_blocking
from sao_gym.protocols import Task, TaskSet

NO_OUTPUT = "[no output]"


class PythonSession(Protocol):
    """Cells that share state."""

    async def run(self, code: str) -> CellResult:
        """Run one cell. Raises SandboxError if the sandbox itself failed."""
        ...

    async def close(self) -> None:
        """Give everything back; idempotent."""
        ...


class PythonSource(Protocol):
    """Where an environment gets its sessions. Both methods run on the background loop."""

    async def lease(self) -> PythonSession:
        """Wait for a free session."""
        ...

    async def close(self) -> None:
        """End every session; idempotent."""
        ...


class Sandboxes:
    """A pool of boxes on the background loop, started when first used; one pool may serve many environments.

    An episode waits while all `size` boxes are leased: give at least as many as episodes run at a time.
    """

    def __init__(
        self,
        size: int = 1,
        limits: SandboxLimits | None = None,
        *,
        allow_unsafe: bool = False,
        site_packages: bool = False,
        preload: Sequence[str] = (),
    ) -> None:
        self._size, self._limits, self._allow_unsafe = size, limits, allow_unsafe
        self._site_packages, self._preload = site_packages, tuple(preload)
        self._pool: PythonPool | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._pool is not None:
            raise ConfigError(
                "boxes that run cannot be copied or pickled; do that before the first call, or close first"
            )
        return self.__dict__

    async def lease(self) -> PythonSession:
        """Wait for a free session. Raises SandboxUnavailableError where isolation cannot be had."""
        if self._pool is None:
            self._pool = PythonPool(
                self._limits,
                self._size,
                self._allow_unsafe,
                preload=self._preload,
                site_packages=self._site_packages,
            )
        return await self._pool.lease()

    async def close(self) -> None:
        """End every box; the next lease starts anew."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()

    def close_blocking(self) -> None:
        """`close` for callers without an event loop."""
        run_blocking(self.close())


class PythonToolEnv(LeasedEnv):
    """A `ToolEnv` with one tool, `python`.

    `sandboxes` is shared and outlives the environment; without it the environment has a box of its own.
    `blank_tool_results` shows the policy nothing of what its code printed: a control experiment.
    """

    _sandboxes: PythonSource

    def __init__(
        self,
        tasks: TaskSet | Sequence[Task],
        *,
        grader: AnswerGrader | None = None,
        max_turns: int | None = None,
        system_prompt: str = "",
        sandboxes: PythonSource | None = None,
        allow_unsafe: bool = False,
        blank_tool_results: bool = False,
    ) -> None:
        super().__init__(tasks, tools=[self.python], grader=grader, max_turns=max_turns, system_prompt=system_prompt)
        self.blank_tool_results = blank_tool_results
        self._hold(sandboxes, lambda: self.make_sandboxes(1, allow_unsafe=allow_unsafe))
        self._session: PythonSession | None = None

    @classmethod
    def make_sandboxes(cls, size: int, *, allow_unsafe: bool = False) -> Sandboxes:
        """Boxes as this environment needs them, to be shared by many of its kind, or one for an environment alone."""
        return Sandboxes(size, allow_unsafe=allow_unsafe)

    async def python(self, code: str) -> str:
        """Run Python code. Variables are kept from call to call; what is printed, and a last expression, comes back.

        Args:
            code: The code to run.
        """
        output = await on_background(self._run_cell(code))
        return "" if self.blank_tool_results else output

    async def _run_cell(self, code: str) -> str:
        if self._session is None:
            self._session = await self._sandboxes.lease()
        result = await self._session.run(code)
        return result.output.removesuffix("\n") or NO_OUTPUT

    async def _end(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()
