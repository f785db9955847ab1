"""What an evaluation's episodes say: one line per episode, and the figures of all together.

Invariants: an error is never a wrong answer, so it leaves the mean and is counted by stage and reason; every mean says
over how many samples it was taken. Torch-free.

Example:
    >>> right = EpisodeResult(uid="a", task_id="t", attempt=0, outcome=OutcomeStatus.TERMINATED, value=1.0, passed=True)
    >>> lost = EpisodeResult(uid="b", task_id="t", attempt=1, outcome=OutcomeStatus.ERROR, reason="sandbox", stage="step")
    >>> summary = summarize([right, lost])
    >>> summary.success, summary.n_scored, summary.lower_bound, summary.errors
    (1.0, 1, 0.5, {'step: sandbox': 1})
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from sao_gym.conversation import turns_of
from sao_gym.statistics import Interval, PassAtK, clustered_interval, mean_pass_at_k
from sao_gym.stream import OutcomeStatus, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an episode cost at an API, in tokens, requests and the currency of the prices given; zeros for an engine.

    `unmetered` counts answers that did not say their tokens: with any, tokens and cost are lower bounds.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    retries: int = 0
    cost: float = 0.0
    unmetered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRun:
    """An episode's record, the stage that failed (reset, generate, step, grade) or None, the policy's last words."""

    trajectory: Trajectory
    stage: str | None = None
    text: str = ""
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """One episode in a line. `value` and `passed` are None without a verdict, `stage` says where an error arose.

    `stage` is reset, generate, step or grade; `text` is what the policy said last, `version` the policy's first one.
    """

    uid: str
    task_id: str
    attempt: int
    outcome: OutcomeStatus
    reason: str | None = None
    stage: str | None = None
    value: float | None = None
    passed: bool | None = None
    detail: str = ""
    grader_version: str = ""
    method: str = ""
    turns: int = 0
    n_action: int = 0
    version: int | None = None
    seed: int = 0
    seconds: float = 0.0
    text: str = ""
    usage: Usage = Usage()

    @property
    def is_scored(self) -> bool:
        """Whether a grader gave a verdict; truncated episodes are graded as they stand."""
        return self.value is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the results say together; means are over the scored samples, None where there is none.

    `lower_bound` is the success with errors and missing verdicts counted as 0. `errors` and `truncations` count by
    reason, errors as `stage: reason`.
    """

    n_tasks: int
    n_samples: int
    n_scored: int
    n_passed: int
    n_truncated: int
    n_error: int
    n_unscored: int
    success: float | None
    interval: Interval | None
    lower_bound: float
    value_mean: float | None
    turns_mean: float | None
    action_tokens_mean: float | None
    errors: Mapping[str, int]
    truncations: Mapping[str, int]
    pass_at_k: tuple[PassAtK, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """All results, in order of tasks and attempts, with the policy versions that sampled them and the time it took."""

    results: tuple[EpisodeResult, ...]
    samples: int
    seconds: float
    version_first: int
    version_last: int
    level: float = 0.95

    @cached_property
    def summary(self) -> Summary:
        """See `Summary`."""
        return summarize(self.results, level=self.level)

    def passed_by_task(self) -> dict[str, list[float]]:
        """Task id to 0/1 of each scored sample: what `statistics.compare_paired` takes. Tasks without any are left out."""
        found: dict[str, list[float]] = {}
        for result in self.results:
            if result.passed is not None:
                found.setdefault(result.task_id, []).append(float(result.passed))
        return found


def to_result(run: EpisodeRun) -> EpisodeResult:
    """An episode in a line."""
    trajectory = run.trajectory
    score, outcome = trajectory.score, trajectory.outcome
    return EpisodeResult(
        uid=trajectory.uid,
        task_id=trajectory.task_id,
        attempt=trajectory.attempt,
        outcome=outcome.status,
        reason=outcome.reason,
        stage=run.stage,
        value=score.value if score else None,
        passed=score.passed if score else None,
        detail=score.detail if score else "",
        grader_version=score.grader_version if score else "",
        method=score.method if score else "",
        turns=turns_of(trajectory),
        n_action=trajectory.n_action or run.usage.completion_tokens,
        version=trajectory.first_version,
        seed=trajectory.seed,
        seconds=trajectory.timings.get("episode_s", 0.0),
        text=run.text,
        usage=run.usage,
    )


def summarize(results: Sequence[EpisodeResult], *, level: float = 0.95) -> Summary:
    """What results say together. pass@k is given for k = 1, 2, 4, ... up to the samples of a task."""
    scored = [result for result in results if result.is_scored]
    errors = [result for result in results if result.outcome is OutcomeStatus.ERROR]
    truncated = [result for result in results if result.outcome is OutcomeStatus.TRUNCATED]
    passed = sum(bool(result.passed) for result in scored)
    by_task: dict[str, list[float]] = {result.task_id: [] for result in results}
    for result in scored:
        by_task[result.task_id].append(float(bool(result.passed)))
    return Summary(
        n_tasks=len(by_task),
        n_samples=len(results),
        n_scored=len(scored),
        n_passed=passed,
        n_truncated=len(truncated),
        n_error=len(errors),
        n_unscored=len(results) - len(scored) - len(errors),
        success=passed / len(scored) if scored else None,
        interval=clustered_interval(by_task, level) if scored else None,
        lower_bound=passed / len(results) if results else 0.0,
        value_mean=_mean([result.value for result in scored if result.value is not None]),
        turns_mean=_mean([result.turns for result in scored]),
        action_tokens_mean=_mean([result.n_action for result in scored]),
        errors=dict(Counter(f"{result.stage}: {result.reason}" for result in errors).most_common()),
        truncations=dict(Counter(str(result.reason) for result in truncated).most_common()),
        pass_at_k=_pass_table(results, by_task),
    )


def _pass_table(results: Sequence[EpisodeResult], by_task: Mapping[str, Sequence[float]]) -> tuple[PassAtK, ...]:
    most = max(Counter(result.task_id for result in results).values(), default=0)
    counts = {task: (len(values), int(sum(values))) for task, values in by_task.items()}
    ks = [1 << i for i in range(most.bit_length()) if 1 << i <= most]
    return tuple(mean_pass_at_k(counts, k) for k in ks)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def to_record(evaluation: Evaluation) -> dict[str, Any]:
    """The evaluation's figures as plain JSON values: summary, counts per task, versions, time."""
    tasks: dict[str, dict[str, int]] = {}
    for result in evaluation.results:
        counts = tasks.setdefault(result.task_id, {"samples": 0, "scored": 0, "passed": 0, "truncated": 0, "error": 0})
        counts["samples"] += 1
        counts["scored"] += result.is_scored
        counts["passed"] += bool(result.passed)
        counts["truncated"] += result.outcome is OutcomeStatus.TRUNCATED
        counts["error"] += result.outcome is OutcomeStatus.ERROR
    return {
        "summary": asdict(evaluation.summary),
        "samples_per_task": evaluation.samples,
        "policy_version": {"first": evaluation.version_first, "last": evaluation.version_last},
        "seconds": evaluation.seconds,
        "tasks": tasks,
    }
