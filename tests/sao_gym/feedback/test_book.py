"""The book of what was served: states, what is kept, what a deletion leaves, and how it is brought in line with a ledger."""

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sao_gym.errors import RunFolderError
from sao_gym.feedback import FeedbackBook, ServedState
from sao_gym.feedback.reconcile import STOPPED, WENT_BACK, by_episode, episode_of, ready_trajectories, reconcile
from sao_gym.ledger import Ledger, RowStatus
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory


def record(number: int, episode: str, *, score: float | None = 1.0, version: int = 0) -> Trajectory:
    said = Segment.action([5, 6], logprobs=[-1.0] * 2, versions=[version] * 2, temperature=1.0, stop=StopReason.STOP)
    info: Mapping[str, Any] = {"feedback": {"episode": episode}}
    made = Trajectory(
        uid=f"r{number}",
        task_id=f"place-{number}",
        env_id="feedback",
        attempt=0,
        streams=(TokenStream(segments=(Segment.observation([1, 2]), said)),),
        outcome=Outcome.terminated(),
        info=info,
    )
    return made if score is None else made.scored(Score(value=score, passed=True))


def test_what_is_trained_is_in_the_ledger_and_not_here() -> None:
    book = FeedbackBook(":memory:")
    for name in "ab":
        book.open(name, row=1)
    book.end("a", ServedState.SCORED, score=1.0, comment="x", trajectory=record(1, "a"))
    book.end("b", ServedState.SCORED, score=1.0, comment="x", why="so", trajectory=record(1, "b"))
    assert book.trajectory("a") is None
    kept = book.trajectory("b")
    assert kept is not None
    assert episode_of(kept) == "b"
    assert [line.is_for_training for line in book.episodes()] == [True, False]
    newest = book.of_row(1)
    assert newest is not None
    assert newest.id == "b"
    assert book.find("c") is None
    assert book.counts() == {ServedState.SCORED: 2}


def test_only_an_open_episode_can_be_withdrawn() -> None:
    book = FeedbackBook(":memory:")
    book.open("a", row=None)
    book.end("a", ServedState.EXPIRED, why="late")
    book.withdraw("a")
    assert book.find("a") is not None
    book.open("b", row=None)
    book.withdraw("b")
    assert book.find("b") is None


def test_a_deleted_episode_stays_deleted(tmp_path: Path) -> None:
    secret = "what nobody may read"
    path = tmp_path / "feedback.sqlite"
    with closing(FeedbackBook(path)) as book:
        book.open("a", row=1)
        book.end("a", ServedState.SCORED, score=1.0, comment=secret, why="x", trajectory=record(1, "a"))
        assert any(secret.encode() in file.read_bytes() for file in tmp_path.iterdir())
        book.delete("a")
        book.end("a", ServedState.SCORED, score=0.5, comment=secret)
        book.score_late("a", 0.5, secret)
        line = book.find("a")
        assert line is not None
        assert (line.state, line.score, line.comment, line.row) == (ServedState.DELETED, None, None, 1)
        assert book.trajectory("a") is None
        assert not any(secret.encode() in file.read_bytes() for file in tmp_path.iterdir())


def test_a_file_that_is_no_book(tmp_path: Path) -> None:
    (tmp_path / "feedback.sqlite").write_text("no database at all, but long enough to be looked at " * 40)
    with pytest.raises(RunFolderError, match=r"is no book of feedback .*; give the folder of a run"):
        FeedbackBook(tmp_path / "feedback.sqlite")


def served(
    book: FeedbackBook, ledger: Ledger, name: str, *, state: str, version: int = 0, is_written: bool = True
) -> int:
    """A row that an episode of this name has filled, as far as `state` says; `is_written`: the book knows of its end."""
    row = ledger.enqueue(f"place-{name}", 0)
    book.open(name, row=row.number)
    if state == "running":
        ledger.set_status(row.number, RowStatus.RUNNING)
        return row.number
    made = record(row.number, name, version=version)
    ledger.set_ready(row.number, made)
    if is_written:
        book.end(name, ServedState.SCORED, score=1.0)
    if state == "trained":
        ledger.set_trained([row.number], step=5)
    return row.number


def test_a_crash_is_put_right() -> None:
    """Rows of all kinds, before and after `recover` to a checkpoint at step 4 with version 2."""
    book, ledger = FeedbackBook(":memory:"), Ledger(":memory:")
    served(book, ledger, "stands", state="ready")
    served(book, ledger, "too new", state="ready", version=3)
    served(book, ledger, "was running", state="running")
    served(book, ledger, "crashed before the book", state="ready", is_written=False)
    trained = served(book, ledger, "trained later", state="trained", version=1)
    newer = served(book, ledger, "trained later, too new", state="trained", version=3)
    files = [record(trained, "trained later", version=1), record(newer, "trained later, too new", version=3)]
    early = served(book, ledger, "trained early", state="ready")
    ledger.set_trained([early], step=3)
    book.open("guest", row=None)
    book.end("guest", ServedState.SCORED, score=0.5, why="no place was free", trajectory=record(99, "guest"))

    before = by_episode([*files, *ready_trajectories(ledger)])
    ledger.recover(4, 2, {trained: files[0], newer: files[1]})
    reconcile(book, ledger, before)
    lines = {line.id: line for line in book.episodes()}
    for name in ("stands", "crashed before the book", "trained later", "trained early"):
        assert lines[name].is_for_training, name
    assert lines["crashed before the book"].score == 1.0
    for name in ("too new", "trained later, too new"):
        assert (lines[name].state, lines[name].why) == (ServedState.SCORED, WENT_BACK)
        assert book.trajectory(name) is not None
    assert (lines["was running"].state, lines["was running"].why) == (ServedState.LOST, STOPPED)
    assert lines["guest"].why == "no place was free"
    reconcile(book, ledger, {})
    assert {line.id: line for line in book.episodes()} == lines  # once more changes nothing


def test_a_row_that_was_filled_again_stands_for_its_last_episode_alone() -> None:
    book, ledger = FeedbackBook(":memory:"), Ledger(":memory:")
    row = served(book, ledger, "first", state="ready", version=9)
    before = by_episode(ready_trajectories(ledger))
    ledger.recover(0, 0, {})
    reconcile(book, ledger, before)
    book.open("second", row=row)
    ledger.set_ready(row, record(row, "second"))
    book.end("second", ServedState.SCORED, score=1.0)
    ledger.set_trained([row], step=1)
    reconcile(book, ledger, {})
    found = {line.id: line.is_for_training for line in book.episodes()}
    assert found == {"first": False, "second": True}
