"""A sandbox of each backend, for the tests of what all of them promise."""

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from sandbox_backends import BACKENDS, MARKS, SPEC, Start

from sao_gym.envs.sandboxes.spec import SandboxSpec, ShellSandbox

if TYPE_CHECKING:
    from e2b_stand_in import StandIn


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, [])) for name in BACKENDS])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend."""
    return str(request.param)


@pytest.fixture(scope="session")
def e2b_service() -> Iterator["StandIn"]:
    """A stand-in for e2b's service, to which the environment points from now on."""
    pytest.importorskip("e2b")
    from e2b_stand_in import environment, serving

    with serving() as service, pytest.MonkeyPatch.context() as patch:
        for name, value in environment(service).items():
            patch.setenv(name, value)
        yield service


@pytest.fixture
def start(backend: str, request: pytest.FixtureRequest) -> Start:
    """Starts a sandbox of the backend as an asynchronous context; the spec's image is filled in."""
    image = ""
    if backend == "local_root":
        image = str(request.getfixturevalue("root_folder"))
    elif backend == "docker":
        image = str(pytest.importorskip("docker_image").IMAGE)
    elif backend == "e2b":
        request.getfixturevalue("e2b_service")

    def begin(spec: SandboxSpec = SPEC) -> AbstractAsyncContextManager[ShellSandbox]:
        return BACKENDS[backend](replace(spec, image=image))

    return begin


@pytest.fixture
async def box(start: Start) -> AsyncIterator[ShellSandbox]:
    """A started sandbox of the backend, with the bounds of `SPEC`."""
    async with start(SPEC) as box:
        yield box
