r"""A sandbox of the e2b service: a machine of its own elsewhere, with one shell for the episode inside.

Every command goes through that shell, as in the other backends, so time-outs kill inside, background children do not
hold up an answer, and output is bounded here before it is kept. Files go through the service, byte for byte. Memory, CPU
and disk are the template's. The SDK hands on output as text: what is no UTF-8 was replaced before it is counted.

Example:
    async with await E2BSandbox.start(SandboxSpec(image="my-template")) as box:
        print((await box.exec("python3 -V")).stdout)
"""

import asyncio
import posixpath
from contextlib import suppress
from types import TracebackType
from typing import Any

from sao_gym.envs.sandboxes.channel import STDERR, STDOUT, ShellChannel
from sao_gym.envs.sandboxes.channel_sandbox import ChannelSandbox
from sao_gym.envs.sandboxes.e2b_service import create, sdk, start_command, translated
from sao_gym.envs.sandboxes.finish import finish
from sao_gym.envs.sandboxes.output import BoundedOutput
from sao_gym.envs.sandboxes.spec import SandboxSpec
from sao_gym.errors import SandboxError, SandboxUnavailableError

LIFETIME_S = 300
"""How long a sandbox lives that nobody prolongs; it is prolonged three times in that time."""
KILL_S = 15.0
BATCH_BYTES = 1 << 20
SHORTEST_PAUSE_S = 0.001
CLOSED = "this sandbox is closed"


class E2BSandbox(ChannelSandbox):
    """A started sandbox; see `ShellSandbox`. Make one with `await E2BSandbox.start(spec)`, in one event loop."""

    def __init__(self, spec: SandboxSpec, lifetime_s: int) -> None:
        self._spec = spec
        self._lifetime_s = lifetime_s
        self._machine: Any = None
        self._starting: asyncio.Future[Any] | None = None
        self._shell: Any = None
        self._user = ""
        self._complaints: BoundedOutput | None = BoundedOutput(4000)
        self._requests: asyncio.Queue[bytes] = asyncio.Queue()
        self._channel = ShellChannel(self._send, spec.limits, env=spec.env, workdir=spec.workdir)
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, spec: SandboxSpec | None = None, *, lifetime_s: int = LIFETIME_S) -> "E2BSandbox":
        """Start a sandbox and wait until its shell answers.

        Raises SandboxUnavailableError where the SDK, the key or the template is not there, SandboxError where the
        service fails or does not answer in time.
        """
        box = cls(spec or SandboxSpec(), lifetime_s)
        limit_s = box.spec.limits.startup_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await box._open()
        except TimeoutError:
            await finish(box.close())
            raise SandboxError(
                f"a sandbox of the e2b service did not start within {limit_s:g} s; "
                "raise startup_timeout_s or start fewer at once"
            ) from None
        except BaseException:
            await finish(box.close())
            raise
        return box

    async def _open(self) -> None:
        self._machine = await create(self._spec, lifetime_s=self._lifetime_s)
        run = self._machine.commands.run(
            start_command(self._spec),
            background=True,
            user="root",
            stdin=True,
            timeout=0,
            retain_output=False,
            on_stdout=lambda text: self._take(STDOUT, text),
            on_stderr=lambda text: self._take(STDERR, text),
        )
        self._starting = asyncio.ensure_future(run)
        with translated():
            self._shell = await asyncio.shield(self._starting)  # one that is given up ends with its sandbox
        work = (self._watch(), self._post(), self._prolong())
        self._tasks = [asyncio.create_task(each) for each in work]
        try:
            await self._channel.open(self._spec.limits.startup_timeout_s)
        except SandboxError as error:
            said = self._complaints.text()[0].strip() if self._complaints else ""
            if said:
                raise SandboxUnavailableError(
                    f"the template's shell could not be started ({said.splitlines()[-1]}); the e2b sandbox needs bash, "
                    "coreutils and util-linux in it"
                ) from error
            raise
        self._complaints = None
        self._user = (await self._channel.exec("id -un")).stdout.strip()

    # ---- the shell

    async def _take(self, stream: int, text: str) -> None:
        """Output of the shell; before it answers, stderr says why it may not."""
        data = text.encode()
        if stream == STDERR and self._complaints is not None:
            self._complaints.add(data)
        pause_s = self._channel.feed(stream, data)
        if pause_s >= SHORTEST_PAUSE_S:
            await asyncio.sleep(pause_s)

    async def _send(self, data: bytes) -> None:
        """What the channel writes; sent in order, many small ones together, whoever is cancelled meanwhile."""
        self._requests.put_nowait(data)

    async def _post(self) -> None:
        try:
            while self._closing is None:  # a request to the service may swallow the cancellation that `close` sends
                batch = bytearray(await self._requests.get())
                while len(batch) < BATCH_BYTES and not self._requests.empty():
                    batch += self._requests.get_nowait()
                with translated():
                    await self._shell.send_stdin(bytes(batch))
        except (SandboxError, SandboxUnavailableError) as error:
            self._channel.feed_end(f"a sandbox ended by itself: {error}")

    async def _watch(self) -> None:
        """Say that the shell is gone as soon as it is."""
        try:
            with translated():
                await self._shell.wait()
        except (SandboxError, SandboxUnavailableError) as error:
            self._channel.feed_end(f"a sandbox ended by itself: {error}")
        else:
            self._channel.feed_end("a sandbox ended by itself")

    async def _prolong(self) -> None:
        while self._closing is None:
            await asyncio.sleep(self._lifetime_s / 3)
            with (
                suppress(SandboxError, SandboxUnavailableError),
                translated(),
            ):  # the next time, or the shell, will tell
                await self._machine.set_timeout(self._lifetime_s)

    # ---- calls

    @property
    def channel(self) -> ShellChannel:
        """The shell inside."""
        return self._channel

    @property
    def sandbox_id(self) -> str:
        """The service's name for it."""
        return str(self._machine.sandbox_id)

    @property
    def guarantees(self) -> tuple[str, ...]:
        """One sentence for each bound of the spec that the service does not keep."""
        return (
            "Memory and CPU time are bounded by the template, not by memory_bytes and cpus.",
            "One file is bounded by disk_bytes; all files together by the template.",
        )

    async def read(self, path: str) -> bytes:
        """Bytes of a file inside. Raises SandboxError if it cannot be read or is larger than file_bytes."""
        most = self._spec.limits.file_bytes
        data = bytearray()
        with self._file_call(path, "read"):
            async with await self._machine.files.read(self._place(path), format="stream", user=self._user) as stream:
                async for chunk in stream:
                    data += chunk
                    if len(data) > most:
                        raise SandboxError(f"{path!r} in a sandbox is larger than file_bytes = {most}")
        return bytes(data)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file inside, with the folders above it. Raises SandboxError if that cannot be done."""
        most = self._spec.limits.file_bytes
        if len(data) > most:
            raise SandboxError(f"{len(data)} bytes for {path!r} are more than file_bytes = {most}")
        with self._file_call(path, "written"):
            await self._machine.files.write(self._place(path), bytes(data), user=self._user, use_octet_stream=True)

    def _file_call(self, path: str, verb: str) -> "_FileCall":
        if self._closing is not None:
            raise SandboxError(CLOSED)
        if not path or "\0" in path:
            raise SandboxError(f"{path!r} names no file in a sandbox")
        return _FileCall(path, verb)

    def _place(self, path: str) -> str:
        return posixpath.join(self._spec.workdir, path)

    # ---- the end

    async def close(self) -> None:
        """End the sandbox with every process inside; idempotent. Raises SandboxError if the service does not say so."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await finish(self._closing)

    async def _close(self) -> None:
        self._channel.feed_end(CLOSED)
        for task in self._tasks:
            task.cancel()
        if self._tasks:  # what the service does not answer must not keep the sandbox alive
            await asyncio.wait(self._tasks, timeout=KILL_S)
        try:
            if self._machine is not None:
                await self._kill()
        finally:
            if self._starting is not None:
                with suppress(Exception):
                    async with asyncio.timeout(KILL_S):
                        await (await self._starting).disconnect()

    async def _kill(self) -> None:
        """Twice if need be: a connection that a broken-off download has blocked must not keep a sandbox alive."""
        try:
            with translated():
                await self._machine.kill(request_timeout=KILL_S)
        except SandboxError:
            with translated():
                await self._machine.kill(request_timeout=KILL_S)


class _FileCall:
    """Around one call for a file: the SDK's errors become SandboxError with the path and the reason."""

    def __init__(self, path: str, verb: str) -> None:
        self._path, self._verb = path, verb

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, SandboxError):
            return
        is_missing = isinstance(error, sdk().NotFoundException)
        said = "No such file or directory" if is_missing else " ".join(str(error).split()) or type(error).__name__
        raise SandboxError(f"{self._path!r} in a sandbox could not be {self._verb} ({said})") from error
