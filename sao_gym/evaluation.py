"""N samples of each task against an engine: every episode's result, and what they say together.

Invariants: results stand in the order of tasks and attempts, whatever finished first; an error is never a wrong
answer, so it leaves the mean and is counted by stage and reason; every mean says over how many samples it was taken.
Torch-free: the engine may be any. Evaluation episodes belong to no batch, so the staleness rule does not count them.

Example:
    evaluation = await evaluate(
        engine=engine, chat=chat, make_env=lambda: make("arithmetic"), tasks=take(tasks, 128), samples=4,
        sampling=Sampling(max_tokens=64), budgets=Budgets(), clock=SystemClock(), seed=0, env_id="arithmetic")
    evaluation.summary.success, evaluation.summary.interval, evaluation.summary.errors
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import gymnasium

from sao_gym.budgets import Budgets
from sao_gym.errors import ConfigError
from sao_gym.messages import Message
from sao_gym.protocols import Chat, Clock, Engine, Sampling, Task, TaskSet
from sao_gym.rollout import EnvPool, Episode, white_box
from sao_gym.statistics import Interval, PassAtK, clustered_interval, mean_pass_at_k
from sao_gym.stream import OutcomeStatus, Trajectory

MakeEnv = Callable[[], gymnasium.Env[tuple[Message, ...], Message]]
_GENERATE_REASONS = ("engine", "DeadlineError")


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
    turns: int = 0
    n_action: int = 0
    version: int | None = None
    seed: int = 0
    seconds: float = 0.0
    text: str = ""

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


def take(tasks: TaskSet | Sequence[Task], limit: int | None = None) -> tuple[Task, ...]:
    """The first `limit` tasks, all for None. Raises ConfigError for none, or all of a set without end."""
    if limit is not None and limit < 1:
        raise ConfigError(f"a limit of {limit} tasks leaves nothing to evaluate; give at least 1")
    if limit is None and len(tasks) > 1_000_000:
        raise ConfigError(f"the task set is as good as endless ({len(tasks)} tasks); give a limit")
    if len(tasks) == 0:
        raise ConfigError("there are no tasks to evaluate; give at least one")
    return tuple(tasks[index] for index in range(min(len(tasks), limit or len(tasks))))


def episode_uid(label: str, task_index: int, attempt: int) -> str:
    """The uid, and session name, of one evaluation episode."""
    return f"{label}-{task_index}-{attempt}"


async def evaluate(
    *,
    engine: Engine,
    make_env: MakeEnv,
    chat: Chat,
    tasks: Sequence[Task],
    samples: int,
    sampling: Sampling,
    budgets: Budgets,
    clock: Clock,
    seed: int,
    env_id: str = "",
    concurrency: int = 16,
    label: str | None = None,
    first_attempt: int = 0,
    level: float = 0.95,
    on_result: Callable[[EpisodeResult, int, int], None] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> Evaluation:
    """Run every task `samples` times, at most `concurrency` episodes at a time.

    `label` begins every session's name: unique per engine, by default a random one. Attempts count from
    `first_attempt`; with `seed` they decide every draw. `on_result(result, done, total)` hears of each episode as it
    ends. Raises UserError (no sandbox, no task, greedy with several samples); failures of one episode are results.
    """
    _check(tasks, samples, sampling, concurrency)
    label = label or f"eval-{secrets.token_hex(4)}"
    start, version_first = clock.now(), engine.version
    pool = EnvPool(make_env, chat, budgets, context_length=engine.context_length)
    total = samples * len(tasks)
    results: dict[int, EpisodeResult] = {}

    async def work(order: int) -> None:
        index, attempt = order // samples, first_attempt + order % samples
        uid = episode_uid(label, index, attempt)
        episode = Episode(uid=uid, task=tasks[index], env_id=env_id, attempt=attempt, run_seed=seed)
        trajectory, stage = await _run(pool, engine, episode, sampling, clock)
        results[order] = to_result(trajectory, chat, stage)
        if on_trajectory:
            on_trajectory(trajectory)
        if on_result:
            on_result(results[order], len(results), total)

    try:
        await _in_parallel(work, total, concurrency)
    finally:
        await pool.close()
    return Evaluation(
        results=tuple(results[order] for order in range(total)),
        samples=samples,
        seconds=clock.now() - start,
        version_first=version_first,
        version_last=engine.version,
        level=level,
    )


def _check(tasks: Sequence[Task], samples: int, sampling: Sampling, concurrency: int) -> None:
    if len(tasks) == 0:
        raise ConfigError("there are no tasks to evaluate; give at least one")
    if samples < 1 or concurrency < 1:
        raise ConfigError(f"samples and concurrency must be at least 1, got {samples} and {concurrency}")
    if sampling.temperature == 0 and samples > 1:
        raise ConfigError(f"greedy decoding says the same {samples} times; take 1 sample, or a temperature above 0")


async def _in_parallel(work: Callable[[int], Any], total: int, concurrency: int) -> None:
    """`work(0)` to `work(total - 1)`, begun in order. The first exception ends all."""
    orders = iter(range(total))

    async def worker() -> None:
        for order in orders:  # shared: each worker takes the next that is left
            await work(order)

    workers = [asyncio.ensure_future(worker()) for _ in range(min(concurrency, total))]
    try:
        await asyncio.gather(*workers)
    finally:
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _run(
    pool: EnvPool, engine: Engine, episode: Episode, sampling: Sampling, clock: Clock
) -> tuple[Trajectory, str | None]:
    """The episode's record, and the stage that failed if one did."""
    asked: list[int] = []
    async with pool.lease() as env:
        trajectory = await white_box(env, engine, episode, sampling=sampling, clock=clock, on_version=asked.append)
    if not trajectory.outcome.is_error:
        return trajectory, None
    reason = trajectory.outcome.reason or ""
    if reason.startswith("grading"):
        return trajectory, "grade"
    if not asked:
        return trajectory, "reset"
    return trajectory, "generate" if reason in _GENERATE_REASONS else "step"


def to_result(trajectory: Trajectory, chat: Chat, stage: str | None = None) -> EpisodeResult:
    """A trajectory in a line."""
    score, outcome = trajectory.score, trajectory.outcome
    return EpisodeResult(
        uid=trajectory.uid,
        task_id=trajectory.task_id,
        attempt=trajectory.attempt,
        outcome=outcome.status,
        reason=outcome.reason,
        stage=stage,
        value=score.value if score else None,
        passed=score.passed if score else None,
        detail=score.detail if score else "",
        grader_version=score.grader_version if score else "",
        turns=trajectory.n_turns,
        n_action=trajectory.n_action,
        version=trajectory.first_version,
        seed=trajectory.seed,
        seconds=trajectory.timings.get("episode_s", 0.0),
        text=_last_words(trajectory, chat),
    )


def _last_words(trajectory: Trajectory, chat: Chat) -> str:
    """What graders of final answers see; where the last turn holds calls alone, the calls as they were written."""
    last = next((stream.actions[-1] for stream in reversed(trajectory.streams) if stream.actions), None)
    if last is None:
        return ""
    message = chat.parse(last.token_ids, is_truncated=trajectory.outcome.is_truncated)
    return message.content or "\n".join(call.raw for call in message.tool_calls)


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
