"""Trap 13 as a benchmark: the trainer is killed at random moments; and the audit sees what it is there to see."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sao_gym.ledger import Ledger
from sao_gym.parquet import write_trajectories
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.trainer.files import TRAJECTORIES, row_uid, step_file

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_ten_kills_lose_nothing_and_repeat_nothing() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/crash.py", "--kills", "10", "--seed", "5"]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    assert figures["ok"] is True
    assert (figures["kills"], figures["lost"], figures["repeated"]) == (10, 0, 0)
    assert figures["runs_with_other_weights"] == 0
    assert sum(figures["killed_at_step"].values()) == 10


def trained_row(number: int) -> Trajectory:
    action = Segment.action([1], logprobs=[-1.0], versions=[0], temperature=1.0, stop=StopReason.STOP)
    row = Trajectory(
        uid=row_uid(number),
        task_id=f"t{number}",
        env_id="e",
        attempt=0,
        streams=(TokenStream(segments=(Segment.observation([1]), action)),),
        outcome=Outcome.terminated(),
    )
    return row.scored(Score(value=1.0, passed=True))


@pytest.fixture
def finished(crash: ModuleType, tmp_path: Path) -> Path:
    """A run as the audit wants it: each step trained its own rows, two more are outstanding or dropped."""
    (tmp_path / TRAJECTORIES).mkdir()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    lines = []
    for step in range(1, crash.STEPS + 1):
        numbers = [ledger.enqueue(f"t{step}-{i}", 0).number for i in range(crash.BATCH)]
        write_trajectories(step_file(tmp_path, step), [trained_row(number) for number in numbers])
        ledger.set_trained(numbers, step)
        lines.append(json.dumps({"step": step, "weight_hash": str(step)}) + "\n")
    ledger.enqueue("outstanding", 0)
    ledger.set_dropped(ledger.enqueue("dropped", 0).number, "truncated")
    ledger.close()
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


def test_the_audit_of_a_whole_run_finds_nothing(crash: ModuleType, finished: Path) -> None:
    audit = crash.Audit(finished)
    audit.look()
    assert audit.close() == (0, 0)


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM rows WHERE task_id = 'outstanding'",
        "UPDATE rows SET attempt = 3 WHERE task_id = 'outstanding'",
        "UPDATE rows SET reason = NULL WHERE task_id = 'dropped'",
        "UPDATE rows SET trained_at_step = 9 WHERE number = 1",
        "UPDATE rows SET status = 'queued' WHERE number = 1",
    ],
)
def test_the_audit_finds_a_lost_prompt(crash: ModuleType, finished: Path, damage: str) -> None:
    audit = crash.Audit(finished)
    audit.look()
    with sqlite3.connect(finished / "ledger.sqlite") as database:
        database.execute(damage)
    database.close()
    assert audit.close() == (1, 0)


def test_the_audit_finds_a_row_trained_twice(crash: ModuleType, finished: Path) -> None:
    rows = [trained_row(number) for number in (1, 2, 3, 4)]
    write_trajectories(step_file(finished, 2), rows)
    lost, repeated = crash.Audit(finished).close()
    assert repeated == 4
    assert lost > 0, "and the second step's own rows are gone"
