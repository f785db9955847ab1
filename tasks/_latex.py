r"""Scalar LaTeX, read into sympy exactly: case counts, decimals are fractions, nothing is guessed.

What the reader does not know, and what could be read in two ways (`1/2x`), raises `UnreadableError`. `\log` is the
natural logarithm; a letter before brackets is a factor, before brackets with commas in them a function.

Example:
    >>> read_latex(r"2\sqrt3 - R r")
    -R*r + 2*sqrt(3)
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import sympy

MAX_DEPTH = 60
MAX_BITS = 4_000_000
MAX_FACTORIAL = 20_000


class UnreadableError(ValueError):
    """The text is no scalar expression that this reader knows."""


class TooLargeError(Exception):
    """The text names a number too large to be worked out: only its own spelling equals it."""


def bounded(value: Any, bound: int) -> Any:
    """The value, unless it is a number beyond the bound. Raises TooLargeError."""
    if value.is_number and bool(abs(value) > bound):
        raise TooLargeError
    return value


def power(base: Any, exponent: Any) -> Any:
    """`base ** exponent`. Raises TooLargeError rather than work out millions of digits."""
    if base.is_Rational and exponent.is_number:
        bits = max(abs(int(base.p)).bit_length(), int(base.q).bit_length())
        bounded(exponent, MAX_BITS // max(bits, 1))
    elif base.is_number and exponent.is_number:
        bounded(exponent, MAX_BITS)
    return base**exponent


def factorial(value: Any) -> Any:
    """`value!`. Raises TooLargeError rather than work out millions of digits."""
    return sympy.factorial(bounded(value, MAX_FACTORIAL))


_TOKEN = re.compile(r"\s*(\\[a-zA-Z]+|\\.|\d+(?:\.\d+)?|\.\d+|[a-zA-Z]|'+|!!|\S)", re.DOTALL)
_GREEK = frozenset(
    [
        "alpha",
        "beta",
        "gamma",
        "delta",
        "epsilon",
        "varepsilon",
        "zeta",
        "eta",
        "theta",
        "vartheta",
        "iota",
        "kappa",
        "lambda",
        "mu",
        "nu",
        "xi",
        "rho",
        "varrho",
        "sigma",
        "tau",
        "upsilon",
        "phi",
        "varphi",
        "chi",
        "psi",
        "omega",
        "Gamma",
        "Delta",
        "Theta",
        "Lambda",
        "Xi",
        "Pi",
        "Sigma",
        "Upsilon",
        "Phi",
        "Psi",
        "Omega",
        "ell",
        "hbar",
        "aleph",
    ]
)
_ACCENTS = frozenset(
    [
        "bar",
        "overline",
        "hat",
        "widehat",
        "tilde",
        "widetilde",
        "vec",
        "dot",
        "ddot",
        "mathcal",
        "mathscr",
        "mathfrak",
        "overrightarrow",
    ]
)
_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "arccot": sympy.acot,
    "asin": sympy.asin, "acos": sympy.acos, "atan": sympy.atan,
    "sinh": sympy.sinh, "cosh": sympy.cosh, "tanh": sympy.tanh, "coth": sympy.coth,
    "exp": sympy.exp, "log": sympy.log, "ln": sympy.log, "lg": lambda value: sympy.log(value, 10),
    "abs": sympy.Abs, "floor": sympy.floor, "ceil": sympy.ceiling,
}  # fmt: skip
_INVERSE = {"sin": sympy.asin, "cos": sympy.acos, "tan": sympy.atan}
FUNCTION_NAMES = frozenset(_FUNCTIONS) | {"sqrt", "max", "min"}
_CLOSING = {"(": ")", "[": "]", "{": "}", r"\{": r"\}", r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_TIMES = frozenset({"*", r"\cdot", r"\times", r"\ast"})


def number(text: str) -> Any:
    """The exact value of digits with at most one point."""
    whole, _, fraction = text.partition(".")
    return sympy.Rational(int(whole + fraction or "0"), 10 ** len(fraction))


def read_latex(text: str) -> Any:
    """The sympy expression that a text names. Raises UnreadableError."""
    reader = _Reader(_TOKEN.findall(text.replace("**", "^")))
    value = reader.sum()
    if reader.token() is not None:
        raise UnreadableError(f"{reader.token()!r} is left over")
    return value


class _Reader:
    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.bars = 0

    def token(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def take(self) -> str:
        token = self.token()
        if token is None:
            raise UnreadableError("the text ends early")
        self.at += 1
        return token

    def expect(self, token: str) -> None:
        if self.take() != token:
            raise UnreadableError(f"no {token}")

    def sum(self) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise UnreadableError("nested too deeply")
        value = self.product(self.sign())
        while self.token() in ("+", "-"):
            value = value + self.product(self.sign())
        self.depth -= 1
        return value

    def sign(self) -> int:
        sign = 1
        while self.token() in ("+", "-"):
            sign = -sign if self.take() == "-" else sign
        return sign

    def product(self, sign: int) -> Any:
        value, divided = sign * self.factor(), False
        while (token := self.token()) is not None:
            if token in _TIMES:
                self.take()
                value, divided = value * (self.sign() * self.factor()), False
            elif token in ("/", r"\div"):
                self.take()
                value, divided = value / (self.sign() * self.factor()), True
            elif self.starts_factor(token):
                if divided:
                    raise UnreadableError("a factor right after a quotient may belong above or below")
                value = value * self.factor()
            else:
                break
        return value

    def starts_factor(self, token: str) -> bool:
        if token == "|":
            return not self.bars
        return token[0].isalnum() or token[0] == "." or token in _CLOSING or self.is_named(token)

    def is_named(self, token: str) -> bool:
        name = token[1:]
        known = name in _GREEK or name in _ACCENTS or name in FUNCTION_NAMES
        return token[0] == "\\" and (known or name in ("pi", "infty", "frac", "binom", "sqrt"))

    def factor(self) -> Any:
        return self.postfix(self.base())

    def postfix(self, value: Any) -> Any:
        while (token := self.token()) in ("^", "!", "!!"):
            self.take()
            if token == "^":
                value = power(value, self.argument())
            else:
                value = factorial(value) if token == "!" else sympy.factorial2(bounded(value, MAX_FACTORIAL))
        return value

    def argument(self) -> Any:
        """What a command or an exponent takes: a group, or one token."""
        token = self.token()
        if token == "-":
            self.take()
            return -self.argument()
        return self.base()

    def digit(self) -> Any:
        r"""An argument of \frac or \binom: of bare digits it takes one."""
        token = self.token()
        if token is not None and token.isdigit() and len(token) > 1:
            self.tokens[self.at : self.at + 1] = [token[0], token[1:]]
        return self.argument()

    def base(self) -> Any:
        token = self.take()
        if token[0].isdigit() or (token[0] == "." and len(token) > 1):
            return number(token)
        if token in _CLOSING:
            return self.group(token)
        if token == "|":
            self.bars += 1
            value = self.sum()
            self.expect("|")
            self.bars -= 1
            return sympy.Abs(value)
        if token.isalpha() and len(token) == 1:
            return self.letter(token)
        if token[0] == "\\":
            return self.command(token[1:])
        raise UnreadableError(f"{token!r} starts no value")

    def group(self, opening: str) -> Any:
        bars, self.bars = self.bars, 0
        value = self.sum()
        self.expect(_CLOSING[opening])
        self.bars = bars
        if opening == r"\{":
            raise UnreadableError("a set is no scalar")
        wraps = {r"\lfloor": sympy.floor, r"\lceil": sympy.ceiling}
        return wraps[opening](value) if opening in wraps else value

    def letter(self, name: str) -> Any:
        if self.token() not in ("_", "'") and not str(self.token()).startswith("'"):
            if name == "e":
                return sympy.E
            if name == "i":
                return sympy.I
        return self.symbol(name)

    def symbol(self, name: str) -> Any:
        if self.token() == "_":
            self.take()
            name += "_" + self.raw_group()
        if str(self.token()).startswith("'"):
            name += self.take()
        arguments = self.arguments()
        return sympy.Symbol(name) if arguments is None else sympy.Function(name)(*arguments)

    def raw_group(self) -> str:
        """The text of a group or of one token, for names."""
        token = self.take()
        if token != "{":
            return token
        depth, parts = 1, []
        while depth:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token, 0)
            parts.append(token)
        return "".join(parts[:-1])

    def arguments(self) -> list[Any] | None:
        """The arguments of a function of several variables that start here."""
        if self.token() != "(":
            return None
        start, values = self.at, []
        try:
            while self.token() in ("(", ","):
                self.take()
                values.append(self.sum())
            self.expect(")")
        except UnreadableError:
            values = []
        if len(values) < 2:
            self.at = start
            return None
        return values

    def command(self, name: str) -> Any:
        if name == "pi":
            return sympy.pi
        if name == "infty":
            return sympy.oo
        if name in _GREEK:
            return self.symbol("\\" + name)
        if name in _ACCENTS:
            return self.symbol(f"\\{'bar' if name == 'overline' else name}{{{self.raw_group()}}}")
        if name == "frac":
            above = self.digit()
            return above / self.digit()
        if name == "binom":
            above = self.digit()
            return sympy.binomial(bounded(above, MAX_FACTORIAL), self.digit())
        if name == "sqrt":
            return self.root()
        if name in ("max", "min"):
            values = self.arguments()
            if values is None:
                raise UnreadableError(f"{name} of one value")
            return (sympy.Max if name == "max" else sympy.Min)(*values)
        if name in _FUNCTIONS:
            return self.function(name)
        raise UnreadableError(f"\\{name} is not known")

    def root(self) -> Any:
        degree: Any = 2
        if self.token() == "[":
            self.take()
            degree = self.sum()
            self.expect("]")
        value = self.argument()
        if degree != 2 and degree.is_odd and value.is_negative:
            return -((-value) ** (1 / degree))
        return value ** (sympy.Integer(1) / degree)

    def function(self, name: str) -> Any:
        apply, power = _FUNCTIONS[name], None
        if name == "log" and self.token() == "_":
            self.take()
            base = self.argument()

            def apply(value: Any) -> Any:
                return sympy.log(value, base)

        if self.token() == "^":
            self.take()
            power = self.argument()
            if power == -1:
                if name not in _INVERSE:
                    raise UnreadableError(f"the inverse of {name}")
                apply, power = _INVERSE[name], None
        value = apply(self.operand())
        return value if power is None else value**power

    def operand(self) -> Any:
        """A function's argument: a bracket, or the factors up to the next sign, function or bracket."""
        token = self.token()
        if token in ("(", "[", "{", "|"):
            return self.base()
        if token == "-":
            self.take()
            return -self.operand()
        value = self.factor()
        while (token := self.token()) is not None and (
            token[0].isalnum() or token[1:] in _GREEK or token in (r"\pi", r"\frac", r"\sqrt")
        ):
            value = value * self.factor()
        return value
