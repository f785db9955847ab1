"""A connection to a Docker engine: blocking calls of the SDK in a few threads, its failures in our words.

The engine is the one that DOCKER_HOST or the platform's default names: Docker, rootless Docker, or podman behind its
compatible socket. A container is labelled with its owner when it is created, attached before it is started, and loses
its standard input when the owner dies: its shell then ends, and with it every process inside. What is left of it is
removed by the next process that connects. A process that ends in good order removes its own.

Example:
    engine = await DockerEngine.connect()
    container = await engine.start(create, name="a-name")
    await engine.remove("a-name")
    await engine.close()
"""

import asyncio
import atexit
import os
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from sao_gym.envs.sandboxes.docker_reaper import reap, remove_container, remove_own
from sao_gym.errors import SandboxError, SandboxUnavailableError

THREADS = 8
CALL_TIMEOUT_S = 120
ENDING_S = 5
MISSING_PACKAGE = "the package docker is not installed, and the docker sandbox needs it: pip install 'sao-gym[docker]'"
_BOUNDS = {"MemoryLimit": "memory", "PidsLimit": "the number of processes", "CpuCfsQuota": "CPU time"}
Result = TypeVar("Result")


class DockerEngine:
    """One engine and a few threads that talk to it; make one with `await DockerEngine.connect()`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self.is_closed = False
        atexit.register(self._close)

    @classmethod
    async def connect(cls, url: str = "") -> "DockerEngine":
        """Connect to `url` or the default engine and remove what dead processes left there.

        Raises SandboxUnavailableError where no engine answers, or where it cannot bound what a container may take.
        """
        return cls(await asyncio.to_thread(_open_client, url))

    async def call(self, work: Callable[[Any], Result]) -> Result:
        """Run `work(api)` in a thread. Raises SandboxError and SandboxUnavailableError in the place of the SDK's."""
        if self.is_closed:
            raise SandboxError("the connection to the Docker engine is closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._guarded, work)

    def _guarded(self, work: Callable[[Any], Result]) -> Result:
        with translated():
            return work(self._client.api)

    async def start(self, create: Callable[[Any], str], name: str) -> socket.socket:
        """Create a container named `name` with `create(api)`, attach to it and start it; the attached connection.

        Where that fails, or the caller is cancelled meanwhile, nothing of the container stays.
        """
        work = asyncio.ensure_future(self.call(lambda api: _start(api, create, name)))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(lambda done: self._abandon(done, name))
            raise

    def _abandon(self, done: "asyncio.Future[socket.socket]", name: str) -> None:
        if not done.cancelled() and done.exception() is None:
            done.result().close()
            with suppress(RuntimeError):  # the threads have ended: `close` has removed it
                self._threads.submit(self._guarded, lambda api: remove_container(api, name))

    async def remove(self, name: str) -> None:
        """Kill and remove a container; nothing happens where it is gone."""
        await self.call(lambda api: remove_container(api, name))

    async def ending(self, name: str) -> str:
        """How a container ended, in words; an empty string while it runs. Raises SandboxError if it is gone."""
        return await self.call(lambda api: _ending(api, name))

    async def written_bytes(self, name: str) -> int:
        """Bytes that a container has written over its image; mounts of memory aside."""
        found = await self.call(lambda api: api.containers(all=True, size=True, filters={"name": name}))
        return int(found[0].get("SizeRw") or 0) if found else 0

    async def close(self) -> None:
        """Remove every container of this process and end the threads; idempotent."""
        if not self.is_closed:
            self.is_closed = True
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        atexit.unregister(self._close)
        self._threads.shutdown(wait=True)
        with suppress(SandboxError, SandboxUnavailableError):  # an engine that is gone keeps nothing running
            self._guarded(remove_own)
        self._client.close()


def _open_client(url: str) -> Any:
    try:
        import docker
    except ImportError as error:
        raise SandboxUnavailableError(MISSING_PACKAGE) from error
    environment = {**os.environ, "DOCKER_HOST": url} if url else dict(os.environ)
    host = environment.get("DOCKER_HOST", "")
    if host.startswith("ssh://"):
        raise SandboxUnavailableError(
            f"the Docker engine is {host!r}, and attached shells do not work over ssh; give a unix:// or tcp:// address"
        )
    where = f"at {host}" if host else "on this machine"
    try:
        client = docker.from_env(timeout=CALL_TIMEOUT_S, max_pool_size=THREADS, environment=environment)
        facts = client.info()
        reap(client.api)
    except (docker.errors.DockerException, OSError) as error:
        raise SandboxUnavailableError(
            f"no Docker engine answers {where} ({_last_words(error)}); start one, or set DOCKER_HOST"
        ) from error
    if missing := [words for key, words in _BOUNDS.items() if facts.get(key) is False]:
        client.close()
        raise SandboxUnavailableError(
            f"the Docker engine {where} cannot bound {' and '.join(missing)} of a container; "
            "give it those control groups (a rootless engine needs cgroup v2 with delegation)"
        )
    return client


def _start(api: Any, create: Callable[[Any], str], name: str) -> socket.socket:
    create(api)
    try:
        connection = _attach(api, name)
        try:
            api.start(name)
        except BaseException:
            connection.close()
            raise
    except BaseException:
        remove_container(api, name)
        raise
    return connection


def _attach(api: Any, name: str) -> socket.socket:
    """The hijacked connection of an attached container; ours to close."""
    streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
    found = api.attach_socket(name, params=streams)
    plain = getattr(found, "_sock", found)
    if isinstance(plain, ssl.SSLSocket):
        return plain
    with plain, found:  # a copy, so that nothing of the SDK's holds the connection open after it is closed here
        return socket.socket(fileno=os.dup(plain.fileno()))


def _ending(api: Any, name: str) -> str:
    with suppress(OSError):  # it goes on running
        api.wait(name, timeout=ENDING_S)  # what its connection told may be ahead of the engine's books
    state = api.inspect_container(name)["State"]
    if state["Running"]:
        return ""
    return f"exit code {state['ExitCode']}{', out of memory' if state.get('OOMKilled') else ''}"


@contextmanager
def translated() -> Iterator[None]:
    """The SDK's errors as ours, in one sentence."""
    from docker.errors import APIError, DockerException

    try:
        yield
    except APIError as error:
        raise SandboxError(f"the Docker engine refused: {_last_words(error)}") from error
    except (DockerException, OSError) as error:  # a failed request is an OSError
        raise SandboxError(f"the Docker engine does not answer: {_last_words(error)}") from error


def _last_words(error: BaseException) -> str:
    """What an error says in the end, on one line."""
    text = str(getattr(error, "explanation", "") or error)
    return " ".join(text.split())[-300:].strip()
