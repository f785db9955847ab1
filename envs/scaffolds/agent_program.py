"""An agent program in a worker environment as a `Scaffold`: its processes run on this machine, its tools in the sandbox.

Example:
    scaffold = OpenHandsScaffold(size=8)
    outcome = await scaffold.run(task, sandbox, "http://127.0.0.1:8000/s/SECRET/v1", Budgets(max_turns=300))
    await scaffold.close()
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sao_gym.budgets import Budgets
from sao_gym.envs.sandboxes.spec import ShellSandbox
from sao_gym.envs.scaffolds.bridge import SandboxBridge
from sao_gym.loops import on_background
from sao_gym.protocols import AGENT_FAILED, Task
from sao_gym.stream import Outcome
from sao_gym.worker_process import AgentProgramError, WorkerCommand, WorkerPool
from sao_gym.workers import environment

DRIVERS = Path(__file__).with_name("drivers")
LONGEST_S = 6 * 3600.0
REQUEST_S = 3600
"""Longest wait for one answer of the model: behind a gateway it may wait for a publication, or for its turn."""
ENV = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "DO_NOT_TRACK": "1",
    "NO_PROXY": "127.0.0.1,localhost",
}


class AgentProgram(ABC):
    """A `Scaffold` over a pool of worker processes, at most `size`; everything runs on the background loop."""

    kind: str
    driver: str
    env: Mapping[str, str] = {}

    def __init__(self, *, size: int = 4, warm: int = 0) -> None:
        self._size, self._warm = size, warm
        self._pool: WorkerPool | None = None
        self._opening: asyncio.Lock | None = None

    @abstractmethod
    def request(self, task: Task, box: ShellSandbox, base_url: str, budgets: Budgets) -> dict[str, Any]:
        """What the driver is told of one episode."""

    @abstractmethod
    def outcome(self, result: Mapping[str, Any]) -> Outcome:
        """How the episode ended, by what the driver said."""

    async def prepare(self) -> None:
        """Have the worker environment, made now if there is none, which takes minutes. Raises ConfigError."""
        await on_background(self._opened())

    async def run(self, task: Task, sandbox: ShellSandbox, base_url: str, budgets: Budgets) -> Outcome:
        """See `Scaffold.run`."""
        return await on_background(self._run(task, sandbox, base_url, budgets))

    async def _run(self, task: Task, box: ShellSandbox, base_url: str, budgets: Budgets) -> Outcome:
        pool = await self._opened()
        given = self.request(task, box, base_url, budgets)
        limit = LONGEST_S if budgets.wall_clock_s is None else budgets.wall_clock_s + 60.0
        try:
            result = await pool.run(given, SandboxBridge(box), timeout_s=limit)
        except AgentProgramError:
            return Outcome.error(AGENT_FAILED)
        return self.outcome(result)

    async def _opened(self) -> WorkerPool:
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._pool is None:
                found = await asyncio.to_thread(environment, self.kind)
                command = WorkerCommand(argv=(str(found.python), str(DRIVERS / self.driver)), env={**ENV, **self.env})
                self._pool = WorkerPool(command, size=self._size, warm=self._warm)
            return self._pool

    async def close(self) -> None:
        """End the processes; the next run starts anew."""
        await on_background(self._close())

    async def _close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
