"""Scalars and histograms of a run to a tracker, through Accelerate's: TensorBoard by default where it is installed, others by name.

`metrics.jsonl` holds all of it in any case. A tracker that was asked for and is not in force ends the run at its start;
what the default lacks is said in one line.

Example:
    with opened_tracking("tensorboard", run_folder) as tracking:
        tracking.step({"step": 1, "reward_mean": 0.5})
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from sao_gym.errors import ConfigError, InvariantError
from sao_gym.trainer.metrics import Histogram

FOLDER = "tracking"


class Tracking:
    """Hands each line of metrics on. `tracker` is one of Accelerate's; None: nothing is tracked."""

    def __init__(self, tracker: Any | None) -> None:
        self.tracker = tracker

    def step(self, record: Mapping[str, Any]) -> None:
        """The numbers of a line, by their keys; those of an inner table as `key/inner`."""
        if self.tracker is not None:
            self.tracker.log(scalars(record), step=record["step"])

    def histograms(self, made: Sequence[Histogram]) -> None:
        """Histograms of a step, where the tracker takes counts that were made elsewhere: TensorBoard does."""
        add = getattr(getattr(self.tracker, "writer", None), "add_histogram_raw", None)
        if add is None:
            return
        for histogram in made:
            if sum(histogram.counts):
                add(**raw_histogram(histogram))


def scalars(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """What of a line is a number: no text, no list, nothing undefined."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{prefix}{key}"] = value
    return found


def raw_histogram(histogram: Histogram) -> dict[str, Any]:
    """Arguments of TensorBoard's `add_histogram_raw`.

    Only counts are known, so sums are those of the middles of the bins; the two open ones are as wide as their
    neighbours.
    """
    edges = np.asarray(histogram.edges)
    low, high = edges[0] - (edges[1] - edges[0]), edges[-1] + (edges[-1] - edges[-2])
    limits = np.append(edges, high)
    middles = (np.concatenate([[low], edges]) + limits) / 2
    counts = np.asarray(histogram.counts)
    held = np.flatnonzero(counts)
    return {
        "tag": histogram.name,
        "min": float(middles[held[0]]),
        "max": float(middles[held[-1]]),
        "num": int(counts.sum()),
        "sum": float(counts @ middles),
        "sum_squares": float(counts @ middles**2),
        "bucket_limits": limits.tolist(),
        "bucket_counts": counts.tolist(),
        "global_step": histogram.step,
    }


def chosen(name: str) -> tuple[str | None, str]:
    """The tracker that `trackers = name` means here, and a line about it. Raises ConfigError if it is not installed."""
    if name == "none":
        return None, "trackers: none, metrics.jsonl alone"
    wanted = "tensorboard" if name == "auto" else name
    if find_spec(wanted) is not None:
        without = "" if wanted == "tensorboard" else ", scalars alone; histograms stand in metrics.parquet"
        return wanted, f"trackers: {wanted}{without}"
    if name == "auto":
        return None, "trackers: tensorboard is not installed, so metrics.jsonl alone (pip install tensorboard adds it)"
    raise ConfigError(f"trackers = {name!r}, but the package {name} is not installed: pip install {name}")


@contextmanager
def opened_tracking(name: str | None, run: Path) -> Iterator[Tracking]:
    """The tracker called `name`, for the run in this folder, seen to be in force (trap 35)."""
    if name is None:
        yield Tracking(None)
        return
    kind = LOGGER_TYPE_TO_CLASS[name]
    tracker = kind(run.name, logging_dir=str(run / FOLDER)) if kind.requires_logging_directory else kind(run.name)
    tracker.start()
    require_in_force(tracker, run)
    try:
        yield Tracking(tracker)
    finally:
        tracker.finish()


def require_in_force(tracker: Any, run: Path) -> None:
    """Raise InvariantError unless the tracker has begun: Accelerate skips it in silence on ranks that are not the first."""
    begun = getattr(tracker, "tracker", None) is not None
    if begun and tracker.requires_logging_directory:
        begun = any(path.is_file() for path in (run / FOLDER).rglob("*"))
    if not begun:
        raise InvariantError(f"the tracker {tracker.name} was asked for and is not in force")
