"""The arithmetic environment, slowed down: every episode waits once, for a heavy-tailed time, before its first answer.

Invariant: the k-th episode that a run starts waits equally long in every run with the same `wait_seed`, whatever its
task, so arms of a comparison meet the same waits in the same order. They come in blocks of 128, each block the 128
midpoint quantiles of a lognormal in random order: no arm is lucky with its tail, and none waits longer than 88 medians
(where the 99th percentile is 50).

Example:
    python -m sao_gym.train --env benchmarks/waiting_arithmetic.py:WaitingArithmetic \
        --env.options '{"pool": 512, "median_s": 0.1, "tail": 50}' ...
"""

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from sao_gym.clock import SystemClock
from sao_gym.envs.arithmetic import ArithmeticEnv
from sao_gym.envs.python_tool import PythonSource, Sandboxes
from sao_gym.messages import Message
from sao_gym.protocols import Clock, Task
from sao_gym.tasks.arithmetic import arithmetic_tasks

BLOCK = 128


def sigma_of(tail: float) -> float:
    """Sigma of the lognormal whose 99th percentile is `tail` times its median."""
    return math.log(tail) / NormalDist().inv_cdf(0.99)


class Waits:
    """One wait after the other, in seconds; see the module."""

    def __init__(self, median_s: float, tail: float, seed: int) -> None:
        normal, sigma = NormalDist(), sigma_of(tail)
        self._block = [median_s * math.exp(sigma * normal.inv_cdf((i + 0.5) / BLOCK)) for i in range(BLOCK)]
        self._rng = np.random.default_rng(seed)
        self._left: list[float] = []

    def draw(self) -> float:
        """The next wait."""
        if not self._left:
            self._left = [self._block[i] for i in self._rng.permutation(BLOCK)]
        return self._left.pop()


class WaitingSandboxes(Sandboxes):
    """Boxes that the environments of a run share, and with them the order of waits."""

    waits: Waits | None = None


class WaitingArithmetic(ArithmeticEnv):
    """`ArithmeticEnv` whose episodes wait lognormally: `median_s` seconds, 99th percentile `tail` times that."""

    def __init__(
        self,
        *,
        pool: int = 4096,
        median_s: float = 0.1,
        tail: float = 50.0,
        wait_seed: int = 0,
        sandboxes: PythonSource | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(arithmetic_tasks(pool=pool), sandboxes=sandboxes)
        shared = self._sandboxes if isinstance(self._sandboxes, WaitingSandboxes) else WaitingSandboxes()
        shared.waits = shared.waits or Waits(median_s, tail, wait_seed)
        self._waits = shared.waits
        self._clock = clock or SystemClock()
        self.wait_s = 0.0

    @classmethod
    def make_sandboxes(cls, size: int, *, allow_unsafe: bool = False) -> Sandboxes:
        """Boxes that carry the order of waits."""
        return WaitingSandboxes(size, allow_unsafe=allow_unsafe)

    def setup(self, task: Task) -> Any:
        """Draw how long this episode will wait."""
        self.wait_s = self._waits.draw()
        return super().setup(task)

    async def step_async(self, action: Message | str) -> Any:
        """Wait before the first answer of an episode, then answer."""
        if self.turn == 0:
            await self._clock.sleep(self.wait_s)
        return await super().step_async(action)
