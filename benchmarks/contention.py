"""What rollouts cost, alone and beside a learner of the same process: measured on a run that has just ended.

Whole episodes run without their waits, one at a time and `SLOTS` at a time, alone and while the learner trains its last
batch again and again. Nothing of a run that schedules them to overlap is needed, so a model fitted on a synchronous run
can be given it.

Example:
    found = measure(run, path / "trajectories", slots=32)    # inside `opened(...)`, after the training
    found.engine_share                                        # 0.7: episodes run at 70 % of their speed while it learns
"""

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sao_gym.clock import SystemClock
from sao_gym.commands.composition import Run
from sao_gym.commands.environments import Environments
from sao_gym.engines.local import LocalEngine
from sao_gym.loops import run_blocking, submit
from sao_gym.parquet import read_trajectories
from sao_gym.protocols import Sampling
from sao_gym.rollout import EnvPool, Episode, white_box
from sao_gym.trainer.plan import make_plan

ENVIRONMENT = "arithmetic"
ROUNDS = 4
SECONDS = 3.0
START_S = 120.0
"""Most seconds until every place has ended its first episode: by then all sandboxes are up."""


@dataclass(frozen=True)
class Contention:
    """A token of an episode takes `base_s + n * each_s` seconds where n episodes run side by side.

    `engine_share`: speed of episodes while the learner works, over their speed alone. `learn_token_s`: seconds by which
    each token sampled meanwhile makes the learner's work longer.
    """

    base_s: float = 0.0
    each_s: float = 0.0
    engine_share: float = 1.0
    learn_token_s: float = 0.0


def measure(run: Run, trajectories: Path, *, slots: int) -> Contention:
    """What the parts of `run` cost each other; it must have ended: its weights are trained further here."""
    engine = run.parts.engine
    if not isinstance(engine, LocalEngine):
        return Contention()
    learn = learning(run, trajectories)
    alone_s = min(learn() for _ in range(ROUNDS))
    with rolling(run, 1):
        one_s = 1 / rate(engine, lambda: time.sleep(SECONDS))
    with rolling(run, slots):
        many = rate(engine, lambda: time.sleep(SECONDS))
    with rolling(run, slots // 2):
        half = rate(engine, lambda: time.sleep(SECONDS))
        together_s: list[float] = []
        beside = rate(engine, lambda: together_s.extend(learn() for _ in range(ROUNDS)))
    each_s = max(0.0, (slots / many - one_s) / (slots - 1))
    lost_s = max(0.0, statistics.median(together_s) - alone_s)
    return Contention(
        base_s=max(one_s - each_s, 0.0),
        each_s=each_s,
        engine_share=min(1.0, beside / half),
        learn_token_s=lost_s / (beside * statistics.median(together_s)),
    )


def learning(run: Run, trajectories: Path) -> Callable[[], float]:
    """Trains the last recorded rows, and says how many seconds that took."""
    rows = read_trajectories(max(trajectories.glob("*.parquet")))
    config, version = run.parts.config, run.parts.engine.version

    def learn() -> float:
        plan = make_plan(rows, config, batch=10**6, actor_batches=10**6, version=version, trains_actor=True, ranks=1)
        started = time.monotonic()
        run.parts.learner.step(plan)
        return time.monotonic() - started

    return learn


def rate(engine: LocalEngine, work: Callable[[], object]) -> float:
    """Tokens a second that the engine samples while `work` runs."""
    before, started = engine.counts.sampled, time.monotonic()
    work()
    return (engine.counts.sampled - before) / (time.monotonic() - started)


@contextmanager
def rolling(run: Run, count: int) -> Iterator[None]:
    """`count` episodes at any time, one after the other."""
    environments = Environments(ENVIRONMENT, {}, size=count)
    engine, clock = run.parts.engine, SystemClock()
    pool = EnvPool(environments.make, run.chat, run.budgets, context_length=engine.context_length)
    sampling, numbers = Sampling(max_tokens=engine.context_length), itertools.count()
    ended, is_started = itertools.count(1), threading.Event()

    async def one_after_the_other() -> None:
        for number in numbers:
            task = environments.tasks[number % len(environments.tasks)]
            episode = Episode(uid=f"c{count}-{number}", task=task, env_id=ENVIRONMENT, attempt=number, run_seed=0)
            async with pool.lease() as env:
                await white_box(env, engine, episode, sampling=sampling, clock=clock)
            if next(ended) == 2 * count:
                is_started.set()

    async def all_of_them() -> None:
        await asyncio.gather(*(one_after_the_other() for _ in range(count)))

    working = submit(all_of_them())
    try:
        if not is_started.wait(START_S):
            raise TimeoutError(f"{count} episodes side by side were not under way after {START_S:g} s")
        yield
    finally:
        working.cancel()
        run_blocking(pool.close())
        run_blocking(environments.close())
