"""What happened in a run and when: admissions, completions, batches, publications, evaluations, each with clock time and versions.

Kept in memory and written as one part per checkpoint, `events.parquet/step_NNNNNN.parquet`, so that a crash leaves
whole parts alone and a resume takes away the parts of lost steps. Readers open the folder as one table.

Example:
    events = EventLog(clock)
    events.add("admission", row=17, engine_version=3)
    parts = PartFiles(run / "events.parquet")
    parts.write(10, events.take())
    pyarrow.parquet.read_table(run / "events.parquet")
"""

import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from sao_gym.protocols import Clock, Engine
from sao_gym.stream import Trajectory

EVENTS = "events.parquet"
EventKind = Literal["admission", "completion", "batch", "trained", "publication", "evaluation"]
_PART = re.compile(r"step_(\d+)\.parquet$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened at `time_s`, on the run's clock; what does not apply is None.

    `row`: number in the ledger; `rows`: those of a batch. `version`: the learner's, or the one that was published.
    `engine_version`: the one in force. `first_version`, `last_version`: of the row's tokens. `seconds`: how long it took;
    for a batch, how long it was waited for. An evaluation is noted at its end, with the `step` that it is about.
    """

    time_s: float
    kind: EventKind
    row: int | None = None
    rows: tuple[int, ...] | None = None
    step: int | None = None
    version: int | None = None
    engine_version: int | None = None
    first_version: int | None = None
    last_version: int | None = None
    outcome: str | None = None
    tokens: int | None = None
    seconds: float | None = None
    weight_hash: str | None = None


SCHEMA = pa.schema(
    [
        ("time_s", pa.float64()),
        ("kind", pa.string()),
        *[(name, pa.int64()) for name in ("row", "step", "version", "engine_version", "first_version", "last_version")],
        ("rows", pa.list_(pa.int64())),
        ("outcome", pa.string()),
        ("tokens", pa.int64()),
        ("seconds", pa.float64()),
        ("weight_hash", pa.string()),
    ]
)


class EventLog:
    """Events that were not written yet, in order. Any thread may add."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def add(self, kind: EventKind, **facts: Any) -> None:
        """Note an event, now. `facts` are fields of `Event`."""
        with self._lock:
            self._events.append(Event(time_s=self._clock.now(), kind=kind, **facts))

    def take(self) -> pa.Table:
        """The events so far as a table; they are forgotten here."""
        with self._lock:
            events, self._events = self._events, []
        columns = {name.name: [getattr(event, name.name) for event in events] for name in fields(Event)}
        return pa.table(columns, schema=SCHEMA)


@asynccontextmanager
async def recorded(events: EventLog, engine: Engine, row: int) -> AsyncIterator[Callable[[Trajectory], Trajectory]]:
    """Note the admission of a row now, and its completion when its trajectory is handed to the function given.

    An episode that is cancelled has no completion: it will be admitted again.
    """
    events.add("admission", row=row, engine_version=engine.version)

    def done(trajectory: Trajectory) -> Trajectory:
        events.add(
            "completion",
            row=row,
            engine_version=engine.version,
            first_version=trajectory.first_version,
            last_version=trajectory.last_version,
            outcome=trajectory.outcome.reason or str(trajectory.outcome.status),
            tokens=trajectory.n_action,
            seconds=trajectory.timings.get("episode_s"),
        )
        return trajectory

    yield done


class PartFiles:
    """A table that grows by one file per checkpoint. The folder appears with its first part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, step: int, table: pa.Table) -> None:
        """Write what belongs to the steps up to `step`; the file appears whole. An empty table writes nothing."""
        if not table.num_rows:
            return
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"step_{step:06d}.parquet"
        draft = path.with_name(f".{path.name}.partial")
        with draft.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)

    def rewind(self, step: int) -> None:
        """Take away the parts of later steps."""
        for number, path in self._parts():
            if number > step:
                path.unlink()

    def read(self) -> list[Mapping[str, Any]]:
        """Every row, in order."""
        rows: Sequence[Any] = [row for _, path in self._parts() for row in pq.read_table(path).to_pylist()]
        return list(rows)

    def _parts(self) -> Iterator[tuple[int, Path]]:
        for path in sorted(self.folder.glob("step_*.parquet")):
            if match := _PART.match(path.name):
                yield int(match[1]), path
