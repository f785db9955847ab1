"""What it costs to serve an application and to take its users' feedback, beside the gateway alone.

Run: python benchmarks/feedback.py [--episodes 2000] [--side 32]

A scripted engine answers at once. `--side` users, in a process of their own over real sockets, each ask and then post feedback,
one episode after another, against a desk with a ledger and a book on the disk; the runtime admits rows and a learner that takes
no time takes batches. In turns, round by round, the same users ask a gateway alone and post nothing. Busy time is what this
process computed, over the episodes; a median over rounds, with the least and the greatest.
The last line is one JSON object. `ok`: every feedback that was accepted for training is in the ledger, with its score.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.feedback import Desk, FeedbackBook, serving
from sao_gym.feedback.reconcile import episode_of
from sao_gym.gateway import Gateway
from sao_gym.ledger import Ledger, LedgerRow, RowStatus
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Sampling, Task
from sao_gym.rollout import Episode
from sao_gym.stream import Trajectory
from sao_gym.tasks.places import feedback_places
from sao_gym.tokenizer import train_tokenizer
from sao_gym.trainer.files import row_uid
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.runtime import Runtime, RuntimeOptions
from sao_gym.trainer.staleness import Outstanding

KEY = "key"
SAYS = "The sea is wide, and whoever looks at it long enough forgets what he came for. " * 4
ROUNDS = 5
BATCH = 32


async def user(address: str, path: str, count: int, said: list[Any]) -> None:
    """One user: asks, and posts feedback where there is an episode; what was posted and how long both took."""
    import httpx

    headers = {"authorization": f"Bearer {KEY}"}
    body = {"model": "policy", "messages": [{"role": "user", "content": "Write about the sea."}]}
    async with httpx.AsyncClient(base_url=address, headers=headers, timeout=600, trust_env=False) as client:
        for number in range(count):
            began = time.perf_counter()
            answer = await client.post(f"{path}/chat/completions", json=body)
            answer.raise_for_status()
            asked = time.perf_counter() - began
            episode, score = answer.headers.get("x-sao-episode"), (number % 11) / 10
            trained = None
            if episode is not None:
                posted = await client.post("/v1/feedback", json={"episode": episode, "score": score})
                trained = posted.raise_for_status().json()["for_training"]
            said.append([episode, score, trained, asked, time.perf_counter() - began - asked])


async def users() -> None:
    """Each line of the input is a round: address, paths, episodes of each. What was said goes out as one line."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        address, paths, count = json.loads(line)
        said: list[Any] = []
        await asyncio.gather(*(user(address, path, count, said) for path in paths))
        print(json.dumps(said), flush=True)


class Weights:
    """None: the engine says what it is told."""

    names: Sequence[str] = ()
    weight_hash = "none"

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """None."""
        return iter(())


class Bench:
    """A desk and a gateway over one engine, and the users' process."""

    def __init__(self, folder: Path, side: int) -> None:
        self.clock, self.side = SystemClock(), side
        chat = OwnChat(train_tokenizer([SAYS] * 4, vocab_size=600))
        says = [*chat.codec.encode(SAYS), chat.stop_token_ids[0]]
        self.engine = ScriptedEngine(lambda prompt: says)
        self.gateway = Gateway(self.engine, chat, self.clock)
        self.ledger, self.book = Ledger(folder / "ledger.sqlite"), FeedbackBook(folder / "feedback.sqlite")
        self.desk = Desk(
            Gateway(self.engine, chat, self.clock),
            self.book,
            clock=self.clock,
            sampling=Sampling(max_tokens=400),
            budgets=Budgets(),
            deadline_s=600,
        )
        self.trained: dict[str, float] = {}
        self.runtime = Runtime(
            ledger=self.ledger,
            order=PromptOrder(feedback_places(), seed=0),
            rule=Outstanding(batch_rows=BATCH, max_staleness=4),
            engine_version=lambda: self.engine.version,
            run_episode=self.episode,
            clock=self.clock,
            options=RuntimeOptions(max_in_flight=4 * side, deadline_s=600),
            on_settled=self.settle,
        )

    async def episode(self, row: LedgerRow, task: Task, on_version: Any) -> Trajectory:
        """One row of the runtime's."""
        episode = Episode(uid=row_uid(row.number), task=task, env_id="feedback", attempt=row.attempt, run_seed=0)
        return await self.desk.episode(
            episode, on_version=on_version, on_answered=lambda: self.runtime.begin_scoring(row.number)
        )

    def settle(self, number: int) -> None:
        """As a training tells the desk."""
        row = self.ledger.row(number)
        self.desk.settle(row_uid(number), is_for_training=row.status is RowStatus.READY, why=row.reason)

    async def learn(self) -> None:
        """Takes every batch at once."""
        for step in range(1, 10**9):
            batch = await self.runtime.next_batch(raises_version=True)
            self.trained |= {str(episode_of(t)): t.score.value for t in batch.trajectories if t.score is not None}
            self.runtime.finish_batch(batch, step)
            await self.engine.publish(Weights(), step)
            self.runtime.changed()

    async def measure(self, episodes: int) -> dict[str, list[list[Any]]]:
        """What the users said, and the busy milliseconds an episode, of the desk and of the gateway, round by round."""
        command, pipe = [sys.executable, __file__, "--users"], asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 26)
        learning = asyncio.ensure_future(self.learn())
        count = max(1, episodes // self.side // ROUNDS)
        found: dict[str, list[list[Any]]] = {"desk": [], "gateway": []}
        try:
            async with serving(self.desk, key=KEY) as desk, self.gateway.serving() as gateway:
                self.runtime.start()
                for number in range(ROUNDS + 1):
                    for name, url in (("desk", desk.url), ("gateway", gateway.url)):
                        figures = await self.round(process, name, url, count)
                        found[name] += [figures] if number else []  # the first one warms up
                if learning.done():
                    learning.result()
                learning.cancel()
                await self.runtime.stop()
                await self.desk.close()
        finally:
            process.kill()
            await process.wait()
        return found

    async def round(self, process: Any, name: str, url: str, count: int) -> list[Any]:
        """What the users said of one round, and the busy milliseconds an episode."""
        opened = []
        if name == "gateway":
            for number in range(self.side):
                episode = Episode(uid=f"g{number}", task=Task(id="t", prompt=""), env_id="x", attempt=0, run_seed=0)
                opened.append(self.gateway.open(episode, sampling=Sampling(max_tokens=400)))
        paths = [episode.path for episode in opened] or ["/v1"] * self.side
        busy = time.process_time()
        process.stdin.write(json.dumps([url, paths, count]).encode() + b"\n")
        said = json.loads(await process.stdout.readline())
        busy = time.process_time() - busy
        for each in opened:
            await each.close()
        self.engine.calls.clear()
        return [said, 1e3 * busy / len(said)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least, greatest."""
    return {"median": round(statistics.median(values), 2), "low": round(min(values), 2), "high": round(max(values), 2)}


async def run(episodes: int, side: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), side)
        found = await bench.measure(episodes)
        held = dict(bench.trained)
        for row in bench.ledger.rows(RowStatus.READY):
            kept = bench.ledger.trajectory(row.number)
            held[str(episode_of(kept))] = kept.score.value if kept.score else -1.0
    said = [line for lines, _ in found["desk"] for line in lines]
    accepted = {episode: score for episode, score, trained, *_ in said if trained}
    return {
        "episodes": len(said),
        "accepted": len(accepted),
        "not_in_ledger": sum(held.get(episode) != score for episode, score in accepted.items()),
        "not_admitted": len(said) - len(accepted),
        "answer_ms": round(1e3 * statistics.median(line[3] for line in said), 2),
        "feedback_ms": round(1e3 * statistics.median(line[4] for line in said), 2),
        "busy_ms": spread([busy for _, busy in found["desk"]]),
        "gateway_busy_ms": spread([busy for _, busy in found["gateway"]]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--side", type=int, default=32, help="users side by side")
    parser.add_argument("--users", action="store_true", help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.users:
        asyncio.run(users())
        return
    figures = asyncio.run(run(words.episodes, words.side))
    print(
        json.dumps(
            {"benchmark": "feedback", "ok": figures["accepted"] > 0 and figures["not_in_ledger"] == 0, **figures}
        )
    )


if __name__ == "__main__":
    main()
