"""Sandboxes with a shell, by the backend's name: `local`, `docker`, `e2b`, or `package.module:function` of one's own.

Nothing of a backend is imported before it is asked for. A backend is opened once and starts many sandboxes.

Example:
    backend = await open_backend("local")
    box = await backend.start(SandboxSpec())
    await box.close()
    await backend.close()
"""

import asyncio
import functools
import importlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from sao_gym.envs.sandboxes.spec import SandboxSpec, ShellSandbox
from sao_gym.errors import ConfigError, SandboxError, SandboxUnavailableError

BACKENDS = ("local", "docker", "e2b")
Start = Callable[[SandboxSpec], Awaitable[ShellSandbox]]


class Backend(Protocol):
    """Starts sandboxes of one kind. All methods belong to one event loop."""

    async def start(self, spec: SandboxSpec) -> ShellSandbox:
        """A started sandbox. Raises ConfigError, SandboxUnavailableError, SandboxError."""
        ...

    async def close(self) -> None:
        """Give back what the backend itself holds; idempotent. Its sandboxes are closed by who started them."""
        ...


class _Plain:
    """A backend that is one function and holds nothing; `reap` removes what dead processes left, also at the end."""

    def __init__(self, start: Start, reap: Callable[[], Awaitable[object]] | None = None) -> None:
        self._start, self._reap = start, reap

    async def start(self, spec: SandboxSpec) -> ShellSandbox:
        return await self._start(spec)

    async def close(self) -> None:
        if self._reap is not None:
            with suppress(SandboxError):
                await self._reap()


class _Docker:
    """Containers of one engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def start(self, spec: SandboxSpec) -> ShellSandbox:
        from sao_gym.envs.sandboxes.docker import DockerSandbox

        return await DockerSandbox.start(self._engine, spec)

    async def close(self) -> None:
        await self._engine.close()


def check_backend(name: str) -> None:
    """Raises ConfigError for a name that stands for no backend."""
    module, _, attribute = name.partition(":") if isinstance(name, str) else ("", "", "")
    if name not in BACKENDS and not (module and attribute):
        raise ConfigError(
            f"there is no sandbox backend {name!r}; give {', '.join(BACKENDS)}, or package.module:function, which takes "
            "a SandboxSpec and returns a started sandbox"
        )


async def open_backend(name: str) -> Backend:
    """The backend behind a name. Raises ConfigError for the name, SandboxUnavailableError where it cannot be had here."""
    check_backend(name)
    if name == "local":
        from sao_gym.envs.sandboxes.local_shell import LocalSandbox, reap

        reap()
        return _Plain(LocalSandbox.start, lambda: asyncio.to_thread(reap))
    if name == "docker":
        from sao_gym.envs.sandboxes.docker_engine import DockerEngine

        return _Docker(await DockerEngine.connect())
    if name == "e2b":
        from sao_gym.envs.sandboxes import e2b, e2b_service

        await e2b_service.reap()
        return _Plain(e2b.E2BSandbox.start, e2b_service.reap)
    return _Plain(_function(name))


async def make_sandbox(name: str, spec: SandboxSpec | None = None) -> ShellSandbox:
    """One sandbox of a backend that holds nothing itself (every one but docker). Raises as `open_backend` and `start`."""
    if name == "docker":
        raise ConfigError("containers share one connection: use open_backend('docker') and its start(spec)")
    return await (await open_backend(name)).start(spec or SandboxSpec())


def _function(reference: str) -> Start:
    module_name, _, attribute = reference.partition(":")
    try:
        found: Any = functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except (ImportError, AttributeError) as error:
        raise SandboxUnavailableError(
            f"the sandbox backend {reference!r} cannot be had ({error}); those that come with this version are "
            f"{', '.join(BACKENDS)}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{reference} is a {type(found).__name__}; a backend is a function that starts a sandbox")
    start: Start = found
    return start
