"""What the results of an evaluation say together: figures, each with its denominator.

Invariants: an error is never a wrong answer, so it leaves the mean and is counted by stage and reason; what cannot be
computed is None, never 0. Torch-free.

Example:
    >>> right = EpisodeResult(uid="a", task_id="t", attempt=0, outcome=OutcomeStatus.TERMINATED, value=1.0, passed=True)
    >>> lost = EpisodeResult(uid="b", task_id="t", attempt=1, outcome=OutcomeStatus.ERROR, reason="sandbox", stage="step")
    >>> summary = summarize([right, lost])
    >>> summary.success, summary.n_scored, summary.lower_bound, summary.errors
    (1.0, 1, 0.5, {'step: sandbox': 1})
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from sao_gym.evaluation_results import Ending, EpisodeResult, Usage
from sao_gym.majority import mean_maj_at_k, vote_classes
from sao_gym.paired import Detectable, detectable_difference
from sao_gym.statistics import AtK, Interval, clustered_interval, mean_pass_at_k, two_level_interval
from sao_gym.stream import OutcomeStatus
from sao_gym.usage import total


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What the results say together; means are over the scored samples, None where there is none.

    `lower_bound` is the success with errors and missing verdicts counted as 0. `errors` and `truncations` count by
    reason, errors as `stage: reason`; `methods` the scored samples by how they were judged. `endings` count
    every sample once (`Ending`), so that of them `truncated` did not pass, where `n_truncated` counts all. `interval` treats the task as what was
    drawn, `interval_bootstrap` the task and its samples. `maj_at_k` is empty where the graders do not tell answers.
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
    interval_bootstrap: Interval | None
    detectable: Detectable | None
    lower_bound: float
    value_mean: float | None
    turns_mean: float | None
    action_tokens_mean: float | None
    endings: Mapping[str, int]
    errors: Mapping[str, int]
    truncations: Mapping[str, int]
    methods: Mapping[str, int]
    pass_at_k: tuple[AtK, ...]
    maj_at_k: tuple[AtK, ...]
    usage: Usage


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
        """See `passed_by_task`."""
        return passed_by_task(self.results)


def summarize(results: Sequence[EpisodeResult], *, level: float = 0.95) -> Summary:
    """What results say together. pass@k and maj@k are given for k = 1, 2, 4, ... up to the samples of a task."""
    scored = [result for result in results if result.is_scored]
    errors = [result for result in results if result.outcome is OutcomeStatus.ERROR]
    truncated = [result for result in results if result.outcome is OutcomeStatus.TRUNCATED]
    passed = sum(bool(result.passed) for result in scored)
    counts = Counter(result.ending for result in results)
    values = passed_by_task(scored)
    ks = _ks(results)
    return Summary(
        n_tasks=len({result.task_id for result in results}),
        n_samples=len(results),
        n_scored=len(scored),
        n_passed=passed,
        n_truncated=len(truncated),
        n_error=len(errors),
        n_unscored=len(results) - len(scored) - len(errors),
        success=passed / len(scored) if scored else None,
        interval=clustered_interval(values, level) if scored else None,
        interval_bootstrap=two_level_interval(values, level) if scored else None,
        detectable=detectable_difference(values, level=level) if scored else None,
        lower_bound=passed / len(results) if results else 0.0,
        value_mean=_mean([result.value for result in scored if result.value is not None]),
        turns_mean=_mean([result.turns for result in scored]),
        action_tokens_mean=_mean([result.n_action for result in scored]),
        endings={ending.value: counts[ending] for ending in Ending},
        errors=dict(Counter(f"{result.stage}: {result.reason}" for result in errors).most_common()),
        truncations=dict(Counter(str(result.reason) for result in truncated).most_common()),
        methods=dict(Counter(result.method or "not said" for result in scored).most_common()),
        pass_at_k=tuple(mean_pass_at_k(_counts(results, values), k) for k in ks),
        maj_at_k=_majorities(results, ks),
        usage=total(result.usage for result in results),
    )


def passed_by_task(results: Iterable[EpisodeResult]) -> dict[str, list[float]]:
    """Task id to 0/1 of each scored sample: what paired comparisons take. Tasks without any are left out."""
    found: dict[str, list[float]] = {}
    for result in results:
        if result.passed is not None:
            found.setdefault(result.task_id, []).append(float(result.passed))
    return found


def _ks(results: Sequence[EpisodeResult]) -> list[int]:
    most = max(Counter(result.task_id for result in results).values(), default=0)
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _counts(results: Sequence[EpisodeResult], values: Mapping[str, Sequence[float]]) -> dict[str, tuple[int, int]]:
    """(scored, passed) of every task, those without a scored sample included."""
    each = {result.task_id: values.get(result.task_id, ()) for result in results}
    return {task: (len(found), int(sum(found))) for task, found in each.items()}


def _majorities(results: Sequence[EpisodeResult], ks: Sequence[int]) -> tuple[AtK, ...]:
    scored = [result for result in results if result.is_scored]
    is_told = all((result.answer is not None) == result.has_answer and result.method for result in scored)
    if not is_told or not any(result.answer is not None for result in scored):
        return ()
    tasks: dict[str, list[EpisodeResult]] = {result.task_id: [] for result in results}
    for result in scored:
        tasks[result.task_id].append(result)
    votes = {
        task: vote_classes([result.answer for result in found], [bool(result.passed) for result in found])
        for task, found in tasks.items()
    }
    return tuple(mean_maj_at_k(votes, k) for k in ks)


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
