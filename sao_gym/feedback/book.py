"""Every episode that an application was served, in SQLite: what became of it, and its record where none is in the ledger.

Invariants: a line never leaves the book, a deleted episode's holds nothing but its name and that it was deleted; what `keep`
does not allow is never written; each change is one transaction that is on the disk when the call returns.

Example:
    >>> book = FeedbackBook(":memory:")
    >>> book.open("a1", row=7)
    >>> book.end("a1", ServedState.SCORED, score=1.0, comment="nice")
    >>> book.find("a1").score, book.find("a1").is_for_training
    (1.0, True)
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal

from sao_gym import parquet
from sao_gym.errors import RunFolderError
from sao_gym.ledger import scrub
from sao_gym.stream import Trajectory

Keep = Literal["all", "trained", "until_trained"]
"""What is kept of what people said: everything; no episode that is not trained, and no comment; nor one that was trained."""
BOOK = "feedback.sqlite"


class ServedState(StrEnum):
    """Of an episode that was served. `open` ones wait for feedback; `lost` ones waited when their run ended."""

    OPEN = "open"
    SCORED = "scored"
    EXPIRED = "expired"
    FAILED = "failed"
    LOST = "lost"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEpisode:
    """One line. `row` is that of the ledger whose place it took, None for one that found none; `why` it is not trained."""

    id: str
    row: int | None
    state: ServedState
    score: float | None = None
    comment: str | None = None
    why: str | None = None
    served_at: str = ""
    ended_at: str | None = None

    @property
    def is_for_training(self) -> bool:
        """Whether its feedback goes, or went, into the policy."""
        return self.state is ServedState.SCORED and self.why is None


_COLUMNS = "id, row, state, score, comment, why, served_at, ended_at"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS served (
  id TEXT PRIMARY KEY, row INTEGER, state TEXT NOT NULL, score REAL, comment TEXT, why TEXT,
  served_at TEXT NOT NULL, ended_at TEXT, trajectory BLOB
);
CREATE INDEX IF NOT EXISTS by_row ON served (row);
"""


class FeedbackBook:
    """The table. One thread uses it. Raises RunFolderError for a file that is none."""

    def __init__(self, path: Path | str, keep: Keep = "all") -> None:
        self.keep = keep
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")  # an application was told that its feedback arrived
            self._db.execute("PRAGMA secure_delete=ON")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise RunFolderError(f"{path} is no book of feedback ({error}); give the folder of a run") from error

    def close(self) -> None:
        """Close the file; idempotent."""
        self._db.close()

    def open(self, id: str, *, row: int | None) -> None:
        """A new episode is served."""
        self._db.execute(
            "INSERT INTO served (id, row, state, served_at) VALUES (?, ?, ?, ?)", (id, row, ServedState.OPEN, _now())
        )

    def withdraw(self, id: str) -> None:
        """Nothing was answered: there was no episode."""
        self._db.execute("DELETE FROM served WHERE id = ? AND state = ?", (id, ServedState.OPEN))

    def find(self, id: str) -> ServedEpisode | None:
        """One line, None if there is none."""
        return next(self._found("WHERE id = ?", (id,)), None)

    def episodes(self, *states: ServedState) -> list[ServedEpisode]:
        """Lines in these states (all without arguments), in the order in which they were served."""
        marks = ",".join("?" * len(states))
        return list(self._found(f"WHERE state IN ({marks}) ORDER BY rowid" if states else "ORDER BY rowid", states))

    def of_row(self, row: int) -> ServedEpisode | None:
        """The last one that took the place of a row."""
        return next(self._found("WHERE row = ? ORDER BY rowid DESC", (row,)), None)

    def _found(self, where: str, values: Sequence[object]) -> Iterator[ServedEpisode]:
        for id, row, state, score, comment, why, served_at, ended_at in self._db.execute(
            f"SELECT {_COLUMNS} FROM served {where}", values
        ).fetchall():
            yield ServedEpisode(
                id=id,
                row=row,
                state=ServedState(state),
                score=score,
                comment=comment,
                why=why,
                served_at=served_at,
                ended_at=ended_at,
            )

    def counts(self) -> dict[ServedState, int]:
        """Number of episodes in each state."""
        found = self._db.execute("SELECT state, COUNT(*) FROM served GROUP BY state")
        return {ServedState(state): count for state, count in found}

    def end(
        self,
        id: str,
        state: ServedState,
        *,
        score: float | None = None,
        comment: str | None = None,
        why: str | None = None,
        trajectory: Trajectory | None = None,
    ) -> None:
        """An episode is over. `why` it is not trained, if it is not; its record then is kept here."""
        kept = parquet.dumps(trajectory) if trajectory is not None and self.keep == "all" and why else None
        self._db.execute(
            "UPDATE served SET state = ?, score = ?, comment = ?, why = ?, ended_at = ?, trajectory = ? "
            "WHERE id = ? AND state != ?",
            (state, score, self._kept(comment), why, _now(), kept, id, ServedState.DELETED),
        )

    def score_late(self, id: str, score: float, comment: str | None) -> None:
        """Feedback for an episode that was over: it is recorded with it."""
        self._db.execute(
            "UPDATE served SET score = ?, comment = ? WHERE id = ? AND state != ?",
            (score, self._kept(comment), id, ServedState.DELETED),
        )

    def set_untrained(self, id: str, why: str, trajectory: Trajectory | None) -> None:
        """What was to be trained, or was, is no longer in the policy."""
        kept = parquet.dumps(trajectory) if trajectory is not None and self.keep == "all" else None
        self._db.execute("UPDATE served SET why = ?, trajectory = ? WHERE id = ?", (why, kept, id))

    def trajectory(self, id: str) -> Trajectory | None:
        """The record that is kept here, None where there is none."""
        found = self._db.execute("SELECT trajectory FROM served WHERE id = ?", (id,)).fetchone()
        return None if found is None or found[0] is None else parquet.loads(found[0])

    def delete(self, *ids: str) -> None:
        """Leave lines that say nothing but that there were such episodes; the old bytes leave the file."""
        self._db.executemany(
            "UPDATE served SET state = ?, score = NULL, comment = NULL, why = NULL, trajectory = NULL WHERE id = ?",
            [(ServedState.DELETED, id) for id in ids],
        )
        scrub(self._db)

    def _kept(self, comment: str | None) -> str | None:
        return comment if self.keep == "all" else None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
