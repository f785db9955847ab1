"""Curves of a run as a picture: reward, critic, staleness and ratios over batches."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PANELS = (
    ("success", ("success_mean",)),
    ("explained variance", ("ev_pre", "ev_post")),
    ("staleness (versions)", ("staleness_mean", "staleness_max")),
    ("rejected share", ("dis_reject_low", "dis_reject_high")),
)
_HELDOUT = (("heldout_success", "o", "held-out, T = 1"), ("heldout_greedy", "^", "held-out, greedy"))


def draw_curves(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Write `path` as a PNG. Steps without a figure leave a gap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [record for record in records if "event" not in record]
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for name in names:
            values = [record.get(name) for record in steps]
            numbers = [float("nan") if value is None else value for value in values]
            axes.plot([record["step"] for record in steps], numbers, label=name)
        if title == "success":
            for key, marker, label in _HELDOUT:
                found = sorted((r["step"], r[key]) for r in records if r.get(key) is not None)
                axes.plot([step for step, _ in found], [value for _, value in found], marker, label=label)
        axes.set_title(title)
        axes.set_xlabel("batch")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
