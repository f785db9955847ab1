r"""Relations between scalars: solved ones are sets of reals, the rest is kept as `left operator 0`.

A relation is solved where it bounds one letter by what that letter is not in: only then is it an answer.

Example:
    >>> x = sympy.Symbol("x")
    >>> solved([x, sympy.Integer(3)], ["<"])
    RealSet(parts=(Part(low=-oo, low_closed=False, high=3, high_closed=False),), variable='x')
"""

import re
from typing import Any

import sympy

from sao_gym.tasks._kinds import Part, RealSet, Relation
from sao_gym.tasks._latex import UnreadableError, read_latex
from sao_gym.tasks._reals import complement, point

RELATION = r"<|>|\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|=|\\ne(?![a-zA-Z])|\\in(?![a-zA-Z])"
NAME = re.compile(r"(?:\\?[a-zA-Z]+|\\(?:bar|hat|overline)\{\w\})'*(?:_(?:\w|\{[^{}]*\}))?")
_APPLIED = re.compile(rf"({NAME.pattern}) ?\(([^()]*)\)")
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def as_name(side: str) -> tuple[str, tuple[str, ...]] | None:
    """(name, arguments) of the left side of a definition."""
    if NAME.fullmatch(side) and (len(side) == 1 or side[0] == "\\" or "_" in side or side[1:].strip("'") == ""):
        return (symbol_name(side), ()) if side not in ("e", "i", r"\pi") else None
    if (found := _APPLIED.fullmatch(side)) and (len(found[1]) == 1 or not found[1].isalpha()):
        return symbol_name(found[1]), tuple(symbol_name(part.strip()) for part in found[2].split(","))
    if re.fullmatch(r"\( ?[a-zA-Z\\](?:[\w{}]*) ?(?:, ?[a-zA-Z\\][\w{}]* ?)+\)", side):
        return re.sub(r"\s", "", side), ()
    return None


def symbol_name(text: str) -> str:
    """The name by which expressions know a letter."""
    try:
        return str(read_latex(text))
    except UnreadableError:
        return re.sub(r"\s", "", text)


def solved(values: list[Any], operators: list[str]) -> RealSet | None:
    """A chain that bounds one letter from one side or two."""
    if any(operator not in (*_FLIPPED, r"\ne") for operator in operators):
        return None
    at = next((i for i, value in enumerate(values) if value.is_Symbol), None)
    at = 1 if len(values) == 3 else at
    if at is None or not values[at].is_Symbol:
        return None
    bounds = [value for i, value in enumerate(values) if i != at]
    if any(values[at] in bound.free_symbols for bound in bounds):
        return None
    name = str(values[at])
    if operators == [r"\ne"]:
        return RealSet(complement((point(bounds[0]),)), name) if bounds[0].is_number else None
    low, low_closed, high, high_closed = -sympy.oo, False, sympy.oo, False
    for index, operator in enumerate(operators):
        bound, above = (values[index + 1], True) if index + 1 != at else (values[index], False)
        operator = operator if above else _FLIPPED.get(operator, operator)
        if operator in ("<", r"\le"):
            high, high_closed = bound, operator == r"\le"
        elif operator in (">", r"\ge"):
            low, low_closed = bound, operator == r"\ge"
        else:
            return None
    if len(operators) > 1 and (low == -sympy.oo or high == sympy.oo):
        return None
    return RealSet((Part(low, low_closed, high, high_closed),), name)


def unsolved(values: list[Any], operators: list[str]) -> Relation | None:
    """One relation as `left operator 0`, None for a chain."""
    if len(operators) != 1:
        return None
    left = values[0] - values[1]
    if operators[0] in (">", r"\ge"):
        left = -left
    kinds: dict[str, str] = {"<": "<", ">": "<", r"\le": "<=", r"\ge": "<=", r"\ne": "!="}
    return Relation(kinds[operators[0]], left) if operators[0] in kinds else None
