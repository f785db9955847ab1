"""How long an episode waits for its sandbox: started when it is asked for, or taken from a pool that keeps some ready.

Run: python benchmarks/sandbox_pool.py [--backend local] [--image NAME] [--leases 20] [--pause 0.5]

Each lease runs one command and is given back; `--pause` seconds lie between two, as a policy's thinking does.
`cold_ms` and `warm_ms` are medians of the wait, `warm_worst_ms` the longest. The last line is one JSON object. `ok`: at least
half of the leases came from those that stood ready, their median wait is under 50 ms, and nothing leaked.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict
from typing import Any

from sao_gym.envs.sandboxes.backends import open_backend
from sao_gym.envs.sandboxes.pool import SandboxPool
from sao_gym.envs.sandboxes.pool_records import PoolMetrics, PoolSettings
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits

MOST_WAIT_MS = 50.0
LIMITS = ShellLimits(memory_bytes=512 * MIB, disk_bytes=256 * MIB, processes=64)


async def waits_ms(options: argparse.Namespace, warm: int) -> tuple[list[float], PoolMetrics]:
    """Waits for one sandbox after another, and what the pool counted."""
    waits, spec = [], SandboxSpec(image=options.image, limits=LIMITS)
    backend = await open_backend(options.backend)
    async with SandboxPool(backend, size=1, settings=PoolSettings(warm=warm)) as pool:
        if warm:
            pool.prepare(spec)
        for _ in range(options.leases):
            await asyncio.sleep(options.pause)
            begin = time.perf_counter()
            async with await pool.lease(spec) as box:
                waits.append((time.perf_counter() - begin) * 1000)
                await box.exec("true")
    return waits, pool.metrics


def report(options: argparse.Namespace) -> dict[str, Any]:
    """Both pools, one after the other."""
    cold, _ = asyncio.run(waits_ms(options, 0))
    warm, metrics = asyncio.run(waits_ms(options, 1))
    figures = {"cold_ms": statistics.median(cold), "warm_ms": statistics.median(warm), "warm_worst_ms": max(warm)}
    is_ok = figures["warm_ms"] < MOST_WAIT_MS and 2 * metrics.warm_leases >= options.leases and metrics.leaks == 0
    return {
        "benchmark": "sandbox_pool",
        "ok": is_ok,
        "backend": options.backend,
        "load": os.getloadavg()[0],
        **{name: round(value, 2) for name, value in figures.items()},
        "metrics": {name: round(value, 3) for name, value in asdict(metrics).items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--image", default="")
    parser.add_argument("--leases", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.5)
    print(json.dumps(report(parser.parse_args())))


if __name__ == "__main__":
    main()
