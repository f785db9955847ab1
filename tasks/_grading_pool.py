"""A few grading workers, started when first needed, shared by all threads of a process.

`ask` blocks; a worker answers within the limits of its child, so the wait for it is bounded. A worker that does not
answer is killed and replaced, and the question is asked once more.
"""

import atexit
import json
import os
import queue
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sao_gym.errors import GradingError
from sao_gym.tasks._grading_worker import Verdict

STARTUP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingLimits:
    """Bounds of one comparison. CPU time decides on a busy machine too; wall-clock time is the backstop."""

    cpu_s: float = 1.5
    wall_s: float = 20.0
    memory_bytes: int = 1 << 30


class GradingWorker:
    """One worker process."""

    def __init__(self) -> None:
        program = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
        program += "from sao_gym.tasks._grading_worker import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ask(self, gold: str, answer: str, limits: GradingLimits) -> Verdict:
        """The verdict on two answers. Raises GradingError if the worker does not give one."""
        question = {
            "gold": gold,
            "answer": answer,
            "cpu_s": limits.cpu_s,
            "wall_s": limits.wall_s,
            "memory_bytes": limits.memory_bytes,
        }
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise GradingError("a grading worker has no pipes")
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            stdin.flush()
            if not select.select([stdout], [], [], limits.wall_s + STARTUP_S)[0]:
                raise GradingError("a grading worker did not answer")
            return Verdict(json.loads(stdout.readline()))
        except (OSError, ValueError) as error:
            raise GradingError(f"a grading worker ended or broke its protocol ({error})") from error

    def close(self) -> None:
        """End the worker and its child; idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()


class GradingPool:
    """At most `size` workers. Use it from any thread; `executor` is for asynchronous callers."""

    def __init__(self, size: int) -> None:
        self.executor = ThreadPoolExecutor(size, thread_name_prefix="grading")
        self.pid = os.getpid()
        self._slots: queue.LifoQueue[GradingWorker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)
        self._size = size

    def ask(self, gold: str, answer: str, limits: GradingLimits) -> Verdict:
        """The verdict on two answers. Raises GradingError if no worker gives one."""
        worker = self._slots.get()
        try:
            for is_last in (False, True):
                worker = worker or GradingWorker()
                try:
                    return worker.ask(gold, answer, limits)
                except BaseException as error:
                    worker.close()
                    worker = None
                    if is_last or not isinstance(error, GradingError):
                        raise
            raise GradingError("no grading worker answered")
        finally:
            self._slots.put(worker)

    def close(self) -> None:
        """Wait for questions under way, then end every worker."""
        self.executor.shutdown(wait=True, cancel_futures=True)
        for worker in [self._slots.get() for _ in range(self._size)]:
            if worker is not None:
                worker.close()
            self._slots.put(None)


class SharedPool:
    """The process's own pool, made when first asked for; a forked child makes its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: GradingPool | None = None

    def get(self) -> GradingPool:
        """The pool."""
        with self._lock:
            if self._pool is None or self._pool.pid != os.getpid():
                self._pool = GradingPool(min(os.cpu_count() or 1, 4))
                atexit.register(self._pool.close)
            return self._pool

    def close(self) -> None:
        """End the workers; the next question starts new ones."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and pool.pid == os.getpid():
            atexit.unregister(pool.close)
            pool.close()
