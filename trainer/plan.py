"""From a batch of rows to a `StepPlan`: cut into micro-batches, dealt to ranks, with the global denominators."""

from collections.abc import Sequence

from sao_gym.stream import Trajectory
from sao_gym.trainer.batch import micro_batches, pack
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.learner import StepPlan


def make_plan(
    trajectories: Sequence[Trajectory],
    config: TrainConfig,
    *,
    batch: int,
    actor_batches: int,
    version: int,
    trains_actor: bool,
    ranks: int = 1,
) -> StepPlan:
    """The plan of one training step. The cut changes no result (trap 11)."""
    n_action = sum(trajectory.n_action for trajectory in trajectories)
    wants_value = config.loss.truncation == "bootstrap"
    dealt = micro_batches([t.n_tokens for t in trajectories], config.learner.micro_batch_tokens, parts=ranks)
    packed = tuple(
        tuple(
            pack(
                [trajectories[row] for row in rows],
                credit=config.loss.credit,
                bootstrap=[wants_value and trajectories[row].outcome.is_truncated for row in rows],
                n_action_global=n_action,
            )
            for rows in part
        )
        for part in dealt
    )
    return StepPlan(
        batch=batch,
        actor_batches=actor_batches,
        version=version,
        trains_actor=trains_actor,
        n_rows=len(trajectories),
        micro_batches=packed,
    )
