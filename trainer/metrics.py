"""One line of metrics.jsonl: what the batch was, what the learner did with it, and where the time went."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sao_gym.stream import Credit, Trajectory
from sao_gym.trainer.runtime import Batch, Losses
from sao_gym.trainer.statistics import StepStatistics

HISTOGRAMS = "metrics.parquet"
LENGTH_EDGES = tuple(float(2**power) for power in range(21))
LOG_RATIO_EDGES = tuple(float(edge) for edge in np.round(np.linspace(-3.0, 3.0, 61), 1))
_HISTOGRAM_SCHEMA = pa.schema(
    [("step", pa.int64()), ("name", pa.string()), ("edges", pa.list_(pa.float64())), ("counts", pa.list_(pa.int64()))]
)


def reward_mass_error(trajectories: Sequence[Trajectory], credit: Credit) -> float:
    """Largest |placed reward - score| over rows: 0 unless reward was lost or doubled (trap 2)."""
    errors = []
    for trajectory in trajectories:
        value = trajectory.score.value if trajectory.score else 0.0
        copies = sum(1 for stream in trajectory.streams if stream.n_action) if credit == "local" else 1
        placed = sum(float(rewards.sum()) for rewards in trajectory.rewards(credit))
        errors.append(abs(placed - value * copies))
    return max(errors, default=0.0)


def batch_metrics(batch: Batch, *, credit: Credit, max_staleness: int) -> dict[str, Any]:
    """What the rows were. Staleness is over tokens that are trained: those not older than `max_staleness`."""
    rows = batch.trajectories
    ages = np.concatenate([batch.version - s.versions for row in rows for s in row.streams if s.n_action])
    trained = ages[ages <= max_staleness]
    scores = [row.score for row in rows if row.score is not None]
    histogram = np.bincount(np.maximum(ages, 0))
    tokens = [row.n_action for row in rows]
    return {
        "reward_mean": float(np.mean([score.value for score in scores])),
        "success_mean": float(np.mean([score.passed for score in scores])),
        "rows": len(rows),
        "prompts": len({row.task_id for row in rows}),
        "tokens_action": sum(tokens),
        "tokens_total": sum(row.n_tokens for row in rows),
        "tokens_action_max": max(tokens),
        "turns_mean": float(np.mean([row.n_turns for row in rows])),
        "truncated_share": float(np.mean([row.outcome.is_truncated for row in rows])),
        "staleness_max": int(trained.max()) if len(trained) else 0,
        "staleness_mean": float(trained.mean()) if len(trained) else 0.0,
        **_ages_by_place(batch, max_staleness),
        "staleness_histogram": [int(count) for count in histogram],
        "first_version_min": min(row.first_version or 0 for row in rows),
        "last_version_max": max(row.last_version or 0 for row in rows),
        "reward_mass_error": reward_mass_error(rows, credit),
        "time_rollout_s": float(np.mean([row.timings.get("episode_s", 0.0) for row in rows])),
        "time_group_wait_s": batch.group_wait_s,
        "time_ready_s": float(np.mean(batch.ready_s)) if batch.ready_s else 0.0,
        "time_wait_s": batch.wait_s,
        "signals": signal_means(rows),
    }


def signal_means(rows: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each figure that the environment recorded of its episodes (`info["signals"]`), over the rows that have it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.info.get("signals", {}).items():
            found.setdefault(name, []).append(float(value))
    return {name: float(np.mean(values)) for name, values in found.items()}


def loss_metrics(losses: Losses) -> dict[str, Any]:
    """Rows and sampled tokens that were lost since the last batch, by reason, and who survived so far."""
    return {
        "dropped_rows": dict(losses.rows),
        "dropped_tokens": dict(losses.tokens),
        "survival": losses.survival.table(),
    }


def token_account_gap(batch: Batch, stats: StepStatistics) -> int:
    """Action tokens of the batch less those that the loss accounts for; 0 on every step that trained the actor."""
    return sum(row.n_action for row in batch.trajectories) - stats.account.total


def _ages_by_place(batch: Batch, max_staleness: int) -> dict[str, float]:
    """The age of trained tokens in two parts: versions until the row's last token, and versions since."""
    flying, queued = [], []
    for row in batch.trajectories:
        last = row.last_version or 0
        versions = np.concatenate([stream.versions for stream in row.streams if stream.n_action])
        trained = versions[batch.version - versions <= max_staleness]
        flying.append(last - trained)
        queued.append(np.full(len(trained), batch.version - last))
    parts = {"staleness_in_flight": np.concatenate(flying), "staleness_in_queue": np.concatenate(queued)}
    return {f"{name}_mean": float(ages.mean()) if len(ages) else 0.0 for name, ages in parts.items()}


def counted(values: npt.ArrayLike, edges: Sequence[float]) -> list[int]:
    """Values [n] in the bins below `edges[0]`, between two edges (the lower one inside), and from the last edge on."""
    places = np.searchsorted(np.asarray(edges), np.asarray(values, dtype=np.float64), side="right")
    return [int(count) for count in np.bincount(places, minlength=len(edges) + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Counts [n+1] of one quantity in a step: below `edges[0]`, between two edges (the lower inside), from the last on."""

    step: int
    name: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]


class HistogramLog:
    """Histograms of the steps since the last checkpoint: tokens by age, by log-ratio, rows by length and by seconds."""

    def __init__(self) -> None:
        self._histograms: list[Histogram] = []

    def add(self, step: int, batch: Batch, stats: StepStatistics) -> tuple[Histogram, ...]:
        """One step's; they are kept and returned. A critic-only step has no ratios, so all its counts of those are 0."""
        rows = batch.trajectories
        ages = np.concatenate([batch.version - s.versions for row in rows for s in row.streams if s.n_action])
        oldest = int(ages.max(initial=0))
        seconds = [row.timings.get("episode_s", 0.0) for row in rows]
        made = tuple(
            Histogram(step=step, name=name, edges=edges, counts=tuple(counted(values, edges)))
            for name, values, edges in (
                ("staleness", ages, tuple(float(age) for age in range(oldest + 2))),
                ("log_ratio", stats.log_ratios, LOG_RATIO_EDGES),
                ("tokens_action", [row.n_action for row in rows], LENGTH_EDGES),
                ("tokens_total", [row.n_tokens for row in rows], LENGTH_EDGES),
                ("episode_ms", [1e3 * value for value in seconds], LENGTH_EDGES),
            )
        )
        self._histograms.extend(made)
        return made

    def take(self) -> pa.Table:
        """The histograms so far as a table; they are forgotten here."""
        made, self._histograms = self._histograms, []
        return pa.Table.from_pylist([asdict(histogram) for histogram in made], schema=_HISTOGRAM_SCHEMA)
