"""How fast the sglang engine's client is beside SGLang's own benchmark tool, against one server, on the same load.

Run: python benchmarks/sglang_client.py --python PYTHON_WITH_SGLANG [--pairs 8] [--requests 256] [--concurrency 64]

Both send the same number of prompts of random ids, keep as many in flight, stream in chunks of as many tokens, and ask for
log-probs. They take turns, who is first alternates, and each pair gives one ratio of sampled tokens a second; the server's own
count says that both sampled all of them. Processor time is that of the client
alone: ours is this process's; the tool's is its own, less what it needs for a single request (its start).
The last line is one JSON object. `ok`: the 95 % interval of the ratio contains or exceeds 0.97, and our processor time for
1,000 tokens is at most 1.2 times the tool's.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from scipy import stats

from sao_gym.clock import SystemClock
from sao_gym.engines.sglang import SGLangEngine
from sao_gym.engines.sglang_disk import DiskTransport
from sao_gym.engines.sglang_process import OwnServer, ServerCommand
from sao_gym.engines.sglang_request import STREAM_INTERVAL
from sao_gym.loops import run_blocking
from sao_gym.models import tiny_qwen3
from sao_gym.protocols import Sampling
from sao_gym.tokenizer import train_tokenizer
from sao_gym.weights import ModuleWeights

LEAST_RATIO, MOST_CPU = 0.97, 1.2
PROMPT_TOKENS, NEW_TOKENS = 64, 128
COUNTER = "sglang:generation_tokens_total"
CPU_ARGS = (
    "--enable-metrics",
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--mem-fraction-static",
    "0.05",
    "--max-total-tokens",
    "40000",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the server."""

    requests: int
    concurrency: int

    @property
    def tokens(self) -> int:
        """Sampled in all."""
        return self.requests * NEW_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One side of a pair."""

    tokens_per_s: float
    cpu_s: float


async def ours(engine: SGLangEngine, load: Load, vocab: int, seed: int) -> Measured:
    """The engine's client, as a run uses it."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(8, vocab, (load.requests, PROMPT_TOKENS)).astype(np.int32)
    gate = asyncio.Semaphore(load.concurrency)

    async def one(index: int) -> int:
        async with gate:
            made = await engine.generate(prompts[index], Sampling(max_tokens=NEW_TOKENS, seed=index), f"{seed}-{index}")
            await engine.end_session(f"{seed}-{index}")
            return len(made.token_ids)

    cpu, start = time.process_time(), time.perf_counter()
    sampled = sum(await asyncio.gather(*(one(index) for index in range(load.requests))))
    took = time.perf_counter() - start
    if sampled != load.tokens:
        raise RuntimeError(f"{sampled} tokens were sampled, not {load.tokens}")
    return Measured(tokens_per_s=sampled / took, cpu_s=time.process_time() - cpu)


def tool(python: str, url: str, model: Path, load: Load, seed: int, folder: Path) -> Measured:
    """SGLang's own."""
    out = folder / f"tool-{seed}-{load.requests}.jsonl"
    words = ["--backend", "sglang", "--base-url", url, "--model", str(model), "--tokenizer", str(model)]
    words += ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1", "--seed", str(seed)]
    words += ["--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(NEW_TOKENS), "--return-logprob"]
    words += ["--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency), "--temperature", "1"]
    words += ["--disable-tqdm", "--warmup-requests", "0", "--output-file", str(out)]
    as_ours = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "stream_interval": STREAM_INTERVAL}
    words += ["--extra-request-body", json.dumps({"sampling_params": as_ours})]
    counted = sampled_so_far(url)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [python, "-m", "sglang.benchmark.serving", *words], capture_output=True, text=True, env=environment()
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    said = json.loads(out.read_text().splitlines()[-1])
    if (sampled := sampled_so_far(url) - counted) != load.tokens:
        raise RuntimeError(f"the tool had {sampled} tokens sampled, not {load.tokens}")
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(tokens_per_s=load.tokens / said["duration"], cpu_s=cpu_s)


def sampled_so_far(url: str) -> int:
    """Tokens that the server has sampled, by its own metrics."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    return int(sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(COUNTER)))


def environment() -> dict[str, str]:
    """Of server and tool: one thread, no network."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}


def pairs(python: str, url: str, engine: SGLangEngine, model: Path, load: Load, count: int, vocab: int) -> list[dict]:
    """`count` pairs, after one that warms both up."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        alone = [tool(python, url, model, Load(requests=1, concurrency=1), 900 + i, place).cpu_s for i in range(3)]
        for index in range(count + 1):
            sides = {}
            for side in ("ours", "tool") if index % 2 else ("tool", "ours"):
                if side == "ours":
                    sides[side] = run_blocking(ours(engine, load, vocab, index))
                else:
                    sides[side] = tool(python, url, model, load, index, place)
            own, other = sides["ours"], sides["tool"]
            pair = {
                "ratio": own.tokens_per_s / other.tokens_per_s,
                "ours_per_s": own.tokens_per_s,
                "ours_cpu": own.cpu_s / load.tokens * 1000,
                "tool_cpu": (other.cpu_s - statistics.median(alone)) / load.tokens * 1000,
            }
            print({name: round(value, 4) for name, value in pair.items()}, flush=True)
            found += [pair] if index else []
    return found


def report(found: list[dict]) -> dict[str, object]:
    """The figures, and whether they are good enough."""
    ratios = [pair["ratio"] for pair in found]
    half = float(stats.t.ppf(0.975, len(ratios) - 1)) * statistics.stdev(ratios) / len(ratios) ** 0.5
    mean = statistics.mean(ratios)
    own, other = (statistics.median(pair[side] for pair in found) for side in ("ours_cpu", "tool_cpu"))
    return {
        "benchmark": "sglang_client",
        "ok": mean + half >= LEAST_RATIO and own <= MOST_CPU * other,
        "pairs": len(found),
        "throughput_ratio": round(mean, 3),
        "throughput_ratio_95": [round(mean - half, 3), round(mean + half, 3)],
        "tokens_per_s": round(statistics.median(pair["ours_per_s"] for pair in found)),
        "cpu_s_per_1000_tokens": round(own, 4),
        "tool_cpu_s_per_1000_tokens": round(other, 4),
        "cpu_ratio": round(own / other, 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="a Python that has SGLang")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--concurrency", type=int, default=64)
    asked = parser.parse_args()
    load = Load(requests=asked.requests, concurrency=asked.concurrency)
    tokenizer = train_tokenizer(["a few words to make a tokenizer from"] * 4, vocab_size=300)
    model = tiny_qwen3(len(tokenizer), 2, 64, context_length=1024).eval()
    os.environ |= environment()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        model.save_pretrained(place / "model")
        tokenizer.save_pretrained(place / "model")
        server = OwnServer(
            ServerCommand(python=asked.python, model=place / "model", log=place / "server.log", args=CPU_ARGS)
        )
        try:
            run_blocking(server.wait_ready(600.0, SystemClock()))
            engine = SGLangEngine([server.url], model, DiskTransport(place / "weights", timeout_s=60))
            run_blocking(engine.start(ModuleWeights(model), 0))
            found = pairs(asked.python, server.url, engine, place / "model", load, asked.pairs, len(tokenizer))
            run_blocking(engine.close())
        finally:
            run_blocking(server.close())
    said = report(found)
    print(json.dumps(said))
    sys.exit(0 if said["ok"] else 1)


if __name__ == "__main__":
    main()
