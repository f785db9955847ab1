"""The persistent shell channel: one long-lived bash inside a sandbox runs every command; any duplex byte stream carries it.

(Signatures; the body follows.)
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from sao_gym.envs.sandboxes.spec import ShellLimits
from sao_gym.protocols import ExecResult

STDOUT, STDERR, DATA = 1, 2, 3
"""Streams that come out of the driver. The first two as in Docker's multiplexed frames; DATA only where a backend has it."""


def driver_argv(*, has_data: bool = False) -> Sequence[str]:
    """Argv of the bash to start inside the sandbox: stdin, stdout, stderr are the channel (fd 3 too, with `has_data`)."""
    raise NotImplementedError


class ShellChannel:
    """The host's end. The backend calls `feed` with what it reads and `feed_end` when the stream is over."""

    def __init__(
        self, send: Callable[[bytes], Awaitable[None]], limits: ShellLimits, *, env: Mapping[str, str], workdir: str
    ) -> None:
        raise NotImplementedError

    def feed(self, stream: int, data: bytes) -> float:
        """Take bytes of STDOUT, STDERR or DATA, from the loop's own thread; returns how long to pause reading (s)."""
        raise NotImplementedError

    def feed_end(self, reason: str) -> None:
        """The stream is over: whoever waits gets a SandboxError that says `reason`."""
        raise NotImplementedError

    async def open(self, timeout_s: float) -> None:
        """Wait until the driver answers. Raises SandboxError."""
        raise NotImplementedError

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `ShellSandbox.exec`. A cancelled call kills its command first. Raises SandboxError."""
        raise NotImplementedError

    async def ping(self, timeout_s: float = 5.0) -> bool:
        """Whether the driver answers."""
        raise NotImplementedError

    @property
    def is_broken(self) -> bool:
        """Whether the driver is gone or broke the protocol; start another one then."""
        raise NotImplementedError
