"""Program notation, as a Python tool prints it (`-1 + exp(16)`, `2**10`), read without ever being run.

The text is parsed by Python's own parser and rebuilt node by node from a whitelist: numbers, + - * / ** ^, single
letters, pi, E, I, and a handful of functions. Anything else is no program notation. Decimals are exact fractions.
"""

import ast
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

import sympy

from sao_gym.tasks._latex import MAX_FACTORIAL, bounded, factorial, power

MAX_LENGTH = 500
MAX_EXPONENT = 400
"""Of ten, in a number such as 1e-30: what a program can print and no more."""
_GREEK = frozenset(
    [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "theta",
        "lambda",
        "mu",
        "rho",
        "sigma",
        "tau",
        "phi",
        "varphi",
        "psi",
        "omega",
    ]
)
_CONSTANTS: Mapping[str, Any] = {
    "pi": sympy.pi,
    "e": sympy.E,
    "E": sympy.E,
    "i": sympy.I,
    "I": sympy.I,
    "j": sympy.I,
    "oo": sympy.oo,
    "inf": sympy.oo,
}
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "sqrt": sympy.sqrt,
    "exp": sympy.exp,
    "log": sympy.log,
    "ln": sympy.log,
    "log2": lambda value: sympy.log(value, 2),
    "log10": lambda value: sympy.log(value, 10),
    "factorial": factorial,
    "factorial2": lambda value: sympy.factorial2(bounded(value, MAX_FACTORIAL)),
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "asin": sympy.asin,
    "acos": sympy.acos,
    "atan": sympy.atan,
    "cbrt": sympy.cbrt,
    "floor": sympy.floor,
    "ceiling": sympy.ceiling,
    "ceil": sympy.ceiling,
    "abs": sympy.Abs,
    "Abs": sympy.Abs,
    "Integer": lambda value: value,
    "Rational": lambda value: value,
    "Fraction": lambda value: value,
}
_FUNCTIONS_OF_TWO: Mapping[str, Callable[[Any, Any], Any]] = {
    "log": sympy.log,
    "binomial": lambda above, below: sympy.binomial(bounded(above, MAX_FACTORIAL), below),
    "comb": lambda above, below: sympy.binomial(bounded(above, MAX_FACTORIAL), below),
    "Rational": lambda above, below: above / below,
    "Fraction": lambda above, below: above / below,
    "pow": power,
}
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.Pow: power,
}
_LOOKS = re.compile(r"\*|\b[a-zA-Z]+\d*\(|\d[eE][-+]?\d|^[-+]?oo$")
_MODULES = re.compile(r"\b(?:math|np|numpy|sympy|sp|fractions)\.(?=[a-zA-Z])")


class NotProgramNotationError(ValueError):
    """The text is no program notation."""


def parse_program(text: str) -> Any | None:
    """The sympy expression that a text in program notation names, or None.

    Text that reads the same in mathematics (`x + 1`, `E`) is not taken for a program.
    """
    if len(text) > MAX_LENGTH or "\\" in text or not _LOOKS.search(text):
        return None
    source = _MODULES.sub("", text).replace("^", "**").strip()
    source = re.sub(r"(?<![\w.])0+(?=\d)", "", source)
    try:
        return _build(ast.parse(source, mode="eval").body, source)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ArithmeticError, TypeError):
        return None


def _number(text: str) -> Any:
    """The exact value of a decimal number as it is written."""
    decimal = Decimal(text.replace("_", ""))
    if abs(decimal.adjusted()) > MAX_EXPONENT:
        raise NotProgramNotationError(text)
    fraction = Fraction(decimal)
    return sympy.Rational(fraction.numerator, fraction.denominator)


def _build(node: ast.expr, source: str) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return sympy.Integer(value) if isinstance(value, int) else _number(_written(node, source))
        case ast.Constant(value=complex() as value) if value.real == 0:
            return _number(_written(node, source)[:-1]) * sympy.I
        case ast.Name(id=name):
            return _name(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand, source)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _build(operand, source)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_build(left, source), _build(right, source))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_build(argument, source))
        case ast.Call(func=ast.Name(id=name), args=[first, second], keywords=[]) if name in _FUNCTIONS_OF_TWO:
            return _FUNCTIONS_OF_TWO[name](_build(first, source), _build(second, source))
    raise NotProgramNotationError(ast.dump(node)[:80])


def _written(node: ast.expr, source: str) -> str:
    return ast.get_source_segment(source, node) or ""


def _name(name: str) -> Any:
    if name in _CONSTANTS:
        return _CONSTANTS[name]
    if name in _GREEK:
        return sympy.Symbol("\\" + name)
    if found := re.fullmatch(r"([a-zA-Z])(?:_?(\w))?", name):
        return sympy.Symbol(found[1] + (f"_{found[2]}" if found[2] else ""))
    raise NotProgramNotationError(name)
