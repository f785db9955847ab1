"""The staleness rule: which rows may start, which batch may be trained (docs/runtime.md).

m = `max_staleness`, B = `batch_rows`, V = the learner's version, O = all outstanding rows: running, scoring, ready and
in training. v0(r) = version of r's first sampled token; until that is known, the engine's version when r first asked
for tokens, and before that the engine's version now, which never falls.

Invariant I(V): no row of O has v0 < V-m, and for k = 0..m: #{r in O : v0(r) <= V-m+k} <= (k+1)B.
- ADMIT keeps I(V), and, while a batch that will raise V is in training, I(V+1) without that batch.
- STEP takes the B oldest ready rows, if I(V+1) holds for what remains.
Then every trained row has staleness <= m: each row of the batch has v0 >= V-m by I(V), and versions inside a row only
grow. If all outstanding rows are ready, taking the B oldest turns "<= (k+2)B at k+1" into "<= (k+1)B at k", so the gate
opens once running rows end.

Rows *let past* (`on_stale = mask`) count as if their v0 were the oldest allowed; their tokens older than m get weight 0.

Groups (several rows of one prompt that are trained together) are admitted, trained, let past and dropped whole. Each
row then counts with the v0 of the oldest row of its group: with its own, the gate could shut for ever. A row of a group
that is run again stays in O, so the group never waits for a place.

Example:
    >>> is_bounded([0, 0, 1], version=1, batch_rows=2, max_staleness=1)
    True
    >>> is_bounded([0, 0, 0], version=1, batch_rows=2, max_staleness=1)
    False
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from sao_gym.errors import InvariantError


def is_bounded(first_versions: Iterable[int], *, version: int, batch_rows: int, max_staleness: int) -> bool:
    """Whether I(version) holds for outstanding rows with these v0."""
    ages = np.fromiter(first_versions, dtype=np.int64) - (version - max_staleness)
    if not len(ages):
        return True
    if ages.min() < 0:
        return False
    counts = np.cumsum(np.bincount(np.minimum(ages, max_staleness + 1), minlength=max_staleness + 1))
    return bool((counts[: max_staleness + 1] <= (np.arange(max_staleness + 1) + 1) * batch_rows).all())


class RowState(StrEnum):
    """Where an outstanding row is."""

    RUNNING = "running"
    READY = "ready"
    TRAINING = "training"


@dataclass(frozen=True, slots=True)
class OutstandingRow:
    """One row of O. `number` is its place in ledger order; `first_version` None: it has not asked for a token yet.

    `group` is the number of its group's first row; a row without is a group of its own.
    """

    number: int
    state: RowState
    first_version: int | None = None
    is_let_past: bool = False
    group: int | None = None

    @property
    def group_key(self) -> int:
        """The number of the first row of its group, itself if it has none."""
        return self.number if self.group is None else self.group


class Outstanding:
    """The set O with the two gates. It knows no clock and no episodes; the runtime tells it what happened."""

    def __init__(self, *, batch_rows: int, max_staleness: int, version: int = 0) -> None:
        self.batch_rows = batch_rows
        self.max_staleness = max_staleness
        self.version = version
        self._rows: dict[int, OutstandingRow] = {}
        self._training_raises_version = False

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, *states: RowState) -> list[OutstandingRow]:
        """Rows in these states (all without arguments), in ledger order."""
        chosen = [row for row in self._rows.values() if not states or row.state in states]
        return sorted(chosen, key=lambda row: row.number)

    def _group_firsts(self, engine_version: int) -> dict[int, int]:
        """v0 of the oldest row of each group."""
        oldest: dict[int, int] = {}
        for row in self._rows.values():
            first = engine_version if row.first_version is None else row.first_version
            oldest[row.group_key] = min(first, oldest.get(row.group_key, first))
        return oldest

    def _groups(self) -> list[list[OutstandingRow]]:
        """The rows of each group, in ledger order."""
        groups: dict[int, list[OutstandingRow]] = {}
        for row in self.rows():
            groups.setdefault(row.group_key, []).append(row)
        return list(groups.values())

    def is_bounded(self, engine_version: int, *, at_version: int, without: Iterable[int] = (), extra: int = 0) -> bool:
        """I(at_version) for O less the rows `without`, plus `extra` rows that would start now."""
        left_out = set(without)
        oldest, floor = self._group_firsts(engine_version), at_version - self.max_staleness
        firsts = [
            max(oldest[row.group_key], floor) if row.is_let_past else oldest[row.group_key]
            for row in self._rows.values()
            if row.number not in left_out
        ]
        firsts += [engine_version] * extra
        return is_bounded(firsts, version=at_version, batch_rows=self.batch_rows, max_staleness=self.max_staleness)

    def can_admit(self, engine_version: int, n: int = 1) -> bool:
        """ADMIT for n rows that start together."""
        if not self.is_bounded(engine_version, at_version=self.version, extra=n):
            return False
        training = [row.number for row in self.rows(RowState.TRAINING)]
        if not (training and self._training_raises_version):
            return True
        return self.is_bounded(engine_version, at_version=self.version + 1, without=training, extra=n)

    def admit(self, number: int, group: int | None = None) -> None:
        """A row starts. Raises InvariantError for a number that is already outstanding."""
        if number in self._rows:
            raise InvariantError(f"row {number} is already outstanding")
        self._rows[number] = OutstandingRow(number, RowState.RUNNING, group=group)

    def restart(self, number: int) -> None:
        """The episode of a row was lost and will be run again in its group; the row keeps its place."""
        self._rows[number] = replace(self._rows[number], state=RowState.RUNNING, first_version=None)

    def set_first_version(self, number: int, version: int) -> None:
        """The row asked for its first token at this engine version, or sampled it: the later call is the exact one."""
        if number in self._rows:
            self._rows[number] = replace(self._rows[number], first_version=version)

    def set_ready(self, number: int, first_version: int) -> None:
        """The row's episode ended and was scored."""
        self._rows[number] = replace(self._rows[number], state=RowState.READY, first_version=first_version)

    def restore(self, number: int, first_version: int, group: int | None = None) -> None:
        """A ready row of an earlier process comes back."""
        self.admit(number, group)
        self.set_ready(number, first_version)

    def remove(self, number: int) -> None:
        """The row leaves O without being trained."""
        self._rows.pop(number, None)

    def oldest_ready(self) -> list[int]:
        """The B ready rows with the oldest v0, in whole groups, equal ones in ledger order; empty if there are fewer."""
        complete = [rows for rows in self._groups() if all(row.state is RowState.READY for row in rows)]
        complete.sort(key=lambda rows: (min(row.first_version or 0 for row in rows), rows[0].number))
        numbers = [row.number for rows in complete for row in rows]
        return numbers[: self.batch_rows] if len(numbers) >= self.batch_rows else []

    def can_step(self, numbers: Sequence[int], engine_version: int) -> bool:
        """STEP: whether I(V+1) holds for what remains after these rows."""
        return self.is_bounded(engine_version, at_version=self.version + 1, without=numbers)

    def blocking(self, numbers: Sequence[int]) -> list[int]:
        """Running rows of groups that are too old for V+1, unless they were let past: what a shut gate waits for."""
        oldest = self.version + 1 - self.max_staleness
        chosen = set(numbers)
        return [
            row.number
            for rows in self._groups()
            if any(row.first_version is not None and row.first_version < oldest for row in rows)
            for row in rows
            if row.state is RowState.RUNNING and row.number not in chosen and not row.is_let_past
        ]

    def let_past(self, number: int) -> None:
        """Count the row and its group as just allowed from now on; tokens older than m will get weight 0."""
        key = self._rows[number].group_key
        for row in self.rows():
            if row.group_key == key:
                self._rows[row.number] = replace(row, is_let_past=True)

    def start_step(self, numbers: Sequence[int], *, raises_version: bool) -> None:
        """These rows are in training; they stay in O until `finish_step`."""
        for number in numbers:
            self._rows[number] = replace(self._rows[number], state=RowState.TRAINING)
        self._training_raises_version = raises_version

    def finish_step(self) -> None:
        """The rows in training leave O; V goes up by one if the actor was trained."""
        for row in self.rows(RowState.TRAINING):
            del self._rows[row.number]
        if self._training_raises_version:
            self.version += 1
        self._training_raises_version = False
