"""What an episode costs while many others wait: one process, a scripted engine, environments that sleep for real.

Run: python benchmarks/concurrency.py [--episodes 10000] [--widths 10 100 1000]

For each width, so many episodes run side by side, each of `TURNS` turns in which its environment waits `WAIT_S` in the mean. An
episode's own work is the time that the process was busy over the episodes that ended; it must not grow with the width.
Then `--episodes` run at the greatest width, and memory after the first fifth is compared with memory at the end.
The last line is one JSON object. `ok`: the busy time per episode grew at most 1.5x, and so did the time an episode took
where the machine was not full; memory grew at most 5 %.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock
from sao_gym.core import AgentEnv, Reply
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.messages import Message
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Sampling, Task
from sao_gym.rollout import EnvPool, Episode, white_box
from sao_gym.stream import Score
from sao_gym.tokenizer import train_tokenizer

TURNS = 3
WAIT_S = 2.0
MOST_GROWTH = 1.5
MOST_MEMORY_GROWTH = 1.05


class Sleeper(AgentEnv):
    """Waits for `WAIT_S` of real time, half more or less, in every turn, then answers; all of it awaits, so no thread is held."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__([Task(id="t", prompt="?")])
        self._clock = SystemClock()
        self._draw = draw

    async def setup(self, task: Task) -> None:
        """Nothing to set up."""

    async def opening(self, task: Task) -> list[Message]:
        """The prompt."""
        return [Message(role="user", content=task.prompt)]

    async def respond(self, message: Message) -> Reply:
        """An answer that took a while."""
        await self._clock.sleep(WAIT_S * self._draw.uniform(0.5, 1.5))
        return Reply(messages=(Message(role="user", content="go on"),), is_final=self.turn >= TURNS)

    async def grade(self) -> Score:
        """Always right."""
        return Score(value=1.0, passed=True)

    async def teardown(self) -> None:
        """Nothing to take down."""


@dataclass(frozen=True, slots=True)
class Round:
    """`count` episodes, `width` at a time: seconds of the median episode, and CPU seconds of the process for each."""

    width: int
    count: int
    episode_s: float
    busy_s: float


class Crowd:
    """Runs episodes, at most `width` side by side."""

    def __init__(self) -> None:
        draw = random.Random(0)
        chat = OwnChat(train_tokenizer(["a?"] * 4, vocab_size=268))
        said = [70, 71, 72, chat.stop_token_ids[0]]
        self._said = said
        self._pool = EnvPool(lambda: Sleeper(draw), chat, Budgets(max_turns=TURNS))
        self._clock = SystemClock()

    async def run(self, width: int, count: int) -> Round:
        """One round."""
        numbers = iter(range(count))
        engine = ScriptedEngine(lambda prompt: self._said)
        taken: list[float] = []

        async def work() -> None:
            for number in numbers:
                episode = Episode(uid=f"e{number}", task=Task(id="t", prompt="?"), env_id="s", attempt=0, run_seed=0)
                async with self._pool.lease() as env:
                    made = await white_box(env, engine, episode, sampling=Sampling(max_tokens=16), clock=self._clock)
                if made.score is None or made.n_turns != TURNS:
                    raise SystemExit(f"episode {number} ended as {made.outcome} after {made.n_turns} turns")
                taken.append(made.timings["episode_s"])
                engine.calls.clear()
                engine.ended_sessions.clear()

        busy = time.process_time()
        await asyncio.gather(*(work() for _ in range(width)))
        busy = time.process_time() - busy
        return Round(width, count, sorted(taken)[len(taken) // 2], busy / count)


def memory_mb() -> float:
    """Resident memory of this process, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def measure(widths: Sequence[int], episodes: int) -> dict[str, object]:
    crowd = Crowd()
    await crowd.run(min(widths), min(widths))
    rounds = [await crowd.run(width, max(width, 50)) for width in widths]
    for made in rounds:
        print(
            f"{made.width:>5} at a time: {made.episode_s:.3f} s an episode, {made.busy_s * 1e3:.2f} ms of work",
            flush=True,
        )
    widest = max(widths)
    await crowd.run(widest, episodes // 5)
    before = memory_mb()
    await crowd.run(widest, episodes - episodes // 5)
    after = memory_mb()
    first, last = rounds[0], rounds[-1]
    growth, busy_growth = last.episode_s / first.episode_s, last.busy_s / first.busy_s
    return {
        "benchmark": "concurrency",
        "ok": growth <= MOST_GROWTH and busy_growth <= MOST_GROWTH and after <= MOST_MEMORY_GROWTH * before,
        "episode_s": {str(made.width): round(made.episode_s, 3) for made in rounds},
        "work_ms": {str(made.width): round(made.busy_s * 1e3, 3) for made in rounds},
        "episode_s_growth": round(growth, 3),
        "work_growth": round(busy_growth, 3),
        "episodes": episodes,
        "memory_mb": [round(before, 1), round(after, 1)],
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0 if the bounds hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--widths", type=int, nargs="+", default=[10, 100, 1000])
    options = parser.parse_args(argv)
    figures = asyncio.run(measure(sorted(options.widths), options.episodes))
    print(json.dumps(figures))
    return 0 if figures["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
