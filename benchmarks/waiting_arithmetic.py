"""The arithmetic environment, slowed down: every episode waits once, for a heavy-tailed time, before its first answer.

Invariant: the wait is drawn from the seed that the episode was reset with, so the same episode (run seed, task,
attempt) waits equally long in every arm of a comparison, and how long it waits says nothing about how hard it is.

Example:
    python -m sao_gym.train --env benchmarks/waiting_arithmetic.py:WaitingArithmetic \
        --env.options '{"pool": 512, "median_s": 0.1, "tail": 50}' ...
"""

import math
from typing import Any

from sao_gym.clock import SystemClock
from sao_gym.envs.arithmetic import ArithmeticEnv
from sao_gym.envs.python_tool import PythonSource
from sao_gym.messages import Message
from sao_gym.protocols import Clock, Task
from sao_gym.tasks.arithmetic import arithmetic_tasks

_Z99 = 2.3263478740408408
"""The 99th percentile of a standard normal variable."""


def sigma_of(tail: float) -> float:
    """Sigma of the lognormal whose 99th percentile is `tail` times its median."""
    return math.log(tail) / _Z99


class WaitingArithmetic(ArithmeticEnv):
    """`ArithmeticEnv` whose episodes wait lognormally: `median_s` seconds, 99th percentile `tail` times that."""

    def __init__(
        self,
        *,
        pool: int = 4096,
        median_s: float = 0.1,
        tail: float = 50.0,
        sandboxes: PythonSource | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(arithmetic_tasks(pool=pool), sandboxes=sandboxes)
        self._median_s, self._sigma = median_s, sigma_of(tail)
        self._clock = clock or SystemClock()
        self.wait_s = 0.0

    def setup(self, task: Task) -> Any:
        """Draw how long this episode will wait."""
        self.wait_s = self._median_s * math.exp(self._sigma * float(self.np_random.standard_normal()))
        return super().setup(task)

    async def step_async(self, action: Message | str) -> Any:
        """Wait before the first answer of an episode, then answer."""
        if self.turn == 0:
            await self._clock.sleep(self.wait_s)
        return await super().step_async(action)
