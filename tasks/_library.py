r"""What only math-verify can read: sums, integrals, limits, products.

It lowers capitals, rounds and guesses, so it is asked for nothing else, and only its reading is used: whether two
expressions are equal is decided by `same_value`.

Example:
    >>> read_by_library(r"\sum_{k=1}^{4} k")
    10
"""

import re
from typing import Any

import sympy
from math_verify import parse

from sao_gym.tasks._algebra import same_value
from sao_gym.tasks._values import read_value

_ASKED = re.compile(r"\\(?:sum|prod|int|iint|oint|lim)(?![a-zA-Z])")
_CAPITAL = re.compile(r"(?<![\\a-zA-Z])[A-Z]")
_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}")


def same_by_library(left: str, right: str) -> bool:
    """Whether two normalised answers, at least one of them beyond our own reader, are equal scalars."""
    if not (_ASKED.search(left) or _ASKED.search(right)):
        return False
    one, other = (_read_either(side) for side in (left, right))
    return one is not None and other is not None and same_value(one, other)


def _read_either(text: str) -> Any | None:
    value = read_value(text)
    return value.exact if value is not None else read_by_library(text)


def read_by_library(text: str) -> Any | None:
    """The scalar that math-verify reads, worked out, or None."""
    if r"\ldots" in text or _CAPITAL.search(text) or _WORDS.search(text):
        return None
    found = parse("\\boxed{" + text + "}", parsing_timeout=None)
    if not found or not isinstance(found[0], sympy.Expr):
        return None
    value = found[0].doit()
    value = value.xreplace({symbol: sympy.Symbol(symbol.name) for symbol in value.free_symbols})
    return None if value.has(sympy.Sum, sympy.Integral, sympy.Limit, sympy.Product, sympy.Float) else value
