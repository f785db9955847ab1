"""Going back to an earlier published version, and taking single episodes out of a run's files.

Invariants: nobody else holds the run; what is set aside stays whole under `rolled_back-<UTC time>/`; each step can be repeated
after a crash.

Example:
    done = roll_back(Path("runs/app"), ledger, version=3, now=datetime.now(UTC))
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from sao_gym.errors import CheckpointError
from sao_gym.ledger import Ledger, RowStatus
from sao_gym.parquet import read_trajectories, write_trajectories
from sao_gym.stream import Trajectory
from sao_gym.trainer.checkpoint import RunState, find_checkpoints
from sao_gym.trainer.files import CHECKPOINTS, ROLLED_BACK, TRAJECTORIES, later_files, row_number, trajectory_files
from sao_gym.trainer.parity import CANARY


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """What was done. `dropped`: rows that were trained since and are never trained again; `aside` holds what was newer."""

    state: RunState
    checkpoints: int
    dropped: tuple[Trajectory, ...]
    aside: Path


def roll_back(run: Path, ledger: Ledger, *, version: int, again: bool, now: datetime) -> RolledBack:
    """Make the newest checkpoint of policy `version` the newest of all. With `again`, rows trained since are trained again.

    Raises CheckpointError, naming the versions that there are.
    """
    whole, _ = find_checkpoints(run / CHECKPOINTS)
    state = next((state for state, _ in reversed(whole) if state.version == version), None)
    if state is None:
        known = ", ".join(str(each) for each in sorted({state.version for state, _ in whole})) or "none"
        raise CheckpointError(
            f"{run} has no checkpoint of version {version}: it has {known}; checkpoint.keep and checkpoint.every decide which "
            "stay"
        )
    aside = run / f"{ROLLED_BACK}-{now:%Y%m%d-%H%M%S}"
    dropped = () if again else _drop_later(run, ledger, state.step, aside)
    newer = [path for each, path in whole if each.step > state.step]
    for path in reversed(newer):
        _move(path, aside / CHECKPOINTS)
    return RolledBack(state=state, checkpoints=len(newer), dropped=dropped, aside=aside)


def _drop_later(run: Path, ledger: Ledger, step: int, aside: Path) -> tuple[Trajectory, ...]:
    """Rows trained after `step` are dropped; their files are set aside. A row in a file that is ready still is trained yet."""
    rows = [row.number for row in ledger.rows(RowStatus.TRAINED) if (row.trained_at_step or 0) > step]
    ledger.drop_group(dict.fromkeys(rows, ROLLED_BACK))
    later = list(later_files(run / TRAJECTORIES, step))
    gone = {row.number for row in ledger.rows(RowStatus.DROPPED) if row.reason == ROLLED_BACK}
    dropped = tuple(t for path in later for t in read_trajectories(path) if row_number(t.uid) in gone)
    for path in later:
        _move(path, aside / TRAJECTORIES)
    return dropped


def _move(path: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path.rename(folder / path.name)


def take_out(run: Path, is_meant: Callable[[Trajectory], bool]) -> list[Trajectory]:
    """Take the trajectories that are meant out of a run's files, and its canary if it was cut from one of them."""
    taken: list[Trajectory] = []
    for path in trajectory_files(run):
        found = read_trajectories(path)
        meant = [trajectory for trajectory in found if is_meant(trajectory)]
        if meant:
            taken += meant
            write_trajectories(path, [trajectory for trajectory in found if not is_meant(trajectory)])
    forget_canary(run, taken)
    return taken


def forget_canary(run: Path, trajectories: list[Trajectory]) -> None:
    """Remove the canary if it is the beginning of one of these; the next publication makes another."""
    path = run / CANARY
    if not path.is_file():
        return
    ids = np.load(path)
    if any(np.array_equal(s.token_ids[: len(ids)], ids) for t in trajectories for s in t.streams):
        path.unlink()
