"""The ledger: each change is whole or nothing, a row holds its trajectory while it is ready, a resume's rules."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sao_gym.errors import InvariantError, RunFolderError
from sao_gym.ledger import Ledger, LedgerRow, RowStatus
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory


def episode(row: LedgerRow, versions: list[int]) -> Trajectory:
    action = Segment.action(
        [5] * len(versions),
        logprobs=np.linspace(-1, -0.5, len(versions)),
        versions=versions,
        temperature=0.7,
        stop=StopReason.STOP,
    )
    made = Trajectory(
        uid=f"r{row.number}",
        task_id=row.task_id,
        env_id="e",
        attempt=row.attempt,
        streams=(TokenStream(segments=(Segment.observation([1, 2]), action)),),
        outcome=Outcome.terminated(),
    )
    return made.scored(Score(value=0.5, passed=True, detail="half\u2028way"))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    made = Ledger(":memory:")
    yield made
    made.close()
    made.close()


def test_a_rows_life(ledger: Ledger) -> None:
    row = ledger.enqueue("a", 0)
    assert row == LedgerRow(1, "a", 0, RowStatus.QUEUED) == ledger.row(1)
    for status in (RowStatus.RUNNING, RowStatus.SCORING):
        ledger.set_status(1, status)
        assert ledger.row(1).status is status
    ledger.set_ready(1, episode(row, [3, 4]))
    ready = ledger.row(1)
    assert (ready.status, ready.first_version, ready.last_version) == (RowStatus.READY, 3, 4)
    back = ledger.trajectory(1)
    assert back.score == Score(value=0.5, passed=True, detail="half\u2028way")
    assert back.streams[0].versions.tolist() == [3, 4]
    assert back.streams[0].behavior_logprobs.tobytes() == episode(row, [3, 4]).streams[0].behavior_logprobs.tobytes()
    ledger.set_trained([1], step=7)
    assert (ledger.row(1).status, ledger.row(1).trained_at_step) == (RowStatus.TRAINED, 7)
    with pytest.raises(InvariantError, match="row 1 holds no trajectory"):
        ledger.trajectory(1)


def test_a_lost_try_is_counted_and_keeps_its_reason(ledger: Ledger) -> None:
    row = ledger.enqueue("a", 2)
    ledger.set_ready(1, episode(row, [3]))
    ledger.requeue(1, reason="sandbox", failed=True)
    assert ledger.row(1) == LedgerRow(1, "a", 2, RowStatus.QUEUED, failures=1, reason="sandbox")
    ledger.requeue(1)
    assert ledger.row(1).reason == "sandbox"
    assert ledger.row(1).failures == 1
    ledger.set_dropped(1, "engine")
    assert (ledger.row(1).status, ledger.row(1).reason) == (RowStatus.DROPPED, "engine")
    assert ledger.counts() == {RowStatus.DROPPED: 1}


def test_one_attempt_of_a_task_is_one_row(ledger: Ledger) -> None:
    ledger.enqueue("a", 0)
    with pytest.raises(sqlite3.IntegrityError):
        ledger.enqueue("a", 0)
    assert len(ledger) == 1
    with pytest.raises(InvariantError, match="no row 9"):
        ledger.row(9)


def test_a_group_is_the_number_of_its_first_row(ledger: Ledger) -> None:
    ledger.enqueue("a", 0)
    assert [(row.number, row.attempt, row.group) for row in ledger.enqueue_group("b", range(3, 6))] == [
        (2, 3, 2),
        (3, 4, 2),
        (4, 5, 2),
    ]
    assert ledger.enqueue_group("c", (0,)) == (ledger.row(5),)
    assert [row.group for row in ledger.rows()] == [None, 2, 2, 2, None]
    ledger.set_ready(2, episode(ledger.row(2), [1]))
    ledger.drop_group({2: "group_dropped", 3: "sandbox", 4: "group_dropped"})
    assert [ledger.row(n).reason for n in (2, 3, 4)] == ["group_dropped", "sandbox", "group_dropped"]
    assert {row.number for row in ledger.rows(RowStatus.DROPPED)} == {2, 3, 4}
    with pytest.raises(InvariantError, match="holds no trajectory"):
        ledger.trajectory(2)


def test_a_group_is_enqueued_whole_or_not_at_all(ledger: Ledger) -> None:
    ledger.enqueue("a", 1)
    with pytest.raises(sqlite3.IntegrityError):
        ledger.enqueue_group("a", (0, 1))
    assert len(ledger) == 1


def test_a_ledger_from_before_there_were_groups_opens(tmp_path: Path) -> None:
    before = Ledger(tmp_path / "l.sqlite")
    before.enqueue("a", 0)
    before.close()
    with closing(sqlite3.connect(tmp_path / "l.sqlite")) as db:
        db.execute("ALTER TABLE rows DROP COLUMN in_group")
        db.commit()
    opened = Ledger(tmp_path / "l.sqlite")
    assert opened.row(1) == LedgerRow(1, "a", 0, RowStatus.QUEUED)
    assert [row.group for row in opened.enqueue_group("b", (0, 1))] == [2, 2]
    opened.close()


def interrupted(ledger: Ledger, at: int) -> None:
    """From now on the `at`-th change of a row fails, as a full disk would make it."""
    left = [at]

    def count(*_: Any) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise OSError("disk full")
        return 0

    ledger._db.create_function("interrupt", 0, count)
    ledger._db.execute("CREATE TEMP TRIGGER t AFTER UPDATE ON rows BEGIN SELECT interrupt(); END")


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_batch_is_trained_as_a_whole_or_not_at_all(ledger: Ledger, at: int) -> None:
    for name in "abc":
        row = ledger.enqueue(name, 0)
        ledger.set_ready(row.number, episode(row, [0]))
    interrupted(ledger, at)
    with pytest.raises(sqlite3.OperationalError):
        ledger.set_trained([1, 2, 3], 1)
    assert ledger.counts() == {RowStatus.READY: 3}
    assert ledger.trajectory(1).uid == "r1"
    ledger.set_trained([1, 2, 3], 1)
    assert ledger.counts() == {RowStatus.TRAINED: 3}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_recovery_that_was_cut_changed_nothing(ledger: Ledger, at: int) -> None:
    rows = [ledger.enqueue(name, 0) for name in "abc"]
    ledger.set_ready(1, episode(rows[0], [0]))
    ledger.set_trained([1], 2)
    ledger.set_status(2, RowStatus.RUNNING)
    ledger.set_ready(3, episode(rows[2], [1]))
    ledger.add_checkpoint(1, 0, "step_1")
    before = ledger.rows()
    interrupted(ledger, at)
    with pytest.raises(sqlite3.OperationalError):
        ledger.recover(1, 0, {1: episode(rows[0], [0])})
    assert ledger.rows() == before
    ledger.recover(1, 0, {1: episode(rows[0], [0])})
    assert [row.status for row in ledger.rows()] == [RowStatus.READY, RowStatus.QUEUED, RowStatus.QUEUED]


def test_a_trained_row_without_its_trajectory_is_run_again(ledger: Ledger) -> None:
    row = ledger.enqueue("a", 0)
    ledger.set_ready(1, episode(row, [0]))
    ledger.set_trained([1], 5)
    ledger.recover(4, 3, {})
    assert ledger.row(1) == LedgerRow(1, "a", 0, RowStatus.QUEUED)


def test_rows_outlive_the_process(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "ledger.sqlite")
    row = first.enqueue("a", 1)
    first.set_ready(1, episode(row, [2]))
    first.add_checkpoint(3, 2, "step_3")
    first.close()
    second = Ledger(tmp_path / "ledger.sqlite")
    assert second.rows() == [LedgerRow(1, "a", 1, RowStatus.READY, first_version=2, last_version=2)]
    assert second.trajectory(1).uid == "r1"
    second.close()


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"SQLite format 3\x00" + b"torn" * 500)
    before = path.read_bytes()
    with pytest.raises(RunFolderError, match=r"ledger\.sqlite is no ledger of a run"):
        Ledger(path)
    assert path.read_bytes() == before
    path.write_text("just text, long enough to be looked at " * 40)
    with pytest.raises(RunFolderError, match="is no ledger of a run"):
        Ledger(path)
    with pytest.raises(RunFolderError, match="is no ledger of a run"):
        Ledger(tmp_path / "none" / "ledger.sqlite")


class LedgerMachine(RuleBasedStateMachine):
    """Any order of changes: the ledger says what a plain dictionary says, and a resume leaves no row half way."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(":memory:")
        self.known: dict[int, RowStatus] = {}
        self.versions: dict[int, list[int]] = {}
        self.files: dict[int, Trajectory] = {}
        self.steps: dict[int, int] = {}
        self.step = 0

    def some(self, data: st.DataObject, *statuses: RowStatus) -> int | None:
        numbers = [number for number, status in self.known.items() if status in statuses]
        return data.draw(st.sampled_from(numbers)) if numbers else None

    @rule()
    def enqueue(self) -> None:
        row = self.ledger.enqueue(f"t{len(self.known)}", 0)
        self.known[row.number] = RowStatus.QUEUED

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        if (number := self.some(data, RowStatus.QUEUED)) is not None:
            self.ledger.set_status(number, RowStatus.RUNNING)
            self.known[number] = RowStatus.RUNNING

    @rule(data=st.data(), versions=st.lists(st.integers(0, 4), min_size=1, max_size=3))
    def finish(self, data: st.DataObject, versions: list[int]) -> None:
        if (number := self.some(data, RowStatus.RUNNING)) is not None:
            self.versions[number] = sorted(versions)
            self.ledger.set_ready(number, episode(self.ledger.row(number), sorted(versions)))
            self.known[number] = RowStatus.READY

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if (number := self.some(data, RowStatus.RUNNING)) is not None:
            self.ledger.requeue(number, reason="engine", failed=True)
            self.known[number] = RowStatus.QUEUED

    @rule(data=st.data())
    def train(self, data: st.DataObject) -> None:
        if (number := self.some(data, RowStatus.READY)) is not None:
            self.step += 1
            self.files[number] = self.ledger.trajectory(number)
            self.ledger.set_trained([number], self.step)
            self.known[number], self.steps[number] = RowStatus.TRAINED, self.step

    @precondition(lambda self: self.step)
    @rule(back=st.integers(0, 3), version=st.integers(0, 4))
    def resume(self, back: int, version: int) -> None:
        self.step = max(self.step - back, 0)
        later = {n: self.files[n] for n, step in self.steps.items() if step > self.step}
        self.ledger.recover(self.step, version, later)
        for number, status in self.known.items():
            given_back = status is RowStatus.READY or number in later
            if status is RowStatus.RUNNING or (given_back and self.versions[number][-1] > version):
                self.known[number] = RowStatus.QUEUED
            elif given_back:
                self.known[number] = RowStatus.READY
        self.steps = {n: step for n, step in self.steps.items() if n not in later}

    @invariant()
    def agrees(self) -> None:
        rows = self.ledger.rows()
        assert {row.number: row.status for row in rows} == self.known
        assert {row.number: row.trained_at_step for row in rows if row.trained_at_step is not None} == self.steps
        for row in rows:
            if row.status is RowStatus.READY:
                assert (row.first_version, row.last_version) == (
                    self.versions[row.number][0],
                    self.versions[row.number][-1],
                )
                assert self.ledger.trajectory(row.number).uid == f"r{row.number}"

    def teardown(self) -> None:
        self.ledger.close()


LedgerMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestAnyOrderOfChanges = LedgerMachine.TestCase
