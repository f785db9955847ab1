"""Grading as SWE-Bench grades: gold 1, all else 0 with the reason, and what failed here is an error and never 0."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import swe_instances as swe

from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits, ShellSandbox
from sao_gym.envs.swe_grading import SweGrade, grade_patch, judge_patch
from sao_gym.envs.swe_report import REPORTS, SharedReports
from sao_gym.envs.swe_task import SweTask
from sao_gym.errors import GradingError, SandboxError

pytest.importorskip("swebench")

LIMITS = ShellLimits(memory_bytes=1024 * MIB, processes=256, disk_bytes=256 * MIB, output_bytes=2 * MIB, cpus=2.0)


@pytest.fixture
async def boxes() -> AsyncIterator[SharedSandboxes]:
    shared = SharedSandboxes(4)
    yield shared
    await shared.close()


def tiny(root: Path, **over: object) -> SweTask:
    return SweTask.of(swe.task_of(swe.tiny_row(str(root), **over)))


async def judged(said: SweTask, patch: str | bytes, boxes: SharedSandboxes, **options: object) -> SweGrade:
    data = patch.encode() if isinstance(patch, str) else patch
    return await judge_patch(said, data, boxes, limits=LIMITS, **options)  # type: ignore[arg-type]


# ---- the gates


async def test_gold_is_1_and_the_whole_account_is_kept(tiny_root: Path, boxes: SharedSandboxes) -> None:
    graded = await judged(tiny(tiny_root), swe.TINY_GOLD, boxes)
    assert (graded.score.value, graded.score.passed, graded.score.method) == (1.0, True, "swebench")
    assert "1 of 1 FAIL_TO_PASS, 1 of 1 PASS_TO_PASS" in graded.score.detail
    assert graded.report.statuses == {"tests/test_m.py::test_add": "PASSED", "tests/test_m.py::test_double": "PASSED"}
    assert "2 passed" in graded.log
    info = json.loads(json.dumps(graded.info))
    assert info["resolved"] is True
    assert info["report"]["tests_status"]["FAIL_TO_PASS"]["success"] == ["tests/test_m.py::test_add"]


@pytest.mark.parametrize(
    ("patch", "why"),
    [
        pytest.param("", "the patch is empty", id="empty"),
        pytest.param(" \n\n", "the patch is empty", id="blank"),
        pytest.param("I think that add is wrong.\n", "the patch does not apply: error: No valid patches", id="garbage"),
        pytest.param(swe.TINY_GOLD.replace("return a - b", "return a * b"), "patch does not apply", id="elsewhere"),
        pytest.param(swe.NO_OP, "0 of 1 FAIL_TO_PASS, 1 of 1 PASS_TO_PASS", id="no-op"),
        pytest.param(swe.TINY_TEST_PATCH, "0 of 1 FAIL_TO_PASS", id="tests-alone"),
        pytest.param(
            swe.TINY_GOLD.replace("+    return a + b", "+    return a +"),
            "0 of 1 FAIL_TO_PASS, 0 of 1 PASS_TO_PASS",
            id="syntax",
        ),
    ],
)
async def test_anything_else_is_0_with_the_reason(
    tiny_root: Path, boxes: SharedSandboxes, patch: str, why: str
) -> None:
    graded = await judged(tiny(tiny_root), patch, boxes)
    assert (graded.score.value, graded.score.passed) == (0.0, False)
    assert why in graded.score.detail


HONEST = {
    "conftest.py": "collect_ignore = []\n",
    "tests/test_more.py": "from m import add\n\n\ndef test_more():\n    assert add(1, 1) == 2\n",
    "tests/test_m.py": "from m import add\n\n\ndef test_mine():\n    assert add(1, 1) == 2\n",
    "setup.cfg": "[metadata]\ndescription = adds\n[tool:pytest]\naddopts = -q\n",
    "reproduce.py": "from m import add\nprint(add(1, 1))\n",
}
LEFT_OUT = ("conftest.py", "setup.cfg", "tests/test_m.py", "tests/test_more.py")


@pytest.mark.parametrize("install", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_tests_of_an_agents_own_neither_help_nor_harm(
    tiny_root: Path, boxes: SharedSandboxes, tmp_path: Path, install: bool
) -> None:
    fixed = {**HONEST, "m.py": swe.TINY_FILES["m.py"].replace("a - b", "a + b")}
    graded = await judged(tiny(tiny_root, install=install), swe.patch_of(tiny_root, tmp_path, fixed), boxes)
    assert graded.score.passed, graded.score.detail
    assert graded.left_out == LEFT_OUT
    assert graded.doubts == ()


async def test_fractions_are_an_option(tiny_root: Path, boxes: SharedSandboxes) -> None:
    said = tiny(tiny_root)
    score = await grade_patch(said, swe.NO_OP.encode(), boxes, limits=LIMITS, fractions=True)
    assert (score.value, score.passed) == (0.5, False)  # all of PASS_TO_PASS, none of FAIL_TO_PASS


async def test_a_stripped_patch_and_one_with_a_fuzzy_context_apply_as_in_the_benchmark(
    tiny_root: Path, boxes: SharedSandboxes
) -> None:
    """Case SW-04: the patch passed through strip() by a client."""
    said = tiny(tiny_root)
    assert (await judged(said, swe.TINY_GOLD.strip(), boxes)).score.passed
    fuzzy = swe.TINY_GOLD.replace("Sum of two numbers", "Sum of 2 numbers").replace(
        "@@ -1,6 +1,6 @@", "@@ -2,6 +2,6 @@"
    )
    assert (await judged(said, fuzzy, boxes)).score.passed


async def test_by_products_arrive_byte_exact(tiny_root: Path, boxes: SharedSandboxes, tmp_path: Path) -> None:
    """Case SW-04: NUL bytes, latin-1, CRLF, no final newline, a mode and a symbolic link, through JSON and back."""
    place = tmp_path / "work"
    swe.git(tmp_path, "clone", "-q", str(tiny_root / "testbed"), str(place))
    swe.git(place, "checkout", "-q", swe.tiny_base())
    (place / "m.py").write_text(swe.TINY_FILES["m.py"].replace("a - b", "a + b"))
    contents = {
        "tool.bin": bytes(range(256)) * 3,
        "latin.txt": "stra\xdfe\n".encode("latin-1"),
        "dos.txt": b"one\r\ntwo\r\n",
        "open.txt": b"no end",
    }
    for name, data in contents.items():
        (place / name).write_bytes(data)
    (place / "README.md").chmod(0o755)
    (place / "link").symlink_to("m.py")
    swe.git(place, "add", "-A")
    patch = swe.git_bytes(place, "diff", "--binary", "HEAD")
    patch = json.loads(json.dumps(patch.decode("utf-8", "surrogateescape"))).encode("utf-8", "surrogateescape")
    names = " ".join(contents)
    command = f"sha256sum {names}; readlink link; test -x README.md && echo mode; pytest -rA tests/test_m.py"
    graded = await judged(tiny(tiny_root, command=command), patch, boxes)
    assert graded.score.passed, graded.score.detail
    import hashlib

    for name, data in contents.items():
        assert f"{hashlib.sha256(data).hexdigest()}  {name}" in graded.log
    assert "\nm.py\n" in graded.log
    assert "\nmode\n" in graded.log


# ---- failures of ours, and those of the patch


async def test_hanging_tests_are_not_resolved(tiny_root: Path, boxes: SharedSandboxes) -> None:
    hang = swe.TINY_GOLD.replace("+    return a + b", "+    import time; time.sleep(600)\n+    return a + b")
    graded = await judged(tiny(tiny_root), hang.replace("+1,6", "+1,7"), boxes, timeout_s=15.0)
    assert graded.score.value == 0.0
    assert "did not end within 15 s" in graded.score.detail


async def test_an_image_that_is_not_there_or_is_another_is_an_error(
    tiny_root: Path, root_folder: Path, boxes: SharedSandboxes, tmp_path: Path
) -> None:
    with pytest.raises((SandboxError, Exception), match="no root folder"):
        await judged(tiny(tmp_path / "nowhere"), swe.TINY_GOLD, boxes)
    with pytest.raises(GradingError, match="has no commit"):
        await judged(tiny(root_folder), swe.TINY_GOLD, boxes)


async def test_a_script_without_marks_is_an_error(tiny_root: Path, boxes: SharedSandboxes) -> None:
    with pytest.raises(GradingError, match="says nowhere where the tests' output is"):
        await judged(tiny(tiny_root, eval_script="pytest\n"), swe.TINY_GOLD, boxes)


async def test_a_log_parser_that_is_unknown_is_an_error(tiny_root: Path, boxes: SharedSandboxes) -> None:
    with pytest.raises(GradingError, match="parse_log_none"):
        await judged(tiny(tiny_root, log_parser="parse_log_none"), swe.TINY_GOLD, boxes)


class Watched:
    """Sandboxes that say when one was leased, and keep it."""

    def __init__(self, below: SharedSandboxes) -> None:
        self._below, self.box, self.leased = below, None, asyncio.Event()
        self.box: ShellSandbox | None

    async def lease(self, spec: SandboxSpec | None = None) -> ShellSandbox:
        self.box = await self._below.lease(spec)
        self.leased.set()
        return self.box


async def test_a_sandbox_that_dies_is_an_error(tiny_root: Path, boxes: SharedSandboxes) -> None:
    watched = Watched(boxes)
    wait = swe.TINY_GOLD.replace("+    return a + b", "+    import time; time.sleep(600)\n+    return a + b")
    said = tiny(tiny_root)
    grading = asyncio.ensure_future(judge_patch(said, wait.replace("+1,6", "+1,7").encode(), watched, limits=LIMITS))
    await watched.leased.wait()
    assert watched.box is not None
    await watched.box.close()
    with pytest.raises(SandboxError):
        await grading


async def test_a_grade_that_is_cancelled_gives_its_sandbox_back(tiny_root: Path, boxes: SharedSandboxes) -> None:
    watched = Watched(boxes)
    grading = asyncio.ensure_future(judge_patch(tiny(tiny_root), swe.TINY_GOLD.encode(), watched, limits=LIMITS))
    await watched.leased.wait()
    grading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await grading
    assert boxes.metrics.leased == 0


# ---- the report's process

ROW = {
    "instance_id": "a__b-1",
    "image": "",
    "repo": "a/b",
    "version": "1",
    "FAIL_TO_PASS": ["t.py::f"],
    "PASS_TO_PASS": ["t.py::p"],
    "log_parser": "parse_log_pytest",
    "eval_type": "pass_and_fail",
}


def log_of(section: str) -> str:
    return f"+ : '>>>>> Start Test Output'\n{section}+ : '>>>>> End Test Output'\n>>>>> Test Exit Code: 0\n"


def test_a_report_process_that_was_killed_is_started_again() -> None:
    reports = SharedReports()
    try:
        section = log_of("PASSED t.py::f\nPASSED t.py::p\n")
        assert reports.ask(ROW, section).resolved
        os.kill(reports.get().pid, signal.SIGKILL)
        assert reports.ask(ROW, section).resolved
    finally:
        reports.close()


def test_a_log_that_takes_too_long_costs_its_own_question_alone() -> None:
    slow = log_of(("_" * 200_000 + " a.py\n") * 2)
    answer = REPORTS.ask({**ROW, "log_parser": "parse_log_sympy"}, slow, cpu_s=0.5)
    assert not answer.is_read
    assert REPORTS.ask(ROW, log_of("PASSED t.py::f\nPASSED t.py::p\n")).resolved


@pytest.mark.slow
def test_the_spec_is_the_one_that_swebench_makes(data_dir: Path) -> None:
    import pyarrow.parquet as pq
    from swebench.harness.log_parsers import PARSER_REGISTRY
    from swebench.harness.utils import make_test_spec
    from swebench.types import TestSpec

    from sao_gym.envs.swe_grading import spec_fields

    rows = pq.read_table(data_dir / "swe_verified.parquet").to_pylist()
    for row in rows:
        said = SweTask.of(swe.task_of(row))
        theirs = make_test_spec(row)
        assert TestSpec(**spec_fields(said), eval_script_list=theirs.eval_script_list) == theirs
        assert said.log_parser in PARSER_REGISTRY
    assert len(rows) == 500
