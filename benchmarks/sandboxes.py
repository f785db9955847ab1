"""What a sandbox with a shell costs, on every backend that this machine has: boot, commands, files, memory, many at once.

Run: python benchmarks/sandboxes.py [--backends local docker] [--image NAME] [--root FOLDER] [--commands 200]

`overhead_ms` is the median round trip of `true` through the open shell, less what a fresh `bash -c true` takes inside the
same sandbox; `one_shot_ms` is a sandbox for one command alone: start, run, close. `local` runs over this machine's own
/usr, or over the unpacked root folder `--root`; `docker` needs an engine and `--image` with bash, coreutils and awk.
The last line is one JSON object. `ok`: every backend that ran adds at most 5 ms to a command, and sixteen of it side by side
made no error; that is for a quiet machine, and `load` says whether it was one. A backend that cannot run here is named with
the reason.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits, ShellSandbox
from sao_gym.errors import SaoGymError

MOST_OVERHEAD_MS = 5.0
SIDE_BY_SIDE = 16
FILE_BYTES = 32 * MIB
Start = Callable[[], AbstractAsyncContextManager[ShellSandbox]]
LIMITS = ShellLimits(memory_bytes=512 * MIB, disk_bytes=256 * MIB, processes=64)
OWN_TIME = "t=$EPOCHREALTIME; for i in {{1..{n}}}; do bash -c true; done; echo $t $EPOCHREALTIME"
MEMORY = "cat /proc/[0-9]*/status 2>/dev/null | awk '/^VmRSS/ {s += $2} END {print s}'"


@asynccontextmanager
async def start_local(options: argparse.Namespace) -> AsyncIterator[Start]:
    from sao_gym.envs.sandboxes.local_shell import LocalSandbox

    @asynccontextmanager
    async def start() -> AsyncIterator[ShellSandbox]:
        async with await LocalSandbox.start(SandboxSpec(image=options.root, limits=LIMITS)) as box:
            yield box

    yield start


@asynccontextmanager
async def start_docker(options: argparse.Namespace) -> AsyncIterator[Start]:
    from sao_gym.envs.sandboxes.docker import DockerEngine, DockerSandbox

    engine = await DockerEngine.connect()

    @asynccontextmanager
    async def start() -> AsyncIterator[ShellSandbox]:
        box = await DockerSandbox.start(engine, SandboxSpec(image=options.image, limits=LIMITS))
        try:
            yield box
        finally:
            await box.close()

    try:
        yield start
    finally:
        await engine.close()


BACKENDS = {"local": start_local, "docker": start_docker}


async def timed(work: Awaitable[Any]) -> float:
    """Seconds that `work` took."""
    start = time.perf_counter()
    await work
    return time.perf_counter() - start


async def boots(start: Start, times: int) -> tuple[float, float]:
    """(median seconds until a sandbox answers, median seconds of a sandbox for one command)."""
    first, whole = [], []
    for _ in range(times):
        begin = time.perf_counter()
        async with start() as box:
            first.append(time.perf_counter() - begin)
            await box.exec("true")
        whole.append(time.perf_counter() - begin)
    return statistics.median(first), statistics.median(whole)


async def round_trips(box: ShellSandbox, commands: int) -> tuple[float, float]:
    """(median seconds of a command through the shell, seconds of a fresh bash inside), taken in turns."""
    through, own = [], []
    for _ in range(5):
        through += [await timed(box.exec("true")) for _ in range(commands // 5)]
        begin, end = (await box.exec(OWN_TIME.format(n=commands // 5))).stdout.split()
        own.append((float(end) - float(begin)) / (commands // 5))
    return statistics.median(through), statistics.median(own)


async def transfer(box: ShellSandbox) -> tuple[float, float]:
    """MB per second (written, read)."""
    data = os.urandom(FILE_BYTES)
    written = await timed(box.write("/tmp/file", data))
    begin = time.perf_counter()
    same = await box.read("/tmp/file") == data
    if not same:
        raise SystemExit("a file did not come back as it was written")
    return FILE_BYTES / written / 1e6, FILE_BYTES / (time.perf_counter() - begin) / 1e6


async def side_by_side(start: Start) -> tuple[float, int]:
    """(seconds for sixteen sandboxes to start, run ten commands each and close, number that went wrong)."""

    async def episode(number: int) -> bool:
        async with start() as box:
            said = [(await box.exec(f"echo {number}")).stdout for _ in range(10)]
        return said == [f"{number}\n"] * 10

    begin = time.perf_counter()
    done = await asyncio.gather(*(episode(number) for number in range(SIDE_BY_SIDE)), return_exceptions=True)
    return time.perf_counter() - begin, sum(good is not True for good in done)


async def measure(start: Start, commands: int) -> dict[str, float]:
    boot_s, one_shot_s = await boots(start, 5)
    async with start() as box:
        memory_kib = float((await box.exec(MEMORY)).stdout)
        through_s, own_s = await round_trips(box, commands)
        written, read = await transfer(box)
    many_s, errors = await side_by_side(start)
    figures = {
        "boot_ms": boot_s * 1e3,
        "one_shot_ms": one_shot_s * 1e3,
        "exec_ms": through_s * 1e3,
        "own_ms": own_s * 1e3,
        "overhead_ms": (through_s - own_s) * 1e3,
        "write_mb_per_s": written,
        "read_mb_per_s": read,
        "memory_mib": memory_kib / 1024,
        "sixteen_s": many_s,
        "errors": errors,
    }
    return {name: round(value, 2) for name, value in figures.items()}


async def run(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in options.backends:
        try:
            async with BACKENDS[name](options) as start:
                found[name] = await measure(start, options.commands)
        except (SaoGymError, ImportError) as error:
            found[name] = {"left_out": str(error)}
        print(f"{name:8}", *(f"{key} {value}" for key, value in found[name].items()), sep="  ", flush=True)
    ran = [figures for figures in found.values() if "left_out" not in figures]
    fits = [figures["overhead_ms"] <= MOST_OVERHEAD_MS and figures["errors"] == 0 for figures in ran]
    return {"benchmark": "sandboxes", "ok": bool(ran) and all(fits), "load": os.getloadavg()[0], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--backends", nargs="+", choices=sorted(BACKENDS), default=sorted(BACKENDS, reverse=True))
    parser.add_argument("--image", default="debian:stable-slim")
    parser.add_argument("--root", default="")
    parser.add_argument("--commands", type=int, default=200)
    print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == "__main__":
    main()
