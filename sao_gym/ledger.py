"""Every prompt's state, in SQLite: queued | running | scoring | ready | trained | dropped(reason).

Each change is one transaction. A ready row holds its trajectory, so a crash loses no finished episode; a row's number
is its place in ledger order. `recover` applies the rules of a resume (docs/runtime.md).
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from sao_gym import parquet
from sao_gym.errors import InvariantError, RunFolderError
from sao_gym.stream import Trajectory

LEDGER_FILE = "ledger.sqlite"


class RowStatus(StrEnum):
    """States of a row; `trained` and `dropped` are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SCORING = "scoring"
    READY = "ready"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One episode to be: `attempt` numbers the task's episodes in the run, `failures` counts lost tries.

    `group` is the number of the first row of its group, None for a row that is trained by itself.
    """

    number: int
    task_id: str
    attempt: int
    status: RowStatus
    failures: int = 0
    reason: str | None = None
    first_version: int | None = None
    last_version: int | None = None
    trained_at_step: int | None = None
    group: int | None = None


_COLUMNS = "number, task_id, attempt, status, failures, reason, first_version, last_version, trained_at_step, in_group"
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS rows (
  number INTEGER PRIMARY KEY, task_id TEXT NOT NULL, attempt INTEGER NOT NULL, status TEXT NOT NULL,
  failures INTEGER NOT NULL DEFAULT 0, reason TEXT, first_version INTEGER, last_version INTEGER,
  trained_at_step INTEGER, trajectory BLOB, in_group INTEGER, UNIQUE (task_id, attempt)
);
CREATE INDEX IF NOT EXISTS by_status ON rows (status) WHERE status NOT IN ('{RowStatus.TRAINED}', '{RowStatus.DROPPED}');
CREATE TABLE IF NOT EXISTS checkpoints (step INTEGER PRIMARY KEY, version INTEGER NOT NULL, folder TEXT NOT NULL);
"""


def scrub(db: sqlite3.Connection) -> None:
    """Take what was overwritten out of a database's files: its free pages and its log."""
    db.execute("PRAGMA secure_delete=ON")
    db.execute("VACUUM")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


class Ledger:
    """The table of rows. One thread uses it; the connection is opened where the ledger is made."""

    def __init__(self, path: Path | str) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
            if not any(name == "in_group" for _, name, *_ in self._db.execute("PRAGMA table_info(rows)")):
                self._db.execute("ALTER TABLE rows ADD COLUMN in_group INTEGER")  # a run from before there were groups
        except sqlite3.DatabaseError as error:
            raise RunFolderError(f"{path} is no ledger of a run ({error}); give the folder that a run wrote") from error

    def close(self) -> None:
        """Close the file; idempotent."""
        self._db.close()

    def _row(self, values: Sequence[object]) -> LedgerRow:
        number, task_id, attempt, status, *rest = values
        return LedgerRow(number, task_id, attempt, RowStatus(str(status)), *rest)  # type: ignore[arg-type]

    def rows(self, *statuses: RowStatus) -> list[LedgerRow]:
        """Rows in these states (all without arguments), in ledger order."""
        marks = ",".join("?" * len(statuses))
        where = f"WHERE status IN ({marks})" if statuses else ""
        found = self._db.execute(f"SELECT {_COLUMNS} FROM rows {where} ORDER BY number", statuses)
        return [self._row(values) for values in found]

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM rows").fetchone()[0])

    def row(self, number: int) -> LedgerRow:
        """One row. Raises InvariantError if there is none of that number."""
        found = self._db.execute(f"SELECT {_COLUMNS} FROM rows WHERE number = ?", (number,)).fetchone()
        if found is None:
            raise InvariantError(f"the ledger has no row {number}")
        return self._row(found)

    def counts(self) -> dict[RowStatus, int]:
        """Number of rows in each state."""
        found = self._db.execute("SELECT status, COUNT(*) FROM rows GROUP BY status")
        return {RowStatus(status): count for status, count in found}

    def trajectory(self, number: int) -> Trajectory:
        """The trajectory of a ready row. Raises InvariantError if the row holds none."""
        found = self._db.execute("SELECT trajectory FROM rows WHERE number = ?", (number,)).fetchone()
        if found is None or found[0] is None:
            raise InvariantError(f"row {number} holds no trajectory")
        return parquet.loads(found[0])

    def enqueue(self, task_id: str, attempt: int) -> LedgerRow:
        """A new row at the end of the order."""
        cursor = self._db.execute(
            "INSERT INTO rows (task_id, attempt, status) VALUES (?, ?, ?)",
            (task_id, attempt, RowStatus.QUEUED),
        )
        return LedgerRow(int(cursor.lastrowid or 0), task_id, attempt, RowStatus.QUEUED)

    def enqueue_group(self, task_id: str, attempts: Sequence[int]) -> tuple[LedgerRow, ...]:
        """New rows of one task at the end of the order: a group, or a single row for one attempt."""
        with self._transaction():
            rows = tuple(self.enqueue(task_id, attempt) for attempt in attempts)
            if len(rows) == 1:
                return rows
            group = rows[0].number
            self._db.executemany("UPDATE rows SET in_group = ? WHERE number = ?", [(group, r.number) for r in rows])
        return tuple(replace(row, group=group) for row in rows)

    def set_status(self, number: int, status: RowStatus) -> None:
        """Move a row to running, scoring or queued."""
        self._db.execute("UPDATE rows SET status = ? WHERE number = ?", (status, number))

    def set_ready(self, number: int, trajectory: Trajectory) -> None:
        """The episode is over and scored; the row now holds it."""
        self._db.execute(
            "UPDATE rows SET status = ?, first_version = ?, last_version = ?, trajectory = ? WHERE number = ?",
            (
                RowStatus.READY,
                trajectory.first_version,
                trajectory.last_version,
                parquet.dumps(trajectory),
                number,
            ),
        )

    def set_trained(self, numbers: Iterable[int], step: int) -> None:
        """A batch went into the weights of `step`; its trajectories live on in the step's parquet file."""
        with self._transaction():
            self._db.executemany(
                "UPDATE rows SET status = ?, trained_at_step = ?, trajectory = NULL WHERE number = ?",
                [(RowStatus.TRAINED, step, number) for number in numbers],
            )

    def set_dropped(self, number: int, reason: str) -> None:
        """The row will never be trained."""
        self._db.execute(
            "UPDATE rows SET status = ?, reason = ?, trajectory = NULL WHERE number = ?",
            (RowStatus.DROPPED, reason, number),
        )

    def drop_group(self, reasons: Mapping[int, str]) -> None:
        """All of these rows will never be trained, each for its reason."""
        with self._transaction():
            for number, reason in reasons.items():
                self.set_dropped(number, reason)

    def requeue_group(self, numbers: Iterable[int], *, reason: str) -> None:
        """The same attempts will be run again."""
        with self._transaction():
            for number in numbers:
                self.requeue(number, reason=reason)

    def requeue(self, number: int, *, reason: str | None = None, failed: bool = False) -> None:
        """The same attempt will be run again. `failed` counts a lost try and keeps its reason."""
        self._db.execute(
            "UPDATE rows SET status = ?, reason = COALESCE(?, reason), failures = failures + ?, first_version = NULL, "
            "last_version = NULL, trained_at_step = NULL, trajectory = NULL WHERE number = ?",
            (RowStatus.QUEUED, reason, int(failed), number),
        )

    def add_checkpoint(self, step: int, version: int, folder: str) -> None:
        """A whole checkpoint lies in `folder`."""
        self._db.execute("INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (step, version, folder))

    def recover(self, step: int, version: int, trained: dict[int, Trajectory]) -> None:
        """Put the rows where they stood at checkpoint `step` with policy `version`.

        `trained` holds the trajectories of rows trained at later steps, by number. Rows trained later go back to
        ready; running and scoring rows, and rows that hold tokens of a version newer than the checkpoint's (a lost
        timeline), go back to queued with the same attempt.
        """
        with self._transaction():
            self._db.execute("DELETE FROM checkpoints WHERE step > ?", (step,))
            for row in self.rows():
                if row.status is RowStatus.TRAINED and (row.trained_at_step or 0) > step:
                    if row.number in trained:
                        self.set_ready(row.number, trained[row.number])
                    else:
                        self.requeue(row.number)
                elif row.status in (RowStatus.RUNNING, RowStatus.SCORING):
                    self.requeue(row.number)
            for row in self.rows(RowStatus.READY):
                if (row.last_version or 0) > version:
                    self.requeue(row.number)
            self._db.execute("UPDATE rows SET trained_at_step = NULL WHERE status != ?", (RowStatus.TRAINED,))

    def scrub(self) -> None:
        """Take what was overwritten out of the files: free pages and the log."""
        scrub(self._db)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of it or, whatever interrupts, nothing."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
