"""Images of a Docker engine: which are there, how large they are, and how much room is left where they are kept.

Example:
    with open_engine() as client:
        present(client), free_bytes(client)
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sao_gym.envs.sandboxes.docker_engine import MISSING_PACKAGE
from sao_gym.errors import SandboxUnavailableError

GLANCE_S = 3.0
START_ENGINE = (
    "install and start one (on Debian: apt-get install docker.io), or set DOCKER_HOST to the address of one that runs"
)


@contextmanager
def open_engine(timeout_s: float = GLANCE_S) -> Iterator[Any]:
    """The SDK's client of the engine that DOCKER_HOST or the platform's default names, seen to answer.

    Raises SandboxUnavailableError.
    """
    try:
        import docker
    except ImportError as error:
        raise SandboxUnavailableError(MISSING_PACKAGE) from error
    host = os.environ.get("DOCKER_HOST", "")
    if host.startswith("ssh://"):
        raise SandboxUnavailableError(f"the Docker engine is {host!r}; give a unix:// or tcp:// address")
    try:
        client = docker.from_env(timeout=timeout_s)
    except docker.errors.DockerException as error:
        raise _silent(host, error) from error
    try:
        try:
            client.ping()
        except (docker.errors.DockerException, OSError) as error:
            raise _silent(host, error) from error
        yield client
    finally:
        client.close()


def _silent(host: str, error: Exception) -> SandboxUnavailableError:
    reason = " ".join(str(error).split())[-120:]
    return SandboxUnavailableError(f"no Docker engine answers {f'at {host}' if host else 'on this machine'} ({reason})")


def present(client: Any) -> frozenset[str]:
    """Names of the images that are there, each with its tag."""
    return frozenset(tag for image in client.api.images() for tag in image.get("RepoTags") or ())


def tagged(name: str) -> str:
    """A name as engines list it: with a tag, without the default registry."""
    short = name.removeprefix("docker.io/").removeprefix("index.docker.io/").removeprefix("library/")
    has_tag = ":" in short.rpartition("/")[2] or "@" in short
    return short if has_tag else f"{short}:latest"


def free_bytes(client: Any) -> int | None:
    """Free bytes where the engine keeps its images; None where that is not on this machine."""
    root = Path(str(client.info().get("DockerRootDir") or ""))
    is_here = str(client.api.base_url).startswith(("http+docker://", "unix://")) and root.is_dir()
    return shutil.disk_usage(root).free if is_here else None


def own_bytes(client: Any, names: frozenset[str]) -> list[int]:
    """For each of these images that is there, the bytes that no other image shares."""
    images = client.df().get("Images") or []
    return [
        max(0, int(image.get("Size") or 0) - max(0, int(image.get("SharedSize") or 0)))
        for image in images
        if names & set(image.get("RepoTags") or ())
    ]
