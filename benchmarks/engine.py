"""Tokens per CPU second of the local engine beside transformers' padded `generate`, in one run, on one thread.

    python benchmarks/engine.py [--rounds 5]

Two loads on a tiny Qwen3 (2 layers x 128): `uniform`, n requests of 24 prompt and 128 new tokens at n = 1, 8, 32, and
`mixed`, 64 requests of 32-256 prompt and 16-128 new tokens, 32 at a time. Rounds alternate between the two engines;
a ratio is the median over rounds, with its smallest and largest. `generate` returns no log-probs and starts each
group of requests together; the engine records log-probs and refills rows as they come free. Only useful tokens count.

On the uniform loads `generate` wastes nothing, so that a ratio near 1 is the most to be had; the mixed load is the
one that agents make. `ok`: at least 5,000 tok/s at n = 32, at least 0.8 of `generate` on uniform loads and 1.2 on the
mixed one, and log-probs within 1e-4 of a plain forward pass.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sao_gym.engines.local import LocalEngine
from sao_gym.models import copy_model, tiny_qwen3
from sao_gym.protocols import Generation, Sampling

VOCAB = 256
ROWS = 32


@dataclass(frozen=True)
class Load:
    """Requests that are made at once."""

    name: str
    prompts: tuple[np.ndarray, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens to be sampled in all."""
        return sum(self.lengths)


def make_loads(rng: np.random.Generator) -> list[Load]:
    loads = [
        Load(f"uniform_{n}", tuple(rng.integers(0, VOCAB, 24) for _ in range(n)), (128,) * n) for n in (1, 8, ROWS)
    ]
    prompts = tuple(rng.integers(0, VOCAB, rng.integers(32, 257)) for _ in range(64))
    return [*loads, Load("mixed_64", prompts, tuple(int(n) for n in rng.integers(16, 129, 64)))]


def run_engine(engine: LocalEngine, load: Load, seed: int) -> tuple[float, list[Generation]]:
    async def ask() -> list[Generation]:
        pairs = enumerate(zip(load.prompts, load.lengths, strict=True))
        return await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=n, seed=seed + i)) for i, (p, n) in pairs))

    start = time.process_time()
    generations = asyncio.run(ask())
    return load.tokens / (time.process_time() - start), generations


def run_generate(model: Any, load: Load) -> float:
    start = time.process_time()
    for first in range(0, len(load.prompts), ROWS):
        generate_padded(model, load.prompts[first : first + ROWS], max(load.lengths[first : first + ROWS]))
    return load.tokens / (time.process_time() - start)


@torch.inference_mode()
def generate_padded(model: Any, prompts: Sequence[np.ndarray], n_new: int) -> None:
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.as_tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=n_new, pad_token_id=0)


def worst_gap(model: Any, load: Load, generations: Sequence[Generation]) -> float:
    worst = 0.0
    for prompt, generation in zip(load.prompts, generations, strict=True):
        ids = torch.as_tensor(np.concatenate([prompt, generation.token_ids]), dtype=torch.long)
        with torch.inference_mode():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
        exact = torch.log_softmax(logits, -1).gather(1, ids[len(prompt) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(exact - generation.logprobs).max()))
    return worst


def measure(rounds: int) -> dict[str, Any]:
    model = tiny_qwen3(VOCAB, context_length=512).eval()
    engine = LocalEngine(copy_model(model), max_slots=ROWS, threads=1)
    figures: dict[str, Any] = {}
    for load in make_loads(np.random.default_rng(0)):
        run_engine(engine, load, 0), run_generate(model, load)  # warm up
        ours, theirs = [], []
        for index in range(rounds):
            speed, generations = run_engine(engine, load, 1000 * index)
            ours.append(speed)
            theirs.append(run_generate(model, load))
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        figures[load.name] = {
            "engine_tokens_per_s": round(statistics.median(ours)),
            "generate_tokens_per_s": round(statistics.median(theirs)),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_min": round(ratios[0], 2),
            "ratio_max": round(ratios[-1], 2),
            "logprob_gap": worst_gap(model, load, generations),
        }
        print(load.name, figures[load.name], flush=True)
    asyncio.run(engine.close())
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    torch.set_num_threads(1)
    figures = measure(parser.parse_args().rounds)
    ok = (
        figures[f"uniform_{ROWS}"]["engine_tokens_per_s"] >= 5000
        and all(load["ratio"] >= (1.2 if name == "mixed_64" else 0.8) for name, load in figures.items())
        and all(load["logprob_gap"] < 1e-4 for load in figures.values())
    )
    print(json.dumps({"benchmark": "engine", "ok": ok, "threads": 1, "loads": figures}))


if __name__ == "__main__":
    main()
