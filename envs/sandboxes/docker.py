r"""A sandbox in a container of Docker's (or podman's): one shell attached for the whole episode runs every command.

The shell is the container's first process, so nothing inside can kill it, and all inside ends with it. Network,
capabilities and new privileges are off; memory, processes, CPU time, output and disk are bounded. /tmp is in memory;
the rest of the image can be written to, and what is written is looked at every second.

Example:
    engine = await DockerEngine.connect()
    async with await DockerSandbox.start(engine, SandboxSpec(image="python:3.12-slim")) as box:
        print((await box.exec("python3 -V")).stdout)
    await engine.close()
"""

import asyncio
import itertools
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sao_gym.envs.sandboxes.channel import ShellChannel, driver_argv
from sao_gym.envs.sandboxes.channel_sandbox import ChannelSandbox
from sao_gym.envs.sandboxes.docker_engine import DockerEngine
from sao_gym.envs.sandboxes.docker_plan import container
from sao_gym.envs.sandboxes.docker_stream import AttachedStream
from sao_gym.envs.sandboxes.finish import finish
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec
from sao_gym.errors import SandboxError
from sao_gym.protocols import ExecResult

LOOK_S = 1.0
"""How often the disk is looked at while a command runs. What is written in between may go past the bound."""
IDLE_LOOKS = 5
"""One look in so many where no command runs."""


class DockerSandbox(ChannelSandbox):
    """A started container; see `ShellSandbox`. Make one with `await DockerSandbox.start(engine, spec)`."""

    def __init__(self, engine: DockerEngine, spec: SandboxSpec, name: str) -> None:
        self._engine = engine
        self._spec = spec
        self._name = name
        self._stream = AttachedStream(self._feed, self._feed_end)
        self._channel = ShellChannel(self._stream.send, spec.limits, env=spec.env, workdir=spec.workdir)
        self._closing = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._running: asyncio.Task[ExecResult] | None = None
        self._turn = asyncio.Lock()
        self._written = 0
        self._is_full = False
        self._over = ""

    @classmethod
    async def start(cls, engine: DockerEngine, spec: SandboxSpec, *, run: str = "") -> "DockerSandbox":
        """Start a container and wait until its shell answers; `run` names the run in its labels.

        Raises SandboxUnavailableError where the image is not there, SandboxError where the container does not start.
        """
        box = cls(engine, spec, f"sao-gym-{secrets.token_hex(8)}")
        try:
            async with asyncio.timeout(spec.limits.startup_timeout_s):
                await box._open(run)
        except TimeoutError:
            await finish(box.close())
            raise SandboxError(
                f"a container did not start within {spec.limits.startup_timeout_s:g} s; "
                "raise startup_timeout_s or start fewer at once"
            ) from None
        except BaseException:
            await finish(box.close())
            raise
        return box

    async def _open(self, run: str) -> None:
        argv = driver_argv(processes=self._spec.limits.processes)
        create = container(self._spec, name=self._name, run=run, argv=argv)
        await self._stream.open(await self._engine.start(create, self._name))
        await self._channel.open(self._spec.limits.startup_timeout_s)
        self._looking = asyncio.create_task(self._look_after_disk())

    def _feed(self, stream: int, data: bytes) -> float:
        return self._channel.feed(stream, data)

    def _feed_end(self, reason: str) -> None:
        self._channel.feed_end(self._over or reason)

    @property
    def channel(self) -> ShellChannel:
        """The shell inside."""
        return self._channel

    @property
    def name(self) -> str:
        """The container's name, as `docker ps` shows it."""
        return self._name

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `ShellSandbox.exec`. A command that writes more than `disk_bytes` is stopped, with exit code 137."""
        async with self._turn:
            self._is_full = False
            work = self._channel.exec(command, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin)
            self._running = asyncio.ensure_future(work)
            try:
                return await self._running
            except SandboxError as error:
                raise await self._explained(error) from error
            except asyncio.CancelledError:
                if not self._is_full:
                    raise
                return ExecResult(stdout="", stderr=f"[stopped: {self._too_much}]\n", exit_code=137)
            finally:
                self._running = None

    async def close(self) -> None:
        """End every process inside and remove the container; idempotent."""
        if not self._closing.is_set():
            self._over = self._over or "this sandbox is closed"
            self._closing.set()
            await finish(self._remove())

    async def _remove(self) -> None:
        self._channel.feed_end(self._over)
        await self._stream.close()
        if self._looking is not None:
            await self._looking
        if not self._engine.is_closed:  # a closed engine has removed all
            await self._engine.remove(self._name)

    async def _look_after_disk(self) -> None:
        for turn in itertools.count(1):
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), LOOK_S)
            if self._closing.is_set() or self._channel.is_broken:
                return
            if self._running is not None or turn % IDLE_LOOKS == 0:
                with suppress(SandboxError):  # an engine that does not answer shows up in the channel
                    await self._check_disk()

    async def _explained(self, error: SandboxError) -> SandboxError:
        """With what the engine knows about a container that ended by itself."""
        if self._over or not self._channel.is_broken:
            return error
        try:
            ending = await self._engine.ending(self._name)
        except SandboxError as silence:
            return SandboxError(f"{error} ({silence})")
        return SandboxError(f"a container ended by itself ({ending})") if ending else error

    async def _check_disk(self) -> None:
        """Stop the command during which too much was written; where there is none, end all inside."""
        before, self._written = self._written, await self._engine.written_bytes(self._name)
        if self._written <= max(before, self._spec.limits.disk_bytes):
            return  # a command that removes files may take its time
        if self._running is not None:
            self._is_full = True
            self._running.cancel()
        else:
            self._over = f"a sandbox was ended: {self._too_much}"
            await self._stream.close()

    @property
    def _too_much(self) -> str:
        return f"more than {self._spec.limits.disk_bytes // MIB} MiB written to disk"
