"""The order of prompts: every epoch a new permutation, decided by the seed alone.

The n-th prompt of a run is the same whenever and wherever it is asked for, so a resumed run goes on with the order of
the unbroken one (trap 36).
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from sao_gym.agent_env import HasById
from sao_gym.errors import CheckpointError, ConfigError, TaskFileError
from sao_gym.protocols import Task, TaskSet

_ENDLESS = 10_000_000


class PromptOrder:
    """Maps n = 0, 1, ... to (task, attempt); `attempt` is the epoch. A set of over 10 million tasks is walked in order."""

    def __init__(self, tasks: TaskSet, seed: int) -> None:
        if not len(tasks):
            raise TaskFileError(f"task set {tasks.name} holds no tasks; give at least one")
        self.tasks = tasks
        self.seed = seed
        self._permutation = lru_cache(maxsize=2)(self._draw)

    def _draw(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.tasks))

    def __getitem__(self, n: int) -> tuple[Task, int]:
        epoch, place = divmod(n, len(self.tasks))
        if len(self.tasks) > _ENDLESS:
            return self.tasks[place], epoch
        return self.tasks[int(self._permutation(epoch)[place])], epoch

    def find(self, task_id: str) -> Task:
        """The task of that id. Raises CheckpointError if the set no longer holds it."""
        try:
            if isinstance(self.tasks, HasById):
                return self.tasks.by_id(task_id)
            return next(task for task in map(self.tasks.__getitem__, range(len(self.tasks))) if task.id == task_id)
        except (LookupError, StopIteration, ConfigError) as error:
            raise CheckpointError(
                f"the run's ledger has a row of task {task_id!r}, which {self.tasks.name} does not hold; "
                "resume with the tasks that the run was started with"
            ) from error
