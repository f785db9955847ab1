"""A study's report: three tables as CSV, a picture, and a page that needs nothing beside it.

Everything is made from the run folders, in one order, so that making it again gives the same bytes.
"""

import csv
import io
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.special import stdtrit

from sao_gym.commands.html_markup import Markup, join, tag
from sao_gym.commands.study_figures import (
    ArmFigures,
    Comparison,
    RunFigures,
    arm_figures,
    comparisons,
    measures_of,
    read_figures,
    whole_seeds,
)
from sao_gym.commands.study_plan import BASE, Places, Study
from sao_gym.over_seeds import LEAST_SEEDS
from sao_gym.recovery import SHARE, WINDOW
from sao_gym.runfolder import write_whole

STYLE = (
    "body{font:15px sans-serif;max-width:64em;margin:2em auto}td,th{padding:.2em .8em;text-align:right}img{width:100%}"
)
POINTS = 60


def write_report(study: Study, places: Places) -> Path:
    """Write runs.csv, arms.csv, comparisons.csv, curves.png and report.html. Returns the page's path."""
    found = read_figures(study, places)
    compared = comparisons(study, found)
    write_whole(places.out / "runs.csv", _csv(_run_rows(found)))
    write_whole(places.out / "arms.csv", _csv(_arm_rows(arm_figures(study, found))))
    write_whole(places.out / "comparisons.csv", _csv(_comparison_rows(compared)))
    _draw(study, found, places.out / "curves.png")
    picture = b64encode((places.out / "curves.png").read_bytes()).decode()
    write_whole(places.out / "report.html", f"<!doctype html>\n{_page(study, found, compared, picture)}\n")
    return places.out / "report.html"


def _csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _run_rows(found: Sequence[RunFigures]) -> list[list[str]]:
    names = measures_of(found)
    rows = [["arm", "seed", *names, "bounds"]]
    for figures in found:
        values = [f"{figures.measures[name]:.6g}" for name in names]
        rows.append([figures.arm, str(figures.seed), *values, " ".join(sorted(figures.bounds))])
    return rows


def _arm_rows(arms: Sequence[ArmFigures]) -> list[list[str]]:
    rows = [["measure", "arm", "seeds", "mean", "low", "high", "bounds"]]
    for one in arms:
        values = (one.mean, one.interval.low, one.interval.high)
        rows.append([one.measure, one.arm, str(one.seeds), *(f"{value:.6g}" for value in values), str(one.bounds)])
    return rows


def _comparison_rows(compared: Sequence[Comparison]) -> list[list[str]]:
    rows = [["measure", "arm", "seeds", "difference", "low", "high", "p", "p_holm", "detectable", "bounds"]]
    for one in compared:
        found = one.difference
        values = (found.mean, found.interval.low, found.interval.high, found.p, one.p_holm, found.detectable)
        rows.append([one.measure, one.arm, str(found.n), *(f"{value:.6g}" for value in values), str(one.bounds)])
    return rows


def _draw(study: Study, found: Sequence[RunFigures], path: Path) -> None:
    """Success on target over trained rows: mean and 95 % t interval over seeds, arm by arm."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for arm in study.arms:
        curves = [_curve(one) for one in found if one.arm == arm.name]
        if not curves:
            continue
        ends = max(rows[-1] for rows, _ in curves)
        grid = np.linspace(0, ends, POINTS)
        table = np.array([np.interp(grid, rows, values) for rows, values in curves])
        (line,) = axes.plot(grid, table.mean(0), label=arm.name)
        if len(table) > 1:
            half = float(stdtrit(len(table) - 1, 0.975)) * table.std(0, ddof=1) / len(table) ** 0.5
            axes.fill_between(grid, table.mean(0) - half, table.mean(0) + half, alpha=0.15, color=line.get_color())
    for rows in _shifts(found):
        axes.axvline(rows, color="black", linewidth=0.8, linestyle=":")
    axes.set_xlabel("trained rows")
    axes.set_ylabel("share on target")
    axes.set_ylim(0, 1)
    if found:
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _curve(figures: RunFigures) -> tuple[np.ndarray, np.ndarray]:
    """Trained rows [n] and the success of the batch that ends there [n]."""
    rows = np.cumsum([batch.rows for batch in figures.batches])
    return rows, np.array([batch.success for batch in figures.batches])


def _shifts(found: Sequence[RunFigures]) -> list[int]:
    """Where the phases of the first run begin."""
    batches = found[0].batches if found else ()
    rows = np.cumsum([0, *(batch.rows for batch in batches)])
    phases = [batch.phase for batch in batches]
    return [int(rows[place]) for place in range(1, len(phases)) if phases[place] > max(phases[:place])]


def _table(rows: Sequence[Sequence[str]]) -> Markup:
    head, *body = rows
    lines = (tag("tr", *(tag("td", _short(cell)) for cell in row)) for row in body)
    return tag("table", tag("tr", *(tag("th", cell) for cell in head)), *lines)


def _short(cell: str) -> str:
    """A number to three digits after the point; its table as CSV has more."""
    return f"{float(cell):.3f}" if "." in cell else cell


def _page(study: Study, found: Sequence[RunFigures], compared: Sequence[Comparison], picture: str) -> Markup:
    seeds = whole_seeds(study, found)
    orientation = f" Fewer than {LEAST_SEEDS}: for orientation alone." if len(seeds) < LEAST_SEEDS else ""
    arms = (tag("li", tag("b", arm.name), f": {arm.about} ", tag("code", " ".join(arm.words))) for arm in study.arms)
    body = join(
        [
            tag("h1", f"Study {study.name}"),
            tag(
                "p",
                f"Preset {study.preset}, {study.steps} batches, settings {' '.join(study.settings) or 'none'}. {len(found)} of "
                f"{len(study.pairs)} runs are done; all arms are with seeds {', '.join(map(str, seeds)) or 'none'}.{orientation}",
            ),
            tag("ul", *arms),
            tag("img", src=f"data:image/png;base64,{picture}", alt="share on target over trained rows, arm by arm"),
            tag(
                "p",
                f"recovery_k: trained rows after the shift into phase k until the share on target over {WINDOW} rows is at "
                f"{SHARE:.0%} of that phase's plateau, the mean over its last quarter. One that was not reached counts with the "
                "length of the phase, which is too little; bounds says how often.",
            ),
            tag("h2", "Arms"),
            tag("p", "Mean over seeds, with a 95 % t interval."),
            _table(_arm_rows(arm_figures(study, found))),
            tag("h2", f"Each arm less {BASE}"),
            tag(
                "p",
                "Paired by seed; 95 % t intervals; p_holm over the arms of a measure; detectable in 80 % of such studies.",
            ),
            _table(_comparison_rows(compared)),
            tag("h2", "Runs"),
            _table(_run_rows(found)),
        ]
    )
    head = tag("head", tag("meta", charset="utf-8"), tag("title", f"study {study.name}"), tag("style", Markup(STYLE)))
    return tag("html", head, tag("body", body), lang="en")
