"""A driver program in a process of its own, spoken to in JSON lines, and a small pool of such processes.

Invariants: one run at a time per process; a process that dies, hangs or breaks the protocol takes its own run alone and is
never used again; every process that was started is ended, with its group, and reaped; its stdout is the protocol and its
stderr is kept, bounded, for messages. It inherits nothing of our environment but what `WorkerCommand` gives it, and ends by
itself when we die.

Example:
    pool = WorkerPool(WorkerCommand(argv=("python3.12", "driver.py")), size=4)
    result = await pool.run({"prompt": "..."}, answer, timeout_s=600.0)
    await pool.close()
"""

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sao_gym.errors import EpisodeError

Answer = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
LINE_BYTES = 96 << 20
EXIT_S = 5.0
TAIL_LINES = 40
RUNS_PER_PROCESS = 200
"""A process is replaced after so many runs: libraries gather memory."""


class WorkerError(EpisodeError):
    """A worker process could not start, died, hung or broke its protocol."""

    kind = "worker"


class AgentProgramError(EpisodeError):
    """The agent program in a worker failed; the message is its own."""

    kind = "agent_program"


class AskRefusedError(EpisodeError):
    """What a program asked for cannot be done: it is told so, and goes on."""

    kind = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """How a worker is started. `env` is added to PATH, LANG and a HOME of its own."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    startup_s: float = 180.0


class WorkerProcess:
    """One started driver. Belongs to the event loop that started it."""

    def __init__(self, process: asyncio.subprocess.Process, home: str) -> None:
        self._process, self._home = process, home
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._listening = asyncio.ensure_future(self._listen())
        self.runs = 0
        self.facts: Mapping[str, Any] = {}

    @classmethod
    async def start(cls, command: WorkerCommand) -> "WorkerProcess":
        """A process that has said that it is ready. Raises WorkerError."""
        home = await asyncio.to_thread(tempfile.mkdtemp, prefix="sao-gym-worker-")
        env = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home}
        try:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**env, **command.env},
                cwd=home,
                limit=LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)
            raise WorkerError(f"the worker {command.argv[0]} could not be started: {error.strerror}") from error
        worker = cls(process, home)
        try:
            async with asyncio.timeout(command.startup_s):
                worker.facts = (await worker._receive()).get("ready", {})
        except TimeoutError as error:
            await worker.kill()
            raise WorkerError(f"a worker was not ready within {command.startup_s:g} s{worker.last_words}") from error
        except BaseException:
            await worker.kill()
            raise
        return worker

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    @property
    def last_words(self) -> str:
        """The end of what it said on stderr, ready to stand in a message."""
        return f"; its last words: {' '.join(' '.join(self._tail).split())[-600:]}" if self._tail else ""

    async def run(self, given: Mapping[str, Any], answer: Answer) -> Mapping[str, Any]:
        """One run; `answer(do, with)` serves what the program asks for meanwhile.

        Raises AgentProgramError where the program says that it failed, WorkerError where the process did, and whatever
        `answer` raises but an AskRefusedError, which the program is told.
        """
        self.runs += 1
        await self._send({"run": dict(given)})
        asked: set[asyncio.Task[None]] = set()
        receiving = asyncio.ensure_future(self._receive())
        try:
            while True:
                await asyncio.wait({receiving, *asked}, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in asked if task.done()]:
                    asked.discard(task)
                    task.result()
                if not receiving.done():
                    continue
                record = receiving.result()
                if "done" in record:
                    return dict(record["done"])
                if "failed" in record:
                    raise AgentProgramError(f"the agent program failed: {record['failed']}")
                if "ask" in record:
                    asked.add(asyncio.ensure_future(self._serve(record, answer)))
                receiving = asyncio.ensure_future(self._receive())
        finally:
            for pending in (receiving, *asked):
                pending.cancel()
            await asyncio.gather(receiving, *asked, return_exceptions=True)

    async def _serve(self, record: Mapping[str, Any], answer: Answer) -> None:
        try:
            result = {"result": await answer(str(record.get("do")), record.get("with") or {})}
        except AskRefusedError as error:
            result = {"error": str(error)}
        await self._send({"answer": record["ask"], **result})

    async def _send(self, record: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(record).encode() + b"\n")
            await stdin.drain()
        except (OSError, RuntimeError) as error:
            raise WorkerError(f"the worker is gone{self.last_words}") from error

    async def _receive(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            line = await stdout.readline()
        except ValueError as error:
            raise WorkerError(f"a worker sent a line of more than {LINE_BYTES >> 20} MiB") from error
        if not line.endswith(b"\n"):
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_S):
                    await asyncio.wait({self._listening})  # its last words may still be on their way
            raise WorkerError(f"the worker ended by itself{self.last_words}")
        try:
            record = json.loads(line)
        except ValueError as error:
            raise WorkerError(f"a worker sent what is no JSON: {line[:80]!r}") from error
        if not isinstance(record, dict):
            raise WorkerError(f"a worker sent {line[:80]!r} where an object was expected")
        return record

    async def _listen(self) -> None:
        stderr = self._process.stderr
        assert stderr is not None
        while data := await stderr.read(65536):
            self._tail.extend(data.decode(errors="replace")[-4000:].splitlines())

    async def kill(self) -> None:
        """End the process and its group, reap it, and remove its folder; idempotent."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        self._listening.cancel()
        with suppress(asyncio.CancelledError):
            await self._listening
        if self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.to_thread(shutil.rmtree, self._home, ignore_errors=True)


class WorkerPool:
    """At most `size` processes of one kind, used again; `warm` of them are started with the first run."""

    def __init__(self, command: WorkerCommand, *, size: int = 4, warm: int = 0) -> None:
        self._command = command
        self._places = asyncio.Semaphore(size)
        self._warm = min(warm, size)
        self._idle: list[WorkerProcess] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._alive: set[WorkerProcess] = set()
        self._is_closed = False

    @property
    def processes(self) -> int:
        """How many processes run now."""
        return len(self._alive)

    async def run(
        self, given: Mapping[str, Any], answer: Answer, *, timeout_s: float | None = None
    ) -> Mapping[str, Any]:
        """One run in a process of the pool; waits for a place. Raises as `WorkerProcess.run`, and WorkerError past time.

        The time counts from when the process is there. A run that did not end well takes its process with it.
        """
        async with self._places:
            worker = await self._take()
            is_well = False
            try:
                async with asyncio.timeout(timeout_s):
                    result = await worker.run(given, answer)
                is_well = True
                return result
            except AgentProgramError:
                is_well = worker.is_alive
                raise
            except TimeoutError as error:
                raise WorkerError(
                    f"an agent program had not ended after {timeout_s:g} s{worker.last_words}", kind="worker_timeout"
                ) from error
            finally:
                await _to_its_end(self._give_back(worker, is_well=is_well))

    async def _take(self) -> WorkerProcess:
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                return worker
            await self._end(worker)
        self._warm_up()
        return await self._start()

    def _warm_up(self) -> None:
        count, self._warm = self._warm, 0
        for _ in range(max(0, count - 1)):
            task = asyncio.ensure_future(self._start_idle())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start_idle(self) -> None:
        with suppress(WorkerError):  # whoever needs one is told why there is none
            self._idle.append(await self._start())

    async def _start(self) -> WorkerProcess:
        if self._is_closed:
            raise WorkerError("the pool of workers is closed")
        worker = await WorkerProcess.start(self._command)
        self._alive.add(worker)
        return worker

    async def _give_back(self, worker: WorkerProcess, *, is_well: bool) -> None:
        if is_well and worker.is_alive and not self._is_closed and worker.runs < RUNS_PER_PROCESS:
            self._idle.append(worker)
        else:
            await self._end(worker)

    async def _end(self, worker: WorkerProcess) -> None:
        await worker.kill()
        self._alive.discard(worker)

    async def close(self) -> None:
        """End every process; idempotent."""
        self._is_closed = True
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        self._idle.clear()
        await asyncio.gather(*(self._end(worker) for worker in list(self._alive)))


async def _to_its_end(work: Awaitable[None]) -> None:
    """Await `work` to its end; a cancellation that arrives meanwhile is passed on afterwards."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError
