"""Program notation, as a Python tool prints it (`-1 + exp(16)`, `2**10`), read without ever being run.

The text is parsed by Python's own parser and rebuilt node by node from a whitelist: numbers, + - * / ** ^, pi, E, I,
and a handful of functions. Anything else is no program notation.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy

MAX_LENGTH = 500
_CONSTANTS: Mapping[str, Any] = {
    "pi": sympy.pi,
    "e": sympy.E,
    "E": sympy.E,
    "i": sympy.I,
    "I": sympy.I,
    "j": sympy.I,
    "oo": sympy.oo,
}
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "sqrt": sympy.sqrt,
    "exp": sympy.exp,
    "log": sympy.log,
    "ln": sympy.log,
    "factorial": sympy.factorial,
    "sin": sympy.sin,
    "cos": sympy.cos,
    "tan": sympy.tan,
    "asin": sympy.asin,
    "acos": sympy.acos,
    "atan": sympy.atan,
    "cbrt": sympy.cbrt,
}
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.Pow: lambda left, right: left**right,
}


class NotProgramNotationError(ValueError):
    """The text is no program notation."""


def parse_program(text: str) -> Any | None:
    """The sympy expression that a text in program notation names, or None."""
    if len(text) > MAX_LENGTH or "\\" in text:
        return None
    source = re.sub(r"\b(?:math|np|numpy|sympy|sp)\.(?=[a-zA-Z])", "", text).replace("^", "**").strip()
    try:
        return _build(ast.parse(source, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ArithmeticError, TypeError):
        return None


def _build(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return sympy.Integer(value) if isinstance(value, int) else sympy.Rational(repr(value))
        case ast.Constant(value=complex() as value) if value.real == 0:
            return sympy.Rational(repr(value.imag)) * sympy.I
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_build(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _build(operand)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
            return _OPERATORS[type(operator)](_build(left), _build(right))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](_build(argument))
    raise NotProgramNotationError(ast.dump(node)[:80])
