"""How often the two intervals of avg@n hold the true success: 30 and 8 problems, 1, 4 and 16 samples, at 95 %.

Problems have success rates of their own, drawn from a beta distribution: the usual mixed benchmark, a hard and a nearly
solved one, one that is all but finished, and one whose problems are solved always or never. The truth is the mean over
all problems of the kind. `wilson` is `clustered_interval`, `bootstrap` draws problems and samples again
(`two_level_interval`). Beside coverage stands the mean width, and how often the interval was a single point.

With 30 problems neither is closer to 95 % throughout. The default, `wilson`, is the one that does not break down: `ok`
says that its lowest coverage is at least 90 % with 30 problems and over all cells above the bootstrap's lowest, and
that it was never a point. Ends in one JSON line.
"""

import argparse
import json
import math

import numpy as np

from sao_gym.statistics import Interval, clustered_interval, two_level_interval

PROBLEMS, SAMPLES, LEVEL, RESAMPLES = (30, 8), (1, 4, 16), 0.95, 1000
KINDS = {
    "mixed": (0.8, 0.8),
    "hard": (0.3, 2.7),
    "solved": (4.5, 0.5),
    "finished": (9.8, 0.2),
    "all_or_none": (0.05, 0.05),
}
"""Parameters of the beta distribution; means 0.5, 0.1, 0.9, 0.98 and 0.5."""
Figures = dict[str, float]


def simulate(kind: str, problems: int, n: int, seeds: int) -> dict[str, Figures]:
    """Figures of both intervals over `seeds` simulated evaluations."""
    a, b = KINDS[kind]
    found: dict[str, list[Interval]] = {"wilson": [], "bootstrap": []}
    for seed in range(seeds):
        rng = np.random.default_rng([seed, problems, n, sorted(KINDS).index(kind)])
        rates = rng.beta(a, b, size=problems)
        rows = (rng.random((problems, n)) < rates[:, None]).astype(float)
        values = {str(i): row.tolist() for i, row in enumerate(rows)}
        found["wilson"].append(clustered_interval(values, LEVEL))
        found["bootstrap"].append(two_level_interval(values, LEVEL, seed=seed, resamples=RESAMPLES))
    return {name: summary(intervals, a / (a + b)) for name, intervals in found.items()}


def summary(intervals: list[Interval], truth: float) -> Figures:
    hits = [one.low <= truth <= one.high for one in intervals]
    widths = [one.high - one.low for one in intervals]
    return {
        "coverage": round(sum(hits) / len(hits), 4),
        "width": round(sum(widths) / len(widths), 4),
        "points": round(sum(width == 0 for width in widths) / len(widths), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="simulated evaluations of each cell")
    seeds = parser.parse_args().seeds
    cells = {}
    for problems in PROBLEMS:
        for kind in KINDS:
            for n in SAMPLES:
                cells[f"{kind}_{problems}x{n}"] = one = simulate(kind, problems, n, seeds)
                told = "  ".join(f"{name} {f['coverage']:.3f} (width {f['width']:.3f})" for name, f in one.items())
                print(f"{kind:<12}{problems:>3} x {n:<3}{told}", flush=True)
    large = {name: one for name, one in cells.items() if f"_{PROBLEMS[0]}x" in name}
    lowest, lowest_large, distance = (
        {way: round(reduce([one[way]["coverage"] for one in chosen.values()]), 4) for way in ("wilson", "bootstrap")}
        for chosen, reduce in ((cells, min), (large, min), (large, mean_distance))
    )
    is_point = any(one["wilson"]["points"] for one in cells.values())
    result = {
        "benchmark": "interval_coverage",
        "ok": lowest_large["wilson"] >= 0.9 and lowest["wilson"] > lowest["bootstrap"] and not is_point,
        "seeds": seeds,
        "level": LEVEL,
        "noise": round(math.sqrt(LEVEL * (1 - LEVEL) / seeds), 4),
        "lowest": lowest,
        "lowest_30": lowest_large,
        "mean_distance_30": distance,
        "cells": cells,
    }
    print(json.dumps(result))


def mean_distance(coverages: list[float]) -> float:
    return sum(abs(coverage - LEVEL) for coverage in coverages) / len(coverages)


if __name__ == "__main__":
    main()
