"""The quickstart over several seeds, with two controls, from one start policy.

Controls: rewards permuted across the rows of each batch (success must not rise), and the trained policy with blank
tool results (success must fall). Prints a table and ends with one JSON line.

    python benchmarks/quickstart_seeds.py --seeds 5 --out runs/seeds [--start runs/x/start]
"""

import argparse
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sao_gym.commands.composition import opened
from sao_gym.commands.presets import TRAIN_PRESETS
from sao_gym.commands.quickstart import Gain, read_gain
from sao_gym.config import dump, find_preset, resolve
from sao_gym.jsonl import read_jsonl
from sao_gym.runfolder import new_folder
from sao_gym.statistics import wilson_interval
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.config_rules import TRAIN_RULES
from sao_gym.trainer.loop import Training
from sao_gym.trainer.runtime import Batch, Runtime


@dataclass(frozen=True)
class SeedResult:
    """One run: success, wall-clock seconds, and the figures of its steps that the promises are about."""

    gain: Gain
    seconds: float
    stale_share: float
    staleness_max: int
    stale_masked: int
    ev_last_third: float


def run_command(*words: str) -> float:
    """Run a command of the project; returns its wall-clock seconds."""
    started = time.monotonic()
    subprocess.run([sys.executable, "-m", *words], check=True)
    return time.monotonic() - started


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics that are steps."""
    return [r for _, r in read_jsonl(run / "metrics.jsonl") if isinstance(r, dict) and "event" not in r]


def one_seed(start: Path, out: Path, seed: int) -> SeedResult:
    """Train with one seed and read what happened."""
    run = out / f"seed_{seed}"
    words = ("--preset", "quickstart", "--model", str(start), "--out", str(run), "--seed", str(seed))
    seconds = run_command("sao_gym.train", *words)
    steps = steps_of(run)
    values = [s["ev_pre"] for s in steps[-len(steps) // 3 :] if s["ev_pre"] is not None]
    return SeedResult(
        gain=read_gain(run),
        seconds=seconds,
        stale_share=float(np.mean([s["staleness_max"] > 0 for s in steps])),
        staleness_max=max(s["staleness_max"] for s in steps),
        stale_masked=sum(s["stale_masked"] for s in steps),
        ev_last_third=float(np.mean(values)),
    )


class PermutedRewards:
    """A runtime that hands out each batch with its scores dealt to other rows."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self._runtime = runtime
        self._random = random.Random(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    async def next_batch(self, *, raises_version: bool) -> Batch:
        """The next batch with permuted scores; shares per action are given up."""
        batch = await self._runtime.next_batch(raises_version=raises_version)
        scores = [row.score for row in batch.trajectories if row.score is not None]
        self._random.shuffle(scores)
        rows = tuple(
            row.scored(replace(score, per_action=())) for row, score in zip(batch.trajectories, scores, strict=True)
        )
        return replace(batch, trajectories=rows)


def permuted(start: Path, out: Path) -> tuple[float, float]:
    """Success at temperature 1 before and after training on permuted rewards."""
    resolved = resolve(
        TrainConfig,
        preset=find_preset(TRAIN_PRESETS, "quickstart"),
        overrides=["--model", str(start)],
        rules=TRAIN_RULES,
    )
    with new_folder(out / "permuted") as folder, opened(resolved.config, folder) as run:
        folder.write_config(dump(resolved))
        heldout = run.heldout
        assert heldout is not None
        heldout.sampled(run.state)
        parts = replace(run.parts, runtime=PermutedRewards(run.parts.runtime, 0))  # type: ignore[arg-type]
        state = Training(parts, run.state, on_step=lambda record: None).run()
        heldout.sampled(state)
    return heldout.results[0].success or 0.0, heldout.results[-1].success or 0.0


def blanked(run: Path) -> float:
    """Success of a trained policy whose tool shows nothing."""
    checkpoint = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name.partition("_")[2]))
    out = run / "blanked"
    words = ("--model", str(checkpoint / "actor"), "--env", "arithmetic", "--limit", "256", "--max-turns", "6")
    budget = ("--max-tokens", "48", "--out", str(out), "--env.options", '{"blank_tool_results": true}')
    run_command("sao_gym.eval", *words, *budget)
    return float(
        json.loads((out / "results.json").read_text())["benchmarks"]["arithmetic-heldout"]["summary"]["success"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path)
    arguments = parser.parse_args()
    start = arguments.start or arguments.out / "start"
    if arguments.start is None:
        run_command("sao_gym.sft", "--preset", "quickstart", "--new", "qwen3_tiny", "--out", str(start))
    results = [one_seed(start, arguments.out, seed) for seed in range(arguments.seeds)]
    before, after = permuted(start, arguments.out)
    blank = blanked(arguments.out / "seed_0")
    print(report(results))
    print(f"rewards permuted: {before:.3f} before, {after:.3f} after; tool results blanked: {blank:.3f}")
    print(json.dumps(verdict(results, before, after, blank)))


def report(results: list[SeedResult]) -> str:
    """The table that docs/quickstart.md shows. Intervals are Wilson's, 95 %, over 512 episodes."""
    rows = [
        "| seed | before (T = 1) | after (T = 1) | 95 % interval | greedy | seconds | mean EV, last third |",
        "|" + "---|" * 7,
    ]
    for seed, result in enumerate(results):
        gain = result.gain
        interval = wilson_interval(round(gain.after * 512), 512)
        rows.append(
            f"| {seed} | {gain.before:.3f} | {gain.after:.3f} | {interval.low:.3f}-{interval.high:.3f} | "
            f"{gain.greedy_before:.3f} -> {gain.greedy_after:.3f} | {result.seconds:.0f} | {result.ev_last_third:+.3f} |"
        )
    return "\n".join(rows)


def verdict(results: list[SeedResult], before: float, after: float, blank: float) -> dict[str, Any]:
    """The promises of the quickstart, each as a figure."""
    good = sum(r.gain.after >= 0.9 for r in results)
    checks = {
        "starts_in_range": all(0.4 <= r.gain.before <= 0.6 for r in results),
        "enough_seeds_reach_0.9": good >= min(3, len(results)),
        "within_180_s": max(r.seconds for r in results) <= 180,
        "stale_in_30_percent_of_steps": min(r.stale_share for r in results) >= 0.3,
        "bound_kept": max(r.staleness_max for r in results) <= 2,
        "ev_positive": all(r.ev_last_third > 0 for r in results),
        "permuted_does_not_rise": after <= before + 0.05,
        "blanked_falls": blank < results[0].gain.after - 0.3,
    }
    return {
        "benchmark": "quickstart_seeds",
        "ok": all(checks.values()),
        "checks": checks,
        "after": [r.gain.after for r in results],
        "before": results[0].gain.before,
        "seconds_max": max(r.seconds for r in results),
        "permuted": [before, after],
        "blanked": blank,
    }


if __name__ == "__main__":
    main()
