"""How fast a policy recovers after its reader's taste has changed: trained rows until most of the plateau is back.

A run is a series of batches. For each phase after the first: the *plateau* is the success over its last quarter, counted in
rows; it has *recovered* with the first batch at which the success over the last `window` rows of that phase reaches `share` of
the plateau. A phase in which that never happens is censored: `rows` is None and `at_least` says how long was waited in vain.
Rows of the phase before that are trained after the shift (they were begun before it) count as time, not as success.

Example:
    >>> before = [BatchSuccess(rows=10, phase=0, success=1.0)] * 4
    >>> after = [BatchSuccess(rows=10, phase=1, success=s) for s in (0.0, 0.4, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)]
    >>> recoveries([*before, *after], window=10)
    (Recovery(phase=1, plateau=1.0, rows=30, at_least=80),)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sao_gym.errors import ConfigError

WINDOW, SHARE, TAIL = 192, 0.9, 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSuccess:
    """One batch: how many rows, the phase that most of them were in, and the share of them that were on target."""

    rows: int
    phase: int
    success: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """After the shift into `phase`: rows until recovered (None: never), of `at_least` rows that the phase lasted."""

    phase: int
    plateau: float
    rows: int | None
    at_least: int


def recoveries(
    batches: Sequence[BatchSuccess], *, window: int = WINDOW, share: float = SHARE, tail: float = TAIL
) -> tuple[Recovery, ...]:
    """One for each phase after the first, in order. Raises ConfigError for settings that mean nothing."""
    if window < 1 or not 0 < share <= 1 or not 0 < tail <= 1:
        raise ConfigError(f"a recovery needs a window of rows and shares from 0 to 1, got {window}, {share}, {tail}")
    phases = sorted({batch.phase for batch in batches})
    return tuple(
        _recovery(phase, [batch for batch in batches if batch.phase == phase], window, share, tail)
        for phase in phases[1:]
    )


def _recovery(phase: int, batches: Sequence[BatchSuccess], window: int, share: float, tail: float) -> Recovery:
    total = sum(batch.rows for batch in batches)
    plateau = _trailing(batches, len(batches) - 1, math.ceil(tail * total))
    found, passed = None, 0
    for place, batch in enumerate(batches):
        passed += batch.rows
        if plateau > 0 and passed >= min(window, total) and _trailing(batches, place, window) >= share * plateau:
            found = passed
            break
    return Recovery(phase=phase, plateau=plateau, rows=found, at_least=total)


def _trailing(batches: Sequence[BatchSuccess], place: int, rows: int) -> float:
    """Success over the batches up to `place` that together hold `rows` rows, or all there are."""
    counted, successes = 0, 0.0
    for batch in reversed(batches[: place + 1]):
        counted += batch.rows
        successes += batch.rows * batch.success
        if counted >= rows:
            break
    return successes / counted if counted else 0.0


def read_batches(records: Iterable[Mapping[str, Any]]) -> list[BatchSuccess]:
    """From the lines of a run's metrics; lines without a phase are passed over."""
    found = []
    for record in records:
        figures = record.get("signals") or {}
        if "phase" in figures and "on_target" in figures:
            phase = int(figures["phase"] + 0.5)
            found.append(BatchSuccess(rows=int(record["rows"]), phase=phase, success=float(figures["on_target"])))
    return found


def spoken(found: Recovery, *, share: float = SHARE) -> str:
    """One line about it."""
    aim = f"{share:.0%} of its plateau of {found.plateau:.3f}"
    if found.rows is None:
        return f"phase {found.phase + 1}: {aim} was not reached in {found.at_least} rows"
    return f"phase {found.phase + 1}: {aim} after {found.rows} rows (it lasted {found.at_least})"
