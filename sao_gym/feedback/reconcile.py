"""The book of feedback, brought in line with a ledger that a crash, a resume or a rollback put back.

Invariant: what the book calls "for training" is in the ledger, ready or trained; what had to leave it is kept in the book.

Example:
    before = by_episode(ledger_and_files())
    ledger.recover(...)
    reconcile(book, ledger, before)
"""

from collections.abc import Iterable, Mapping

from sao_gym.feedback.book import FeedbackBook, ServedEpisode, ServedState
from sao_gym.ledger import Ledger, RowStatus
from sao_gym.stream import Trajectory

WENT_BACK = "the run went back to before it"
STOPPED = "the run stopped before its feedback came"


def episode_of(trajectory: Trajectory) -> str | None:
    """Name of the served episode that a trajectory records, None for any other."""
    said = trajectory.info.get("feedback")
    return said.get("episode") if isinstance(said, Mapping) else None


def by_episode(trajectories: Iterable[Trajectory]) -> dict[str, Trajectory]:
    """Those that record a served episode, by its name."""
    return {name: t for t in trajectories if (name := episode_of(t)) is not None}


def ready_trajectories(ledger: Ledger) -> list[Trajectory]:
    """The records that the ledger holds."""
    return [ledger.trajectory(row.number) for row in ledger.rows(RowStatus.READY)]


def reconcile(book: FeedbackBook, ledger: Ledger, before: Mapping[str, Trajectory]) -> None:
    """Say of every episode whether it stands. `before`: the records that were there before the ledger went back."""
    ready = by_episode(ready_trajectories(ledger))
    trained = {row.number for row in ledger.rows(RowStatus.TRAINED)}
    lines = book.episodes(ServedState.OPEN, ServedState.SCORED)
    newest = {line.row: line.id for line in book.episodes()}
    for line in lines:
        stands = line.id in ready or (line.row in trained and newest[line.row] == line.id)
        if line.state is ServedState.OPEN:
            _settle(book, line, before.get(line.id), stands=stands)
        elif line.is_for_training and not stands:
            book.set_untrained(line.id, WENT_BACK, before.get(line.id))


def _settle(book: FeedbackBook, line: ServedEpisode, made: Trajectory | None, *, stands: bool) -> None:
    """An episode that was open when the process died: its feedback is in the ledger, or it never came."""
    if made is None or made.score is None:
        book.end(line.id, ServedState.LOST, why=STOPPED)
        return
    why = None if stands else WENT_BACK
    book.end(line.id, ServedState.SCORED, score=made.score.value, why=why, trajectory=made)
