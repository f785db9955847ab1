"""A histogram as inline SVG: stacked bars, readable without script, every bar with its count as a tooltip.

Invariant: the bars' counts sum to the values given.

Example:
    >>> bins = bin_values([("right", [1, 2, 2]), ("other", [9])], most_bins=4)
    >>> [(b.low, b.high, b.counts) for b in bins]
    [(1, 3, (3, 0)), (4, 6, (0, 0)), (7, 9, (0, 1))]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sao_gym.commands.html_markup import Markup, join, tag

Series = Sequence[tuple[str, Sequence[int]]]
"""Name of each stacked part and its values, whole numbers from 0."""
WIDTH, HEIGHT, LEFT, BELOW, ABOVE = 420, 150, 44, 34, 10


@dataclass(frozen=True, slots=True)
class Bin:
    """Values from `low` to `high`, both counted; one count per series."""

    low: int
    high: int
    counts: tuple[int, ...]


def bin_values(series: Series, most_bins: int = 24) -> tuple[Bin, ...]:
    """Bins of one round width that hold all values, at most `most_bins` + 1; none without values."""
    every = [value for _, values in series for value in values]
    if not every:
        return ()
    width = _round_up((max(every) - min(every) + 1) / most_bins)
    start = min(every) if width <= 3 else min(every) // width * width
    n_bins = (max(every) - start) // width + 1
    counts = [[0] * len(series) for _ in range(n_bins)]
    for index, (_, values) in enumerate(series):
        for value in values:
            counts[(value - start) // width][index] += 1
    return tuple(Bin(start + i * width, start + (i + 1) * width - 1, tuple(row)) for i, row in enumerate(counts))


def histogram(series: Series, *, unit: str) -> Markup:
    """The SVG; class `s0`, `s1`, ... colours the series from the bottom up. Says so where there is nothing to draw."""
    bins = bin_values(series)
    if not bins:
        return tag("p", f"no {unit} to show", class_="none")
    tallest = max(sum(one.counts) for one in bins)
    step = (WIDTH - LEFT) / len(bins)
    bars = [_bar(one, series, LEFT + i * step, step, tallest, unit) for i, one in enumerate(bins)]
    base = HEIGHT - BELOW
    axis = [
        tag("line", x1=LEFT, y1=base, x2=WIDTH, y2=base, class_="axis"),
        _label(LEFT, base + 14, f"{bins[0].low:,}", "start"),
        _label(WIDTH, base + 14, f"{bins[-1].high:,}", "end"),
        _label((LEFT + WIDTH) / 2, base + 28, unit, "middle"),
        _label(LEFT - 4, ABOVE + 8, f"{tallest:,}", "end"),
        _label(LEFT - 4, base, "0", "end"),
    ]
    total = sum(sum(one.counts) for one in bins)
    return tag(
        "svg", *axis, *bars, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=f"{unit} of {total} episodes"
    )


def _bar(one: Bin, series: Series, x: float, step: float, tallest: int, unit: str) -> Markup | None:
    total = sum(one.counts)
    if not total:
        return None
    room, base, parts = HEIGHT - BELOW - ABOVE, float(HEIGHT - BELOW), []
    for index, count in enumerate(one.counts):
        height = room * count / tallest
        base -= height
        place = {"x": round(x, 1), "y": round(base, 1), "width": round(step * 0.9, 1), "height": round(height, 1)}
        parts.append(tag("rect", class_=f"s{index}", **place) if count else None)
    span = f"{one.low:,}" if one.low == one.high else f"{one.low:,} to {one.high:,}"
    each = ", ".join(f"{name} {count}" for (name, _), count in zip(series, one.counts, strict=True) if count)
    return tag("g", tag("title", f"{span} {unit}: {each}"), join(parts))


def _label(x: float, y: float, text: str, anchor: str) -> Markup:
    return tag("text", text, x=round(x, 1), y=round(y, 1), text_anchor=anchor)


def _round_up(width: float) -> int:
    """The least of 1, 2, 3, 5 times a power of ten that is not below `width`; bins of 3 are for small numbers alone."""
    power = 10 ** max(0, math.floor(math.log10(max(width, 1))))
    return next(int(power * factor) for factor in (1, 2, 3, 5, 10) if power * factor >= width)
