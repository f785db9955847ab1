"""From a batch of rows to a `StepPlan`: cut into micro-batches, dealt to ranks, with the global denominators."""

from collections.abc import Sequence

import numpy as np

from sao_gym.stream import Trajectory
from sao_gym.trainer.batch import micro_batches, pack
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.learner import ActorShare, StepPlan


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
    """The plan of one training step. The cut changes no result (trap 11).

    Each of the actor's updates takes its share of the rows, in ledger order; the critic reads all of them.
    """
    n_action = sum(trajectory.n_action for trajectory in trajectories)
    wants_value = config.loss.truncation == "bootstrap"
    n_updates = min(config.actor.updates_per_batch, len(trajectories)) if trains_actor else 1
    shares = [part.tolist() for part in np.array_split(np.arange(len(trajectories)), n_updates)]
    cuts = [_deal(share, trajectories, config.learner.micro_batch_tokens, ranks) for share in shares]
    dealt = [[rows for cut in cuts for rows in cut[rank]] for rank in range(ranks)]
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
        rows=tuple(tuple(map(tuple, part)) for part in dealt),
        updates=tuple(
            ActorShare(
                micro_batches=len(cut[0]),
                n_rows=len(share),
                n_action=sum(trajectories[row].n_action for row in share),
            )
            for share, cut in zip(shares, cuts, strict=True)
        ),
        rewards=tuple(t.score.value if t.score else 0.0 for t in trajectories),
        tasks=tuple(t.task_id for t in trajectories),
        groups=tuple(t.group_id or t.task_id for t in trajectories),
    )


def _deal(share: list[int], trajectories: Sequence[Trajectory], max_tokens: int, ranks: int) -> list[list[list[int]]]:
    """Per rank the micro-batches of these rows, by their numbers in the batch."""
    dealt = micro_batches([trajectories[row].n_tokens for row in share], max_tokens, parts=ranks)
    return [[[share[row] for row in rows] for rows in part] for part in dealt]
