"""Asynchronous training beside the synchronous barrier: same model, tasks, seeds and waits, one arm after the other.

    python -m sao_gym.sft --preset quickstart --new qwen3_tiny --out runs/start
    python benchmarks/async_vs_sync.py --start runs/start --out runs/async_vs_sync [--full]

Every episode of the arithmetic environment really waits once, lognormally, the 99th percentile 50 times the median
(`waiting_arithmetic.py`), the k-th episode of an arm as long as the k-th of any other. Each arm trains for a fixed wall-clock time: `sync` (max_staleness 0), `grpo` (the preset in
small: groups of 8 behind the same barrier, no critic), `one_step_off` (max_staleness 1, wait), and max_staleness m with
`wait` and `mask`.

An arm's figures are over the time between the end of its last warm-up batch (those that train the critic alone, then m
more, so that rows which lay ready from the start are gone) and the end of its last batch. Learner idle: the share of it
spent waiting for a batch. Rollout idle: episode places (the most that ever ran at once in that arm) that stood empty.
Speed-up: trajectories per second over those of `grpo`. Reward at equal samples: mean reward of the last batches up to
the number of batches that every arm reached; its interval is over seeds, over rows with one seed. Equal wall-clock:
`--seconds` after the end of the first batch. No round of seeds begins that would not fit into `--budget-minutes`.
"""

import argparse
import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from contention import Contention, measure

from sao_gym.commands.composition import Run, opened
from sao_gym.commands.presets import TRAIN_PRESETS
from sao_gym.config import dump, find_preset, resolve
from sao_gym.runfolder import new_folder
from sao_gym.statistics import wilson_interval
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.config_rules import TRAIN_RULES
from sao_gym.trainer.loop import Training

ENVIRONMENT = f"{Path(__file__).with_name('waiting_arithmetic.py')}:WaitingArithmetic"
LAST_BATCHES = 8
"""Batches over which a reward is averaged."""
SLOTS = 32
"""Requests that the engine decodes side by side."""
GRACE_S = 0.01
"""A few per cent of a learner's step: every batch may wait that long once."""
AIM_SPEEDUP, AIM_IDLE = 2.8, 0.05
_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % points of Student's t by degrees of freedom."""


@dataclass(frozen=True)
class Load:
    """What all arms have in common. Seconds are wall-clock; `critic_only` batches train no actor."""

    start: Path
    out: Path
    seconds: float
    batch: int
    median_s: float
    tail: float
    in_flight: int
    critic_only: int


@dataclass(frozen=True)
class Arm:
    """One way to train: name, settings, batches of warm-up; `patience` stretches its share of time."""

    name: str
    settings: tuple[str, ...]
    warm_up: int = 0
    patience: float = 1.0
    has_critic: bool = True


@dataclass(frozen=True)
class Step:
    """One batch: when it was trained (seconds since the arm began), and what its line of metrics said."""

    at_s: float
    wait_s: float
    learn_s: float
    reward: float
    rows: int
    tokens: int
    tokens_total: int
    staleness_mean: float
    staleness_max: int
    masked: int
    rollout_s: float
    publish_s: float | None


@dataclass
class Trace:
    """One arm with one seed. `in_flight` samples (time, episodes running)."""

    arm: str
    seed: int
    warm_up: int
    steps: list[Step] = field(default_factory=list)
    in_flight: list[tuple[float, int]] = field(default_factory=list)
    engine_s: float = 0.0
    env_s: float = 0.0
    turns: float = 0.0
    tokens: float = 0.0
    contention: Contention = field(default_factory=Contention)

    def window(self) -> list[Step]:
        """The steps that count; the first of them only marks the beginning."""
        return self.steps[self.warm_up - 1 :]

    def training_s(self, step: Step) -> float:
        """Seconds from the end of the first batch (the sandboxes are up by then) to the end of this one."""
        return step.at_s - self.steps[0].at_s


class TimeIsUpError(Exception):
    """The arm's time is over."""


def arms_of(full: bool) -> list[Arm]:
    """The arms, the barriers first. `one_step_off` is m = 1 with `wait`."""
    arms = [
        Arm("sync", m_settings(0), patience=3.0),
        Arm("grpo", grpo_settings(), patience=3.0, has_critic=False),
        Arm("one_step_off", m_settings(1, "wait"), warm_up=1, patience=2.0),
        Arm("m1_mask", m_settings(1, "mask"), warm_up=1, patience=2.0),
    ]
    for m in (2, 4, 8, 16) if full else (2, 4, 8):
        arms += [
            Arm(f"m{m}_{how}", m_settings(m, how), warm_up=m, patience=patience)
            for how, patience in (("wait", 2.0), ("mask", 1.5 if m >= 8 else 1.0))
        ]
    return arms


def m_settings(m: int, on_stale: str = "wait") -> tuple[str, ...]:
    """Settings of the one-rollout-per-prompt method at this bound."""
    words: tuple[str, ...] = ("--staleness.max-staleness", str(m))
    if m:
        words += ("--staleness.on-stale", on_stale)
    if m and on_stale == "mask":
        words += ("--staleness.stale-grace-s", str(GRACE_S))
    return words


def grpo_settings() -> tuple[str, ...]:
    """Preset `grpo` in small: whole groups of 8 behind the synchronous barrier, Clip-Higher, no critic."""
    clip = ("--loss.policy", "ppo", "--loss.eps-low", "0.2", "--loss.eps-high", "0.28")
    reference = ("--loss.ratio-reference", "proximal", "--actor.updates-per-batch", "4")
    return (*m_settings(0), "--group-size", "8", "--loss.advantage", "group", *clip, *reference)


def configured(load: Load, arm: Arm, seed: int) -> Any:
    """The resolved configuration of one run."""
    options = {"pool": 4096, "median_s": load.median_s, "tail": load.tail, "wait_seed": seed}
    words = [
        *("--model", str(load.start), "--seed", str(seed), "--steps", "1000000"),
        *("--batch-size", str(load.batch), "--env", ENVIRONMENT, "--env.options", json.dumps(options)),
        *("--rollout.max-in-flight", str(load.in_flight)),
        *(("--critic.only-steps", str(load.critic_only)) if arm.has_critic else ()),
        *("--engine.slots", str(SLOTS)),
        *("--checkpoint.every", "1000000", "--evaluation.at-ends", "false"),
        *arm.settings,
    ]
    preset = find_preset(TRAIN_PRESETS, "quickstart")
    return resolve(TrainConfig, preset=preset, overrides=words, rules=TRAIN_RULES)


def run_arm(load: Load, arm: Arm, seed: int) -> Trace:
    """Train one arm with one seed for its time."""
    resolved = configured(load, arm, seed)
    trace = Trace(arm.name, seed, load.critic_only + arm.warm_up)
    path = load.out / f"{arm.name}_{seed}"
    with new_folder(path) as folder, opened(resolved.config, folder) as run:
        folder.write_config(dump(resolved))
        started = time.monotonic()

        def on_step(record: dict[str, Any]) -> None:
            trace.steps.append(step_of(record, time.monotonic() - started))
            is_over = trace.training_s(trace.steps[-1]) >= load.seconds * arm.patience
            if is_over and len(trace.steps) > trace.warm_up + 2:
                raise TimeIsUpError

        with watched(run, trace, started), suppress(TimeIsUpError):
            Training(run.parts, run.state, on_step=on_step).run()
        if arm.name == "sync":
            trace.contention = measure(run, path / "trajectories", slots=SLOTS)
    read_timings(path, trace)
    return trace


def step_of(record: dict[str, Any], at_s: float) -> Step:
    """A line of metrics as a record."""
    return Step(
        at_s=at_s,
        wait_s=record["time_wait_s"],
        learn_s=record["time_step_s"] - record["time_wait_s"],
        reward=record["reward_mean"],
        rows=record["rows"],
        tokens=record["tokens_action"],
        tokens_total=record["tokens_total"],
        staleness_mean=record["staleness_mean"],
        staleness_max=record["staleness_max"],
        masked=record["stale_masked"],
        rollout_s=record["time_rollout_s"],
        publish_s=record["time_publish_s"],
    )


@contextmanager
def watched(run: Run, trace: Trace, started: float) -> Iterator[None]:
    """Count the episodes that run, twenty times a second."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            trace.in_flight.append((time.monotonic() - started, run.parts.runtime.in_flight))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def read_timings(path: Path, trace: Trace) -> None:
    """Means over episodes, from the trajectories: seconds in the engine, in the environment, turns, sampled tokens."""
    from sao_gym.parquet import read_trajectories

    rows = [row for file in sorted((path / "trajectories").glob("*.parquet")) for row in read_trajectories(file)]
    trace.engine_s = statistics.fmean(row.timings["engine_s"] for row in rows)
    trace.env_s = statistics.fmean(row.timings["env_s"] for row in rows)
    trace.turns = statistics.fmean(row.n_turns for row in rows)
    trace.tokens = statistics.fmean(row.n_action for row in rows)


@dataclass(frozen=True)
class Figures:
    """What one arm with one seed came to."""

    arm: str
    seed: int
    batches: int
    warm_up: int
    seconds: float
    trajectories_per_s: float
    tokens_per_s: float
    learner_idle: float
    rollout_idle: float
    masked_share: float
    staleness_mean: float
    staleness_max: int
    learn_s: float
    publish_s: float
    engine_s: float
    env_s: float
    turns: float
    tokens: float
    base_s: float
    each_s: float
    engine_share: float
    learn_token_s: float


def figures_of(trace: Trace) -> Figures:
    """An arm's figures over its window."""
    first, *counted = trace.window()
    span = counted[-1].at_s - first.at_s
    running = [count for at, count in trace.in_flight if first.at_s <= at <= counted[-1].at_s]
    tokens = sum(step.tokens for step in counted)
    published = [step.publish_s for step in counted if step.publish_s is not None]
    return Figures(
        arm=trace.arm,
        seed=trace.seed,
        batches=len(trace.steps),
        warm_up=trace.warm_up,
        seconds=span,
        trajectories_per_s=sum(step.rows for step in counted) / span,
        tokens_per_s=tokens / span,
        learner_idle=sum(step.wait_s for step in counted) / span,
        rollout_idle=1.0 - statistics.fmean(running) / max(running),
        masked_share=sum(step.masked for step in counted) / tokens,
        staleness_mean=statistics.fmean(step.staleness_mean for step in counted),
        staleness_max=max(step.staleness_max for step in counted),
        learn_s=statistics.fmean(step.learn_s for step in counted),
        publish_s=statistics.fmean(published) if published else 0.0,
        engine_s=trace.engine_s,
        env_s=trace.env_s,
        turns=trace.turns,
        tokens=trace.tokens,
        **asdict(trace.contention),
    )


@dataclass(frozen=True)
class Reward:
    """Mean reward of the last batches before a common point, and its 95 % interval."""

    mean: float
    low: float
    high: float


def reward_of(rewards: Sequence[float], rows_each: int) -> Reward:
    """Mean over seeds; the interval is Student's over seeds, Wilson's over rows with one seed."""
    mean = statistics.fmean(rewards)
    if len(rewards) == 1:
        interval = wilson_interval(mean * rows_each, rows_each)
        return Reward(mean, interval.low, interval.high)
    t95 = _T95[min(len(rewards), len(_T95)) - 1]
    half = t95 * statistics.stdev(rewards) / math.sqrt(len(rewards))
    return Reward(mean, mean - half, mean + half)


def rewards_until(traces: Sequence[Trace], batch: int, until: Callable[[Trace], int]) -> Reward:
    """Reward of an arm's runs over the last batches before `until(trace)` batches."""
    means, rows = [], 0
    for trace in traces:
        end = max(until(trace), 1)
        chosen = trace.steps[max(end - LAST_BATCHES, 0) : end]
        rows += len(chosen) * batch
        means.append(statistics.fmean(step.reward for step in chosen))
    return reward_of(means, rows)


def steps_by(trace: Trace, seconds: float) -> int:
    """Batches that were trained within `seconds`."""
    return sum(trace.training_s(step) <= seconds for step in trace.steps)


@dataclass(frozen=True)
class Point:
    """One arm over its seeds: means of its figures, and its rewards at equal samples and at equal time."""

    arm: str
    seeds: int
    speedup: float
    speedup_tokens: float
    learner_idle: float
    rollout_idle: float
    masked_share: float
    staleness_mean: float
    staleness_max: int
    trajectories_per_s: float
    at_equal_samples: Reward
    at_equal_time: Reward


def points_of(traces: Sequence[Trace], load: Load) -> list[Point]:
    """All arms beside the grouped barrier. A point's speed-up is a ratio of means over seeds."""
    by_arm: dict[str, list[Trace]] = {}
    for trace in traces:
        by_arm.setdefault(trace.arm, []).append(trace)
    figures = {arm: [figures_of(trace) for trace in runs] for arm, runs in by_arm.items()}
    common = min(len(trace.steps) for trace in traces)
    base = figures.get("grpo") or figures["sync"]

    def mean(arm: Sequence[Figures], name: str) -> float:
        return statistics.fmean(getattr(one, name) for one in arm)

    return [
        Point(
            arm=arm,
            seeds=len(runs),
            speedup=mean(figures[arm], "trajectories_per_s") / mean(base, "trajectories_per_s"),
            speedup_tokens=mean(figures[arm], "tokens_per_s") / mean(base, "tokens_per_s"),
            learner_idle=mean(figures[arm], "learner_idle"),
            rollout_idle=mean(figures[arm], "rollout_idle"),
            masked_share=mean(figures[arm], "masked_share"),
            staleness_mean=mean(figures[arm], "staleness_mean"),
            staleness_max=max(one.staleness_max for one in figures[arm]),
            trajectories_per_s=mean(figures[arm], "trajectories_per_s"),
            at_equal_samples=rewards_until(runs, load.batch, lambda trace: common),
            at_equal_time=rewards_until(runs, load.batch, lambda trace: steps_by(trace, load.seconds)),
        )
        for arm, runs in by_arm.items()
    ]


def table(points: Sequence[Point]) -> str:
    """The front, one arm a line."""
    rows = [
        "| arm | seeds | trajectories/s | speed-up | in tokens | learner idle | rollout idle | masked | staleness mean "
        "(max) | reward, equal samples | reward, equal time |",
        "|" + "---|" * 11,
    ]
    for p in points:
        samples, timed = p.at_equal_samples, p.at_equal_time
        rows.append(
            f"| {p.arm} | {p.seeds} | {p.trajectories_per_s:.1f} | {p.speedup:.2f} | {p.speedup_tokens:.2f} "
            f"| {p.learner_idle:.1%} | {p.rollout_idle:.1%} | {p.masked_share:.2%} "
            f"| {p.staleness_mean:.2f} ({p.staleness_max}) | {samples.mean:.3f} ({samples.low:.3f}-{samples.high:.3f}) "
            f"| {timed.mean:.3f} ({timed.low:.3f}-{timed.high:.3f}) |"
        )
    return "\n".join(rows)


def reaching(points: Sequence[Point]) -> list[str]:
    """Arms that reach the aim: fast, the learner busy, reward at equal samples inside the synchronous interval."""
    sync = next(point.at_equal_samples for point in points if point.arm == "sync")
    return [
        point.arm
        for point in points
        if point.speedup >= AIM_SPEEDUP
        and point.learner_idle <= AIM_IDLE
        and sync.low <= point.at_equal_samples.mean <= sync.high
    ]


def draw(points: Sequence[Point], path: Path) -> None:
    """Speed-up over learner idle, and both rewards, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    front, rewards = figure.subplots(1, 2)
    for point in points:
        marker = "o" if point.arm.endswith("mask") else "s"
        front.plot(point.learner_idle, point.speedup, marker)
        front.annotate(point.arm, (point.learner_idle, point.speedup), xytext=(4, 4), textcoords="offset points")
    front.axhline(AIM_SPEEDUP, linestyle=":", color="grey")
    front.axvline(AIM_IDLE, linestyle=":", color="grey")
    front.set(xlabel="learner idle", ylabel="trajectories per second over the grouped barrier")
    for shift, name in ((-0.1, "at_equal_samples"), (0.1, "at_equal_time")):
        found: list[Reward] = [getattr(point, name) for point in points]
        spread = [[r.mean - r.low for r in found], [r.high - r.mean for r in found]]
        places = [index + shift for index in range(len(found))]
        label = name.replace("_", " ")
        rewards.errorbar(places, [r.mean for r in found], yerr=spread, fmt="o", capsize=2, label=label)
    rewards.set_xticks(range(len(points)), [point.arm for point in points], rotation=60)
    rewards.set(ylabel="reward, 95 % interval")
    rewards.legend()
    figure.savefig(path, dpi=110)


def run_all(load: Load, arms: Sequence[Arm], seeds: int, budget_s: float) -> list[Trace]:
    """Whole rounds of all arms, seed after seed, while the next round fits into the budget."""
    started, traces = time.monotonic(), list[Trace]()
    for seed in range(seeds):
        before = time.monotonic()
        for arm in arms:
            traces.append(run_arm(load, arm, seed))
            last = figures_of(traces[-1])
            print(
                f"seed {seed} {arm.name}: {last.batches} batches, {last.trajectories_per_s:.1f} trajectories/s, learner "
                f"idle {last.learner_idle:.1%}",
                flush=True,
            )
        now = time.monotonic()
        if now + (now - before) > started + budget_s:
            break
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="policy that every arm starts from")
    parser.add_argument("--out", type=Path, required=True, help="new folder for runs, front.png and front.json")
    parser.add_argument("--full", action="store_true", help="five seeds, longer arms, also m = 16; two to three hours")
    parser.add_argument("--seconds", type=float, help="training time of an asynchronous arm")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--budget-minutes", type=float)
    parser.add_argument("--arms", help="names, comma-separated; default: all")
    parser.add_argument("--median-s", type=float, default=0.1, help="median wait of an episode")
    parser.add_argument("--batch", type=int, default=32)
    given = parser.parse_args()
    load = Load(
        start=given.start,
        out=given.out,
        seconds=given.seconds or (90.0 if given.full else 25.0),
        batch=given.batch,
        median_s=given.median_s,
        tail=50.0,
        in_flight=512,
        critic_only=3,
    )
    arms = [arm for arm in arms_of(given.full) if not given.arms or arm.name in given.arms.split(",")]
    seeds = given.seeds or (5 if given.full else 1)
    traces = run_all(load, arms, seeds, 60.0 * (given.budget_minutes or (150.0 if given.full else 9.0)))
    points = points_of(traces, load)
    draw(points, given.out / "front.png")
    (given.out / "front.json").write_text(json.dumps(record_of(load, traces, points)), encoding="utf-8")
    print(table(points))
    print(f"picture: {given.out / 'front.png'}   figures: {given.out / 'front.json'}")
    print(json.dumps(verdict(points)))


def record_of(load: Load, traces: Sequence[Trace], points: Sequence[Point]) -> dict[str, Any]:
    """All that was measured, for `simulate_scale.py --measured`."""
    return {
        "batch": load.batch,
        "median_s": load.median_s,
        "tail": load.tail,
        "in_flight": load.in_flight,
        "slots": SLOTS,
        "grace_s": GRACE_S,
        "points": [asdict(point) for point in points],
        "runs": [asdict(figures_of(trace)) for trace in traces],
        "steps": {f"{trace.arm}_{trace.seed}": [asdict(step) for step in trace.steps] for trace in traces},
    }


def verdict(points: Sequence[Point]) -> dict[str, Any]:
    """The line for machines. `ok`: some arm reaches the aim."""
    good = reaching(points)
    return {
        "benchmark": "async_vs_sync",
        "ok": bool(good),
        "reach_the_aim": good,
        "seeds": max(point.seeds for point in points),
        "speedup": {point.arm: round(point.speedup, 3) for point in points},
        "learner_idle": {point.arm: round(point.learner_idle, 4) for point in points},
        "rollout_idle": {point.arm: round(point.rollout_idle, 4) for point in points},
        "masked_share": {point.arm: round(point.masked_share, 5) for point in points},
        "reward_equal_samples": {point.arm: round(point.at_equal_samples.mean, 4) for point in points},
    }


if __name__ == "__main__":
    main()
