r"""What kind of answer a text is: a value, a list, a tuple, a set of reals, a definition, a relation, words.

Reading never fails: what no rule knows is `Opaque`. Texts come normalised (`_answers.normalise`).

Example:
    >>> read("0<x<1"), read("(0,1)")
    (RealSet(parts=(Part(low=0, ...
"""

import itertools
import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import sympy

from sao_gym.tasks._algebra import same_value
from sao_gym.tasks._answers import join_thousands, meaning, spelling, split_list, split_top, strip_braces, unwrap_text
from sao_gym.tasks._kinds import (
    ALL_REALS,
    POSITIVE_REALS,
    Builder,
    Conditioned,
    Congruence,
    Definition,
    Grid,
    Items,
    Opaque,
    Part,
    Pieces,
    Reading,
    RealSet,
    Relation,
    Words,
)
from sao_gym.tasks._latex import UnreadableError, read_latex
from sao_gym.tasks._pieces import SIGNS, expand_signs, split_pieces
from sao_gym.tasks._prose import Description, describe
from sao_gym.tasks._reals import as_real_set, combine, complement, intersect
from sao_gym.tasks._relations import NAME, RELATION, as_name, solved, unsolved
from sao_gym.tasks._values import Value, read_value

MAX_ITEMS = 200
_INTRODUCTION = re.compile(
    r"^(?:(?:so |thus |hence )?(?:the |our )?(?:final )?answer(?: is| =)?|answer):? ", re.IGNORECASE
)
MAXSIGNS = 4


_AND_OR = r"(?<![\\a-zA-Z])(?:and|or)(?![a-zA-Z])"
_CONDITION = re.compile(
    r"(?<![\\a-zA-Z])(?:for some|for all|for any|for every|for each|for|where|with|such that|when)(?![a-zA-Z])"
)
_GRID = re.compile(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_MODULUS = re.compile(r"\(?\s*(?:\\pmod|\\bmod|\\mod|(?<![a-zA-Z\\])mod)\s*(\{.*\}|\\?\w+)\s*\)?$")


@lru_cache(maxsize=4096)
def read(text: str) -> Reading:
    """The meaning of a normalised answer."""
    text = strip_braces(unwrap_text(text).rstrip(" .,;"))
    text = _INTRODUCTION.sub("", text.replace(r"\langle", "(").replace(r"\rangle", ")"))
    joined = join_thousands(text)
    text = text if "," in joined else joined
    if text in (r"\{\}", r"\{ \}"):
        return Words(Description(frozenset()))
    for rule in (_read_pieces, _read_words, _read_grid, _read_condition, _read_items, _read_congruence):
        if (found := rule(text)) is not None:
            return found
    for rule in (_read_set, _read_brackets, _read_relation):
        if (found := rule(text)) is not None:
            return found
    return read_value(text) or Opaque(meaning(text))


def _read_words(text: str) -> Reading | None:
    description = describe(text)
    if description is None:
        form = re.fullmatch(
            r"(?:[Aa]ll )?(?:positive |non-?negative )?(?:integers|numbers)?(?: \w)? ?of the form (.+)", text
        )
        return read(form[1]) if form else None
    if description == Description(frozenset({"real"})):
        return ALL_REALS
    if description == Description(frozenset({"positive real"})):
        return POSITIVE_REALS
    return Words(description)


def _read_pieces(text: str) -> Reading | None:
    pairs = split_pieces(text)
    if len(pairs) < 2:
        return None
    values = [read(value) for value, _ in pairs]
    values = [value.value if isinstance(value, Definition) else value for value in values]
    conditions = [read(when) if re.search(RELATION, when) else Opaque(meaning(when)) for _, when in pairs]
    return Pieces(tuple(zip(values, conditions, strict=True)))


def _read_grid(text: str) -> Reading | None:
    found = _GRID.fullmatch(text)
    if found is None or r"\begin" in found[2]:
        return None
    rows = [row for row in re.split(r"\\\\", found[2]) if row.strip()]
    cells = tuple(tuple(read(cell.strip()) for cell in row.split("&")) for row in rows)
    return Grid(cells, found[1].lower() if found[1] in "vV" and found[1] else "")


def _read_condition(text: str) -> Reading | None:
    found = _CONDITION.search(text)
    if found is None or not text[: found.start()].strip(" ,;("):
        return None
    closing = ")" if text[: found.start()].rstrip().endswith("(") else ""
    head = text[: found.start()].strip(" ,;(" if closing else " ,;")
    condition = read(text[found.end() :].strip().removesuffix(closing).strip())
    answer = read(head)
    if isinstance(answer, Opaque):
        return Opaque(meaning(text))
    if isinstance(condition, Definition) and isinstance(condition.value, Value) and isinstance(answer, Value):
        return replace(answer, exact=answer.exact.xreplace({sympy.Symbol(condition.name): condition.value.exact}))
    return Conditioned(answer, condition)


def _read_items(text: str) -> Reading | None:
    parts, joints = split_top(text, rf"[,;]|{_AND_OR}")
    parts = [part for part in parts if part]
    if SIGNS.search(text):
        parts = [value for part in parts for value in expand_signs(part)]
    if len(parts) < 2 or len(parts) > MAX_ITEMS:
        return None
    items = tuple(read(part) for part in parts)
    relations = [item for item in items if isinstance(item, RealSet) and item.variable]
    if len(relations) == len(items) and len({item.variable for item in relations}) == 1:
        if "and" in joints and "or" not in joints:
            return combine(relations, as_all=True)
        if "or" in joints or r"\cup" in joints:
            return combine(relations, as_all=False)
    return Items(items)


def _read_congruence(text: str) -> Reading | None:
    found = _MODULUS.search(text)
    if found is None:
        return None
    left, ops = split_top(text[: found.start()].strip(" ,("), r"\\equiv(?![a-zA-Z])|=")
    try:
        residue, modulus = read_latex(left[-1]), read_latex(strip_braces(found[1]))
    except (UnreadableError, ArithmeticError, TypeError, ValueError):
        return None
    variable = left[0] if ops else None
    return Congruence(residue, modulus, variable)


def _read_set(text: str) -> Reading | None:
    r"""Unions, \mathbb{R} without points."""
    pieces, joints = split_top(text, r"\\cup(?![a-zA-Z])|\\setminus(?![a-zA-Z])|\\backslash(?![a-zA-Z])")
    if not joints:
        return None
    variable, _, first = pieces[0].rpartition(r"\in ")
    whole = as_real_set(read(first.strip()))
    for joint, piece in zip(joints, pieces[1:], strict=True):
        other = as_real_set(read(piece))
        if whole is None or other is None or (joint != r"\cup" and any(p.low != p.high for p in other.parts)):
            return None
        if joint == r"\cup":
            whole = replace(whole, parts=(*whole.parts, *other.parts))
        else:
            left = intersect(whole.parts, complement(other.parts))
            if left is None:
                return None
            whole = replace(whole, parts=left)
    return whole and replace(whole, variable=variable.strip() or None)


def _read_brackets(text: str) -> Reading | None:
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return _read_braces(text[2:-2])
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]":
        return None
    inner = text[1:-1]
    if len(split_top(text + ",", ",")[0]) != 2 or _closes_early(text):
        return None
    parts = split_list(inner)
    if len(parts) == 1:
        return read(inner) if text[0] + text[-1] == "()" and not re.search(RELATION, inner) else None
    items = tuple(read(part) for part in parts)
    if len(items) == 2 and text[0] + text[-1] != "()":
        low, high = items
        if isinstance(low, Value) and isinstance(high, Value):
            return RealSet((Part(low.exact, text[0] == "[", high.exact, text[-1] == "]"),))
        return None
    return Items(items, text[0] + text[-1]) if text[0] + text[-1] in ("()", "[]") else None


def _closes_early(text: str) -> bool:
    depth = 0
    for index, character in enumerate(text):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if depth == 0 and index < len(text) - 1:
            return True
    return False


def _read_braces(inner: str) -> Reading | None:
    element, colon = split_top(inner, r":|\|")
    if len(element) == 2 and colon:
        condition = read(element[1])
        name = element[0].partition(r"\in ")[0].strip()
        if isinstance(condition, RealSet) and condition.variable == name:
            return condition
        return Builder(spelling(element[0]), condition)
    parts = [value for part in split_list(inner) for value in (expand_signs(part) if SIGNS.search(part) else [part])]
    if any(not part for part in parts) or len(parts) > MAX_ITEMS:
        return None
    return Items(tuple(read(part) for part in parts), "{}")


def _read_relation(text: str) -> Reading | None:
    text = re.sub(r"\\equiv(?![a-zA-Z])", "=", text)  # a congruence has been read before
    sides, operators = split_top(text, RELATION)
    if not operators or any(not side for side in sides):
        return None
    if operators == [r"\in"] and NAME.fullmatch(sides[0]):
        inner = read(sides[1])
        found = as_real_set(inner) if isinstance(inner, RealSet) or not isinstance(inner, Words) else None
        return replace(found, variable=sides[0]) if found else (inner if isinstance(inner, Words) else None)
    if set(operators) == {"="}:
        return _read_equation(sides)
    values = [_scalar(side) for side in sides]
    if any(value is None for value in values):
        return None
    return solved(values, operators) or unsolved(values, operators)


def _scalar(text: str) -> Any | None:
    value = read_value(text)
    return value.exact if value is not None else None


def _read_equation(sides: list[str]) -> Reading | None:
    names = [as_name(side) for side in sides]
    if names[0] is None and len(sides) == 2 and names[1] is not None:
        sides, names = sides[::-1], names[::-1]
    values = [read(side) for side in sides[1:]]
    if names[0] is not None and all(
        isinstance(value, Value | Items | RealSet | Grid | Words | Pieces) for value in values
    ):
        name, arguments = names[0]
        first = values[-1]
        known = isinstance(first, Value) and name in {str(symbol) for symbol in first.exact.free_symbols}
        if not known and (len(values) == 1 or _all_equal(values)):
            return Definition(name, arguments, first)
    scalars = [scalar for scalar in map(_scalar, sides) if scalar is not None]
    if len(scalars) < len(sides):
        return None
    if not any(scalar.free_symbols for scalar in scalars):
        return Value(scalars[-1]) if _all_equal([Value(scalar) for scalar in scalars]) else None
    return Relation("=", scalars[0] - scalars[1]) if len(scalars) == 2 else None


def _all_equal(values: list[Reading]) -> bool:
    return all(
        isinstance(a, Value) and isinstance(b, Value) and same_value(a.exact, b.exact)
        for a, b in itertools.pairwise(values)
    )
