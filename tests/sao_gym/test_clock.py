"""Clocks: virtual time moves only when nothing else is left to do, in the order of what is due."""

import asyncio
import re
import threading
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from sao_gym.clock import SystemClock, VirtualClock

ROOT = Path(__file__).resolve().parents[2]


@given(delays=st.lists(st.floats(0, 1e6), max_size=20))
def test_sleepers_wake_in_the_order_in_which_they_are_due(delays: list[float]) -> None:
    async def main() -> list[tuple[float, int]]:
        clock = VirtualClock()
        woken: list[tuple[float, int]] = []

        async def sleeper(index: int, seconds: float) -> None:
            await clock.sleep(seconds)
            woken.append((clock.now(), index))

        tasks = [asyncio.ensure_future(sleeper(i, s)) for i, s in enumerate(delays)]
        await clock.run(lambda: all(task.done() for task in tasks))
        assert all(task.done() for task in tasks)
        return woken

    assert asyncio.run(main()) == sorted((seconds, index) for index, seconds in enumerate(delays))


async def test_time_stands_still_while_there_is_something_to_do() -> None:
    clock = VirtualClock()
    seen: list[float] = []

    async def chain() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
            seen.append(clock.now())
        await clock.sleep(3.0)
        seen.append(clock.now())

    alarm = asyncio.ensure_future(clock.sleep(1.0))
    task = asyncio.ensure_future(chain())
    await clock.run(task.done)
    assert seen == [0.0] * 10 + [3.0]
    assert alarm.done()


async def test_run_returns_when_nothing_sleeps_any_more() -> None:
    clock = VirtualClock()
    stuck = asyncio.ensure_future(asyncio.get_running_loop().create_future())
    await clock.run(stuck.done)
    assert not stuck.done()
    assert clock.now() == 0.0
    stuck.cancel()


async def test_run_waits_for_threads_where_there_are_some() -> None:
    clock, gate = VirtualClock(), threading.Event()

    async def work() -> float:
        await asyncio.to_thread(gate.wait)
        await clock.sleep(5.0)
        return clock.now()

    working = asyncio.ensure_future(work())
    await clock.run(working.done)
    assert not working.done()
    running = asyncio.ensure_future(clock.run(working.done, has_others=True))
    await asyncio.sleep(0.05)
    assert not running.done()
    gate.set()
    await running
    assert await working == 5.0


async def test_a_cancelled_sleeper_moves_no_time() -> None:
    clock = VirtualClock()
    long, short = (asyncio.ensure_future(clock.sleep(seconds)) for seconds in (5.0, 9.0))
    await asyncio.sleep(0)
    long.cancel()
    await clock.run(short.done)
    assert clock.now() == 9.0
    negative = asyncio.ensure_future(clock.sleep(-1.0))
    await clock.run(negative.done)
    assert clock.now() == 9.0, "time never falls"


async def test_the_systems_clock_never_falls() -> None:
    clock = SystemClock()
    before = clock.now()
    await clock.sleep(0.001)
    assert clock.now() >= before + 0.001


def test_the_runtime_knows_no_other_time_and_no_other_sleep() -> None:
    """docs/runtime.md: one injected clock. (`asyncio.sleep(0)` waits for nothing.)"""
    names = ("rollout", "ledger", "parquet", "gateway", "collect", "engines/scripted")
    files = [ROOT / "sao_gym" / f"{name}.py" for name in names]
    files = [file for file in files if file.exists()] + sorted((ROOT / "trainer").glob("*.py"))
    own = re.compile(
        r"\btime\.(time|monotonic|perf_counter|sleep)\b|\bimport time\b|asyncio\.(sleep\((?!0\))|wait_for|timeout)"
    )
    found = [f"{file.name}: {line}" for file in files for line in file.read_text().splitlines() if own.search(line)]
    assert len(files) > 20
    assert found == []
