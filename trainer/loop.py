"""The training loop: the main thread learns, the event loop's thread runs episodes, the engine's thread samples.

    next_batch -> plan -> learner.step -> rows leave -> publish (returns at once) -> metrics -> checkpoint -> evaluator

A step that trains the actor raises the policy version by one; the first `critic.only_steps` batches train the critic
alone and raise none. Publication runs beside the next wait for a batch; the staleness rule knows the engine's version.

A run ends in one of four ways: its last step; `request_stop` (the step in progress ends, the rest of the episodes is
cancelled, a checkpoint is written); an error that names its cause; or a death of the process. It resumes from each.
"""

import errno
import logging
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sao_gym.conversation import require_token_records
from sao_gym.errors import DeadlineError, EngineError, InvariantError, RunFolderError, TaskFileError, UserError
from sao_gym.ledger import Ledger
from sao_gym.loops import run_blocking, submit
from sao_gym.parquet import read_trajectories, write_trajectories
from sao_gym.protocols import Clock, CountsWork, Engine
from sao_gym.runfolder import RunFolder
from sao_gym.stream import Trajectory
from sao_gym.trainer.checkpoint import RunState, prune, save_checkpoint
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.evaluator import Evaluator
from sao_gym.trainer.events import EVENTS, EventKind, EventLog, PartFiles
from sao_gym.trainer.files import CHECKPOINTS, TRAJECTORIES, forget_saved, step_file
from sao_gym.trainer.learner import Learner
from sao_gym.trainer.metrics import HISTOGRAMS, Histogram, HistogramLog, batch_metrics, loss_metrics, token_account_gap
from sao_gym.trainer.parity import PARITY, Parity, ParityLog, advice, canary_of
from sao_gym.trainer.plan import make_plan
from sao_gym.trainer.publish import Probe, PublicationReport, Publisher, make_probe
from sao_gym.trainer.runtime import Batch, Losses, Runtime
from sao_gym.trainer.statistics import StepStatistics
from sao_gym.weights import ModuleWeights

_log = logging.getLogger(__name__)


def recorded_folder(source: Path) -> Path:
    """Where the trajectories of `source`, a run or a folder of files, lie. Raises TaskFileError if it is no folder."""
    if not source.is_dir():
        raise TaskFileError(f"there is no folder {source}; give the folder of a run, or one of trajectory files")
    return source / TRAJECTORIES if (source / TRAJECTORIES).is_dir() else source


def require_batch(source: Path, batch_size: int) -> None:
    """Raise TaskFileError unless `source` holds at least one batch."""
    next(recorded_batches(source, batch_size, 1))


def recorded_batches(source: Path, batch_size: int, steps: int) -> Iterator[list[Trajectory]]:
    """At most `steps` batches of recorded, usable trajectories, in their order. `source` is a run or a folder of files.

    Raises TaskFileError if a file cannot be read, or if the folder holds less than one batch.
    """
    rows: list[Trajectory] = []
    made = 0
    for path in sorted(recorded_folder(source).glob("*.parquet")):
        found = read_trajectories(path)
        require_token_records(found, path)
        rows += [t for t in found if t.n_action and t.score is not None and not t.outcome.is_error]
        while len(rows) >= batch_size and made < steps:
            yield rows[:batch_size]
            rows, made = rows[batch_size:], made + 1
    if not made:
        raise TaskFileError(
            f"{source} holds {len(rows)} usable trajectories, a batch needs {batch_size}; give the folder of a run, or "
            "a smaller --batch-size"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of. Of what is `counting`, by name, each line of metrics has the totals."""

    config: TrainConfig
    folder: RunFolder
    ledger: Ledger
    learner: Learner
    engine: Engine
    runtime: Runtime
    clock: Clock
    tokenizer: Any
    events: EventLog
    counting: Mapping[str, CountsWork] = field(default_factory=dict)


class EngineFailedError(UserError):
    """The engine is gone, takes no weights any more, or nothing has come for too long."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextmanager
def named_failures(run: Path) -> Iterator[None]:
    """What ends a run from outside, in one sentence: a full disk, an engine that is gone, a wait past its deadline."""
    go_on = f"go on with --resume {run}"
    try:
        yield
    except EngineError as error:
        raise EngineFailedError(
            f"the engine failed ({error}); the run stands at its last checkpoint: {go_on}"
        ) from error
    except DeadlineError as error:
        raise EngineFailedError(f"the run stands still ({error}); it stands at its last checkpoint: {go_on}") from error
    except (OSError, sqlite3.OperationalError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_ROOM:
            raise
        raise RunFolderError(
            f"{run} cannot be written ({error}); its newest whole checkpoint stands: make room, then {go_on}"
        ) from error


class Training:
    """Runs batches from `state` on. `on_step` hears each line of metrics, `on_histograms` the same step's histograms.

    `evaluator` evaluates beside the steps; it is finished after the last one, and cancelled by whatever else ends the run.
    """

    def __init__(
        self,
        parts: Parts,
        state: RunState,
        *,
        on_step: Callable[[dict[str, Any]], None],
        on_histograms: Callable[[Sequence[Histogram]], None] | None = None,
        evaluator: Evaluator | None = None,
    ) -> None:
        self.parts = parts
        self.state = state
        self._on_step = on_step
        self._on_histograms = on_histograms
        self._evaluator = evaluator
        self._source: ModuleWeights | None = None
        self._publisher = Publisher(
            parts.engine,
            parts.clock,
            self._on_published,
            deadline_s=parts.config.deadline_s,
            tolerance=parts.config.engine.probe_tolerance,
        )
        self._published: PublicationReport | None = None
        self._publication_began = 0.0
        self._waiting: Future[Batch] | None = None
        self._saved = state.step
        self._histograms = HistogramLog()
        self._parity = ParityLog()
        self._is_advised = False
        self.is_stopping = False
        (parts.folder.path / TRAJECTORIES).mkdir(exist_ok=True)

    def run(self) -> RunState:
        """Train up to `config.steps` batches, or until a stop was requested. The last one always gets a checkpoint.

        Raises EngineFailedError, RunFolderError, CheckpointError and EpisodesFailedError, each naming what ended the run.
        """
        with named_failures(self.parts.folder.path):
            try:
                self._train()
                if self.state.step != self._saved:
                    self.save()
                if self._evaluator and not self.is_stopping:
                    self._evaluator.finish()
            finally:
                if self._evaluator:
                    self._evaluator.cancel()
        return self.state

    def _train(self) -> None:
        run_blocking(_soon(self.parts.runtime.start))
        try:
            self._evaluate()  # what a resumed run's step has not had
            while self.state.step < self.parts.config.steps and not self.is_stopping:
                self._step()
            self._publisher.finish()
        finally:
            run_blocking(self.parts.runtime.stop())

    def request_stop(self) -> None:
        """End after the step in progress; no episode is admitted any more, and an evaluation is broken off.

        May be called from a signal handler.
        """
        self.is_stopping = True
        submit(self.parts.runtime.stop())
        if self._waiting is not None:
            self._waiting.cancel()
        if self._evaluator is not None:
            self._evaluator.request_stop()

    def _next_batch(self, *, trains_actor: bool) -> Batch | None:
        """The next batch; None if a stop was requested while it was waited for."""
        waiting = submit(self.parts.runtime.next_batch(raises_version=trains_actor))
        self._waiting = waiting
        try:
            return None if self.is_stopping else waiting.result()
        except CancelledError:
            if self.is_stopping:
                return None
            raise
        finally:
            waiting.cancel()
            self._waiting = None

    def _step(self) -> None:
        config, clock, runtime = self.parts.config, self.parts.clock, self.parts.runtime
        started = clock.now()
        step = self.state.step + 1
        trains_actor = self.state.step >= config.critic_only_steps
        batch = self._next_batch(trains_actor=trains_actor)
        if batch is None:
            return
        self._note("batch", step, batch, seconds=batch.wait_s)
        plan = make_plan(
            batch.trajectories,
            config,
            batch=self.state.step,
            actor_batches=self.state.version,
            version=self.state.version,
            trains_actor=trains_actor,
            ranks=self.parts.learner.world,
        )
        stats = self.parts.learner.step(plan)
        write_trajectories(step_file(self.parts.folder.path, step), batch.trajectories)
        report = self._publisher.finish() or self._published
        self.state = replace(self.state, step=step, version=self.state.version + int(trains_actor))
        # Rows leave before the engine can serve what they taught: else it would be a race which prompts come next.
        run_blocking(_soon(runtime.finish_batch, batch, step))
        if trains_actor:
            self._publish(batch)
        self._note("trained", step, batch, seconds=stats.critic_s + stats.actor_s)
        losses: Losses = run_blocking(_soon(runtime.take_losses))
        self._record(batch, stats, report, losses, clock.now() - started)
        self._between_steps()

    def _note(self, kind: EventKind, step: int, batch: Batch, *, seconds: float) -> None:
        self.parts.events.add(
            kind,
            step=step,
            rows=batch.numbers,
            version=self.state.version,
            engine_version=self.parts.engine.version,
            seconds=seconds,
            weight_hash=self.state.weight_hash,
        )

    def _publish(self, batch: Batch) -> None:
        source = self.parts.learner.weights()
        probe = make_probe(self.parts.learner.bare_actor, batch.trajectories[0].streams[0].token_ids)
        self.state = replace(self.state, weight_hash=source.weight_hash)
        self._source = source if self._evaluator else None
        self._publication_began = self.parts.clock.now()
        self._publisher.start(source, self.state.version, probe, self._canary(batch))

    def _canary(self, batch: Batch) -> Probe | None:
        """The run's canary, scored as the learner computes."""
        most = self.parts.config.engine.canary_tokens
        if not most or self._keeps_no_text:
            return None
        ids = canary_of(self.parts.folder.path, batch.trajectories, most)
        with self.parts.learner.accelerator.autocast():
            return make_probe(self.parts.learner.bare_actor, ids, most=len(ids))

    def _on_published(self) -> None:
        """On the event loop, when the engine serves the new version."""
        self.parts.events.add(
            "publication",
            version=self.parts.engine.version,
            engine_version=self.parts.engine.version,
            seconds=self.parts.clock.now() - self._publication_began,
            weight_hash=self.state.weight_hash,
        )
        self.parts.runtime.changed()

    def _record(
        self, batch: Batch, stats: StepStatistics, report: PublicationReport | None, losses: Losses, seconds: float
    ) -> None:
        config = self.parts.config
        record: dict[str, Any] = {
            "step": self.state.step,
            "policy_version": self.state.version,
            **batch_metrics(batch, credit=config.loss.credit, max_staleness=config.staleness.max_staleness),
            **stats.metrics(),
            **loss_metrics(losses),
            "time_publish_s": report.seconds if report else None,
            "publish_probe_error": report.probe_error if report else None,
            "publish_failures": report.failures if report else 0,
            **self._parity_metrics(batch, stats, report),
            "time_step_s": seconds,
            "learner_busy_share": (stats.critic_s + stats.actor_s) / seconds if seconds else None,
            "weight_hash": self.state.weight_hash,
        }
        for part, counting in self.parts.counting.items():
            record |= {f"{part}_{name}": count for name, count in counting.counters().items()}
        record["tokens_per_s"] = record["tokens_total"] / seconds if seconds else None
        record["trajectories_per_s"] = len(batch.trajectories) / seconds if seconds else None
        if config.check:
            self._check(batch, stats, record)
        self.parts.folder.append_metrics(record)
        self._on_step(record)
        histograms = self._histograms.add(self.state.step, batch, stats)
        if self._on_histograms:
            self._on_histograms(histograms)

    def _parity_metrics(self, batch: Batch, stats: StepStatistics, report: PublicationReport | None) -> dict[str, Any]:
        """Engine against learner: on the canary after the last publication, and on what this version sampled itself."""
        config, canary = self.parts.config, Parity(n=0)
        if report is not None and report.canary is not None:
            canary = report.canary.parity
            self._parity.add(self.state.step, report.version, "canary", report.canary)
        self._parity.add(self.state.step, batch.version, "batch", stats.lag_0)
        if (canary.mean or 0.0) > config.engine.parity_warning and not self._is_advised:
            self._is_advised = True
            _log.warning(advice(canary, engine=config.engine.kind, precision=config.learner.precision))
        return {**canary.metrics("parity_canary"), **stats.lag_0.parity.metrics("parity_lag_0")}

    def _check(self, batch: Batch, stats: StepStatistics, record: dict[str, Any]) -> None:
        """Promises that a step can test for itself (`--check`)."""
        if record["reward_mass_error"] > 1e-5:
            raise InvariantError(
                f"step {record['step']}: rewards placed differ from scores by {record['reward_mass_error']}"
            )
        if batch.raises_version and (gap := token_account_gap(batch, stats)):
            raise InvariantError(f"step {record['step']}: the token account does not close, {gap} tokens are missing")
        oldest = self.parts.config.staleness.max_staleness
        masked = sum(record["staleness_histogram"][oldest + 1 :])
        if batch.raises_version and masked != stats.account.stale_masked:
            raise InvariantError(
                f"step {record['step']}: {masked} tokens are too old, {stats.account.stale_masked} were masked"
            )
        if self.parts.config.staleness.on_stale == "wait" and masked:
            raise InvariantError(f"step {record['step']}: {masked} tokens are older than the rule allows")

    def _between_steps(self) -> None:
        config = self.parts.config
        if self._evaluator:
            self._evaluator.poll()
        last = self.state.step >= config.steps
        if last or self.state.step % config.checkpoint.every == 0:
            self.save()
        self._published = None
        self._evaluate()

    def _evaluate(self) -> None:
        """Begin the evaluation that the present step is due, if it is."""
        source, self._source = self._source, None
        if self._evaluator is None or self.is_stopping:
            return
        if self.state.step >= self.parts.config.steps and self._evaluator.is_due(self.state.step):
            self._evaluator.finish()  # the last one is not skipped
        if self.is_stopping or not self._evaluator.claim(self.state.step):
            return
        if not self._evaluator.is_pinned:
            self._published = self._publisher.finish()  # the engine shall serve what is evaluated
        self._evaluator.begin(self.state, lambda: source or self.parts.learner.weights())

    @property
    def _keeps_no_text(self) -> bool:
        """Whether what was trained and saved is not kept."""
        return self.parts.config.serves_applications and self.parts.config.feedback.keep == "until_trained"

    def save(self) -> Path:
        """Write events, histograms and a checkpoint of the present state, then prune old ones."""
        folder = self.parts.folder.path / CHECKPOINTS
        survival = run_blocking(_soon(self.parts.runtime.survival_state))
        self.state = replace(self.state, survival=survival)
        logs = ((EVENTS, self.parts.events), (HISTOGRAMS, self._histograms), (PARITY, self._parity))
        for name, log in logs:
            PartFiles(self.parts.folder.file(name)).write(self.state.step, log.take())
        path = save_checkpoint(folder, self.parts.learner, self.parts.tokenizer, self.state)
        run_blocking(_soon(self.parts.ledger.add_checkpoint, self.state.step, self.state.version, path.name))
        prune(folder, self.parts.config.checkpoint.keep)
        if self._keeps_no_text:
            forget_saved(self.parts.folder.path)
            run_blocking(_soon(self.parts.ledger.scrub))
        self._saved = self.state.step
        return path


async def _soon(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` on the event loop, whose thread alone may touch runtime and ledger."""
    return function(*arguments)
