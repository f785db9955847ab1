"""Imitation (SFT): raise the probability of the action tokens of given trajectories, and of nothing else.

Labels are the action segments' tokens, stop token included. Invariant: masks come from segments and lengths, never
from ids, so that a tokenizer whose padding is its stop token trains the same (trap: a stop token that is never a
label is never learnt). One seed gives one order of rows and, on one machine, the same weights to the last bit.

Example:
    imitation = Imitation(model, ImitationConfig(lr=3e-3), steps=100)
    for rows in row_order(len(trajectories), batch_size=32, steps=100, seed=0):
        print(imitation.step([trajectories[i] for i in rows]).loss)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from sao_gym.config import setting
from sao_gym.errors import ConfigError, InvariantError
from sao_gym.stream import Trajectory
from sao_gym.trainer.actor import Actor, Inputs
from sao_gym.trainer.attention import use_packed_attention
from sao_gym.trainer.batch import micro_batches, pack
from sao_gym.trainer.config import OptimizerConfig
from sao_gym.trainer.critic import switch_off_dropout
from sao_gym.trainer.optimizer import lr_multiplier, make_optimizer, set_lr


@dataclass(frozen=True, kw_only=True)
class ImitationConfig(OptimizerConfig):
    """The optimiser of imitation."""

    lr: float = setting(1e-5, help="learning rate", alias="lr")
    lr_warmup_steps: int = setting(10, help="steps over which the learning rate rises to lr")
    cosine: bool = setting(False, help="let the learning rate fall to 0 along a cosine at the last step")
    micro_batch_tokens: int = setting(16384, help="packed tokens of one forward pass; changes no result")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.micro_batch_tokens < 1:
            raise ConfigError(f"micro_batch_tokens = {self.micro_batch_tokens}: give at least 1")


@dataclass(frozen=True, slots=True)
class ImitationStep:
    """One step: mean of -log pi over its action tokens before it, how many, gradient norm before clipping, rate."""

    loss: float
    tokens: int
    gradient_norm: float
    lr: float


def learning_rate(step: int, steps: int, config: ImitationConfig) -> float:
    """Learning rate of step 0, 1, ..., steps - 1."""
    fall = 0.5 * (1.0 + math.cos(math.pi * step / steps)) if config.cosine else 1.0
    return config.lr * lr_multiplier(step, config.lr_warmup_steps) * fall


def row_order(rows: int, *, batch_size: int, steps: int, seed: int) -> Iterator[list[int]]:
    """Row numbers of each batch: one shuffle after another, so that no row comes twice before each came once."""
    if rows < 1:
        raise InvariantError("there is no row to draw from")
    rng = np.random.default_rng([seed, 3])
    waiting: list[int] = []
    for _ in range(steps):
        while len(waiting) < batch_size:
            waiting += rng.permutation(rows).tolist()
        yield waiting[:batch_size]
        del waiting[:batch_size]


class Imitation:
    """A float32 causal language model that learns from trajectories, in place. `steps` is the schedule's length."""

    def __init__(self, model: nn.Module, config: ImitationConfig, *, steps: int) -> None:
        if {parameter.dtype for parameter in model.parameters()} != {torch.float32}:
            raise InvariantError("master weights are float32: load the model as such")
        use_packed_attention(model)
        switch_off_dropout(model)
        model.train()
        self.config, self.steps = config, steps
        self.actor = Actor(model)
        self.optimizer = make_optimizer(model, config)
        self._done = 0

    def step(self, trajectories: Sequence[Trajectory]) -> ImitationStep:
        """One optimiser step on a batch; the gradient does not depend on how it is cut into micro-batches."""
        rate = learning_rate(self._done, self.steps, self.config)
        set_lr(self.optimizer, rate)
        tokens = sum(trajectory.n_action for trajectory in trajectories)
        loss = self._backward(trajectories, tokens)
        parameters = list(self.actor.parameters())
        limit = math.inf if self.config.grad_clip is None else self.config.grad_clip
        norm = float(nn.utils.clip_grad_norm_(parameters, limit))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._done += 1
        return ImitationStep(loss, tokens, norm, rate)

    @torch.no_grad()
    def loss(self, trajectories: Sequence[Trajectory]) -> float:
        """Mean of -log pi over the action tokens under the weights as they are."""
        inputs = Inputs.of(pack(trajectories), next(self.actor.parameters()).device)
        return -float(self.actor(inputs)[0].mean())

    def _backward(self, trajectories: Sequence[Trajectory], tokens: int) -> float:
        total = 0.0
        sizes = [trajectory.n_tokens for trajectory in trajectories]
        for rows in micro_batches(sizes, self.config.micro_batch_tokens)[0]:
            packed = pack([trajectories[row] for row in rows], n_action_global=tokens)
            logprobs, _ = self.actor(Inputs.of(packed, next(self.actor.parameters()).device))
            loss = -logprobs.sum() / tokens
            torch.autograd.backward(loss)
            total += float(loss.detach())
        return total
