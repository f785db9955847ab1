"""The learner: one collective entry, `step`, that turns a batch into new weights.

    rank 0:  plan -> broadcast -> K critic passes -> advantages -> actor step(s) -> statistics -> rank 0
    others:  serve() waits for plans and does the same on its share

The first critic pass reads the values that the advantages use (`advantage_values = pre`), then the passes train the
critic, then the actor takes one step, or `updates_per_batch` of them, each on its share of the rows. Arms without a
critic get one advantage per row from the batch's rewards, computed alike on every rank. The local loss is sum x world / N_global: data-parallel training averages over
ranks, and that is undone here (docs/paper.md row 4). Nothing else in the project touches torch.distributed.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn

from sao_gym.errors import InvariantError
from sao_gym.protocols import Clock
from sao_gym.trainer.actor import Actor, Inputs
from sao_gym.trainer.attention import use_packed_attention
from sao_gym.trainer.baselines import RowAdvantages
from sao_gym.trainer.batch import Packed
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.critic import Critic, FreezeTable, freeze, switch_off_dropout
from sao_gym.trainer.estimation import critic_targets, estimation_units, policy_advantages
from sao_gym.trainer.losses import (
    ExplainedVariance,
    PolicyLoss,
    PolicyObjective,
    TokenAccount,
    policy_loss,
    token_weights,
    value_loss,
)
from sao_gym.trainer.optimizer import (
    GradientNorms,
    gradient_norms,
    lr_multiplier,
    make_optimizer,
    set_lr,
    snapshot,
    update_size,
)
from sao_gym.trainer.statistics import StepStatistics
from sao_gym.weights import ModuleWeights

Floats64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorShare:
    """What one update of the actor learns from: so many micro-batches on each rank, rows and tokens over all ranks."""

    micro_batches: int
    n_rows: int
    n_action: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One batch, cut for all ranks: `micro_batches[rank]` are that rank's, as many on each (empty ones at the end).

    `version` is the policy version that learns from it; tokens older than version - max_staleness weigh 0.
    `actor_batches` counts batches that trained the actor before this one, `batch` counts all. `rows` are the numbers of
    the rows in each micro-batch, and rewards, tasks and groups [n_rows] theirs, in the order of the batch.
    """

    batch: int
    actor_batches: int
    version: int
    trains_actor: bool
    n_rows: int
    micro_batches: tuple[tuple[Packed, ...], ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    updates: tuple[ActorShare, ...]
    rewards: tuple[float, ...]
    tasks: tuple[str, ...]
    groups: tuple[str, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """A micro-batch on the device, with what both losses need of it: weights and stale [A]."""

    packed: Packed
    inputs: Inputs
    weights: Tensor
    stale: Tensor


@dataclass(frozen=True, eq=False, slots=True)
class _Estimate:
    """Values before the passes, critic targets and advantages of a micro-batch, all [A]."""

    values: Floats64
    targets: Floats64
    advantages: Floats64


class Learner:
    """Actor, critic and their optimisers behind one entry.

    `model` is a float32 causal language model. `critic` is None exactly where `loss.advantage` is not `critic`. Seconds
    are read from `clock`.
    """

    def __init__(
        self, config: TrainConfig, model: nn.Module, critic: Critic | None, accelerator: Accelerator, clock: Clock
    ) -> None:
        if (critic is not None) != config.loss.has_critic:
            raise InvariantError(f"loss.advantage = {config.loss.advantage} and critic = {critic} do not go together")
        networks = [model] if critic is None else [model, critic]
        if {p.dtype for network in networks for p in network.parameters()} != {torch.float32}:
            raise InvariantError("master weights are float32: load the model and the critic as such")
        self.config = config
        self.accelerator = accelerator
        self.clock = clock
        self.freeze_table: FreezeTable | None = freeze(critic, _pattern(config.critic.train)) if critic else None
        for network in [model] if critic is None else [model, critic.backbone]:
            use_packed_attention(network)
            switch_off_dropout(network)
            if config.learner.gradient_checkpointing:
                backend: Any = network
                backend.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model = model
        self.bare_critic = critic
        self.bare_actor = Actor(model)
        self.actor = accelerator.prepare_model(self.bare_actor)
        self.critic: Any = accelerator.prepare_model(critic) if critic else None
        self.actor_optimizer = accelerator.prepare_optimizer(make_optimizer(model, config.actor))
        self.critic_optimizer: Any = (
            accelerator.prepare_optimizer(make_optimizer(critic, config.critic)) if critic else None
        )
        self.row_advantages = RowAdvantages(config.loss)
        self.actor.train()
        if self.critic is not None:
            self.critic.train()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return int(self.accelerator.num_processes)

    def weights(self, dtype: torch.dtype | None = None) -> ModuleWeights:
        """The policy as it stands, ready to be published."""
        return ModuleWeights(self.model, dtype)

    def step(self, plan: StepPlan) -> StepStatistics:
        """Learn from one batch on all ranks. Called on rank 0 only; the others sit in `serve`."""
        self._broadcast(plan)
        return self._step(plan)

    def serve(self) -> None:
        """Ranks above 0: take part in every step until `stop`."""
        while (plan := self._broadcast(None)) is not None:
            self._step(plan)
        self._disband()

    def stop(self) -> None:
        """Release the ranks that sit in `serve`. Rank 0 calls it last; after it no step can be taken."""
        self._broadcast(None)
        self._disband()

    def _disband(self) -> None:
        """End data-parallel training: the networks stay, their wrappers go."""
        if self.world == 1:
            return
        self.accelerator.wait_for_everyone()
        # A wrapper that outlives the process group tears it down under the interpreter's lock and waits for gloo's
        # threads, which need that lock to free their last tensors: the process would hang at its end.
        self.actor, self.critic = self.bare_actor, self.bare_critic
        self.accelerator.free_memory()

    def _broadcast(self, plan: StepPlan | None) -> StepPlan | None:
        if self.world == 1:
            return plan
        box = [plan]
        broadcast_object_list(box, from_process=0)
        return box[0]

    def _step(self, plan: StepPlan) -> StepStatistics:
        parts = [self._part(packed, plan) for packed in plan.micro_batches[self.accelerator.process_index]]
        has_critic = self.bare_critic is not None
        stats = StepStatistics(rows=sum(part.packed.n_rows for part in parts), has_critic=has_critic)
        started = self.clock.now()
        estimates = self._train_critic(plan, parts, stats) if has_critic else self._compare_rewards(plan, parts)
        estimates = self._whitened(estimates) if self.config.loss.whiten else estimates
        for estimate in estimates:
            stats.add_estimates(estimate.values, estimate.targets, estimate.advantages)
        stats.critic_s = self.clock.now() - started
        started = self.clock.now()
        if plan.trains_actor:
            self._train_actor(plan, parts, estimates, stats)
        stats.actor_s = self.clock.now() - started
        return stats if self.world == 1 else StepStatistics.total(gather_object([stats]))

    def _part(self, packed: Packed, plan: StepPlan) -> _Part:
        device = self.accelerator.device
        row = torch.as_tensor(packed.row, device=device)
        aggregation = self.config.loss.aggregation
        weights = token_weights(
            row,
            torch.bincount(row, minlength=packed.n_rows),
            denominator=packed.n_action_global if aggregation == "token_mean" else plan.n_rows,
            aggregation=aggregation,
        )
        oldest = plan.version - self.config.staleness.max_staleness
        stale = torch.as_tensor(packed.versions < oldest, device=device)
        return _Part(packed, Inputs.of(packed, device), weights * self.world, stale)

    # -- critic

    def _train_critic(self, plan: StepPlan, parts: list[_Part], stats: StepStatistics) -> list[_Estimate]:
        """K passes; the values that the first one reads are those of the advantages, unless told otherwise."""
        config = self.config.critic
        set_lr(self.critic_optimizer, config.lr * lr_multiplier(plan.batch, config.lr_warmup_steps))
        estimates: list[_Estimate] = []
        moves = self._sum(sum(int((~part.stale).sum()) for part in parts)) > 0
        for update in range(config.updates):
            for index, (part, sync) in enumerate(self._synced(self.critic, parts)):
                with sync:
                    values, after = self._values(part)
                    if update == 0:
                        read = values.detach().double().cpu().numpy()
                        estimates.append(self._estimate(part.packed, read, after))
                    target = torch.as_tensor(estimates[index].targets, device=values.device)
                    loss = value_loss(values, target, part.weights.masked_fill(part.stale, 0.0))
                    self._backward(loss)
                if update == 0:
                    stats.value_loss += float(loss.detach()) / self.world
            norms = self._apply(self.critic, self.critic_optimizer, config.grad_clip, moves=moves)
            stats.critic_gradient = stats.critic_gradient or norms
        stats.critic_updates = config.updates if moves else 0
        return self._read_again(parts, estimates, stats)

    @torch.no_grad()
    def _read_again(self, parts: list[_Part], estimates: list[_Estimate], stats: StepStatistics) -> list[_Estimate]:
        """Explained variance after the passes; with `advantage_values = post`, advantages from these values too."""
        kept: list[_Estimate] = []
        for part, estimate in zip(parts, estimates, strict=True):
            values, after = self._values(part)
            read = values.double().cpu().numpy()
            stats.after_passes += ExplainedVariance.of(estimate.targets, read)
            if self.config.critic.advantage_values == "post":
                estimate = replace(estimate, advantages=self._estimate(part.packed, read, after).advantages)
            kept.append(estimate)
        return kept

    def _values(self, part: _Part) -> tuple[Tensor, Floats64]:
        """Values at action tokens [A], on the graph, and after the end of each row [R], 0 where none is wanted."""
        wanted = np.flatnonzero(part.packed.bootstrap_index >= 0)
        ends = torch.as_tensor(part.packed.bootstrap_index[wanted], device=part.inputs.state_index.device)
        both = self.critic(part.inputs, torch.cat([part.inputs.state_index, ends]))
        after = np.zeros(part.packed.n_rows)
        after[wanted] = both[part.packed.n_action :].detach().double().cpu().numpy()
        return both[: part.packed.n_action], after

    def _estimate(self, packed: Packed, values: Floats64, after: Floats64) -> _Estimate:
        if not packed.n_action:
            return _Estimate(values, np.zeros(0), np.zeros(0))
        units = estimation_units(packed, after, self.config.loss)
        advantages = policy_advantages(packed, values, units, self.config.loss)
        return _Estimate(values, critic_targets(packed, units, self.config.loss), advantages)

    def _compare_rewards(self, plan: StepPlan, parts: list[_Part]) -> list[_Estimate]:
        """Without a critic: each token has the advantage of its row, and there is no value to explain."""
        of_rows = self.row_advantages.of_batch(plan.rewards, plan.tasks, plan.groups)
        numbers = plan.rows[self.accelerator.process_index]
        nothing = np.zeros(0)
        return [
            _Estimate(nothing, nothing, of_rows[np.array(rows, dtype=np.int64)][part.packed.row])
            for rows, part in zip(numbers, parts, strict=True)
        ]

    # -- actor

    def _train_actor(
        self, plan: StepPlan, parts: list[_Part], estimates: list[_Estimate], stats: StepStatistics
    ) -> None:
        config = self.config.actor
        set_lr(self.actor_optimizer, config.lr * lr_multiplier(plan.actor_batches, config.lr_warmup_steps))
        references = self._references(parts)
        before = snapshot(self.model)
        start = 0
        for share in plan.updates:
            chosen = slice(start, start + share.micro_batches)
            start += share.micro_batches
            norms = self._update_actor(plan, share, parts[chosen], estimates[chosen], references[chosen], stats)
            stats.actor_gradient = stats.actor_gradient or norms
        stats.actor_update = update_size(before, self.model)

    def _update_actor(
        self,
        plan: StepPlan,
        share: ActorShare,
        parts: list[_Part],
        estimates: list[_Estimate],
        references: list[Tensor | None],
        stats: StepStatistics,
    ) -> GradientNorms:
        """One optimiser step on a share of the rows, whose loss is a mean over that share."""
        whole, own = self._denominator(plan), self._denominator(share)
        account = TokenAccount()
        triples = zip(self._synced(self.actor, parts), estimates, references, strict=True)
        for (part, sync), estimate, reference in triples:
            advantages = torch.as_tensor(estimate.advantages, device=self.accelerator.device)
            with sync:
                logprobs, entropy = self.actor(part.inputs)
                loss = self._policy_loss(part, logprobs, advantages, reference, whole / own if own else 1.0)
                self._backward(loss.loss)
            account += loss.account
            if not stats.account_by_update:
                stats.add_parity(part.packed, plan.version, logprobs)
            stats.add_policy(loss, entropy, advantages, self.world)
        moves = self._sum(account.kept) > 0
        norms = self._apply(self.actor, self.actor_optimizer, self.config.actor.grad_clip, moves=moves)
        stats.account_by_update += (account,)
        stats.actor_updates += int(moves)
        stats.skipped_actor_steps += int(not moves)
        return norms

    def _denominator(self, of: StepPlan | ActorShare) -> float:
        """What token weights are divided by, for a whole batch or a share of it."""
        if self.config.loss.aggregation != "token_mean":
            return of.n_rows
        return of.n_action if isinstance(of, ActorShare) else sum(share.n_action for share in of.updates)

    @torch.no_grad()
    def _references(self, parts: list[_Part]) -> list[Tensor | None]:
        """Log-probs that the ratio divides by [A] of each micro-batch; None: those that the engine recorded.

        `proximal` are those of the weights that the batch found. Every batch that trains the actor is published, so the
        weights published last (`synced`) are the same.
        """
        if self.config.loss.ratio_reference == "rollout":
            return [None] * len(parts)
        return [self.actor(part.inputs)[0] for part in parts]

    def _policy_loss(
        self, part: _Part, logprobs: Tensor, advantages: Tensor, reference: Tensor | None, scale: float
    ) -> PolicyLoss:
        loss = self.config.loss
        objective = PolicyObjective(
            kind=loss.policy, eps_low=loss.eps_low, eps_high=loss.eps_high, detach_ratio=loss.detach_ratio
        )
        return policy_loss(
            objective,
            logprobs,
            behavior_logprobs=torch.as_tensor(part.packed.behavior_logprobs, device=logprobs.device),
            advantages=advantages,
            token_weights=part.weights * scale,
            reference_logprobs=reference,
            stale=part.stale,
            row=torch.as_tensor(part.packed.row, device=logprobs.device),
        )

    # -- shared

    def _synced(self, network: nn.Module, parts: list[_Part]) -> Iterator[tuple[_Part, Any]]:
        """Parts, with gradients exchanged between ranks only in the last backward pass."""
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            yield part, nullcontext() if last else self.accelerator.no_sync(network)

    def _backward(self, loss: Tensor) -> None:
        """Accumulation is counted here: the division that Accelerate's own setting asks for is undone."""
        self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)

    def _apply(self, network: nn.Module, optimizer: Any, clip: float | None, *, moves: bool) -> GradientNorms:
        """One optimiser step; norms are those before clipping.

        `moves` false: none of the batch's tokens taught anything, and momentum and decay must not move weights on
        such a step (trap 32).
        """
        norms = gradient_norms(network.named_parameters())
        if moves:
            if clip is not None:
                self.accelerator.clip_grad_norm_(network.parameters(), clip)
            optimizer.step()
        optimizer.zero_grad()
        return norms

    def _whitened(self, estimates: list[_Estimate]) -> list[_Estimate]:
        flat = np.concatenate([estimate.advantages for estimate in estimates])
        n, total, squares = (self._sum(x) for x in (len(flat), float(flat.sum()), float(flat @ flat)))
        mean = total / n
        std = max(squares / n - mean**2, 0.0) ** 0.5
        return [replace(e, advantages=(e.advantages - mean) / (std + 1e-8)) for e in estimates]

    def _sum(self, value: float) -> float:
        """`value` summed over ranks."""
        if self.world == 1:
            return value
        device = self.accelerator.device
        return float(self.accelerator.reduce(torch.tensor(value, dtype=torch.float64, device=device)))


def _pattern(train: str | list[str]) -> str | tuple[str, ...]:
    return train if isinstance(train, str) else tuple(train)
