"""The backends that the contract is tested on: one entry each. A new backend adds its own, and all tests run on it."""

import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import MappingProxyType

import pytest

from sao_gym.envs.sandboxes.local_shell import LocalSandbox
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits, ShellSandbox

LIMITS = ShellLimits(
    memory_bytes=256 * MIB, processes=64, disk_bytes=64 * MIB, output_bytes=4000, file_bytes=8 * MIB, cpus=1.0
)
SPEC = SandboxSpec(limits=LIMITS, env={"FROM_SPEC": "it's so"})
Start = Callable[..., AbstractAsyncContextManager[ShellSandbox]]


@contextlib.asynccontextmanager
async def start_local(spec: SandboxSpec) -> AsyncIterator[ShellSandbox]:
    """On this machine, over its own /usr or a root folder."""
    box = await LocalSandbox.start(spec)
    try:
        yield box
    finally:
        await box.close()


@contextlib.asynccontextmanager
async def start_docker(spec: SandboxSpec) -> AsyncIterator[ShellSandbox]:
    """In a container of the engine that the tests install."""
    import docker
    import docker_image

    from sao_gym.envs.sandboxes.docker import DockerEngine, DockerSandbox

    with contextlib.closing(docker.from_env()) as client:
        if reason := docker_image.missing_image(client):
            pytest.skip(reason)
    engine = await DockerEngine.connect()
    try:
        box = await DockerSandbox.start(engine, spec)
        try:
            yield box
        finally:
            await box.close()
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def start_e2b(spec: SandboxSpec) -> AsyncIterator[ShellSandbox]:
    """At the service that E2B_API_URL names: the tests' own stand-in."""
    from sao_gym.envs.sandboxes.e2b import E2BSandbox

    async with await E2BSandbox.start(spec) as box:
        yield box


BACKENDS = MappingProxyType({"local": start_local, "local_root": start_local, "docker": start_docker, "e2b": start_e2b})
WALLED = tuple(name for name in BACKENDS if name != "e2b")
"""Those that stand up to abuse here; the stand-in for e2b's service gives its sandboxes no machine of their own."""
MARKS = MappingProxyType({"docker": [pytest.mark.docker]})


def processes_with(marker: str) -> list[int]:
    """Processes of this machine whose command line or program holds `marker`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found


def wait_until_there(marker: str, least: int = 1) -> None:
    """Fails if fewer than `least` processes with `marker` are there after a while: a child is named once it has execed."""
    until = time.monotonic() + 20
    while len(processes_with(marker)) < least and time.monotonic() < until:
        time.sleep(0.02)
    assert len(processes_with(marker)) >= least


def wait_until_gone(marker: str, seconds: float = 10.0) -> None:
    """Fails if a process with `marker` is left after `seconds`."""
    until = time.monotonic() + seconds
    while processes_with(marker) and time.monotonic() < until:
        time.sleep(0.02)
    assert processes_with(marker) == []
