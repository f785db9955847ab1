"""What the Python tool costs: a session, a cell, and many sessions side by side.

Run: python benchmarks/python_tool.py [--sessions 200] [--side-by-side 32]
The last line is one JSON object; `ok` says that a session costs at most 5 ms of CPU (this process and the boxes).
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from sao_gym.envs.sandboxes.local import PythonPool, SandboxLimits

MAX_SESSION_CPU_MS = 5.0


def cpu_s_of_tree() -> float:
    """CPU seconds of this process and everything below it, the dead that were waited for included."""
    tick = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = sum(map(int, fields[11:15])) / tick
    total, me = 0.0, os.getpid()
    for pid in parents:
        above = pid
        while above not in (me, 0):
            above = parents.get(above, 0)
        total += spent[pid] if above == me else 0.0
    return total


def summary(values_s: Sequence[float]) -> dict[str, float]:
    """Median and 10th and 90th percentile, in milliseconds."""
    tenths = statistics.quantiles(values_s, n=10)
    return {
        "median_ms": round(statistics.median(values_s) * 1e3, 3),
        "p10_ms": round(tenths[0] * 1e3, 3),
        "p90_ms": round(tenths[-1] * 1e3, 3),
    }


async def one_session(pool: PythonPool) -> float:
    start = time.perf_counter()
    session = await pool.lease()
    result = await session.run("6 * 7")
    await session.close()
    if result.output != "42\n":
        raise SystemExit(f"the sandbox answered {result!r}")
    return time.perf_counter() - start


async def measure_sessions(pool: PythonPool, count: int) -> tuple[list[float], float]:
    """(wall seconds of each of `count` sessions one after another, CPU seconds of one)."""
    await one_session(pool)
    before = cpu_s_of_tree()
    walls = [await one_session(pool) for _ in range(count)]
    return walls, (cpu_s_of_tree() - before) / count


async def measure_cells(pool: PythonPool, count: int) -> list[float]:
    session = await pool.lease()
    walls = []
    for _ in range(count):
        start = time.perf_counter()
        await session.run("1 + 1")
        walls.append(time.perf_counter() - start)
    await session.close()
    return walls


async def measure(sessions: int, side_by_side: int) -> dict[str, object]:
    start = time.perf_counter()
    async with PythonPool(SandboxLimits(), size=1) as pool:
        await one_session(pool)
        first_s = time.perf_counter() - start
        walls, cpu_s = await measure_sessions(pool, sessions)
        cells = await measure_cells(pool, sessions)
    async with PythonPool(SandboxLimits(), size=side_by_side) as pool:
        start = time.perf_counter()
        await asyncio.gather(*(one_session(pool) for _ in range(side_by_side)))
        cold_s = time.perf_counter() - start
        start = time.perf_counter()
        await asyncio.gather(*(one_session(pool) for _ in range(side_by_side)))
        warm_s = time.perf_counter() - start
    async with PythonPool(SandboxLimits(), preload=("numpy", "sympy"), site_packages=True, size=1) as pool:
        preloaded, preloaded_cpu_s = await measure_sessions(pool, max(sessions // 4, 10))
    return {
        "first_session_ms": round(first_s * 1e3, 1),
        "session": summary(walls),
        "session_cpu_ms": round(cpu_s * 1e3, 2),
        "cell": summary(cells),
        "side_by_side": side_by_side,
        "side_by_side_cold_s": round(cold_s, 3),
        "side_by_side_warm_s": round(warm_s, 3),
        "preloaded_session": summary(preloaded),
        "preloaded_session_cpu_ms": round(preloaded_cpu_s * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--side-by-side", type=int, default=32)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.sessions, options.side_by_side))
    is_cheap = float(str(figures["session_cpu_ms"])) <= MAX_SESSION_CPU_MS
    print(json.dumps({"benchmark": "python_tool", "ok": is_cheap, **figures}))


if __name__ == "__main__":
    main()
