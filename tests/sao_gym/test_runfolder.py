"""Run folders: one holder, refusals that touch nothing (case CF-05), files that appear whole."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from sao_gym.errors import RunFolderError
from sao_gym.runfolder import RunFolder, default_path

HOLD = """
import sys, pathlib
from sao_gym.runfolder import RunFolder
run = RunFolder.create(pathlib.Path(sys.argv[1]))
run.write_config("steps = 1")
print("held", flush=True)
sys.stdin.read()
"""


def snapshot(path: Path) -> dict[str, tuple[str, int]]:
    files = [item for item in sorted(path.rglob("*")) if item.is_file()]
    return {f.name: (hashlib.sha256(f.read_bytes()).hexdigest(), f.stat().st_mtime_ns) for f in files}


def finished(path: Path) -> Path:
    with RunFolder.create(path) as run:
        run.write_config("steps = 5\n")
        run.append_metrics({"step": 5})
    return path


def test_a_folder_that_holds_a_run_is_refused_untouched(tmp_path: Path) -> None:
    # case CF-05
    path = finished(tmp_path / "r")
    before = snapshot(path)
    with pytest.raises(RunFolderError, match=r"already holds a run.*--resume .*r, or give a new folder"):
        RunFolder.create(path)
    assert snapshot(path) == before
    with RunFolder.open_for_resume(path) as run:
        run.append_metrics({"step": 6})
        assert [record["step"] for record in run.read_metrics()] == [5, 6]


def test_unrelated_files_are_refused_untouched(tmp_path: Path) -> None:
    # case CF-05
    (tmp_path / "thesis.tex").write_text("precious")
    before = snapshot(tmp_path)
    with pytest.raises(RunFolderError, match=r"not empty and holds no run \(it has thesis\.tex\)"):
        RunFolder.create(tmp_path)
    with pytest.raises(RunFolderError, match="holds no run"):
        RunFolder.open_for_resume(tmp_path)
    assert snapshot(tmp_path) == before
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "thesis.tex")
    with pytest.raises(RunFolderError, match="there is no run folder"):
        RunFolder.open_for_resume(tmp_path / "none")


def test_a_second_process_is_told_the_pid_of_the_first(tmp_path: Path) -> None:
    # case CF-05
    path = tmp_path / "r"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        before = snapshot(path)
        for attempt in (RunFolder.create, RunFolder.open_for_resume):
            with pytest.raises(RunFolderError, match=f"in use by process {other.pid}"):
                attempt(path)
        assert snapshot(path) == before
        other.send_signal(signal.SIGKILL)
    # Death releases the lock, without anybody cleaning up.
    RunFolder.open_for_resume(path).close()


def test_of_many_that_start_at_once_one_wins(tmp_path: Path) -> None:
    # case CF-05
    path = tmp_path / "r"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(4)
    ]
    winners, losers = [], []
    for racer in racers:
        assert racer.stdout is not None
        (winners if racer.stdout.readline() == b"held\n" else losers).append(racer)
    assert (len(winners), len(losers)) == (1, 3)
    for racer in losers:
        assert f"in use by process {winners[0].pid}".encode() in racer.communicate()[1]
    winners[0].communicate()


def test_a_run_that_failed_before_it_began_leaves_the_folder_free(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "r").close()
    with RunFolder.create(tmp_path / "r") as run:
        assert sorted(item.name for item in run.path.iterdir()) == ["lock"]
        assert int((run.path / "lock").read_text()) == os.getpid()
        with pytest.raises(RunFolderError, match=f"process {os.getpid()}"):
            RunFolder.create(tmp_path / "r")


def test_metrics_lines(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as run:
        assert run.read_metrics() == []
        run.append_metrics({"step": 1, "a": float("inf"), "b": np.float32(0.5), "c": [float("nan")], "d": np.int64(3)})
        run.append_metrics({"step": 2, "text": "a\u2028b\nc", "ok": np.bool_(True), "none": None})
        text = run.file("metrics.jsonl").read_text()
        assert text.count("\n") == 2
        assert text.isascii()
        with run.file("metrics.jsonl").open("a") as torn:
            torn.write('{"step": 3, "a"')
        first, second = run.read_metrics()
        assert first == {"step": 1, "a": None, "b": 0.5, "c": [None], "d": 3}
        assert second == {"step": 2, "text": "a\u2028b\nc", "ok": True, "none": None}
        run.rewind_metrics(1)
        run.append_metrics({"step": 2})
        assert [record["step"] for record in run.read_metrics()] == [1, 2]


def test_config_and_manifest(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as run:
        run.write_manifest({"torch": "2", "seed": np.int64(1), "loss": float("nan"), "path": Path("x")})
        run.write_config("a = 1\n")
        run.write_config("a = 2\n")
    assert json.loads((tmp_path / "manifest.json").read_text()) == {
        "torch": "2",
        "seed": 1,
        "loss": None,
        "path": "x",
    }
    assert (tmp_path / "config.toml").read_text() == "a = 2\n"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["config.toml", "lock", "manifest.json"]


def test_default_names() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert default_path("quickstart", now) == Path("runs/quickstart-20260102-030405")
    assert default_path("my/env.py:Maze", now) == Path("runs/my-env.py-Maze-20260102-030405")
    assert default_path("../..", now) == Path("runs/run-20260102-030405")


def test_a_mark_stands_in_every_line_from_then_on(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "r") as run:
        run.append_metrics({"step": 1})
        run.mark(contaminated=True)
        run.append_metrics({"step": 2, "contaminated": False})
        assert run.read_metrics() == [{"step": 1}, {"step": 2, "contaminated": True}]
