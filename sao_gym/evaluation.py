"""N samples of each task against a policy: every episode's result, and what they say together.

Invariants: results stand in the order of tasks and attempts, whatever finished first; an error is never a wrong
answer, so it leaves the mean and is counted by stage and reason; every mean says over how many samples it was taken.
Torch-free: an `EpisodeRunner` may drive any policy (`TokenRunner` an engine). Evaluation episodes belong to no batch,
so the staleness rule does not count them.

Example:
    runner = TokenRunner(
        engine=engine, chat=chat, make_env=lambda: make("arithmetic"), budgets=Budgets(), clock=SystemClock(),
        sampling=Sampling(max_tokens=64))
    evaluation = await evaluate(
        runner=runner, tasks=take(tasks, 128), samples=4, clock=SystemClock(), seed=0, env_id="arithmetic")
    evaluation.summary.success, evaluation.summary.interval, evaluation.summary.errors
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from sao_gym.errors import ConfigError
from sao_gym.evaluation_results import Ending, EpisodeResult, EpisodeRun, Usage, to_result
from sao_gym.evaluation_summary import Evaluation, Summary, passed_by_task, summarize, to_record
from sao_gym.protocols import Clock, Task, TaskSet
from sao_gym.rollout import Episode
from sao_gym.stream import Trajectory
from sao_gym.token_runner import TokenRunner

__all__ = [
    "Ending",
    "EpisodeResult",
    "EpisodeRun",
    "EpisodeRunner",
    "Evaluation",
    "Summary",
    "TokenRunner",
    "Usage",
    "episode_uid",
    "evaluate",
    "passed_by_task",
    "summarize",
    "take",
    "to_record",
    "to_result",
]

_NONE: Mapping[str, EpisodeResult] = MappingProxyType({})


class EpisodeRunner(Protocol):
    """Whatever takes a policy through an episode; one runner drives many episodes at a time."""

    @property
    def version(self) -> int:
        """The policy's version now; 0 for one that never changes."""
        ...

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn, so that every sample of a task says the same."""
        ...

    async def run(self, episode: Episode) -> EpisodeRun:
        """One episode. Raises UserError for what ends the whole evaluation; other failures are outcomes `error`."""
        ...

    async def close(self) -> None:
        """Give back the environments; idempotent."""
        ...


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
    runner: EpisodeRunner,
    tasks: Sequence[Task],
    samples: int,
    clock: Clock,
    seed: int,
    env_id: str = "",
    concurrency: int = 16,
    label: str | None = None,
    first_attempt: int = 0,
    level: float = 0.95,
    kept: Mapping[str, EpisodeResult] = _NONE,
    answer_of: Callable[[str], str | None] | None = None,
    on_result: Callable[[EpisodeResult, int, int], None] | None = None,
    on_trajectory: Callable[[Trajectory], None] | None = None,
) -> Evaluation:
    """Run every task `samples` times, at most `concurrency` episodes at a time; the runner is closed at the end.

    `label` begins every session's name: unique per engine, by default a random one. Attempts count from
    `first_attempt`; with `seed` they decide every draw. `kept` holds results by uid that are not run again.
    `answer_of` finds the answer in a policy's last words, for maj@k.
    `on_trajectory` hears of each episode as it ends, then `on_result(result, done, total)`. Raises UserError (no
    sandbox, no task, greedy with several samples); failures of one episode are results.
    """
    _check(runner, tasks, samples, concurrency)
    label = label or f"eval-{secrets.token_hex(4)}"
    start, version_first = clock.now(), runner.version
    pairs = [(index, first_attempt + attempt) for index in range(len(tasks)) for attempt in range(samples)]
    uids = [episode_uid(label, *pair) for pair in pairs]
    results = {uid: kept[uid] for uid in uids if uid in kept}
    missing = [order for order, uid in enumerate(uids) if uid not in results]

    async def work(order: int) -> None:
        index, attempt = pairs[order]
        episode = Episode(uid=uids[order], task=tasks[index], env_id=env_id, attempt=attempt, run_seed=seed)
        run = await runner.run(episode)
        result = results[episode.uid] = to_result(run, answer_of(run.text) if answer_of else None)
        if on_trajectory:
            on_trajectory(run.trajectory)
        if on_result:
            on_result(result, len(results), len(pairs))

    try:
        await _in_parallel(work, missing, concurrency)
    finally:
        await runner.close()
    return Evaluation(
        results=tuple(results[uid] for uid in uids),
        samples=samples,
        seconds=clock.now() - start,
        version_first=version_first,
        version_last=runner.version,
        level=level,
    )


def _check(runner: EpisodeRunner, tasks: Sequence[Task], samples: int, concurrency: int) -> None:
    if len(tasks) == 0:
        raise ConfigError("there are no tasks to evaluate; give at least one")
    if samples < 1 or concurrency < 1:
        raise ConfigError(f"samples and concurrency must be at least 1, got {samples} and {concurrency}")
    if samples > 1 and runner.is_greedy:
        raise ConfigError(f"greedy decoding says the same {samples} times; take 1 sample, or a temperature above 0")


async def _in_parallel(work: Callable[[int], Any], orders: Sequence[int], concurrency: int) -> None:
    """`work` of each order, begun in turn. The first exception ends all."""
    left = iter(orders)

    async def worker() -> None:
        for order in left:  # shared: each worker takes the next that is left
            await work(order)

    workers = [asyncio.ensure_future(worker()) for _ in range(min(concurrency, len(orders)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
