"""What a run keeps of itself: events and histograms per checkpoint, and batches that teach the same again."""

import json
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from sao_gym.clock import VirtualClock
from sao_gym.commands.train import main
from sao_gym.errors import RunFolderError
from sao_gym.ledger import Ledger, RowStatus
from sao_gym.parquet import read_trajectories, write_trajectories
from sao_gym.trainer.events import EventLog, PartFiles
from sao_gym.trainer.files import step_file
from sao_gym.trainer.replay import RecordedRun


@pytest.fixture
def run(crash: ModuleType, tiny_model: Path, tmp_path: Path) -> Path:
    """An asynchronous run of 6 steps, with a checkpoint after 3 and 6."""
    path = tmp_path / "run"
    given = crash.words(tiny_model, 0, is_lock_step=False)
    assert main([*given, "--steps", "6", "--out", str(path)]) == 0
    return path


def test_a_replay_gives_the_same_weights_after_every_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hashes = {record["weight_hash"] for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    assert len(hashes) == 6, "the run does learn; its first step trains the critic alone"
    assert main(["--replay", str(run)]) == 0
    assert "6 steps replayed, the weights are the same after each" in capsys.readouterr().out


def test_a_replay_finds_the_first_step_that_differs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = read_trajectories(step_file(run, 4))
    write_trajectories(step_file(run, 4), [*rows[:-1], rows[0]])
    assert main(["--replay", str(run)]) == 1
    assert "step 4 differs" in capsys.readouterr().out


def test_a_replay_of_a_run_that_was_taken_up_again(
    crash: ModuleType, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    assert main([*crash.words(tiny_model, 0, is_lock_step=False), "--steps", "3", "--out", str(path)]) == 0
    assert main(["--resume", str(path), "--steps", "7", "--allow-change"]) == 0
    assert main(["--replay", str(path)]) == 0
    assert "7 steps replayed" in capsys.readouterr().out


def test_what_cannot_be_replayed_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--replay", str(run), "--steps", "3"]) == 2
    assert "nothing beside it" in capsys.readouterr().err
    assert main(["--replay", str(run.parent)]) == 2
    assert "holds no run" in capsys.readouterr().err
    step_file(run, 2).unlink()
    assert main(["--replay", str(run)]) == 2
    assert "step_000002.parquet is missing" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="holds no step"):
        RecordedRun.read(run)


def test_events_tell_the_life_of_every_row(run: Path) -> None:
    events = PartFiles(run / "events.parquet").read()
    assert [event["time_s"] for event in events] == sorted(event["time_s"] for event in events)
    of = {kind: [e for e in events if e["kind"] == kind] for kind in ("admission", "completion", "batch", "trained")}
    admitted, ended = [e["row"] for e in of["admission"]], [e["row"] for e in of["completion"]]
    assert len(admitted) == len(set(admitted)), "nothing failed, so nothing was admitted twice"
    assert set(ended) <= set(admitted)
    ledger = Ledger(run / "ledger.sqlite")
    trained = {row.number: row for row in ledger.rows(RowStatus.TRAINED)}
    ledger.close()
    for kind in ("batch", "trained"):
        assert [e["step"] for e in of[kind]] == list(range(1, 7))
        assert {row: e["step"] for e in of[kind] for row in e["rows"]} == {
            number: row.trained_at_step for number, row in trained.items()
        }
    assert all(e["first_version"] <= e["last_version"] <= e["engine_version"] for e in of["completion"])
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [e["weight_hash"] for e in of["trained"]] == [record["weight_hash"] for record in records]
    published = {e["version"]: e["weight_hash"] for e in events if e["kind"] == "publication"}
    by_version = {record["policy_version"]: record["weight_hash"] for record in records}
    assert published, "publications were seen"
    assert all(by_version[version] == weights for version, weights in published.items())
    assert pq.read_table(run / "events.parquet").num_rows == len(events), "the folder reads as one table"


def test_histograms_count_every_token_and_row(run: Path) -> None:
    rows = PartFiles(run / "metrics.parquet").read()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_step = {(row["step"], row["name"]): row for row in rows}
    for record in records:
        for name, count in (
            ("staleness", record["tokens_action"]),
            ("log_ratio", record["tokens_action"] if record["policy_loss"] is not None else 0),
            ("tokens_action", record["rows"]),
            ("tokens_total", record["rows"]),
            ("episode_ms", record["rows"]),
        ):
            found = by_step[record["step"], name]
            assert sum(found["counts"]) == count
            assert len(found["counts"]) == len(found["edges"]) + 1
        ages = by_step[record["step"], "staleness"]["counts"][1:]
        assert ages[: len(record["staleness_histogram"])] == record["staleness_histogram"]


def test_a_resume_takes_the_events_of_lost_steps_away(run: Path) -> None:
    parts = PartFiles(run / "events.parquet")
    assert [event["step"] for event in parts.read() if event["kind"] == "trained"] == [1, 2, 3, 4, 5, 6]
    (run / "checkpoints" / "step_6" / "state.json").unlink()  # as after a crash in the last checkpoint
    assert main(["--resume", str(run)]) == 0
    assert [event["step"] for event in parts.read() if event["kind"] == "trained"] == [1, 2, 3, 4, 5, 6]
    assert {row.uid for row in read_trajectories(step_file(run, 5))} == {
        f"r{number}" for e in parts.read() if e["kind"] == "trained" and e["step"] == 5 for number in e["rows"]
    }


def test_an_event_log_forgets_what_was_taken(tmp_path: Path) -> None:
    log, parts = EventLog(VirtualClock()), PartFiles(tmp_path / "events.parquet")
    log.add("admission", row=1, engine_version=2)
    parts.write(1, log.take())
    parts.write(2, log.take())
    log.add("admission", row=2, engine_version=2)
    parts.write(3, log.take())
    assert [(event["row"], event["time_s"]) for event in parts.read()] == [(1, 0.0), (2, 0.0)]
    assert sorted(path.name for path in parts.folder.iterdir()) == ["step_000001.parquet", "step_000003.parquet"]
    parts.rewind(2)
    assert [event["row"] for event in parts.read()] == [1]
