"""One trajectory as the learner sees it, token by token: ratio, fate, value, delta, advantage, reward.

Invariant: nothing is computed here that the learner computes otherwise. The row is packed as a batch of one; values
and log-probs come from the networks' own forward passes, credit from `estimation`, fates from `losses.policy_loss`.
What depends on the rest of a batch is left out: whitening, and the weight 1 / N that a token has in the loss.

Example:
    explanation = explain(trajectory, Actor(model), critic, config, version=7, text_of=codec.decode)
    [token.text for token in explanation.tokens if token.figures and token.figures.fate is not Fate.KEPT]
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sao_gym.errors import TaskFileError
from sao_gym.stream import SegmentKind, Trajectory
from sao_gym.trainer.actor import Actor, Inputs
from sao_gym.trainer.attention import use_packed_attention
from sao_gym.trainer.batch import Packed
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.critic import Critic, switch_off_dropout
from sao_gym.trainer.estimation import critic_targets, estimation_units, policy_advantages
from sao_gym.trainer.losses import PolicyLoss, PolicyObjective, policy_loss
from sao_gym.trainer.plan import make_plan

Floats64 = npt.NDArray[np.float64]


class Fate(StrEnum):
    """What the policy loss does with an action token."""

    KEPT = "kept"
    LOW = "low"
    """Left out: its ratio lies at or below the lower bound."""
    HIGH = "high"
    """Left out: its ratio lies at or above the upper bound."""
    STALE = "stale"
    """Left out: it is older than `max_staleness` versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionFigures:
    """What the learner knows of one action token; `weight` multiplies the advantage in its gradient."""

    version: int
    behavior_logprob: float
    current_logprob: float
    ratio: float
    fate: Fate
    weight: float
    value: float
    delta: float
    advantage: float
    target: float
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedToken:
    """One token. `turn` is the action it belongs to or follows, -1 before the first; observations have no figures."""

    stream: int
    segment: int
    kind: SegmentKind
    turn: int
    position: int
    token_id: int
    text: str
    figures: ActionFigures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A trajectory's tokens in order, and the lambdas of its credit: one, or one per stream with `local` credit."""

    trajectory: Trajectory
    version: int
    lambdas: tuple[float, ...]
    tokens: tuple[ExplainedToken, ...]

    @property
    def figures(self) -> tuple[ActionFigures, ...]:
        """Those of the action tokens, in order."""
        return tuple(token.figures for token in self.tokens if token.figures is not None)

    @property
    def reward_sum(self) -> float:
        """Reward placed on all tokens."""
        return sum(figures.reward for figures in self.figures)

    def count(self, fate: Fate) -> int:
        """Action tokens with this fate."""
        return sum(figures.fate is fate for figures in self.figures)


@torch.inference_mode()
def explain(
    trajectory: Trajectory,
    actor: Actor,
    critic: Critic,
    config: TrainConfig,
    *,
    version: int,
    text_of: Callable[[Sequence[int]], str],
) -> Explanation:
    """Explain one trajectory with these networks, as a learner at policy version `version` would train it.

    `text_of` spells a list of ids. Raises TaskFileError for a trajectory without action tokens.
    """
    if not trajectory.n_action:
        raise TaskFileError(f"trajectory {trajectory.uid} holds no action token, so there is nothing to explain")
    for network in (actor.model, critic.backbone):
        use_packed_attention(network)
        switch_off_dropout(network)
    packed = _one_row(trajectory, config, version)
    inputs = Inputs.of(packed, torch.device("cpu"))
    logprobs, _ = actor(inputs)
    values, after = _values(critic, packed, inputs)
    units = estimation_units(packed, after, config.loss)
    advantages = policy_advantages(packed, values, units, config.loss)
    # With lambda = 0 the recursion is its own first term.
    one_step = replace(units, lam=np.zeros_like(units.lam))
    loss = _loss(packed, config, version, logprobs, advantages)
    figures = _figures(
        packed,
        loss,
        logprobs,
        values=values,
        deltas=policy_advantages(packed, values, one_step, config.loss),
        advantages=advantages,
        targets=critic_targets(packed, units, config.loss),
    )
    return Explanation(
        trajectory=trajectory,
        version=version,
        lambdas=tuple(units.lam.tolist()),
        tokens=tuple(_tokens(trajectory, figures, text_of)),
    )


def _one_row(trajectory: Trajectory, config: TrainConfig, version: int) -> Packed:
    plan = make_plan([trajectory], config, batch=0, actor_batches=0, version=version, trains_actor=True)
    return plan.micro_batches[0][0]


def _values(critic: Critic, packed: Packed, inputs: Inputs) -> tuple[Floats64, Floats64]:
    """Values before each action token [A], and after the row's end [1], 0 where none is wanted."""
    end = int(packed.bootstrap_index[0])
    wanted = inputs.state_index if end < 0 else torch.cat([inputs.state_index, torch.tensor([end])])
    both = critic(inputs, wanted).double().numpy()
    return both[: packed.n_action], both[packed.n_action :] if end >= 0 else np.zeros(1)


def _loss(packed: Packed, config: TrainConfig, version: int, logprobs: Tensor, advantages: Floats64) -> PolicyLoss:
    loss = config.loss
    return policy_loss(
        PolicyObjective(kind=loss.policy, eps_low=loss.eps_low, eps_high=loss.eps_high, detach_ratio=loss.detach_ratio),
        logprobs,
        behavior_logprobs=torch.as_tensor(packed.behavior_logprobs),
        advantages=torch.as_tensor(advantages),
        token_weights=torch.full((packed.n_action,), 1.0 / packed.n_action, dtype=torch.float64),
        stale=torch.as_tensor(packed.versions < version - config.staleness.max_staleness),
        row=torch.as_tensor(packed.row),
    )


def _figures(
    packed: Packed,
    loss: PolicyLoss,
    logprobs: Tensor,
    *,
    values: Floats64,
    deltas: Floats64,
    advantages: Floats64,
    targets: Floats64,
) -> list[ActionFigures]:
    with np.errstate(over="ignore"):
        ratios = np.exp(loss.log_ratio.double().numpy())
    masks = (
        (Fate.STALE, loss.stale_masked),
        (Fate.LOW, loss.rejected_low),
        (Fate.HIGH, loss.rejected_high),
        (Fate.KEPT, loss.kept),
    )
    return [
        ActionFigures(
            version=int(packed.versions[a]),
            behavior_logprob=float(packed.behavior_logprobs[a]),
            current_logprob=float(logprobs[a]),
            ratio=float(ratios[a]),
            fate=next(fate for fate, mask in masks if mask[a]),
            weight=float(loss.weight[a]),
            value=float(values[a]),
            delta=float(deltas[a]),
            advantage=float(advantages[a]),
            target=float(targets[a]),
            reward=float(packed.rewards[a]),
        )
        for a in range(packed.n_action)
    ]


def _tokens(
    trajectory: Trajectory, figures: Sequence[ActionFigures], text_of: Callable[[Sequence[int]], str]
) -> Iterator[ExplainedToken]:
    left = iter(figures)
    for number, stream in enumerate(trajectory.streams):
        position = 0
        for index, segment in enumerate(stream.segments):
            for token_id in segment.token_ids.tolist():
                yield ExplainedToken(
                    stream=number,
                    segment=index,
                    kind=segment.kind,
                    turn=int(stream.turns[position]),
                    position=position,
                    token_id=token_id,
                    text=text_of([token_id]),
                    figures=next(left) if segment.is_action else None,
                )
                position += 1
