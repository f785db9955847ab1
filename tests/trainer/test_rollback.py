"""Going back to an earlier version, and taking episodes out of a run's files, on run folders made by hand."""

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from sao_gym.errors import CheckpointError
from sao_gym.ledger import Ledger, RowStatus
from sao_gym.parquet import read_trajectories, write_trajectories
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.trainer.checkpoint import find_checkpoints
from sao_gym.trainer.files import CHECKPOINTS, TRAJECTORIES, forget_saved, step_file, trajectory_files
from sao_gym.trainer.parity import CANARY, canary_of
from sao_gym.trainer.rollback import forget_canary, roll_back, take_out

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def record(number: int) -> Trajectory:
    said = Segment.action([number] * 3, logprobs=[-1.0] * 3, versions=[0] * 3, temperature=1.0, stop=StopReason.STOP)
    stream = TokenStream(segments=(Segment.observation([1, number]), said))
    made = Trajectory(
        uid=f"r{number}", task_id=f"t{number}", env_id="e", attempt=0, streams=(stream,), outcome=Outcome.terminated()
    )
    return made.scored(Score(value=1.0, passed=True))


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Ledger]:
    """Six steps of one row each, a checkpoint at each of the last four; versions begin two steps late."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    (tmp_path / TRAJECTORIES).mkdir()
    for step in range(1, 7):
        row = ledger.enqueue(f"t{step}", 0)
        ledger.set_ready(row.number, record(row.number))
        write_trajectories(step_file(tmp_path, step), [record(row.number)])
        ledger.set_trained([row.number], step)
        if step > 2:
            folder = tmp_path / CHECKPOINTS / f"step_{step}"
            folder.mkdir(parents=True)
            (folder / "weights").write_text("w")
            state = {"step": step, "version": step - 2, "weight_hash": "h", "files": {"weights": 1}}
            (folder / "state.json").write_text(json.dumps(state))
    return tmp_path, ledger


def steps(run: Path) -> list[int]:
    return [state.step for state, _ in find_checkpoints(run / CHECKPOINTS)[0]]


def test_back_to_a_version(run: tuple[Path, Ledger]) -> None:
    path, ledger = run
    done = roll_back(path, ledger, version=2, again=False, now=NOW)
    assert (done.state.step, done.checkpoints) == (4, 2)
    assert [t.uid for t in done.dropped] == ["r5", "r6"]
    assert steps(path) == [3, 4]
    assert done.aside == path / "rolled_back-20260102-030405"
    assert sorted(p.name for p in (done.aside / CHECKPOINTS).iterdir()) == ["step_5", "step_6"]
    assert [file.parent.parent.name for file in trajectory_files(path)][-2:] == [done.aside.name] * 2
    assert {row.number: row.reason for row in ledger.rows(RowStatus.DROPPED)} == {5: "rolled_back", 6: "rolled_back"}
    assert [row.number for row in ledger.rows(RowStatus.TRAINED)] == [1, 2, 3, 4]
    once_more = roll_back(path, ledger, version=2, again=False, now=NOW)
    assert (once_more.checkpoints, once_more.dropped) == (0, ())


def test_a_row_that_a_crash_left_ready_is_trained_yet(run: tuple[Path, Ledger]) -> None:
    """Its step's file was written, and then the process died before the ledger called it trained."""
    path, ledger = run
    ledger.requeue(6)
    ledger.set_ready(6, record(6))
    done = roll_back(path, ledger, version=2, again=False, now=NOW)
    assert [t.uid for t in done.dropped] == ["r5"]
    assert [row.number for row in ledger.rows(RowStatus.READY)] == [6]


def test_what_was_trained_since_may_be_trained_again(run: tuple[Path, Ledger]) -> None:
    path, ledger = run
    done = roll_back(path, ledger, version=3, again=True, now=NOW)
    assert (done.state.step, done.dropped, steps(path)) == (5, (), [3, 4, 5])
    assert step_file(path, 6).exists()
    assert ledger.rows(RowStatus.DROPPED) == []


def test_a_version_that_is_not_there_changes_nothing(run: tuple[Path, Ledger]) -> None:
    path, ledger = run
    with pytest.raises(CheckpointError, match=r"no checkpoint of version 9: it has 1, 2, 3, 4; checkpoint\.keep"):
        roll_back(path, ledger, version=9, again=False, now=NOW)
    assert steps(path) == [3, 4, 5, 6]
    assert list(path.glob("rolled_back-*")) == []


def test_episodes_are_taken_out_of_every_file(run: tuple[Path, Ledger]) -> None:
    path, ledger = run
    roll_back(path, ledger, version=3, again=False, now=NOW)
    taken = take_out(path, lambda trajectory: trajectory.uid in ("r2", "r6"))
    assert [t.uid for t in taken] == ["r2", "r6"]
    left = [t.uid for file in trajectory_files(path) for t in read_trajectories(file)]
    assert left == ["r1", "r3", "r4", "r5"]
    assert take_out(path, lambda trajectory: trajectory.uid == "r2") == []


def test_the_canary_goes_with_the_episode_that_it_was_cut_from(tmp_path: Path) -> None:
    cut = canary_of(tmp_path, [record(7)], most=4)
    np.testing.assert_array_equal(cut, [1, 7, 7, 7])
    forget_canary(tmp_path, [record(8)])
    assert (tmp_path / CANARY).exists()
    forget_canary(tmp_path, [record(8), record(7)])
    assert not (tmp_path / CANARY).exists()
    forget_canary(tmp_path, [record(7)])


def test_what_the_oldest_checkpoint_would_learn_again_is_kept(run: tuple[Path, Ledger]) -> None:
    path, _ = run
    forget_saved(path)
    assert [file.name for file in trajectory_files(path)] == [f"step_{step:06d}.parquet" for step in (4, 5, 6)]
