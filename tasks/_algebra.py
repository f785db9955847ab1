"""Whether two exact expressions are equal: numbers to a thousand digits, expressions in letters at many points.

Nothing is ever compared as a float: differences are evaluated with sympy's own error bounds, to so many digits that
what is left is 0. Expressions in letters stand for lengths, counts and parameters: they are compared where both are
real, at positive numbers, also at negative ones where no root or logarithm is taken, and at positive integers alone
where factorials or signs like (-1)^n occur.

Example:
    >>> same_value(sympy.sqrt(8), 2 * sympy.sqrt(2)), same_value(sympy.exp(-900), sympy.exp(-901))
    (True, False)
"""

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from sympy.functions.combinatorial.factorials import CombinatorialFunction

DIGITS = 1200
LETTER_DIGITS = 120
POINTS = 6
STEP_POINTS = 40
MIN_POINTS = 3
MAX_TRIES = 60


def same_value(left: Any, right: Any) -> bool:
    """Whether two scalar expressions are equal wherever both are defined."""
    if left == right:
        return left not in (sympy.nan, sympy.zoo)
    if left.has(sympy.nan, sympy.zoo) or right.has(sympy.nan, sympy.zoo):
        return False
    if left.is_infinite or right.is_infinite:
        return False
    if left.is_Rational and right.is_Rational:
        return False
    difference = left - right
    if left.has(AppliedUndef) or right.has(AppliedUndef):
        return bool(sympy.expand(difference) == 0)
    if not difference.free_symbols:
        return is_zero(difference, sympy.Integer(1) if left.free_symbols else left, DIGITS)
    return _agree_at_points(left, right)


def is_zero(difference: Any, scale: Any, digits: int) -> bool:
    """Whether a number is 0 as far as `digits` digits of `scale` tell."""
    if difference.is_Rational:
        return bool(difference == 0)
    value = sympy.N(difference, 15, maxn=digits)
    if not value.is_number or value.has(sympy.nan, sympy.zoo, sympy.oo):
        return False
    size = _exponent(value)
    return size is None or size < _exponent_or_zero(scale) - 3 * digits


def _exponent(value: Any) -> int | None:
    """The binary exponent of a number's size, None for 0."""
    sizes = [_float_exponent(part) for part in value.as_real_imag()]
    known = [size for size in sizes if size is not None]
    return max(known) if known else None


def _float_exponent(part: Any) -> int | None:
    part = sympy.N(part, 15)
    if part == 0:
        return None
    mantissa = getattr(part, "_mpf_", None)
    if mantissa is None or mantissa[1] == 0:
        return None
    return int(mantissa[2] + mantissa[3])


def _exponent_or_zero(value: Any) -> int:
    return _exponent(sympy.N(value, 15, maxn=100)) or 0


def _agree_at_points(left: Any, right: Any) -> bool:
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    is_complex = left.has(sympy.I) or right.has(sympy.I)
    valid, wanted = 0, STEP_POINTS if left.has(sympy.floor, sympy.ceiling) else POINTS
    for values in itertools.islice(_points(len(symbols), left, right), MAX_TRIES):
        point = dict(zip(symbols, values, strict=True))
        value, other = left.subs(point), right.subs(point)
        if not _is_usable(value, is_complex) or not _is_usable(other, is_complex):
            continue
        if not is_zero(value - other, value, LETTER_DIGITS):
            return False
        valid += 1
        if valid >= wanted:
            return True
    return valid >= MIN_POINTS


def _is_usable(value: Any, is_complex: bool) -> bool:
    number = sympy.N(value, 15)
    if not number.is_number or number.has(sympy.nan, sympy.zoo, sympy.oo, sympy.AccumBounds):
        return False
    return is_complex or bool(abs(sympy.im(number)) < 1e-9)


def _points(n: int, left: Any, right: Any) -> Iterator[tuple[Any, ...]]:
    """Values for n letters; the same for the same pair, whichever comes first."""
    draw = random.Random(n)
    both = (left, right)
    if any(side.has(CombinatorialFunction) or _has_sign_power(side) for side in both):
        while True:
            yield tuple(sympy.Integer(value) for value in draw.sample(range(1, 16 + n), n))
    steps = any(side.has(sympy.floor, sympy.ceiling) for side in both)
    signs = (1,) if any(_has_root(side) for side in both) else (1, -1)
    for index in itertools.count():
        if steps and index % 2:  # where a step is, and the logarithms of small numbers are whole
            yield tuple(sympy.Integer(1 + (index // 2 + draw.randrange(n)) % 17) for _ in range(n))
            continue
        top = (3, 40, 1)[index % 3]  # small, large, below 1
        yield tuple(draw.choice(signs) * sympy.Rational(draw.randrange(1, 97 * top), 97) for _ in range(n))


def _has_sign_power(value: Any) -> bool:
    return any(power.base.is_negative and power.exp.free_symbols for power in value.atoms(sympy.Pow))


def _has_root(value: Any) -> bool:
    powers = value.atoms(sympy.Pow)
    return bool(value.atoms(sympy.log)) or any(not power.exp.is_integer and power.base.free_symbols for power in powers)


def same_decimal(decimal: Any, digits: int, exact: Any) -> bool:
    """Whether a decimal of many digits is what a program prints of an exact number that ends in no decimal."""
    if digits < 12 or not exact.is_number or exact.is_real is not True or ends(exact):
        return False
    size = abs(decimal)
    if not sympy.Rational(1, 10**9) < size < 10**12:
        return False
    return bool(abs(sympy.N(exact - decimal, 15, maxn=DIGITS)) < size * sympy.Rational(1, 10 ** (digits - 2)))


def ends(value: Any) -> bool:
    """Whether a number is a fraction whose decimals end."""
    if not value.is_Rational:
        return False
    below = int(value.q)
    for prime in (2, 5):
        while below % prime == 0:
            below //= prime
    return below == 1


def same_renamed(left: Any, right: Any, fixed: frozenset[str]) -> bool:
    """Whether two expressions are equal once letters that only one of them has are renamed; `fixed` are not."""
    own = sorted((s for s in left.free_symbols - right.free_symbols if str(s) not in fixed), key=str)
    others = sorted((s for s in right.free_symbols - left.free_symbols if str(s) not in fixed), key=str)
    if len(own) != len(others) or len(left.free_symbols) != len(right.free_symbols) or len(own) > 3:
        return False
    for names in itertools.permutations(others):
        renaming: Mapping[Any, Any] = dict(zip(own, names, strict=True))
        if same_value(left.xreplace(renaming), right):
            return True
    return False
