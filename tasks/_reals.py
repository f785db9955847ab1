r"""Sets of reals as intervals and points: unions, intersections, and whether two are the same.

Ends are exact. Sets with letters in their ends are compared part by part, as they stand.

Example:
    >>> complement((point(sympy.Integer(2)),))
    (Part(low=-oo, ... high=2, ...), Part(low=2, ... high=oo, ...))
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sympy

from sao_gym.tasks._algebra import same_value
from sao_gym.tasks._kinds import Items, Part, Reading, RealSet
from sao_gym.tasks._values import Value


def point(value: Any) -> Part:
    """One number as a part of a set."""
    return Part(value, True, value, True)


def as_real_set(reading: Reading) -> RealSet | None:
    """A reading as a set of reals, where it may be one."""
    if isinstance(reading, RealSet):
        return reading
    if isinstance(reading, Items) and all(isinstance(item, Value) for item in reading.items):
        values = [item.exact for item in reading.items if isinstance(item, Value)]
        if reading.brackets == "()" and len(values) == 2:
            return RealSet((Part(values[0], False, values[1], False),))
        if reading.brackets in ("{}", "") and reading.items:
            return RealSet(tuple(Part(value, True, value, True) for value in values))
    return None


def combine(sets: Sequence[RealSet], *, as_all: bool) -> RealSet | None:
    """What lies in all of the sets, or in any of them; None where letters leave it open."""
    whole = sets[0]
    for other in sets[1:]:
        parts = intersect(whole.parts, other.parts) if as_all else (*whole.parts, *other.parts)
        if parts is None:
            return None
        whole = replace(whole, parts=parts)
    return whole


def intersect(left: tuple[Part, ...], right: tuple[Part, ...]) -> tuple[Part, ...] | None:
    parts = []
    for a in left:
        for b in right:
            lows = _pick(a.low, a.low_closed, b.low, b.low_closed, largest=True)
            highs = _pick(a.high, a.high_closed, b.high, b.high_closed, largest=False)
            if lows is None or highs is None:
                return None
            empty = sympy.simplify(highs[0] - lows[0])
            if empty.is_extended_positive or (empty == 0 and lows[1] and highs[1]):
                parts.append(Part(lows[0], lows[1], highs[0], highs[1]))
    return tuple(parts)


def _pick(a: Any, a_closed: bool, b: Any, b_closed: bool, *, largest: bool) -> tuple[Any, bool] | None:
    if a == b:
        return a, a_closed and b_closed
    greater = (a - b).is_extended_positive
    if greater is None:
        return None
    return (a, a_closed) if greater is largest else (b, b_closed)


def complement(points: tuple[Part, ...]) -> tuple[Part, ...]:
    """The reals without some points, given in any order."""
    values = sorted((part.low for part in points), key=lambda value: float(sympy.N(value)))
    ends = [-sympy.oo, *values, sympy.oo]
    return tuple(Part(low, False, high, False) for low, high in itertools.pairwise(ends))


def same_sets(left: RealSet, right: RealSet) -> bool:
    """Whether two sets of reals have the same points; two inequalities are in the same letter."""
    if left.variable and right.variable and left.variable != right.variable:
        return False
    one, other = merged(left.parts), merged(right.parts)
    return len(one) == len(other) and all(
        a.low_closed == b.low_closed
        and a.high_closed == b.high_closed
        and same_end(a.low, b.low)
        and same_end(a.high, b.high)
        for a, b in zip(one, other, strict=True)
    )


def same_end(left: Any, right: Any) -> bool:
    return bool(left == right) or same_value(left, right)


def merged(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Parts in order, those that touch joined; parts with letters in them stay as they are."""
    if any(not (part.low.is_extended_real and part.high.is_extended_real and part.low.is_number) for part in parts):
        return parts
    if any(not part.high.is_number for part in parts):
        return parts
    kept: list[Part] = []
    real = [p for p in parts if p.low < p.high or (p.low_closed and p.high_closed and same_end(p.low, p.high))]
    for part in sorted(real, key=lambda part: (sympy.N(part.low, 30), not part.low_closed)):
        last = kept[-1] if kept else None
        if (
            last is None
            or part.low > last.high
            or (same_end(part.low, last.high) and not (part.low_closed or last.high_closed))
        ):
            kept.append(part)
        elif part.high > last.high or (same_end(part.high, last.high) and part.high_closed):
            kept[-1] = Part(last.low, last.low_closed, part.high, part.high_closed)
    return tuple(kept)
