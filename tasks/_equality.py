"""Whether two answers say the same, in one process and without limits: run it in a grading worker.

The verdict does not depend on which of the two is the gold answer. Where a rule of ours can read both sides it
decides; what only math-verify can read, it decides, as far as it keeps capitals apart.
"""

import itertools
import logging
import re
from dataclasses import dataclass
from enum import StrEnum

import sympy

from sao_gym.tasks._algebra import same_decimal, same_renamed, same_value
from sao_gym.tasks._answers import as_integer, meaning, normalise, space_commas, spelling
from sao_gym.tasks._kinds import (
    Builder,
    Conditioned,
    Congruence,
    Definition,
    Grid,
    Items,
    Opaque,
    Pieces,
    Reading,
    RealSet,
    Relation,
    Words,
)
from sao_gym.tasks._latex import TooLargeError
from sao_gym.tasks._library import same_by_library
from sao_gym.tasks._reading import read
from sao_gym.tasks._reals import as_real_set, same_sets
from sao_gym.tasks._values import Value

MAX_LENGTH = 2000
MAX_PAIRS = 3000


class Verdict(StrEnum):
    """What is said about two answers."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict and how it was reached: "spelling", "table", "symbolic" or "undecided"."""

    verdict: Verdict
    method: str


def find(left: str, right: str) -> Finding:
    """What the rules say of two answers, neither of them boxed."""
    left, right = normalise(left), normalise(right)
    if not left or not right:
        return Finding(Verdict.DIFFERENT, "none")
    if spelling(left) == spelling(right) or meaning(left) == meaning(right):
        return Finding(Verdict.EQUAL, "spelling")
    if max(len(left), len(right)) > MAX_LENGTH:
        return Finding(Verdict.DIFFERENT, "spelling")
    left, right = space_commas(left, right), space_commas(right, left)
    one, other = (read(side if r"\circ" in side else as_integer(side) or side) for side in (left, right))
    method = "table" if isinstance(one, Words) or isinstance(other, Words) else "symbolic"
    if same(one, other):
        return Finding(Verdict.EQUAL, method)
    is_read = not (is_unread(one) or is_unread(other))
    if not is_read and same_by_library(left, right):
        return Finding(Verdict.EQUAL, "symbolic")
    if not is_read and not (is_number(one) or is_number(other)):
        return Finding(Verdict.UNDECIDED, "undecided")
    return Finding(Verdict.DIFFERENT, method)


def is_equal(left: str, right: str) -> bool:
    """Whether two answers, neither of them boxed, are equal."""
    return find(left, right).verdict is Verdict.EQUAL


def is_unread(reading: Reading) -> bool:
    """Whether part of an answer could not be read."""
    match reading:
        case Opaque():
            return True
        case Items(items=items):
            return any(map(is_unread, items))
        case Definition(value=value):
            return is_unread(value)
        case Conditioned(answer=answer, condition=condition):
            return is_unread(answer) or is_unread(condition)
        case Pieces() | Builder():
            return True
        case Grid(rows=rows):
            return any(is_unread(cell) for row in rows for cell in row)
    return False


def is_number(reading: Reading) -> bool:
    """Whether an answer is one number: then what cannot be read is no answer to the question."""
    return isinstance(reading, Value) and not reading.exact.free_symbols


def same(left: Reading, right: Reading) -> bool:
    """Whether two readings are the same answer, whichever comes first."""
    if left == right:
        return not is_nan(left)
    return _try_same(left, right) or (type(left) is not type(right) and _try_same(right, left))


def _try_same(left: Reading, right: Reading) -> bool:
    try:
        return _same(left, right)
    except (MemoryError, RecursionError, TooLargeError):
        raise
    except Exception:  # algebra fails on much that a policy may write; that is no match
        return False


def is_nan(reading: Reading) -> bool:
    return isinstance(reading, Value) and reading.exact.has(sympy.nan, sympy.zoo)


def _same(left: Reading, right: Reading) -> bool:
    match left, right:
        case Value(), Value():
            return same_values(left, right)
        case Definition(), Definition():
            return same_definitions(left, right)
        case Definition(), Items(items=items, brackets="{}") if len(items) == 1:
            return same(left, items[0])
        case Definition(), (Opaque() | Relation() | Congruence() | Conditioned()):
            return False
        case Definition(), _:
            return same_defined(left, right)
        case Items(), Items():
            return same_items(left, right)
        case Items(items=(single,), brackets=("{}" | "")), Value():
            return same(single, right)
        case RealSet(), RealSet():
            return same_sets(left, right)
        case RealSet(), Items():
            as_set = as_real_set(right)
            return as_set is not None and same_sets(left, as_set)
        case RealSet(), Value() if len(left.parts) == 1:
            return left.parts[0].low == left.parts[0].high and same(Value(left.parts[0].low), right)
        case RealSet(), Words():
            return is_counting(left, right)
        case Words(), Value():
            return is_power(left, right)
        case Relation(), Relation():
            return same_relations(left, right)
        case Congruence(), Congruence():
            return same_congruences(left, right)
        case Congruence(), Value():
            return same_value(left.residue, right.exact)
        case Grid(), Grid():
            return left.fence == right.fence and same_rows(left.rows, right.rows)
        case Conditioned(), Conditioned():
            return same(left.answer, right.answer) and same(left.condition, right.condition)
        case Conditioned(), _:
            return same(left.answer, right)
        case Pieces(), Pieces():
            return same_pieces(left, right)
        case Builder(), Builder():
            return left.element == right.element and same(left.condition, right.condition)
    return False


def same_values(left: Value, right: Value) -> bool:
    """Whether two values are equal; units count where both have one."""
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if same_value(left.exact, right.exact):
        return True
    if left.is_percent != right.is_percent:
        bare, percent = (right, left) if left.is_percent else (left, right)
        return same_value(bare.exact, percent.exact * 100)
    for decimal, exact in ((left, right), (right, left)):
        if decimal.digits and not exact.digits and same_decimal(decimal.exact, decimal.digits, exact.exact):
            return True
    return False


def same_definitions(left: Definition, right: Definition) -> bool:
    """Whether two definitions of the same name agree, up to the letters of arguments and free constants."""
    if left.name != right.name:
        return False
    if bool(left.arguments) != bool(right.arguments):  # f = 0 beside f(x) = 0
        return same(left.value, right.value)
    if len(left.arguments) != len(right.arguments):
        return False
    if not (isinstance(left.value, Value) and isinstance(right.value, Value)):
        return left.arguments == right.arguments and same(left.value, right.value)
    arguments = {sympy.Symbol(old): sympy.Symbol(new) for old, new in zip(left.arguments, right.arguments, strict=True)}
    value = left.value.exact.subs(arguments, simultaneous=True)
    if same_values(Value(value, left.value.unit), right.value):
        return True
    return can_rename(left, right.value) and same_renamed(value, right.value.exact, frozenset(right.arguments))


def same_defined(left: Definition, right: Reading) -> bool:
    """Whether a definition agrees with a bare answer."""
    if same(left.value, right):
        return True
    if not (isinstance(left.value, Value) and isinstance(right, Value)) or not can_rename(left, right):
        return False
    return same_renamed(left.value.exact, right.exact, frozenset(left.arguments))


def can_rename(definition: Definition, other: Value) -> bool:
    """Whether a definition's letters may be constants of its own: a function's, or the k of `n = 4k + 3`."""
    if definition.arguments:
        return True
    if not isinstance(definition.value, Value):
        return False
    return all(
        value.exact.is_polynomial()
        and all(re.fullmatch("[ijklmnqrst]", str(symbol)) for symbol in value.exact.free_symbols)
        and len(value.exact.free_symbols) == 1
        and sympy.Poly(value.exact).domain == sympy.ZZ
        for value in (definition.value, other)
    )


def same_items(left: Items, right: Items) -> bool:
    """Sets without order, tuples in order; a bare list beside a tuple is one."""
    ordered = {"()", "[]"} & {left.brackets, right.brackets}
    if ordered and ("{}" in (left.brackets, right.brackets) or ordered == {"()", "[]"}):
        return False
    one, other = without_dots(left.items), without_dots(right.items)
    if ordered:
        return len(one) == len(other) and all(map(same, one, other))
    if (named := names(left)) and len(one) == len(other) and not names(right):
        return bool(named) and all(map(same, one, other))
    if names(right) and not named and len(one) == len(other):
        return all(map(same, one, other))
    if len(one) * len(other) > MAX_PAIRS:
        return len(one) == len(other) and all(map(same, one, other))
    return _covers(one, other) and _covers(other, one)


def names(items: Items) -> bool:
    """Whether the items define different names: `x = 1, y = 2`."""
    found = [item.name for item in items.items if isinstance(item, Definition)]
    return len(found) == len(items.items) and len(set(found)) == len(found) > 1


def _covers(these: tuple[Reading, ...], those: tuple[Reading, ...]) -> bool:
    return all(any(same(item, other) for other in those) for item in these)


DOTS = Opaque(r"\ldots")


def without_dots(items: tuple[Reading, ...]) -> tuple[Reading, ...]:
    r"""A progression `1, 2, \\ldots, 9` as first value, step, dots and last; any other items as they are."""
    if items.count(DOTS) != 1 or items[-2:-1] != (DOTS,) or len(items) < 3:
        return items
    known = [item.exact for item in (*items[:-2], items[-1]) if isinstance(item, Value)]
    if len(known) != len(items) - 1:
        return items
    start, last = known[:-1], known[-1]
    step = start[1] - start[0] if len(start) > 1 else sympy.Integer(1)
    if any(sympy.simplify(b - a - step) != 0 for a, b in itertools.pairwise(start)):
        return items
    return (Value(start[0]), Value(step), DOTS, Value(last))


def is_counting(left: RealSet, right: Words) -> bool:
    """`n >= 1` is what "all positive integers" says."""
    first = left.parts[0]
    kind = {"positive integer": 1, "non-negative integer": 0}.get(next(iter(right.description.kinds), ""))
    is_integer = left.variable in ("n", "k", "m") and len(left.parts) == 1
    return (
        is_integer and len(right.description.kinds) == 1 and not right.description.without
        and first.low == kind and first.low_closed and first.high == sympy.oo
    )  # fmt: skip


def is_power(left: Words, right: Value) -> bool:
    """`2^k` is what "powers of 2" says."""
    base, exponent = right.exact.as_base_exp()
    return (
        left.description.kinds == {f"power of {base}"}
        and not left.description.without
        and isinstance(exponent, sympy.Symbol)
        and str(exponent) != "n"  # the letter that a problem asks for; 2^n is then a formula in it
    )


def same_relations(left: Relation, right: Relation) -> bool:
    """Whether two unsolved relations are the same up to a factor."""
    if left.operator != right.operator or left.left.free_symbols != right.left.free_symbols:
        return False
    ratio = sympy.cancel(left.left / right.left)
    if ratio.free_symbols or not ratio.is_nonzero:
        return False
    return left.operator in ("=", "!=") or bool(ratio.is_positive)


def same_congruences(left: Congruence, right: Congruence) -> bool:
    """Whether two residues are the same for the same modulus."""
    if left.variable and right.variable and left.variable != right.variable:
        return False
    if not same_value(left.modulus, right.modulus):
        return False
    difference = left.residue - right.residue
    return difference == 0 or bool((difference / left.modulus).is_integer)


def same_rows(left: tuple[tuple[Reading, ...], ...], right: tuple[tuple[Reading, ...], ...]) -> bool:
    """Whether two matrices agree cell by cell."""
    return [len(row) for row in left] == [len(row) for row in right] and all(
        all(map(same, one, other)) for one, other in zip(left, right, strict=True)
    )


def same_pieces(left: Pieces, right: Pieces) -> bool:
    """Whether two piecewise answers have the same values under the same conditions, in any order."""
    return len(left.pieces) == len(right.pieces) and all(
        any(same(a, b) and same(when, under) for b, under in right.pieces) for a, when in left.pieces
    )


def quiet() -> None:
    """Sympy and math-verify write warnings; nobody reads a worker's."""
    logging.disable(logging.CRITICAL)


def warm_up() -> None:
    """Load what the first comparison would load, so that children find it in memory."""
    is_equal(r"\frac{1}{2}+\sqrt{x}+\sin x", "0.25 + x")
    is_equal(r"(-\infty,3)", "x<3")
    is_equal(r"\sum_{k=1}^{4} k", "10")
