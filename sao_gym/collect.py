"""Many episodes of one fixed policy, side by side, in the order they were asked for.

Invariant: the answer is one trajectory per episode whatever failed; bad user input ends all of them at once.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sao_gym.protocols import Clock, Engine, Sampling, TaskSet
from sao_gym.rollout import EnvPool, Episode
from sao_gym.stream import Trajectory


async def collect(
    pool: EnvPool,
    engine: Engine,
    episodes: Sequence[Episode],
    *,
    sampling: Sampling,
    clock: Clock,
    max_in_flight: int = 32,
) -> list[Trajectory]:
    """Run `episodes`, at most `max_in_flight` at a time. Raises UserError and InvariantError as `white_box` does."""
    gate = asyncio.Semaphore(max_in_flight)

    async def one(episode: Episode) -> Trajectory:
        async with gate, pool.lease() as env:
            return await pool.run(env, engine, episode, sampling=sampling, clock=clock)

    running = [asyncio.ensure_future(one(episode)) for episode in episodes]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def numbered(tasks: TaskSet, count: int, *, env_id: str, seed: int, name: str) -> list[Episode]:
    """`count` episodes over the tasks in turn; an episode's uid starts with `name`."""
    size = len(tasks)
    return [
        Episode(
            uid=f"{name}-{index}",
            task=tasks[index % size],
            env_id=env_id,
            attempt=index // size,
            run_seed=seed,
        )
        for index in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Success:
    """Share of episodes that passed, over those that did not fail by themselves."""

    rate: float
    episodes: int
    errors: int
    tokens: float
    turns: float

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> "Success":
        """Count; an episode whose infrastructure failed is left out and reported. Means are per episode."""
        whole = [t for t in trajectories if not t.outcome.is_error and t.score is not None]
        passed = [t.score.passed for t in whole if t.score is not None]
        return cls(
            rate=float(np.mean(passed)) if passed else 0.0,
            episodes=len(whole),
            errors=len(trajectories) - len(whole),
            tokens=float(np.mean([t.n_tokens for t in whole])) if whole else 0.0,
            turns=float(np.mean([t.n_turns for t in whole])) if whole else 0.0,
        )
