"""How much a learner and an engine of one process slow each other: measured on a run that has just ended.

The learner trains its last batch again, alone and while the engine decodes; the engine decodes alone and meanwhile.
Nothing of a run that schedules them to overlap is needed, so a model fitted on a synchronous run can be given it.

Example:
    shares = measure(run, path / "trajectories")    # inside `opened(...)`, after the training
    shares.learner                                   # 0.8: the learner runs at 80 % of its speed while the engine works
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sao_gym.commands.composition import Run
from sao_gym.engines.local import LocalEngine
from sao_gym.parquet import read_trajectories
from sao_gym.protocols import Sampling
from sao_gym.stream import Ids
from sao_gym.trainer.plan import make_plan

ROUNDS = 3
REQUESTS = 16
TOKENS = 16


@dataclass(frozen=True)
class Shares:
    """Speed of each while both work, over its speed alone; at most 1."""

    learner: float = 1.0
    engine: float = 1.0


def measure(run: Run, trajectories: Path) -> Shares:
    """Shares of the parts of `run`, which must have ended: its weights are trained further here."""
    engine = run.parts.engine
    if not isinstance(engine, LocalEngine):
        return Shares()
    rows = read_trajectories(max(trajectories.glob("*.parquet")))
    prompts = [row.streams[0].token_ids[: len(row.streams[0].token_ids) // 2] for row in rows[:REQUESTS]]

    def learn() -> float:
        config = run.parts.config
        plan = make_plan(
            rows, config, batch=10**6, actor_batches=10**6, version=engine.version, trains_actor=True, ranks=1
        )
        started = time.monotonic()
        run.parts.learner.step(plan)
        return time.monotonic() - started

    alone_s = min(learn() for _ in range(ROUNDS))
    with decoding(engine, prompts):
        alone = rate(engine, lambda: time.sleep(2.0 * alone_s))
        together_s: list[float] = []
        together = rate(engine, lambda: together_s.extend(learn() for _ in range(ROUNDS)))
    return Shares(learner=min(1.0, alone_s * ROUNDS / sum(together_s)), engine=min(1.0, together / alone))


def rate(engine: LocalEngine, work: Callable[[], object]) -> float:
    """Tokens a second that the engine samples while `work` runs."""
    before, started = engine.counts.sampled, time.monotonic()
    work()
    return (engine.counts.sampled - before) / (time.monotonic() - started)


@contextmanager
def decoding(engine: LocalEngine, prompts: list[Ids]) -> Iterator[None]:
    """Keep the engine busy with these prompts."""
    over = threading.Event()

    async def ask(index: int, prompt: Ids) -> None:
        seed = 0
        while not over.is_set():
            seed += 1
            await engine.generate(prompt, Sampling(max_tokens=TOKENS, seed=seed * len(prompts) + index))

    async def ask_all() -> None:
        await asyncio.gather(*(ask(index, prompt) for index, prompt in enumerate(prompts)))

    thread = threading.Thread(target=lambda: asyncio.run(ask_all()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
