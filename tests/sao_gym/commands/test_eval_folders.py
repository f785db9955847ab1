"""An evaluation's folder: gone on with, graded again, compared. Episodes are real, the policy is a script."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sao_gym.commands.eval import main
from sao_gym.jsonl import read_jsonl, write_jsonl
from sao_gym.parquet import read_trajectories

ROOT = Path(__file__).resolve().parents[3]
ENV = '''
import asyncio, os, pathlib
from sao_gym.core import ToolEnv
from sao_gym.errors import GradingError, SandboxError
from sao_gym.protocols import Task
from sao_gym.stream import Score

FOLDER = pathlib.Path(__file__).parent

def grade(gold, response):
    rule = (FOLDER / "rule").read_text()
    if rule == "broken":
        raise GradingError("no verdict")
    right = response == gold if rule == "exact" else response.strip(".") == gold
    return Score(value=float(right), passed=right, detail=response, grader_version=rule, method="spelling")

class Say(ToolEnv):
    """Says are counted in a file; a task named in `faults` fails, one named in `blocks` never ends."""
    def __init__(self):
        super().__init__([Task(id=f"t{i}", prompt=f"Say {i}.", answer=str(i)) for i in range(3)], grader=grade)

    async def setup(self, task):
        with (FOLDER / "calls").open("a") as file:
            file.write(task.id + "\\n")
        if task.id in (FOLDER / "faults").read_text().split():
            raise SandboxError("planted")
        if task.id in (FOLDER / "blocks").read_text().split():
            (FOLDER / "blocked").touch()
            await asyncio.Event().wait()
'''


class World:
    """A folder with an environment, a script, and switches for both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "say.py").write_text(ENV)
        self.set(faults="", blocks="", rule="exact", calls="")
        said = [
            {"task_id": f"t{i}", "attempt": a, "turns": [f"{i}" if a == 0 else f"{i}."]}
            for i in range(3)
            for a in (0, 1)
        ]
        write_jsonl(folder / "said.jsonl", said)

    def set(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / name).write_text(text)

    @property
    def calls(self) -> list[str]:
        """Tasks of the episodes that were begun since the last time this was asked."""
        found = (self.folder / "calls").read_text().split()
        self.set(calls="")
        return sorted(found)

    def words(self, out: str) -> list[str]:
        words = ["--env", f"{self.folder / 'say.py'}:Say", "--engine", "scripted", "--n", "2", "--concurrency", "1"]
        return [*words, "--completions", str(self.folder / "said.jsonl"), "--out", str(self.folder / out)]

    def run(self, out: str) -> Path:
        assert main(self.words(out)) == 0
        return self.folder / out


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def figures(folder: Path) -> Any:
    """results.json without times and history."""
    record = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    for one in record["benchmarks"].values():
        del one["seconds"]
    return record["benchmarks"]


def samples(folder: Path) -> list[dict[str, Any]]:
    rows = [dict(row) for _, row in read_jsonl(folder / "samples.jsonl")]
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "lock"}


def unfinished(world: World, out: str) -> Path:
    """A finished evaluation made to look as if it had been killed: its raw records stand in the log again."""
    from sao_gym.episode_log import EpisodeLog

    folder = world.run(out)
    log = EpisodeLog(folder / "episodes.log")
    for one in read_trajectories(folder / "trajectories.parquet"):
        log.append(one)
    for name in ("trajectories.parquet", "results.json", "report.html"):
        (folder / name).unlink()
    return folder


def test_resume_runs_the_missing_the_torn_and_the_failed_alone(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case EV-03: 6 pairs, of which 2 are finished, 1 ended in an error, 2 left no row and 1 has a torn row."""
    unbroken = world.run("unbroken")
    world.set(faults="t2")
    folder = unfinished(world, "out")
    lines = (folder / "samples.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["outcome"] for line in lines] == ["terminated"] * 4 + ["error"] * 2
    # t0: both finished; t1: no row, torn row; t2: an error, no row
    (folder / "samples.jsonl").write_bytes(b"".join([*lines[:2], lines[4], lines[3][:-20]]))
    world.set(faults="", calls="")
    capsys.readouterr()
    assert main(["--resume", str(folder)]) == 0
    out = capsys.readouterr().out
    assert world.calls == ["t1", "t1", "t2", "t2"]
    assert "2 of 6 episodes stand, 4 run again (1 ended in an error)" in out
    assert "samples.jsonl, line 4: cut" in out
    rows = samples(folder)
    assert [(row["task_id"], row["attempt"]) for row in rows] == [(f"t{i}", a) for i in range(3) for a in (0, 1)]
    assert rows == samples(unbroken)
    assert figures(folder) == figures(unbroken)
    kept = read_trajectories(folder / "trajectories.parquet")
    assert [one.uid for one in kept] == [row["uid"] for row in rows]
    assert not any(one.outcome.is_error for one in kept)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["resumed"] == [{"kept": 2, "problems": ["samples.jsonl, line 4: cut, or no result"]}]
    # nothing is left to do: nothing runs, and nothing but history and time changes
    assert main(["--resume", str(folder)]) == 0
    assert world.calls == []
    assert samples(folder) == rows


def test_a_line_without_its_raw_record_is_run_again(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unfinished(world, "out")
    log = folder / "episodes.log"
    log.write_bytes(log.read_bytes()[:-1])
    world.set(calls="")
    assert main(["--resume", str(folder)]) == 0
    out = capsys.readouterr().out
    assert world.calls == ["t2"]
    assert "bytes of a record that was cut" in out
    assert "has a line and no raw record" in out
    assert len(read_trajectories(folder / "trajectories.parquet")) == 6


def test_a_parquet_file_that_was_cut_is_said_and_run_again(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    folder = world.run("out")
    path = folder / "trajectories.parquet"
    path.write_bytes(path.read_bytes()[:-30])
    world.set(calls="")
    assert main(["--resume", str(folder)]) == 0
    assert "trajectories.parquet: cannot be read" in capsys.readouterr().out
    assert len(world.calls) == 6
    assert len(read_trajectories(path)) == 6


def test_a_killed_evaluation_gives_the_results_of_an_unbroken_one(world: World) -> None:
    unbroken = world.run("unbroken")
    world.set(blocks="t1", calls="")
    command = [sys.executable, "-m", "sao_gym.eval", *world.words("out")]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    blocked = world.folder / "blocked"
    try:
        while not blocked.exists():  # two episodes are over, the third hangs
            assert process.poll() is None
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    folder = world.folder / "out"
    assert len(samples(folder)) == 2
    assert not (folder / "trajectories.parquet").exists()
    assert world.calls == ["t0", "t0", "t1"]
    world.set(blocks="")
    assert main(["--resume", str(folder)]) == 0
    assert world.calls == ["t1", "t1", "t2", "t2"]
    assert samples(folder) == samples(unbroken)
    assert figures(folder) == figures(unbroken)
    raw = [
        [(one.uid, one.streams) for one in read_trajectories(each / "trajectories.parquet")]
        for each in (folder, unbroken)
    ]
    assert raw[0] == raw[1]


def test_resume_refuses_another_evaluation(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    folder = world.run("out")
    before = files(folder)
    cases = [
        (["--resume", str(folder), "--n", "4"], "other settings (sampling.n: 2 -> 4)"),
        (["--resume", str(folder), "--protocol", "quick"], "leave --protocol out"),
        (["--resume", str(world.folder / "none")], "there is no run folder"),
        (["--resume", str(world.folder)], "holds no run"),
        (["--resume", str(folder), "--rescore", str(folder)], "exclude each other"),
        (world.words("out"), "go on with it by --resume"),
    ]
    for words, sentence in cases:
        assert main(words) == 2, words
        assert sentence in capsys.readouterr().err, words
    assert files(folder) == before
    (world.folder / "say.py").write_text(ENV.replace("Say {i}.", "Say {i}!"))
    for name in [name for name in sys.modules if name.startswith("sao_gym_file_say")]:
        del sys.modules[name]
    assert main(["--resume", str(folder)]) == 2
    assert "are not those of the run" in capsys.readouterr().err
    assert files(folder) == before


def test_concurrency_may_change_on_resume(world: World) -> None:
    folder = unfinished(world, "out")
    assert main(["--resume", str(folder), "--max-concurrency", "3"]) == 0
    assert (folder / "report.html").exists()


# -- rescore


def test_rescore_of_its_own_output_changes_nothing(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    folder = world.run("out")
    before, _ = files(folder), world.calls
    assert main(["--rescore", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Say: 0 of 6 verdicts changed" in out
    assert "nothing changed; no file was touched" in out
    assert files(folder) == before
    assert world.calls == [], "nothing was run"


def test_rescore_shows_what_changed_and_keeps_the_old_results(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    folder = world.run("out")
    before = files(folder)
    world.set(rule="lenient", calls="")
    assert main(["--rescore", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "Say: 3 of 6 verdicts changed, 3 more are told in other words" in out
    assert "0 -> 1  t1 sample 1" in out
    assert "1.000  [" in out
    after = files(folder)
    assert after["results.1.json"] == before["results.json"]
    assert after["samples.1.jsonl"] == before["samples.jsonl"]
    assert after["trajectories.parquet"] == before["trajectories.parquet"]
    assert {row["grader_version"] for row in samples(folder)} == {"lenient"}
    assert next(iter(figures(folder).values()))["summary"]["success"] == 1.0
    assert world.calls == []
    # and again: its own output now
    assert main(["--rescore", str(folder)]) == 0
    assert files(folder) == after
    # a resume goes by the new verdicts
    assert main(["--resume", str(folder)]) == 0
    assert next(iter(figures(folder).values()))["summary"]["success"] == 1.0


def test_a_failed_grade_can_be_graded_again(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.set(rule="broken")
    assert main(world.words("out")) == 1
    folder = world.folder / "out"
    assert [row["stage"] for row in samples(folder)] == ["grade"] * 6
    world.set(rule="exact")
    assert main(["--rescore", str(folder)]) == 0
    assert "error (grade) -> 1" in capsys.readouterr().out
    assert [row["passed"] for row in samples(folder)] == [True, False] * 3
    assert {row["outcome"] for row in samples(folder)} == {"terminated"}


def test_rescore_refuses_what_it_cannot_grade(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    own = ENV + "\n    def grade_final(self, message):\n        return super().grade_final(message)\n"
    (world.folder / "say.py").write_text(own)
    folder = world.run("out")
    before = files(folder)
    assert main(["--rescore", str(folder)]) == 2
    assert "cannot be graded from its record" in capsys.readouterr().err
    (folder / "results.json").unlink()
    assert main(["--rescore", str(folder)]) == 2
    assert "did not end" in capsys.readouterr().err
    assert main(["--rescore", str(folder), "--n", "3"]) == 2
    assert "give nothing beside it" in capsys.readouterr().err
    del before["results.json"]
    assert files(folder) == before


# -- compare


def test_two_folders_are_compared(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    first = world.run("first")
    second = world.folder / "second"
    shutil.copytree(first, second)
    world.set(rule="lenient")
    assert main(["--rescore", str(second)]) == 0
    capsys.readouterr()
    assert main(["--compare", str(first), str(second)]) == 0
    out = capsys.readouterr().out
    assert "+0.500" in out
    assert "3 in both: 3 better, 0 worse" in out
    for words, sentence in (
        (["--compare", str(first)], "needs two folders"),
        (["--compare", str(first), str(second), "--n", "2"], "needs two folders"),
        (["--compare", str(first), str(world.folder)], "holds no results"),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err
