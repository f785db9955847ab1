"""The simulated machine: work shared as it says, the rule kept, and speeds that arithmetic gives."""

import asyncio
import importlib
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from sao_gym.clock import VirtualClock

scale: Any = importlib.import_module("scale_world")
simulation: Any = importlib.import_module("simulate_scale")


async def ends_of(clock: VirtualClock, processor: Any, jobs: list[tuple[float, float]]) -> list[float]:
    """When each job (start, amount) is done."""
    ends = [math.nan] * len(jobs)

    async def one(index: int, start: float, amount: float) -> None:
        await clock.sleep(start)
        await processor.work(amount)
        ends[index] = clock.now()

    working = asyncio.gather(*(one(i, *job) for i, job in enumerate(jobs)))
    await clock.run(working.done, settle=scale.SETTLE)
    assert working.done()
    return ends


async def test_jobs_beyond_the_slots_wait_in_line() -> None:
    clock = VirtualClock()
    processor = scale.Processor(clock, 2)
    ends = await ends_of(clock, processor, [(0.0, 4.0), (0.0, 1.0), (0.5, 2.0), (0.5, 1.0)])
    assert ends == pytest.approx([4.0, 1.0, 3.0, 4.0])
    assert processor.jobs == 0
    assert processor.busy_slot_s == pytest.approx(8.0), "all work, none twice"


async def test_a_change_of_speed_counts_from_when_it_happens() -> None:
    clock = VirtualClock()
    processor = scale.Processor(clock, 1)

    async def slow_down() -> None:
        await clock.sleep(1.0)
        processor.set_speed(0.5)

    slowing = asyncio.ensure_future(slow_down())
    assert await ends_of(clock, processor, [(0.0, 2.0), (0.0, 1.0)]) == pytest.approx([3.0, 5.0])
    await slowing


@pytest.mark.parametrize("slots", [1, 3])
async def test_no_work_is_lost_over_random_jobs(slots: int) -> None:
    draw, clock = random.Random(slots), VirtualClock()
    processor = scale.Processor(clock, slots)
    jobs = [(draw.uniform(0, 30), draw.uniform(0.01, 5)) for _ in range(60)]
    ends = await ends_of(clock, processor, jobs)
    assert all(end >= start + amount - 1e-6 for end, (start, amount) in zip(ends, jobs, strict=True))
    assert processor.busy_slot_s == pytest.approx(sum(amount for _, amount in jobs))


def steady(**changes: Any) -> Any:
    """A load whose episodes wait equally long."""
    load = scale.Load(environments=64, batch=8, tail=1.0, median_wait_s=10.0, turns=1, waits=1, tokens=1e-6, batches=6)
    return replace(load, **changes)


MACHINE = scale.Machine(learn_s=2.0, lag_s=1e-6)


def test_lock_step_takes_the_wait_and_then_the_learning() -> None:
    got = simulation.simulate(MACHINE, steady(max_staleness=0, on_stale="wait")).result
    assert got.trajectories_per_s == pytest.approx(8 / 12.0, rel=1e-3)
    assert got.learner_idle == pytest.approx(10 / 12, rel=1e-3)
    assert (got.staleness_max, got.masked_share) == (0, 0.0)


def test_a_wide_enough_bound_keeps_the_learner_busy() -> None:
    got = simulation.simulate(MACHINE, steady(max_staleness=8)).result
    assert got.trajectories_per_s == pytest.approx(8 / 2.0, rel=1e-3)
    assert got.learner_idle == pytest.approx(0.0, abs=1e-3)
    assert 0 < got.staleness_max <= 8


def test_environments_are_what_is_short() -> None:
    got = simulation.simulate(MACHINE, steady(max_staleness=8, environments=8, batches=20)).result
    assert got.trajectories_per_s == pytest.approx(8 / 10.0, rel=0.05)
    assert got.environments_idle == pytest.approx(0.0, abs=0.01)


def test_engine_slots_are_what_is_short() -> None:
    machine = replace(MACHINE, slots=2, token_s=1.0)
    got = simulation.simulate(machine, steady(max_staleness=8, tokens=5.0, batches=20)).result
    assert got.trajectories_per_s == pytest.approx(2 / 5.0, rel=0.1)
    assert got.slots_idle == pytest.approx(0.0, abs=0.02)


def test_tokens_slow_the_learner_and_the_learner_slows_them() -> None:
    """Half the engine's speed while it learns, and a learner that loses a hundredth of a second to each token."""
    load = steady(max_staleness=16, tokens=30.0, median_wait_s=1e-3, environments=200, batches=20)
    apart = replace(MACHINE, token_s=0.05)
    shared = replace(apart, engine_share=0.5, learn_token_s=0.01)
    assert simulation.simulate(apart, load).result.trajectories_per_s == pytest.approx(8 / 2.0, rel=0.05)
    got = simulation.simulate(shared, load).result
    # 30 tokens a row, 8 rows a batch: each batch costs the learner its own 2 s and 2.4 s more
    assert got.trajectories_per_s == pytest.approx(8 / 4.4, rel=0.1)
    alone = simulation.simulate(shared, replace(load, max_staleness=0, on_stale="wait")).result
    assert alone.trajectories_per_s == pytest.approx(8 / (2.0 + 30 * 0.05), rel=0.2), (
        "the barrier lets neither wait for the other"
    )


def test_each_request_more_makes_all_slower() -> None:
    machine = replace(MACHINE, learn_s=1e-3, slots=4, token_s=0.1, each_token_s=0.05)
    load = steady(max_staleness=8, tokens=10.0, median_wait_s=1e-3, environments=64, batches=20)
    got = simulation.simulate(machine, load).result
    assert got.trajectories_per_s == pytest.approx(4 / (10 * (0.1 + 4 * 0.05)), rel=0.1)


def test_batches_count_after_the_warm_up() -> None:
    fill = steady(max_staleness=2, environments=8, median_wait_s=10.0)
    late = simulation.simulate(MACHINE, replace(fill, warm_up=8)).result
    assert simulation.simulate(MACHINE, replace(fill, warm_up=4)).result == simulation.simulate(MACHINE, fill).result
    assert late.trajectories_per_s == pytest.approx(8 / 10.0, rel=0.05)


@pytest.mark.parametrize("on_stale", ["wait", "mask"])
@pytest.mark.parametrize(("m", "group_size"), [(0, 1), (1, 4), (3, 1), (3, 4)])
def test_the_bound_holds_with_heavy_tails_and_lagging_engines(m: int, group_size: int, on_stale: str) -> None:
    load = steady(tail=50.0, max_staleness=m, on_stale=on_stale, group_size=group_size, turns=3, waits=3)
    got = simulation.simulate(replace(MACHINE, engines=3, lag_s=3.0), load).result
    assert on_stale == "mask" or got.masked_share == 0.0, "no token older than m was handed out"
    assert got.masked_share < 0.5
    assert got.trajectories_per_s > 0


def test_the_same_seed_gives_the_same_world() -> None:
    load = steady(tail=50.0)
    assert simulation.simulate(MACHINE, load) == simulation.simulate(MACHINE, load)
    assert simulation.simulate(MACHINE, load) != simulation.simulate(MACHINE, replace(load, seed=1))
