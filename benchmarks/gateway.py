"""What the gateway costs a call, with many sessions at once, and whether its memory stays flat.

Run: python benchmarks/gateway.py [--sessions 100] [--calls 10000]

A scripted engine answers at once; clients in a process of their own keep every session busy over real sockets. Sessions
last `TURNS` calls, each with a tool call and its result, then they are closed and others opened. Busy time is what this
process computed, over the calls; memory after the first fifth is compared with memory at the end. Then each answer takes
`ENGINE_S`, and what a call takes beyond that is its latency through the gateway.
The last line is one JSON object. `ok`: busy below 2 ms a call, memory grew at most 5 %.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.gateway import Gateway
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Sampling, Task
from sao_gym.rollout import Episode
from sao_gym.tokenizer import train_tokenizer

TURNS = 10
ENGINE_S = 0.5
MOST_BUSY_MS = 2.0
MOST_MEMORY_GROWTH = 1.05
SAYS = '<think>A look first.</think>I list the files.<tool_call>{"name": "bash", "arguments": {"command": "ls -l"}}</tool_call>'
RESULT = "-rw-r--r-- 1 user user 1234 Jan 01 00:00 file.py\n" * 8
TOOL = {
    "name": "bash",
    "description": "Run.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]


async def asked(reader: Any, writer: Any, path: str, messages: list[Any]) -> Any:
    """One call over a connection that stays open: no client library's own time is in it."""
    body = json.dumps({"model": "policy", "messages": messages, "tools": TOOLS}).encode()
    head = f"POST {path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(answer.decode())
    length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return json.loads(await reader.readexactly(int(length.split(b":")[1])))["choices"][0]["message"]


async def session(port: int, path: str, seconds: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    messages: list[Any] = [{"role": "system", "content": "You work. " * 40}, {"role": "user", "content": "Do it."}]
    for _ in range(TURNS):
        start = time.perf_counter()
        message = await asked(reader, writer, path, messages)
        seconds.append(time.perf_counter() - start)
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": RESULT}
        messages += [message, result]
    writer.close()


async def clients(port: int) -> None:
    """Each line of the input is a round: paths of sessions. Its latencies go out as one line."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        seconds: list[float] = []
        await asyncio.gather(*(session(port, path, seconds) for path in json.loads(line)))
        print(json.dumps(seconds), flush=True)


def memory_mb() -> float:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


class Bench:
    """A gateway and its clients' process."""

    def __init__(self, sessions: int) -> None:
        self.sessions = sessions
        self.chat = OwnChat(train_tokenizer([SAYS, RESULT] * 4, vocab_size=600))
        self.says = [*self.chat.codec.encode(SAYS), self.chat.stop_token_ids[0]]
        self.uid = 0

    async def measure(self, rounds: int, latency_s: float = 0.0) -> dict[str, Any]:
        """Figures of so many rounds, after one to warm up."""
        engine = ScriptedEngine(lambda prompt: self.says, latency_s=latency_s)
        gateway = Gateway(engine, self.chat)
        async with gateway.serving() as address:
            command = [sys.executable, __file__, "--clients", str(address.port)]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24)
            try:
                await self.round(gateway, process)
                engine.calls.clear()
                busy, wall = 0.0, 0.0
                memory: list[float] = []
                seconds: list[float] = []
                for _ in range(rounds):
                    began = time.process_time(), time.perf_counter()
                    seconds += await self.round(gateway, process)
                    busy, wall = busy + time.process_time() - began[0], wall + time.perf_counter() - began[1]
                    engine.calls.clear()  # the script's own record, which grows with every call
                    memory.append(memory_mb())
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()
        if gateway.metrics.break_rate or gateway.metrics.streams != self.sessions * (rounds + 1):
            raise RuntimeError(f"the sessions left other streams than one each: {gateway.metrics.as_info()}")
        n = len(seconds)
        return {
            "calls": n,
            "busy_ms": 1e3 * busy / n,
            "wall_ms": 1e3 * wall / n,
            "memory_mb": memory,
            "seconds": seconds,
        }

    async def round(self, gateway: Gateway, process: Any) -> list[float]:
        """One round of sessions; the latencies of their calls."""
        opened = []
        for _ in range(self.sessions):
            self.uid += 1
            episode = Episode(uid=f"e{self.uid}", task=Task(id="t", prompt=""), env_id="x", attempt=0, run_seed=0)
            opened.append(gateway.open(episode, sampling=Sampling(max_tokens=200)))
        process.stdin.write(json.dumps([episode.path for episode in opened]).encode() + b"\n")
        line = await process.stdout.readline()
        for episode in opened:
            await episode.close()
        return list(json.loads(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--clients", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        asyncio.run(clients(options.clients))
        return
    rounds = max(options.calls // (options.sessions * TURNS), 1)
    full = asyncio.run(Bench(options.sessions).measure(rounds))
    paced = asyncio.run(Bench(options.sessions).measure(1, latency_s=ENGINE_S))
    beyond = [1e3 * (taken - ENGINE_S) for taken in paced["seconds"]]
    growth = full["memory_mb"][-1] / full["memory_mb"][max(rounds // 5 - 1, 0)]
    figures = {
        "benchmark": "gateway",
        "ok": full["busy_ms"] < MOST_BUSY_MS and growth <= MOST_MEMORY_GROWTH,
        "sessions": options.sessions,
        "calls": full["calls"],
        "busy_ms_per_call": round(full["busy_ms"], 3),
        "wall_ms_per_call": round(full["wall_ms"], 3),
        "latency_ms_median": round(statistics.median(beyond), 3),
        "latency_ms_p90": round(statistics.quantiles(beyond, n=10)[-1], 3),
        "memory_mb_first_fifth": round(full["memory_mb"][max(rounds // 5 - 1, 0)], 1),
        "memory_mb_end": round(full["memory_mb"][-1], 1),
        "memory_growth": round(growth, 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
