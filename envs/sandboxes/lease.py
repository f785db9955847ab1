"""A sandbox that is handed out: every call is a sign of life, and `close` gives it back.

Invariant: a lease that is over never reaches its sandbox again, whoever ended it; its calls raise SandboxLeaseError.

Example:
    lease = await pool.lease(SandboxSpec())
    print((await lease.exec("nproc")).stdout)
    await lease.close()
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sao_gym.envs.sandboxes.finish import Closing
from sao_gym.envs.sandboxes.spec import SandboxSpec, ShellSandbox
from sao_gym.errors import SandboxError, SandboxLeaseError
from sao_gym.protocols import Clock, ExecResult


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """What a pool knows of one leased sandbox: since when (s), when it was last heard of, and what ended the lease."""

    box: ShellSandbox
    clock: Clock
    since: float
    seen: float
    give_back: "Callable[[Held], Awaitable[None]]"
    running: int = 0
    execs: int = 0
    exec_s: float = 0.0
    over: str = ""

    def silence_s(self) -> float:
        """Seconds without a sign of life; a call that runs is one."""
        return 0.0 if self.running else self.clock.now() - self.seen

    @contextmanager
    def call(self, *, is_command: bool = False) -> Iterator[None]:
        """Around one call of the sandbox."""
        if self.over:
            raise SandboxLeaseError(self.over)
        began = self.clock.now()
        self.running += 1
        try:
            yield
        except SandboxError as error:
            if self.over:
                raise SandboxLeaseError(self.over) from error
            raise
        finally:
            self.seen = self.clock.now()
            self.running -= 1
            if is_command:
                self.execs += 1
                self.exec_s += self.seen - began


class Lease(Closing):
    """A leased sandbox; see `ShellSandbox`. A holder that thinks for long says `beat`."""

    def __init__(self, held: Held) -> None:
        self._held = held

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        return self._held.box.spec

    @property
    def box(self) -> ShellSandbox:
        """The sandbox itself, for what only its backend has. Calls of it are no signs of life."""
        return self._held.box

    @property
    def is_over(self) -> bool:
        """Whether the sandbox was given or taken back."""
        return bool(self._held.over)

    def beat(self) -> None:
        """Say that the holder is alive. Raises SandboxLeaseError when the lease is over."""
        with self._held.call():
            pass

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """See `ShellSandbox.exec`. Raises SandboxLeaseError when the lease is over."""
        with self._held.call(is_command=True):
            return await self._held.box.exec(command, timeout_s=timeout_s, cwd=cwd, env=env, stdin=stdin)

    async def read(self, path: str) -> bytes:
        """Bytes of a file inside. Raises SandboxError if it cannot be read."""
        with self._held.call():
            return await self._held.box.read(path)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file inside, with the folders above it. Raises SandboxError if that cannot be done."""
        with self._held.call():
            await self._held.box.write(path, data)

    async def is_alive(self) -> bool:
        """Whether the lease holds and the sandbox answers now; never raises."""
        return not self._held.over and await self._held.box.is_alive()

    async def close(self) -> None:
        """Give the sandbox back, which ends it; idempotent."""
        await self._held.give_back(self._held)
