"""A row of SWE-Bench Verified with its own script, parser and patches, on Flask 2.2.3's source distribution."""

import json
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import swe_instances as swe

from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.sandboxes.spec import MIB, ShellLimits
from sao_gym.envs.swe_grading import judge_patch
from sao_gym.envs.swe_report import FAIL_TO_PASS, PASS_TO_PASS
from sao_gym.envs.swe_task import SweTask

pytest.importorskip("swebench")
pytestmark = pytest.mark.slow

LIMITS = ShellLimits(memory_bytes=2048 * MIB, processes=256, disk_bytes=512 * MIB, output_bytes=4 * MIB, cpus=2.0)
THERE = 57
"""Of the 59 tests of PASS_TO_PASS, those that are in the source distribution."""


@pytest.fixture(scope="module")
def official(data_dir: Path) -> Any:
    import pyarrow.parquet as pq

    rows = pq.read_table(data_dir / "swe_verified.parquet").to_pylist()
    return next(row for row in rows if row["instance_id"] == swe.FLASK_ID)


@pytest.fixture(scope="module")
def flask_root(root_folder: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    assert pytestconfig.cache is not None
    try:
        return swe.flask_root(
            root_folder, tmp_path_factory.mktemp("flask"), Path(str(pytestconfig.cache.mkdir("swe-flask")))
        )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the package index is not reachable: {error}")


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
async def place(request: pytest.FixtureRequest, flask_root: Path) -> AsyncIterator[tuple[SharedSandboxes, str]]:
    backend = str(request.param)
    image = str(flask_root) if backend == "local" else swe.import_root(flask_root, "sao-gym-flask:latest")
    boxes = SharedSandboxes(2, backend=backend)
    yield boxes, image
    await boxes.close()


def instance(root: Path, official: Any, image: str) -> SweTask:
    return SweTask.of(swe.task_of(swe.flask_row(root, official, image)))


async def test_gold_passes_and_a_no_op_does_not(
    flask_root: Path, official: Any, place: tuple[SharedSandboxes, str]
) -> None:
    boxes, image = place
    said = instance(flask_root, official, image)
    graded = await judge_patch(said, said.gold.encode(), boxes, limits=LIMITS)
    assert graded.doubts == (), graded.log[-2000:]
    assert len(graded.report.passed(FAIL_TO_PASS)) == 1
    passed = graded.report.passed(PASS_TO_PASS)
    assert len(passed) == THERE, sorted(set(said.pass_to_pass) - set(passed))
    assert not graded.score.passed  # two tests are not there
    there = replace(said, pass_to_pass=passed)
    assert (await judge_patch(there, said.gold.encode(), boxes, limits=LIMITS)).score.value == 1.0
    no_op = "--- a/README.rst\n+++ b/README.rst\n@@ -1,2 +1,3 @@\n Flask\n =====\n+More\n"
    graded = await judge_patch(there, no_op.encode(), boxes, limits=LIMITS)
    assert (graded.score.value, len(graded.report.passed(PASS_TO_PASS))) == (0.0, THERE)
    assert json.loads(json.dumps(graded.info))["resolved"] is False
