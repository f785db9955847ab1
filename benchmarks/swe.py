"""What grading costs beside the evaluation script alone: pairs of both in sandboxes of one kind, side by side in time.

    python benchmarks/swe.py                     # the tiny repository of the tests, on the backend local
    python benchmarks/swe.py --pairs 8 --sleep 5 # with tests that take 5 seconds
    python benchmarks/swe.py --backend docker --image NAME

A raw run leases a sandbox, applies the patch with `git apply`, runs the row's script, reads its output and gives the
sandbox back. `ok` says that a grade takes at most 1.1 times the raw run and 0.6 s more, by the median of the pairs.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests/envs"), str(ROOT / "tests/envs/sandboxes")]

from sao_gym.envs.sandboxes.shared import SharedSandboxes  # noqa: E402
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits  # noqa: E402
from sao_gym.envs.swe_grading import judge_patch  # noqa: E402
from sao_gym.envs.swe_report import REPORTS  # noqa: E402
from sao_gym.envs.swe_task import SweTask  # noqa: E402

LIMITS = ShellLimits(memory_bytes=1024 * MIB, processes=256, disk_bytes=256 * MIB, output_bytes=2 * MIB, cpus=2.0)
FACTOR, EXTRA_S = 1.1, 0.6


def made_root(folder: Path) -> Path:
    """The tiny repository in a root folder of this Debian's own packages."""
    import tarfile

    import docker_image
    import swe_instances

    folder.chmod(0o755)
    with tarfile.open(folder / "packed.tar", "w") as archive:
        docker_image.pack(archive, docker_image.closure(docker_image.PACKAGES) - docker_image.UNUSED)
    with tarfile.open(folder / "packed.tar") as archive:
        archive.extractall(folder / "base", filter="fully_trusted")
    (folder / "base/testbed").mkdir()
    return swe_instances.tiny_root(folder / "base", folder / "tiny")


async def raw_s(said: SweTask, patch: bytes, boxes: SharedSandboxes) -> float:
    began = time.perf_counter()
    spec = SandboxSpec(image=said.image, workdir=said.workdir, limits=LIMITS)
    async with await boxes.lease(spec) as box:
        await box.write("/tmp/patch.diff", patch)
        await box.write("/eval.sh", said.eval_script.encode())
        command = "git -c safe.directory='*' apply /tmp/patch.diff && bash /eval.sh 2>&1"
        done = await box.exec(command, timeout_s=600.0)
    if "1 failed" in done.stdout or "2 passed" not in done.stdout:
        raise SystemExit(f"the raw run did not pass: {done.stdout[-300:]}")
    return time.perf_counter() - began


async def graded_s(said: SweTask, patch: bytes, boxes: SharedSandboxes) -> float:
    began = time.perf_counter()
    graded = await judge_patch(said, patch, boxes, limits=LIMITS, timeout_s=600.0)
    if not graded.score.passed:
        raise SystemExit(f"the gold patch did not pass: {graded.score.detail}")
    return time.perf_counter() - began


async def measured(said: SweTask, backend: str, pairs: int) -> list[tuple[float, float]]:
    import swe_instances

    patch = swe_instances.TINY_GOLD.encode()
    boxes = SharedSandboxes(1, backend=backend)
    try:
        await graded_s(said, patch, boxes)
        found = []
        for number in range(pairs):  # the order alternates, so that a machine that warms up favours neither
            first, second = (raw_s, graded_s) if number % 2 else (graded_s, raw_s)
            one, two = await first(said, patch, boxes), await second(said, patch, boxes)
            found.append((one, two) if number % 2 else (two, one))
            print(f"raw {found[-1][0]:.2f} s, graded {found[-1][1]:.2f} s", flush=True)
        return found
    finally:
        await boxes.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of a grade beside the evaluation script alone.")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds that the tests take beside their own")
    parser.add_argument("--backend", default="local")
    parser.add_argument("--image", default="", help="an image or root folder that holds the tiny repository")
    parser.add_argument("--install", action="store_true", help="the script installs the repository too")
    options = parser.parse_args()
    import swe_instances

    with tempfile.TemporaryDirectory() as folder:
        image = options.image or str(made_root(Path(folder)))
        command = f"sleep {options.sleep:g}; pytest -rA tests/test_m.py"
        row = swe_instances.tiny_row(image, install=options.install, command=command)
        pairs = asyncio.run(measured(SweTask.of(swe_instances.task_of(row)), options.backend, options.pairs))
    REPORTS.close()
    over = [graded - FACTOR * raw for raw, graded in pairs]
    figures = {
        "benchmark": "swe",
        "ok": statistics.median(over) <= EXTRA_S,
        "backend": options.backend,
        "pairs": len(pairs),
        "raw_s": round(statistics.median(raw for raw, _ in pairs), 3),
        "graded_s": round(statistics.median(graded for _, graded in pairs), 3),
        "over_s": round(statistics.median(over), 3),
        "most_over_s": round(max(over), 3),
    }
    print(json.dumps(figures))
    raise SystemExit(not figures["ok"])


if __name__ == "__main__":
    main()
