"""The engine's thread: it owns the model, takes jobs between two decode steps and sleeps when there is nothing to do.

Invariants:
- only this thread touches the decoder; others hand it jobs and get futures.
- whoever waits gets an answer: if the thread dies, every future that is open, and every later one, fails with
  EngineError.
- a future that was cancelled frees its row before the next step.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from sao_gym.engines.decoder import Decoder
from sao_gym.engines.request import Request
from sao_gym.errors import EngineError, SaoGymError
from sao_gym.protocols import Generation, Sampling

T = TypeVar("T")


class EngineThread:
    """Runs a decoder. `threads` is the number of torch threads to compute with, None for torch's own choice."""

    def __init__(self, decoder: Decoder, threads: int | None = None) -> None:
        self._decoder = decoder
        self._threads = threads
        self._wake = threading.Condition()
        self._jobs: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._open: dict[Request, Future[Generation]] = {}
        self._ended: str | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="sao-gym-engine", daemon=True)
        self._thread.start()

    def generate(self, ids: list[int], sampling: Sampling, session: str | None) -> "Future[Generation]":
        """Queue a request; its future ends with the generation."""
        future: Future[Generation] = Future()

        def admit() -> None:
            if not future.cancelled():
                self._open[self._decoder.add(ids, sampling, session)] = future

        self._post(admit, future)
        return future

    def call(self, work: Callable[[Decoder], T]) -> "Future[T]":
        """Run `work` on the decoder between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(self._decoder))
            except SaoGymError as error:
                future.set_exception(error)

        self._post(run, future)
        return future

    def settle(self, requests: list[Request]) -> None:
        """Give finished requests to those who wait for them. For jobs that end requests themselves."""
        for request in requests:
            future = self._open.pop(request, None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(request.generation())
            except EngineError as error:
                future.set_exception(error)

    def stop(self) -> None:
        """Ask the thread to end after the step it is in."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _post(self, job: Callable[[], None], future: "Future[T]") -> None:
        with self._wake:
            if self._ended is not None or self._stopping:
                future.set_exception(EngineError(self._ended or "the engine was closed"))
                return
            self._jobs.append((job, future))
            self._wake.notify()

    def _run(self) -> None:
        reason = "the engine was closed"
        try:
            if self._threads is not None:
                torch.set_num_threads(self._threads)
            while self._take_jobs():
                self._drop_cancelled()
                if self._decoder.has_work:
                    self.settle(self._decoder.step())
        except BaseException as error:  # this is the thread's last act: those who wait must hear of it
            reason = f"the engine thread died: {type(error).__name__}: {error}"
        self._fail_all(reason)

    def _take_jobs(self) -> bool:
        with self._wake:
            while not (self._jobs or self._stopping or self._decoder.has_work):
                self._wake.wait()
            if self._stopping:
                return False
        while self._jobs:
            self._jobs[0][0]()
            self._jobs.popleft()  # after it ran: a job that kills the thread is still open, and is failed
        return True

    def _drop_cancelled(self) -> None:
        for request, future in list(self._open.items()):
            if future.cancelled():
                del self._open[request]
                self._decoder.drop(request)

    def _fail_all(self, reason: str) -> None:
        with self._wake:
            self._ended = reason
            unanswered: list[Future[Any]] = [future for _, future in self._jobs]
            self._jobs.clear()
        unanswered.extend(self._open.values())
        for future in unanswered:
            if future.cancelled() or future.done():
                continue
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(EngineError(reason))
        self._open.clear()
