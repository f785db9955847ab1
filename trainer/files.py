"""Where a run's checkpoints and trajectories lie.

Example:
    >>> step_file(Path("runs/first"), 3).as_posix(), row_number(row_uid(17))
    ('runs/first/trajectories/step_000003.parquet', 17)
"""

import re
from collections.abc import Iterator
from pathlib import Path

from sao_gym.trainer.checkpoint import find_checkpoints

CHECKPOINTS = "checkpoints"
TRAJECTORIES = "trajectories"
ROLLED_BACK = "rolled_back"
"""Beginning of the names of folders with what a rollback set aside."""
_STEP_FILE = re.compile(r"step_(\d+)\.parquet$")


def step_file(run: Path, step: int) -> Path:
    """Where the trajectories of a step lie."""
    return run / TRAJECTORIES / f"step_{step:06d}.parquet"


def row_uid(number: int) -> str:
    """The uid of a ledger row's trajectory."""
    return f"r{number}"


def row_number(uid: str) -> int:
    """The ledger row of a trajectory's uid."""
    return int(uid.removeprefix("r"))


def later_files(folder: Path, step: int) -> Iterator[Path]:
    """Files of trajectories of the steps after `step`, in order."""
    for path in sorted(folder.glob("step_*.parquet")):
        match = _STEP_FILE.match(path.name)
        if match and int(match[1]) > step:
            yield path


def trajectory_files(run: Path) -> Iterator[Path]:
    """Every file of a run that holds trajectories, those that were set aside included."""
    yield from sorted((run / TRAJECTORIES).glob("step_*.parquet"))
    yield from sorted(run.glob(f"{ROLLED_BACK}-*/{TRAJECTORIES}/step_*.parquet"))


def forget_saved(run: Path) -> None:
    """Remove trajectories that no checkpoint would have to learn from again."""
    whole, _ = find_checkpoints(run / CHECKPOINTS)
    oldest = min((state.step for state, _ in whole), default=0)
    kept = set(later_files(run / TRAJECTORIES, oldest))
    for path in (run / TRAJECTORIES).glob("step_*.parquet"):
        if path not in kept:
            path.unlink()
