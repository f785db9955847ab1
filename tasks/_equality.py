"""Whether two answers say the same, in one process and without limits: run it in a grading worker.

The verdict does not depend on which of the two is the gold answer.
"""

import logging
import re
from typing import Any

import sympy
from math_verify import parse, verify
from sympy.core.function import AppliedUndef

from sao_gym.tasks._answers import (
    align_brackets,
    expand_signs,
    has_dots,
    is_set,
    is_tuple,
    join_list,
    meaning,
    normalise,
    spelling,
    without_unit,
    words,
)
from sao_gym.tasks._notation import parse_program

MAX_LENGTH = 2000
DECIMALS = 12
"""How closely a decimal has to agree with an exact value."""
_SHORT_WORDS = frozenset({"all", "any", "odd", "the", "for", "are", "not", "yes"})
_INEQUALITIES = (sympy.StrictLessThan, sympy.LessThan, sympy.StrictGreaterThan, sympy.GreaterThan)


def is_equal(left: str, right: str) -> bool:
    """Whether two answers, neither of them boxed, are equal."""
    left, right = normalise(left), normalise(right)
    if not left or not right:
        return False
    if spelling(left) == spelling(right) or meaning(left) == meaning(right):
        return True
    if has_dots(left) or has_dots(right) or max(len(left), len(right)) > MAX_LENGTH:
        return False  # what dots leave out no algebra can compare
    left, right = (expand_signs(join_list(without_unit(side))) for side in (left, right))
    left, right = align_brackets(left, right)
    if is_prose(left) or is_prose(right) or (is_tuple(left) and is_set(right)) or (is_set(left) and is_tuple(right)):
        return False
    return any(agree(first, second) for first in readings(left) for second in readings(right) if first and second)


def is_prose(answer: str) -> bool:
    """Whether an answer is words rather than a value with a unit behind it."""
    found = [word for word in words(answer) if len(word) > 3 or word in _SHORT_WORDS]  # abc may be a product
    return bool(found) and not re.match(r"\s*[-+]?(?:\d|\\frac)", answer) and parse_program(answer) is None


def readings(answer: str) -> list[list[Any]]:
    """What an answer may mean: as LaTeX, and as program notation."""
    meanings: list[list[Any]] = []
    program = parse_program(answer)
    if program is not None:
        meanings.append([program])
    if "**" not in answer:
        meanings.append(parse("\\boxed{" + answer + "}", parsing_timeout=None))
    return meanings


def agree(left: list[Any], right: list[Any]) -> bool:
    """Whether two readings are equal, whichever comes first.

    A relation that is not solved for one variable would restate the question: it equals no value.
    """
    if any(map(is_unsolved, left)) != any(map(is_unsolved, right)):
        return False
    return any(
        verify(gold, answer, float_rounding=DECIMALS, timeout_seconds=None)
        for gold, answer in ((left, right), (right, left))
    )


def is_unsolved(value: Any) -> bool:
    """Whether a value is an equation or inequality that does not isolate one variable or function."""
    if isinstance(value, sympy.And):
        return any(is_unsolved(part) for part in value.args)
    if not isinstance(value, (*_INEQUALITIES, sympy.Eq)):
        return False
    for variable, bound in ((value.lhs, value.rhs), (value.rhs, value.lhs)):
        if isinstance(variable, (AppliedUndef, sympy.Tuple)) or (
            isinstance(variable, sympy.Symbol) and variable not in bound.free_symbols
        ):
            return False
    return True


def quiet() -> None:
    """math-verify warns that its own time-outs are off; ours are the worker's."""
    logging.disable(logging.CRITICAL)


def warm_up() -> None:
    """Load what the first comparison would load, so that children find it in memory."""
    is_equal(r"\frac{1}{2}+\sqrt{x}", "0.25 + x")
