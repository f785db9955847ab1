"""Sandboxes with a shell for many environments: one backend, and at most so many side by side.

Example:
    boxes = SharedSandboxes(8, backend="docker")
    box = await boxes.lease(SandboxSpec(image="python:3.12-slim"))     # waits while eight are in use
    await box.close()
    await boxes.close()
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from sao_gym.envs.sandboxes.backends import Backend, check_backend, open_backend
from sao_gym.envs.sandboxes.spec import SandboxSpec, ShellSandbox
from sao_gym.errors import ConfigError
from sao_gym.protocols import ExecResult


class SharedSandboxes:
    """Starts a sandbox for each lease and ends it with the lease. All of it runs on the background loop."""

    def __init__(self, size: int = 1, *, backend: str = "local") -> None:
        check_backend(backend)
        if size < 1:
            raise ConfigError(f"at least one sandbox must be allowed, got {size}")
        self.backend = backend
        self._size = size
        self._opened: Backend | None = None
        self._opening: asyncio.Lock | None = None
        self._free: asyncio.Semaphore | None = None
        self._leases: set[Lease] = set()

    def __getstate__(self) -> dict[str, Any]:
        if self._opened is not None:
            raise ConfigError(
                "sandboxes that run cannot be copied or pickled; do that before the first, or close first"
            )
        return self.__dict__

    async def lease(self, spec: SandboxSpec | None = None) -> "Lease":
        """Wait for a free place and start a sandbox. Raises ConfigError, SandboxUnavailableError, SandboxError."""
        self._opening = self._opening or asyncio.Lock()
        self._free = self._free or asyncio.Semaphore(self._size)
        free = self._free
        async with self._opening:
            if self._opened is None:
                self._opened = await open_backend(self.backend)
        backend = self._opened
        await free.acquire()
        try:
            lease = Lease(await backend.start(spec or SandboxSpec()), self._leases, free)
        except BaseException:
            free.release()
            raise
        return lease

    async def close(self) -> None:
        """End every sandbox and the backend; the next lease starts anew."""
        for lease in list(self._leases):
            await lease.close()
        backend, self._opened = self._opened, None
        if backend is not None:
            await backend.close()


class Lease:
    """A sandbox whose `close` also makes room for the next one; see `ShellSandbox`."""

    def __init__(self, box: ShellSandbox, leases: "set[Lease]", free: asyncio.Semaphore) -> None:
        self._box, self._leases, self._free = box, leases, free
        leases.add(self)

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._box.spec

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `ShellSandbox.exec`."""
        return await self._box.exec(command, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin)

    async def read(self, path: str) -> bytes:
        """See `ShellSandbox.read`."""
        return await self._box.read(path)

    async def write(self, path: str, data: bytes) -> None:
        """See `ShellSandbox.write`."""
        await self._box.write(path, data)

    async def is_alive(self) -> bool:
        """See `ShellSandbox.is_alive`."""
        return await self._box.is_alive()

    async def close(self) -> None:
        """End the sandbox and give its place back; idempotent."""
        if self in self._leases:
            self._leases.discard(self)
            try:
                await self._box.close()
            finally:
                self._free.release()
