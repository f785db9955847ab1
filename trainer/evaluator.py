"""Evaluation beside training: the weights of a step, pinned in an engine of their own, outside the staleness rule.

    step N ends -> `claim`, `begin`: N's weights travel to the copy, their hash is compared
                -> episodes of the copy, while rollouts and learner go on
                -> `poll` between two later steps hands the result on

One evaluation at a time: one that is due while another runs is skipped and counted, so training never waits for an
evaluation before its last step. `finish` waits for the last one, `cancel` ends it. Without an engine of its own the
rollouts' engine is used, and the result says which versions took part. Evaluating changes nothing that training sees.

Example:
    evaluator = Evaluator(engine=copy, is_pinned=True, evaluate=sample_heldout, every=10, clock=clock, events=events,
                          report=print)
    if evaluator.claim(state.step):
        evaluator.begin(state, learner.weights)
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from typing import Any

from sao_gym.errors import InvariantError, SaoGymError
from sao_gym.evaluation import Evaluation
from sao_gym.loops import run_blocking, submit
from sao_gym.protocols import Clock, Engine, WeightSource
from sao_gym.trainer.checkpoint import RunState
from sao_gym.trainer.events import EventLog

STOPPED = "stopped before its end"
Evaluate = Callable[[Engine], Coroutine[Any, Any, Evaluation]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What came of the evaluation after `step`: `evaluation`, or the `error` that it ended in.

    `weight_hash` is that of the one set of weights that sampled all of it, None for mixed versions. `skipped`: how many
    evaluations were due while it ran.
    """

    step: int
    evaluation: Evaluation | None = None
    error: str | None = None
    weight_hash: str | None = None
    skipped: int = 0

    @property
    def is_mixed(self) -> bool:
        """Whether several policy versions took part."""
        return self.evaluation is not None and self.evaluation.version_first != self.evaluation.version_last


class Evaluator:
    """Evaluates every `every` steps. `done` are steps that need no evaluation, because they have had theirs.

    `engine` belongs to the evaluator alone if `is_pinned`, else it is the one that training samples with. All methods
    are the loop's thread's, `request_stop` also a signal handler's.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        is_pinned: bool,
        evaluate: Evaluate,
        every: int,
        clock: Clock,
        events: EventLog,
        report: Callable[[Evaluated], None],
        done: Iterable[int] = (),
    ) -> None:
        self.engine = engine
        self.is_pinned = is_pinned
        self._evaluate = evaluate
        self._every = every
        self._clock = clock
        self._events = events
        self._report = report
        self._done = set(done)
        self._running: Future[Evaluated] | None = None
        self._idle: asyncio.Event | None = None
        self._step = 0
        self._skipped = 0

    @property
    def is_running(self) -> bool:
        """Whether an evaluation was begun and not yet reported."""
        return self._running is not None

    def is_due(self, step: int) -> bool:
        """Whether `step` is one of those to evaluate after, and has not been."""
        return step > 0 and step % self._every == 0 and step not in self._done

    def claim(self, step: int) -> bool:
        """Whether an evaluation is to begin after `step`. One that is due while another runs is counted as skipped."""
        if not self.is_due(step):
            return False
        self.poll()
        self._skipped += self.is_running
        return not self.is_running

    def begin(self, state: RunState, weights: Callable[[], WeightSource]) -> None:
        """Start the evaluation of a step that was claimed; returns at once."""
        if self._running is not None:
            raise InvariantError("one evaluation at a time: claim the step first")
        self._step = state.step
        self._done.add(state.step)
        self._running = submit(self._run(state, weights() if self.is_pinned else None))

    def poll(self) -> None:
        """Report the evaluation that has ended meanwhile, if one has. Raises what was no fault of the evaluation."""
        if self._running is not None and self._running.done():
            self._settle()

    def finish(self) -> None:
        """Wait for the evaluation under way, if there is one, and report it."""
        self._settle()

    def cancel(self) -> None:
        """End the evaluation under way and wait until its episodes are gone; idempotent."""
        self.request_stop()
        self._settle()

    def request_stop(self) -> None:
        """Let the evaluation under way end now; whoever polls, finishes or cancels hears that it was stopped."""
        if self._running is not None:
            self._running.cancel()

    def _settle(self) -> None:
        if self._running is None:
            return
        try:
            found = self._running.result()
        except CancelledError:
            run_blocking(self._until_idle())
            found = Evaluated(step=self._step, error=STOPPED)
        finally:
            self._running = None
        skipped, self._skipped = self._skipped, 0
        self._report(replace(found, skipped=skipped))

    async def _until_idle(self) -> None:
        if self._idle is not None:
            await self._idle.wait()

    async def _run(self, state: RunState, source: WeightSource | None) -> Evaluated:
        self._idle = asyncio.Event()
        started = self._clock.now()
        try:
            if source is not None:
                await self._pin(source, state)
            evaluation = await self._evaluate(self.engine)
            found = Evaluated(step=state.step, evaluation=evaluation, weight_hash=self._hash_of(state, evaluation))
        except InvariantError:
            raise
        except SaoGymError as error:  # what evaluates is broken; training is not
            found = Evaluated(step=state.step, error=str(error))
        finally:
            self._idle.set()
        self._events.add(
            "evaluation",
            step=state.step,
            version=state.version,
            engine_version=self.engine.version,
            seconds=self._clock.now() - started,
            weight_hash=found.weight_hash,
            outcome=found.error or "done",
        )
        return found

    async def _pin(self, source: WeightSource, state: RunState) -> None:
        """Serve these weights, proved by their hash. The version may be one that the copy already holds."""
        if self.engine.version != state.version:
            await self.engine.publish(source, state.version)
        held = (await self.engine.health()).weight_hash
        if held != state.weight_hash:
            raise InvariantError(
                f"the evaluation's engine holds the weights {held}, those of step {state.step} are {state.weight_hash}"
            )

    def _hash_of(self, state: RunState, evaluation: Evaluation) -> str | None:
        """The hash of the weights that sampled all of it, None where they changed meanwhile."""
        versions = {result.version for result in evaluation.results if result.version is not None}
        versions |= {evaluation.version_first, evaluation.version_last}
        if versions == {state.version}:
            return state.weight_hash
        if self.is_pinned:
            raise InvariantError(f"step {state.step}: version {state.version} was pinned, {sorted(versions)} sampled")
        return None
