"""Sandboxes with a shell for many environments: one backend, opened when it is first needed, and one pool over it.

Example:
    boxes = SharedSandboxes(8, backend="docker")
    box = await boxes.lease(SandboxSpec(image="python:3.12-slim"))     # waits while eight are in use
    await box.close()
    await boxes.close()
"""

import asyncio
from typing import Any

from sao_gym.envs.sandboxes.backends import check_backend, open_backend
from sao_gym.envs.sandboxes.lease import Lease
from sao_gym.envs.sandboxes.pool import SandboxPool
from sao_gym.envs.sandboxes.pool_records import PoolMetrics, PoolSettings
from sao_gym.envs.sandboxes.spec import SandboxSpec
from sao_gym.errors import ConfigError

SILENCE_S = 4 * 3600.0
"""An episode may wait for long between two commands: for its engine, or for a person who looks on."""


class SharedSandboxes:
    """A pool that starts with the first lease; all of it runs on the background loop. `warm`: see `PoolSettings`."""

    def __init__(self, size: int = 1, *, backend: str = "local", warm: int = 0) -> None:
        check_backend(backend)
        if size < 1:
            raise ConfigError(f"at least one sandbox must be allowed, got {size}")
        self.backend = backend
        self._size = size
        self._settings = PoolSettings(warm=warm, silence_timeout_s=SILENCE_S)
        self._pool: SandboxPool | None = None
        self._opening: asyncio.Lock | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._pool is not None:
            raise ConfigError(
                "sandboxes that run cannot be copied or pickled; do that before the first, or close first"
            )
        return {**self.__dict__, "_opening": None}

    @property
    def metrics(self) -> PoolMetrics:
        """What the pool has done since it was opened."""
        return self._pool.metrics if self._pool is not None else PoolMetrics()

    async def lease(self, spec: SandboxSpec | None = None) -> Lease:
        """Wait for a free place and a sandbox. Raises ConfigError, SandboxUnavailableError, SandboxError."""
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._pool is None:
                self._pool = SandboxPool(await open_backend(self.backend), size=self._size, settings=self._settings)
            pool = self._pool
        return await pool.lease(spec)

    async def close(self) -> None:
        """End every sandbox and the backend; the next lease starts anew."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
