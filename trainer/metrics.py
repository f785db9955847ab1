"""One line of metrics.jsonl: what the batch was, what the learner did with it, and where the time went."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sao_gym.stream import Credit, Trajectory
from sao_gym.trainer.runtime import Batch, Losses
from sao_gym.trainer.statistics import StepStatistics


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
        "staleness_histogram": [int(count) for count in histogram],
        "first_version_min": min(row.first_version or 0 for row in rows),
        "last_version_max": max(row.last_version or 0 for row in rows),
        "reward_mass_error": reward_mass_error(rows, credit),
        "time_rollout_s": float(np.mean([row.timings.get("episode_s", 0.0) for row in rows])),
        "time_ready_s": float(np.mean(batch.ready_s)) if batch.ready_s else 0.0,
        "time_wait_s": batch.wait_s,
    }


def loss_metrics(losses: Losses) -> dict[str, Any]:
    """Rows and sampled tokens that were lost since the last batch, by reason."""
    return {"dropped_rows": dict(losses.rows), "dropped_tokens": dict(losses.tokens)}


def token_account_gap(batch: Batch, stats: StepStatistics) -> int:
    """Action tokens of the batch less those that the loss accounts for; 0 on every step that trained the actor."""
    return sum(row.n_action for row in batch.trajectories) - stats.account.total
