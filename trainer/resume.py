"""Putting a run folder back to its newest whole checkpoint (docs/runtime.md).

Rows trained after it go back to ready, with their trajectories; running and scoring rows, and rows that hold tokens of
a version that the checkpoint does not know, are queued again with the same attempt, and so are rows that had been let
past the gate: they are older than the rule allows. If I(V) then fails, because critic-only batches were lost, the
newest ready rows are queued again until it holds. A group of which some rows are ready counts whole, at the v0 of the
oldest, and is queued again whole. Metrics of lost steps are dropped.
"""

from sao_gym.ledger import Ledger, RowStatus
from sao_gym.parquet import read_trajectories
from sao_gym.runfolder import RunFolder
from sao_gym.stream import Trajectory
from sao_gym.trainer.checkpoint import RunState
from sao_gym.trainer.files import TRAJECTORIES, later_files, row_number
from sao_gym.trainer.runtime import groups_of
from sao_gym.trainer.staleness import is_bounded


def recovered(ledger: Ledger, folder: RunFolder, state: RunState, *, batch_rows: int, max_staleness: int) -> None:
    """Make ledger, trajectories and metrics those of `state`."""
    lost = list(later_files(folder.path / TRAJECTORIES, state.step))
    trained: dict[int, Trajectory] = {row_number(t.uid): t for path in lost for t in read_trajectories(path)}
    ledger.recover(state.step, state.version, trained)
    for path in lost:
        path.unlink()
    folder.rewind_metrics(state.step)
    oldest = state.version - max_staleness
    ready: list[tuple[list[int], int]] = []
    for group in groups_of(ledger.rows(RowStatus.QUEUED, RowStatus.READY)):
        firsts = [row.first_version or 0 for row in group if row.status is RowStatus.READY]
        numbers = [row.number for row in group]
        if firsts and min(firsts) < oldest:
            ledger.requeue_group(numbers, reason="older than the bound after a resume")
        elif firsts:
            ready.append((numbers, min(firsts)))
    while ready and not is_bounded(
        [first for numbers, first in ready for _ in numbers],
        version=state.version,
        batch_rows=batch_rows,
        max_staleness=max_staleness,
    ):
        ledger.requeue_group(ready.pop()[0], reason="beyond the bound after a resume")
