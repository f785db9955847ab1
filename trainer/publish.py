"""Weights on their way to the engine, off the learner's critical path, one publication at a time, each one verified.

First the engine compares the weight hash; then a probe is scored by engine and learner, which catches what a hash
cannot: an engine that computes something else with the same weights (trap 14). A publication that fails leaves the
old version serving and is tried again; the staleness rule knows the engine's version and waits.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from sao_gym.errors import DeadlineError, EngineError, InvariantError
from sao_gym.loops import submit
from sao_gym.protocols import Clock, Engine
from sao_gym.stream import Floats, Ids
from sao_gym.trainer.actor import Actor, Inputs
from sao_gym.trainer.batch import Packed
from sao_gym.trainer.parity import TokenPairs
from sao_gym.weights import ModuleWeights

PROBE_TOKENS = 64
PROBE_TOLERANCE = 1e-3
TRIES = 3


@dataclass(frozen=True, eq=False, slots=True)
class Probe:
    """A short prompt and the learner's log-prob of each of its tokens [n] at temperature 1; the first is 0."""

    token_ids: Ids
    logprobs: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationReport:
    """One finished publication. `probe_error` is the largest difference in log-prob between engine and learner.

    `canary`: the log-probs of both on the canary, where there was one.
    """

    version: int
    weight_hash: str
    seconds: float
    probe_error: float
    failures: int
    canary: TokenPairs | None = None


@torch.no_grad()
def make_probe(actor: Actor, token_ids: Ids, *, most: int = PROBE_TOKENS) -> Probe:
    """Score the first `most` tokens of a stream with the learner's present weights, in the type that they are kept in."""
    ids = np.asarray(token_ids[:most], dtype=np.int64)
    n = len(ids)
    packed = Packed(
        token_ids=ids,
        position_ids=np.arange(n),
        doc_starts=np.array([0, n]),
        state_index=np.arange(n - 1),
        target_ids=ids[1:],
        behavior_logprobs=np.zeros(n - 1, dtype=np.float32),
        temperature=np.ones(n - 1, dtype=np.float32),
        versions=np.zeros(n - 1, dtype=np.int64),
        rewards=np.zeros(n - 1),
        row=np.zeros(n - 1, dtype=np.int64),
        stream=np.zeros(n - 1, dtype=np.int64),
        turn=np.zeros(n - 1, dtype=np.int64),
        bootstrap_index=np.array([-1]),
        group=np.zeros(1, dtype=np.int64),
        n_action_global=n - 1,
    )
    # An actor of its own: Accelerate has made the learner's compute in the run's precision.
    logprobs, _ = Actor(actor.model)(Inputs.of(packed, next(actor.parameters()).device))
    return Probe(ids.astype(np.int32), np.concatenate([[0.0], logprobs.float().cpu().numpy()]).astype(np.float32))


class Publisher:
    """Publishes to one engine. `on_change` is called on the event loop when the engine's version went up."""

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        on_change: Callable[[], None],
        *,
        deadline_s: float,
        tolerance: float = PROBE_TOLERANCE,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._on_change = on_change
        self._deadline_s = deadline_s
        self._tolerance = tolerance
        self._pending: Future[PublicationReport] | None = None

    def start(self, source: ModuleWeights, version: int, probe: Probe, canary: Probe | None = None) -> None:
        """Send weights; returns at once. `finish` must have been called for the publication before."""
        if self._pending is not None:
            raise InvariantError("one publication at a time: finish the last one first")
        self._pending = submit(self._publish(source, version, probe, canary))

    def finish(self) -> PublicationReport | None:
        """The report of the publication under way, waiting for its end; None if there is none.

        Raises DeadlineError, EngineError after the last try or if engine and learner disagree. Past the
        deadline the publication is given up: it is cancelled where it waits.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        try:
            return pending.result(self._deadline_s)
        except DeadlineError:
            raise  # the engine's own: it names what was waited for
        except TimeoutError as error:
            pending.cancel()
            raise DeadlineError(f"waited {self._deadline_s:g} s for the engine to take new weights") from error

    async def _publish(
        self, source: ModuleWeights, version: int, probe: Probe, canary: Probe | None
    ) -> PublicationReport:
        started = self._clock.now()
        failures = 0
        while True:
            try:
                await self._engine.publish(source, version)
                break
            except EngineError:
                failures += 1
                if failures == TRIES:
                    raise
        self._on_change()
        pairs = await self._scored(probe)
        error = pairs.parity.max or 0.0
        if not error <= self._tolerance:
            raise EngineError(
                f"engine and learner disagree by {error:.2e} on version {version} (at most {self._tolerance:g}): it does not "
                "compute what it was sent; one that computes in bfloat16 needs a larger --engine.probe-tolerance"
            )
        return PublicationReport(
            version=version,
            weight_hash=source.weight_hash,
            seconds=self._clock.now() - started,
            probe_error=error,
            failures=failures,
            canary=None if canary is None else await self._scored(canary),
        )

    async def _scored(self, probe: Probe) -> TokenPairs:
        """The engine's log-probs beside the learner's; the first token has none."""
        scored = await self._engine.score(probe.token_ids)
        return TokenPairs(scored[1:], probe.logprobs[1:], np.arange(1, len(probe.token_ids)))
