"""The comparison's own arithmetic: windows, speed-ups, rewards at equal samples and time; and the waiting environment."""

import asyncio
import importlib
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sao_gym.clock import VirtualClock
from sao_gym.messages import Message

measurement: Any = importlib.import_module("async_vs_sync")
waiting: Any = importlib.import_module("waiting_arithmetic")


def trace(arm: str, seed: int, *, every_s: float, wait_s: float, rewards: list[float], warm_up: int = 1) -> Any:
    steps = [
        measurement.Step(
            at_s=10.0 + every_s * index,
            wait_s=wait_s,
            learn_s=every_s - wait_s,
            reward=reward,
            rows=32,
            tokens=100,
            tokens_total=300,
            staleness_mean=0.5,
            staleness_max=index % 2,
            masked=5 if index == 2 else 0,
            rollout_s=0.1,
            publish_s=None if index % 2 else 0.01,
        )
        for index, reward in enumerate(rewards)
    ]
    in_flight = [(0.0, 1000)] + [(10.0 + 0.1 * i, 10 if i % 2 else 30) for i in range(200)]
    return measurement.Trace(arm, seed, warm_up, steps=steps, in_flight=in_flight)


def load_of(tmp_path: Path, seconds: float = 8.0) -> Any:
    return measurement.Load(
        start=tmp_path, out=tmp_path, seconds=seconds, batch=32, median_s=0.05, tail=50.0, in_flight=64, critic_only=1
    )


def test_figures_are_of_the_window_after_the_warm_up() -> None:
    figures = measurement.figures_of(trace("m1_mask", 0, every_s=2.0, wait_s=0.5, rewards=[0.0] * 6, warm_up=2))
    assert figures.batches == 6
    assert figures.seconds == pytest.approx(8.0)
    assert figures.trajectories_per_s == pytest.approx(4 * 32 / 8.0)
    assert figures.tokens_per_s == pytest.approx(50.0)
    assert figures.learner_idle == pytest.approx(0.25)
    assert figures.rollout_idle == pytest.approx(1 - 20 / 30, abs=0.01), "what ran before the window does not count"
    assert figures.masked_share == pytest.approx(5 / 400)
    assert (figures.staleness_max, figures.publish_s) == (1, 0.01)


def test_points_compare_with_the_grouped_barrier(tmp_path: Path) -> None:
    rising = [0.1 * i for i in range(10)]
    traces = [
        trace("sync", 0, every_s=4.0, wait_s=3.0, rewards=rising[:4]),
        trace("grpo", 0, every_s=4.0, wait_s=3.0, rewards=rising[:5]),
        trace("m4_mask", 0, every_s=1.0, wait_s=0.01, rewards=rising),
    ]
    points = {point.arm: point for point in measurement.points_of(traces, load_of(tmp_path))}
    assert points["grpo"].speedup == 1.0
    assert points["m4_mask"].speedup == pytest.approx(4.0)
    assert points["m4_mask"].speedup_tokens == pytest.approx(4.0)
    for arm in points:
        assert points[arm].at_equal_samples.mean == pytest.approx(0.15), "four batches of each arm"
    assert points["sync"].at_equal_time.mean == pytest.approx(statistics.fmean(rising[:3])), "8 s are three batches"
    assert points["m4_mask"].at_equal_time.mean == pytest.approx(statistics.fmean(rising[1:9])), "the last 8 of 9"
    assert measurement.reaching(list(points.values())) == ["m4_mask"]
    shown = measurement.table(list(points.values()))
    assert len(shown.splitlines()) == 5
    assert len({line.count("|") for line in shown.splitlines()}) == 1
    measurement.draw(list(points.values()), tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    line = measurement.verdict(list(points.values()))
    assert line["ok"] is True
    json.dumps(measurement.record_of(load_of(tmp_path), traces, list(points.values())))


@pytest.mark.parametrize(
    ("every_s", "wait_s", "reward"),
    [(2.0, 0.01, 0.3), (1.0, 0.06, 0.3), (1.0, 0.01, 0.9)],
    ids=["too slow", "idle", "another reward"],
)
def test_what_misses_the_aim_is_not_named(tmp_path: Path, every_s: float, wait_s: float, reward: float) -> None:
    traces = [
        trace("sync", 0, every_s=4.0, wait_s=3.0, rewards=[0.3] * 6),
        trace("grpo", 0, every_s=4.0, wait_s=3.0, rewards=[0.3] * 6),
        trace("m4_mask", 0, every_s=every_s, wait_s=wait_s, rewards=[reward] * 9),
    ]
    points = measurement.points_of(traces, load_of(tmp_path))
    assert measurement.reaching(points) == []
    assert measurement.verdict(points)["ok"] is False


def test_the_interval_is_over_seeds_where_there_are_some() -> None:
    found = measurement.reward_of([0.4, 0.5, 0.6], rows_each=100)
    assert found.mean == pytest.approx(0.5)
    assert found.high - found.mean == pytest.approx(4.303 * 0.1 / 3**0.5)
    one = measurement.reward_of([0.5], rows_each=100)
    assert (one.low, one.high) == pytest.approx((0.404, 0.596), abs=1e-3)


def test_every_arm_is_a_configuration_that_differs_only_in_its_scheduling(tmp_path: Path) -> None:
    load = load_of(tmp_path)
    arms = measurement.arms_of(full=True)
    configs = {arm.name: measurement.configured(load, arm, 3).config for arm in arms}
    assert configs["sync"].staleness.max_staleness == 0
    assert configs["grpo"].group_size == 8
    assert {c.batch_size for c in configs.values()} == {32}
    assert {c.seed for c in configs.values()} == {3}
    assert {json.dumps(c.env.options, sort_keys=True) for c in configs.values()} == {
        '{"median_s": 0.05, "pool": 4096, "tail": 50.0, "wait_seed": 3}'
    }
    bounds = {(c.staleness.max_staleness, c.staleness.on_stale) for n, c in configs.items() if n.startswith("m")}
    assert {(m, how) for m in (2, 4, 8, 16) for how in ("wait", "mask")} <= bounds


# -- the environment that waits


async def wait_of(env: Any, clock: VirtualClock, seed: int) -> tuple[float, float]:
    """Seconds of an episode's first and second answer."""
    await env.reset_async(seed=seed, options={"task": env.tasks[0]})

    async def two() -> tuple[float, float]:
        begun = clock.now()
        await env.step_async("no call")
        return begun, clock.now()

    working = asyncio.ensure_future(two())
    await clock.run(working.done, has_others=True)
    begun, ended = await working
    return ended - begun, env.wait_s


async def test_the_kth_episode_of_a_run_waits_as_long_in_every_arm() -> None:
    clock = VirtualClock()

    async def waits(wait_seed: int, envs: int) -> list[float]:
        shared = waiting.WaitingArithmetic.make_sandboxes(4)
        options = {"pool": 8, "median_s": 3.0, "wait_seed": wait_seed, "sandboxes": shared, "clock": clock}
        made = [waiting.WaitingArithmetic(**options) for _ in range(envs)]
        found = [await wait_of(made[k % envs], clock, seed=100 * envs + k) for k in range(12)]
        assert all(waited == pytest.approx(drawn) for waited, drawn in found)
        return [drawn for _, drawn in found]

    alone = await waits(5, envs=1)
    assert len(set(alone)) == 12
    assert await waits(5, envs=3) == alone
    assert await waits(6, envs=3) != alone


async def test_only_the_first_answer_waits() -> None:
    clock = VirtualClock()
    env = waiting.WaitingArithmetic(pool=8, clock=clock)
    await env.reset_async(seed=1, options={"task": env.tasks[0]})
    cut = Message.assistant('<tool_call>{"name": "nothing"}</tool_call>')
    working = asyncio.ensure_future(env.step_async(cut))
    await clock.run(working.done, has_others=True)
    assert clock.now() == pytest.approx(env.wait_s)
    env._rewards, env._is_over = [0.0], False
    await asyncio.wait_for(env.step_async("done"), 5.0)
    assert clock.now() == pytest.approx(env.wait_s)
    env.close()


def test_every_block_holds_the_whole_lognormal() -> None:
    source = waiting.Waits(2.0, 50.0, seed=3)
    blocks = [[source.draw() for _ in range(waiting.BLOCK)] for _ in range(3)]
    assert blocks[0] != blocks[1]
    assert sorted(blocks[0]) == sorted(blocks[1]) == sorted(blocks[2])
    assert statistics.median(blocks[0]) == pytest.approx(2.0, rel=1e-3)
    below = sorted(blocks[0])
    assert below[-2] < 100.0 < below[-1], "the 99th percentile, 50 medians, lies between the two longest"
    assert max(blocks[0]) == pytest.approx(2.0 * 87.6, rel=0.01)


@pytest.mark.slow
def test_two_arms_really_train(tmp_path: Path, benchmarks_folder: Path) -> None:
    start, out = tmp_path / "start", tmp_path / "out"
    words = ["--preset", "quickstart", "--new", "qwen3_tiny", "--out", str(start), "--steps", "5"]
    subprocess.run([sys.executable, "-m", "sao_gym.sft", *words], check=True)
    script = [sys.executable, str(benchmarks_folder / "async_vs_sync.py"), "--start", str(start), "--out", str(out)]
    options = ["--seconds", "1", "--median-s", "0.001", "--batch", "8", "--arms", "sync,grpo,m2_mask"]
    done = subprocess.run([*script, *options], check=True, capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    assert set(line["speedup"]) == {"sync", "grpo", "m2_mask"}
    assert (out / "front.png").is_file()
    predict = [sys.executable, str(benchmarks_folder / "simulate_scale.py"), "--predict-only", "--measured"]
    done = subprocess.run([*predict, str(out / "front.json")], check=True, capture_output=True, text=True)
    assert set(json.loads(done.stdout.splitlines()[-1])["prediction_errors"]) == {"sync", "grpo", "m2_mask"}
