"""What every sandbox with a shell does alike: its commands, and by default its files, go through one channel.

Example:
    class MySandbox(ChannelSandbox):
        def __init__(self, spec, send):
            self._spec = spec
            self._channel = ShellChannel(send, spec.limits, env=spec.env, workdir=spec.workdir)

        @property
        def channel(self):
            return self._channel

        async def close(self):
            self._channel.feed_end("this sandbox is closed")
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

from sao_gym.envs.sandboxes.channel import ShellChannel
from sao_gym.envs.sandboxes.finish import Closing
from sao_gym.envs.sandboxes.spec import SandboxSpec
from sao_gym.protocols import ExecResult


class ChannelSandbox(Closing):
    """A `ShellSandbox` over a `ShellChannel`. A subclass starts it, says its channel, and closes it."""

    _spec: SandboxSpec

    @property
    @abstractmethod
    def channel(self) -> ShellChannel:
        """The shell inside. Raises SandboxError before the sandbox was started."""

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._spec

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
        return await self.channel.exec(command, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin)

    async def read(self, path: str) -> bytes:
        """Bytes of a file inside. Raises SandboxError if it cannot be read."""
        return await self.channel.read(path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file inside, with the folders above it. Raises SandboxError if that cannot be done."""
        await self.channel.write(path, data)

    async def is_alive(self) -> bool:
        """Whether the shell inside answers now; never raises."""
        return await self.channel.ping()
