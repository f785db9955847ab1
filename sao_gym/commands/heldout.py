"""Held-out success of a run: before and after training on the live engine, beside training on an engine of its own.

Every evaluation leaves a line of metrics and a file of its episodes, `evaluations/step_NNNNNN.jsonl`. Its episodes belong
to no batch, so the staleness rule does not count them. A step that has its line is not evaluated again by a resume.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sao_gym.budgets import Budgets
from sao_gym.commands.heldout_tasks import HeldoutTasks
from sao_gym.evaluation import EpisodeResult, Evaluation, TokenRunner, evaluate
from sao_gym.jsonl import dump_line
from sao_gym.loops import run_blocking
from sao_gym.protocols import Chat, Clock, Engine, Sampling
from sao_gym.runfolder import RunFolder, write_whole
from sao_gym.statistics import Interval
from sao_gym.trainer.checkpoint import RunState
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.evaluator import Evaluated, Evaluator
from sao_gym.trainer.events import EventLog

EVALUATIONS = "evaluations"
_FILE = re.compile(r"step_(\d+)(_greedy)?\.jsonl$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutResult:
    """Success after `step` batches, over `episodes` scored ones; `greedy` at temperature 0, else at 1."""

    step: int
    greedy: bool
    success: float | None
    interval: Interval | None
    episodes: int


class Heldout:
    """Evaluates a run's policy. `engine` is the live one, `copy` the one for pinned weights, where there is one."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        folder: RunFolder,
        chat: Chat,
        budgets: Budgets,
        clock: Clock,
        given: HeldoutTasks,
        engine: Engine,
        copy: Engine | None,
    ) -> None:
        self._config, self._folder, self._clock = config, folder, clock
        self._chat, self._budgets = chat, budgets
        self._engine, self._copy = engine, copy
        self.given = given
        self.results: list[HeldoutResult] = []

    def evaluator(self, events: EventLog) -> Evaluator | None:
        """What the loop evaluates with between its ends; None where nothing is asked for."""
        wanted = self._config.evaluation
        if wanted.every is None:
            return None
        last = {self._config.steps} if wanted.at_ends else set()
        return Evaluator(
            engine=self._copy or self._engine,
            is_pinned=self._copy is not None,
            evaluate=lambda engine: self.run(engine, greedy=False),
            every=wanted.every,
            clock=self._clock,
            events=events,
            report=self._report,
            done=self._done("heldout_success") | last,
        )

    def both(self, state: RunState) -> None:
        """Sampled at temperature 1, then greedily, what this step has not had; training stands still meanwhile."""
        for greedy, key in ((False, "heldout_success"), (True, "heldout_greedy")):
            if state.step not in self._done(key):
                self._at_rest(state, greedy=greedy)

    def sampled(self, state: RunState) -> None:
        """Sampled at temperature 1; training stands still meanwhile."""
        self._at_rest(state, greedy=False)

    async def run(self, engine: Engine, *, greedy: bool) -> Evaluation:
        """All episodes of one evaluation."""
        tasks, config = self.given.tasks, self._config
        return await evaluate(
            runner=TokenRunner(
                engine=engine,
                chat=self._chat,
                make_env=self.given.environments.make,
                budgets=self._budgets,
                sampling=Sampling(max_tokens=engine.context_length, temperature=0.0 if greedy else 1.0),
                clock=self._clock,
            ),
            tasks=tasks,
            samples=1 if greedy else -(-config.evaluation.episodes // len(tasks)),
            clock=self._clock,
            seed=config.seed,
            env_id=self.given.environments.name,
            concurrency=config.rollout.max_in_flight,
        )

    def _at_rest(self, state: RunState, *, greedy: bool) -> None:
        evaluation = run_blocking(self.run(self._engine, greedy=greedy))
        found = Evaluated(step=state.step, evaluation=evaluation, weight_hash=state.weight_hash)
        self._report(found, greedy=greedy)

    def _done(self, key: str) -> set[int]:
        """Steps that have their line."""
        return {record["step"] for record in self._folder.read_metrics() if key in record}

    def _report(self, found: Evaluated, *, greedy: bool = False) -> None:
        if found.evaluation is None:
            print(f"held-out evaluation after {found.step} batches: {found.error}", flush=True)
            self._folder.append_metrics(_line_without_result(found))
            return
        result = _result(found.step, found.evaluation, greedy=greedy)
        self.results.append(result)
        write_evaluation(self._folder.path, result, found.evaluation)
        self._folder.append_metrics(_line(found, found.evaluation, result, self.given))
        print(_sentence(found, found.evaluation, result, self.given), flush=True)


def _result(step: int, evaluation: Evaluation, *, greedy: bool) -> HeldoutResult:
    summary = evaluation.summary
    return HeldoutResult(
        step=step,
        greedy=greedy,
        success=summary.success,
        interval=summary.interval,
        episodes=summary.n_scored,
    )


def _line(found: Evaluated, evaluation: Evaluation, result: HeldoutResult, given: HeldoutTasks) -> dict[str, Any]:
    """A line of metrics."""
    return {
        "step": found.step,
        "event": "evaluation",
        "heldout_greedy" if result.greedy else "heldout_success": result.success,
        "heldout_low": result.interval.low if result.interval else None,
        "heldout_high": result.interval.high if result.interval else None,
        "episodes": result.episodes,
        "heldout_samples": evaluation.summary.n_samples,
        "heldout_truncated": evaluation.summary.n_truncated,
        "heldout_methods": _shares(evaluation),
        "heldout_errors": evaluation.summary.n_error,
        "heldout_tasks": given.name,
        "heldout_contaminated": given.is_contaminated,
        "heldout_version_first": evaluation.version_first,
        "heldout_version_last": evaluation.version_last,
        "heldout_weight_hash": found.weight_hash,
        "heldout_skipped": found.skipped,
        "heldout_s": evaluation.seconds,
    }


def _shares(evaluation: Evaluation) -> dict[str, float]:
    """Share of the scored samples by how they were judged; of a writing environment's, by the style they are in."""
    summary = evaluation.summary
    return {method: count / summary.n_scored for method, count in summary.methods.items()}


def _line_without_result(found: Evaluated) -> dict[str, Any]:
    """A line of metrics about an evaluation that came to nothing."""
    return {
        "step": found.step,
        "event": "evaluation",
        "heldout_error": found.error,
        "heldout_skipped": found.skipped,
    }


def _sentence(found: Evaluated, evaluation: Evaluation, result: HeldoutResult, given: HeldoutTasks) -> str:
    kind = "greedy" if result.greedy else "T = 1"
    shown = "none was scored" if result.success is None else f"{result.success:.3f}"
    spread = f" ({result.interval.low:.3f}-{result.interval.high:.3f})" if result.interval else ""
    notes = []
    if evaluation.summary.n_error:
        notes.append(
            f"{evaluation.summary.n_error} of {evaluation.summary.n_samples} episodes lost to errors, not scored"
        )
    if found.is_mixed:
        notes.append(f"mixed versions, {evaluation.version_first} to {evaluation.version_last}")
    if given.is_contaminated:
        notes.append(f"contaminated: {len(given.overlaps)} of {len(given.tasks)} tasks overlap the training tasks")
    if found.skipped:
        notes.append(f"{found.skipped} due meanwhile skipped")
    said = f"held-out success after {found.step} batches ({kind}): {shown}{spread} of {result.episodes}"
    return said + "".join(f"; {note}" for note in notes)


def write_evaluation(run: Path, result: HeldoutResult, evaluation: Evaluation) -> None:
    """One line an episode, in order of tasks and attempts; the file appears whole."""
    folder = run / EVALUATIONS
    folder.mkdir(exist_ok=True)
    name = f"step_{result.step:06d}{'_greedy' if result.greedy else ''}.jsonl"
    write_whole(folder / name, "".join(dump_line(_sample(one)) for one in evaluation.results))


def rewind_evaluations(run: Path, step: int) -> None:
    """Take away what belongs to later steps."""
    for path in (run / EVALUATIONS).glob("step_*.jsonl"):
        if (match := _FILE.match(path.name)) and int(match[1]) > step:
            path.unlink()


def _sample(result: EpisodeResult) -> dict[str, Any]:
    return {**asdict(result), "outcome": result.outcome.value}
