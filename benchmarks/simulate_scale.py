"""How the asynchronous runtime scales: the real scheduler under a virtual clock, 10 to 10,000 environments, 1 to 512 engines.

    python benchmarks/simulate_scale.py [--full] [--measured runs/async_vs_sync/front.json]

`scale_world.py` runs `trainer.runtime.Runtime` itself; engines, environments and learner only take virtual time.
Episodes wait lognormally, the 99th percentile 50 times the median. Four sweeps: environments, engines, the bound m with
`wait` and `mask`, and all three sizes together; then the advice that follows from them.

`--measured` takes the figures of `async_vs_sync.py`: durations are fitted on its synchronous arm alone (seconds a batch
and a publication take, tokens and turns of an episode; and what tokens cost alone, side by side and beside the learner,
`contention.py`, which is measured once that arm has ended). Every other arm is predicted over the same batches, with
the same waits, and compared.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scale_world import Load, Machine, Result, World

NEAR_BEST = 0.95
LARGEST_IDLE = 0.05
LARGEST_ERROR = 0.15
MACHINE = Machine(engines=8)
LOAD = Load(environments=1000, median_wait_s=10.0)


@dataclass(frozen=True)
class Run:
    """One simulated point."""

    machine: Machine
    load: Load
    result: Result


def simulate(machine: Machine, load: Load) -> Run:
    """Run one load on one machine."""
    return Run(machine, load, asyncio.run(World(machine, load).run()))


def show(title: str, runs: Sequence[Run]) -> None:
    """A sweep as a table."""
    print(f"\n{title}")
    print("| environments | engines | batch | m | on_stale | episodes/s | learner idle | environments idle | ", end="")
    print("engine slots idle | staleness mean (max) | masked |")
    print("|" + "---|" * 11)
    for run in runs:
        load, got = run.load, run.result
        print(
            f"| {load.environments} | {run.machine.engines} | {load.batch} | {load.max_staleness} | {load.on_stale} "
            f"| {got.trajectories_per_s:.3f} | {got.learner_idle:.1%} | {got.environments_idle:.1%} "
            f"| {got.slots_idle:.1%} | {got.staleness_mean:.2f} ({got.staleness_max}) | {got.masked_share:.2%} |",
            flush=True,
        )


def sweep_environments(full: bool) -> list[Run]:
    counts = (10, 20, 30, 60, 100, 200, 300, 1000, 3000, 10000) if full else (10, 30, 60, 100, 300, 1000, 10000)
    return [simulate(MACHINE, replace(LOAD, environments=count)) for count in counts]


def sweep_engines(full: bool) -> list[Run]:
    counts = (1, 2, 3, 4, 8, 32, 128, 512) if full else (1, 2, 3, 4, 32, 512)
    slow = replace(MACHINE, slots=16)
    return [simulate(replace(slow, engines=count), LOAD) for count in counts]


def sweep_bounds(full: bool) -> list[Run]:
    runs = [simulate(MACHINE, replace(LOAD, max_staleness=0, on_stale="wait"))]
    for m in (1, 2, 4, 8, 16) if full else (1, 2, 4, 8):
        runs.append(simulate(MACHINE, replace(LOAD, max_staleness=m, on_stale="wait")))
        runs.append(simulate(MACHINE, replace(LOAD, max_staleness=m, on_stale="mask")))
    return runs


def sweep_sizes(full: bool) -> list[Run]:
    """Everything grows together: a batch for four environments' worth, an engine for sixteen rows of it."""
    sizes = (100, 400, 1000, 4000, 10000) if full else (100, 400, 1000)
    few = replace(LOAD, batches=4)
    return [
        simulate(
            replace(MACHINE, engines=max(1, round(size * 512 / 10000))),
            replace(few, environments=size, batch=size // 5),
        )
        for size in sizes
    ]


def enough(runs: Sequence[Run]) -> Run:
    """The first run of a sweep whose throughput is within 5 % of the best."""
    best = max(run.result.trajectories_per_s for run in runs)
    return next(run for run in runs if run.result.trajectories_per_s >= NEAR_BEST * best)


def is_bound_kept(runs: Sequence[Run]) -> bool:
    """Whether no run with `wait` handed out a token that was too old; those of `mask` are counted, not hidden."""
    return all(run.result.masked_share == 0.0 for run in runs if run.load.on_stale == "wait")


def advice(environments: Sequence[Run], engines: Sequence[Run], bounds: Sequence[Run]) -> dict[str, Any]:
    """What the sweeps say, as figures."""
    by_environments, by_engines = enough(environments), enough(engines)
    masks = [run for run in bounds if run.load.on_stale == "mask"]
    idle_enough = [run for run in masks if run.result.learner_idle <= LARGEST_IDLE]
    chosen = idle_enough[0] if idle_enough else enough(masks)
    used = by_engines.load.environments * (1.0 - by_engines.result.environments_idle)
    sync = bounds[0].result.trajectories_per_s
    return {
        "environments": by_environments.load.environments,
        "staleness_mean": round(by_environments.result.staleness_mean, 2),
        "staleness_mean_with_more": round(environments[-1].result.staleness_mean, 2),
        "environments_most_used": (by_environments.load.max_staleness + 1) * by_environments.load.batch,
        "engines": by_engines.machine.engines,
        "running_episodes_per_engine": round(used / by_engines.machine.engines, 1),
        "m": chosen.load.max_staleness,
        "on_stale": chosen.load.on_stale,
        "speedup_over_sync": round(chosen.result.trajectories_per_s / sync, 2),
        "masked_share": round(chosen.result.masked_share, 4),
    }


def say(found: dict[str, Any]) -> None:
    """The advice in words."""
    print(
        f"\nadvice for this load: {found['environments']} environments are enough, and tokens are "
        f"{found['staleness_mean']} versions old with them, {found['staleness_mean_with_more']} with more; over (m + 1) x batch "
        f"= {found['environments_most_used']} never run at a time, whatever is paid for. {found['engines']} engines are enough, "
        f"with {found['running_episodes_per_engine']} running episodes each. m = {found['m']} with {found['on_stale']}: "
        f"{found['speedup_over_sync']} times the synchronous speed, {found['masked_share']:.2%} of tokens masked."
    )


@dataclass(frozen=True)
class Prediction:
    """One arm of `async_vs_sync.py`: trajectories per second as simulated and as measured; idle shares beside them."""

    arm: str
    predicted: float
    measured: float
    predicted_idle: float
    measured_idle: float

    @property
    def error(self) -> float:
        """Relative error of the predicted speed."""
        return self.predicted / self.measured - 1.0


def fitted(measured: dict[str, Any]) -> tuple[Machine, Load]:
    """Machine and load from the runs of the synchronous arm alone, and the settings that all arms shared."""
    runs = [run for run in measured["runs"] if run["arm"] == "sync"]

    def mean(name: str) -> float:
        return statistics.fmean(run[name] for run in runs)

    machine = Machine(
        engines=1,
        slots=measured["slots"],
        token_s=mean("base_s"),
        each_token_s=mean("each_s"),
        lag_s=mean("publish_s"),
        learn_s=mean("learn_s"),
        learn_token_s=mean("learn_token_s"),
        engine_share=mean("engine_share"),
    )
    load = Load(
        environments=measured["in_flight"],
        batch=measured["batch"],
        median_wait_s=measured["median_s"],
        tail=measured["tail"],
        tokens=mean("tokens"),
        turns=max(1, round(mean("turns"))),
        waits=1,
        grace_s=measured["grace_s"],
        in_blocks=True,
    )
    return machine, load


def scheduling(arm: str) -> dict[str, Any]:
    """What an arm's name says: `sync` and `grpo` are the barrier, `one_step_off` m = 1 with wait, else `m4_mask`."""
    if arm in ("sync", "grpo"):
        return {"max_staleness": 0, "on_stale": "wait", "group_size": 8 if arm == "grpo" else 1}
    if arm == "one_step_off":
        return {"max_staleness": 1, "on_stale": "wait"}
    bound, _, how = arm.partition("_")
    return {"max_staleness": int(bound.removeprefix("m")), "on_stale": how}


def predict(measured: dict[str, Any]) -> list[Prediction]:
    """Every measured arm, simulated with durations of the synchronous one."""
    machine, load = fitted(measured)
    print(f"\nfitted on the synchronous arm: {machine}")
    return [predicted_arm(point, measured["runs"], machine, load) for point in measured["points"]]


def predicted_arm(point: dict[str, Any], runs: Sequence[dict[str, Any]], machine: Machine, load: Load) -> Prediction:
    """One arm: each of its runs over the batches that counted there, with the waits of its seed."""
    load = replace(load, **scheduling(point["arm"]))
    results = [
        simulate(
            machine,
            replace(load, seed=run["seed"], warm_up=run["warm_up"], batches=run["batches"] - run["warm_up"]),
        ).result
        for run in runs
        if run["arm"] == point["arm"]
    ]
    return Prediction(
        arm=point["arm"],
        predicted=statistics.fmean(result.trajectories_per_s for result in results),
        measured=point["trajectories_per_s"],
        predicted_idle=statistics.fmean(result.learner_idle for result in results),
        measured_idle=point["learner_idle"],
    )


def show_predictions(found: Sequence[Prediction]) -> None:
    print("| arm | trajectories/s predicted | measured | error | learner idle predicted | measured |")
    print("|" + "---|" * 6)
    for p in found:
        print(
            f"| {p.arm} | {p.predicted:.1f} | {p.measured:.1f} | {p.error:+.1%} | {p.predicted_idle:.1%} "
            f"| {p.measured_idle:.1%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="more points, and 10,000 environments with 512 engines")
    parser.add_argument("--measured", type=Path, help="front.json of async_vs_sync.py")
    parser.add_argument("--predict-only", action="store_true", help="no sweeps")
    given = parser.parse_args()
    started = time.monotonic()
    line: dict[str, Any] = {"benchmark": "simulate_scale", "ok": True}
    if not given.predict_only:
        environments, engines = sweep_environments(given.full), sweep_engines(given.full)
        bounds, sizes = sweep_bounds(given.full), sweep_sizes(given.full)
        show("environments", environments)
        show("engines of 16 slots", engines)
        show("the bound m", bounds)
        show("everything together", sizes)
        line["advice"] = advice(environments, engines, bounds)
        line["bound_kept"] = is_bound_kept((*environments, *engines, *bounds, *sizes))
        say(line["advice"])
    if given.measured:
        found = predict(json.loads(given.measured.read_text(encoding="utf-8")))
        show_predictions(found)
        errors = {p.arm: round(p.error, 3) for p in found}
        line["prediction_errors"] = errors
        line["within_15_percent"] = all(abs(error) <= LARGEST_ERROR for error in errors.values())
    line["ok"] = line.get("bound_kept", True) and line.get("within_15_percent", True)
    line["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(line))


if __name__ == "__main__":
    main()
