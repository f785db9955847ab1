"""How often the two intervals of avg@n hold the true success: 30 problems, 1, 4 and 16 samples, at 95 %.

Problems have success rates of their own, drawn from a beta distribution: the usual mixed benchmark, a hard and a nearly
solved one, and one whose problems are solved always or never. The truth is the mean over all problems of the kind.
`wilson` is `clustered_interval`, `bootstrap` draws problems and samples again (`two_level_interval`). Beside coverage
stands the mean width. `ok` says that the default, `wilson`, is never below 90 % and in the mean at least as close to 95 % as
the other. Ends in one JSON line.
"""

import argparse
import json
import math

import numpy as np

from sao_gym.statistics import Interval, clustered_interval, two_level_interval

PROBLEMS, SAMPLES, LEVEL, RESAMPLES = 30, (1, 4, 16), 0.95, 1000
KINDS = {"mixed": (0.8, 0.8), "hard": (0.3, 2.7), "solved": (4.5, 0.5), "all_or_none": (0.05, 0.05)}
"""Parameters of the beta distribution; means 0.5, 0.1, 0.9 and 0.5."""


def simulate(kind: str, n: int, seeds: int) -> dict[str, dict[str, float]]:
    """Coverage and mean width of both intervals over `seeds` simulated evaluations."""
    a, b = KINDS[kind]
    truth, found = a / (a + b), {"wilson": [], "bootstrap": []}
    for seed in range(seeds):
        rng = np.random.default_rng([seed, n, sorted(KINDS).index(kind)])
        rates = rng.beta(a, b, size=PROBLEMS)
        rows = (rng.random((PROBLEMS, n)) < rates[:, None]).astype(float)
        values = {str(i): row.tolist() for i, row in enumerate(rows)}
        found["wilson"].append(clustered_interval(values, LEVEL))
        found["bootstrap"].append(two_level_interval(values, LEVEL, seed=seed, resamples=RESAMPLES))
    return {name: summary(intervals, truth) for name, intervals in found.items()}


def summary(intervals: list[Interval], truth: float) -> dict[str, float]:
    hits = [one.low <= truth <= one.high for one in intervals]
    width = sum(one.high - one.low for one in intervals) / len(intervals)
    return {"coverage": round(sum(hits) / len(hits), 4), "width": round(width, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4000, help="simulated evaluations of each kind and n")
    seeds = parser.parse_args().seeds
    cells = {}
    for kind in KINDS:
        for n in SAMPLES:
            cells[f"{kind}_n{n}"] = one = simulate(kind, n, seeds)
            print(
                f"{kind:<12} n={n:<3}",
                "  ".join(f"{name} {v['coverage']:.3f} ({v['width']:.3f})" for name, v in one.items()),
            )
    off = {name: [abs(one[name]["coverage"] - LEVEL) for one in cells.values()] for name in ("wilson", "bootstrap")}
    worst = min(one["wilson"]["coverage"] for one in cells.values())
    closer = sum(off["wilson"]) <= sum(off["bootstrap"])
    result = {
        "benchmark": "interval_coverage",
        "ok": worst >= 0.9 and closer,
        "problems": PROBLEMS,
        "seeds": seeds,
        "level": LEVEL,
        "noise": round(math.sqrt(LEVEL * (1 - LEVEL) / seeds), 4),
        "mean_distance": {name: round(sum(values) / len(values), 4) for name, values in off.items()},
        "cells": cells,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
