r"""One value: a number or an expression, with the unit that stands behind it.

Example:
    >>> read_value(r"2\frac{1}{3} cm")
    Value(exact=7/3, unit='cm', is_percent=False, digits=0)
"""

import re
from dataclasses import dataclass
from typing import Any

import sympy

from sao_gym.tasks._answers import has_dots, join_thousands, strip_braces
from sao_gym.tasks._latex import FUNCTION_NAMES, UnreadableError, number, read_latex
from sao_gym.tasks._notation import parse_program

MAX_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class Value:
    """A scalar. `digits` counts the digits of a decimal number, 0 for all else."""

    exact: Any
    unit: str = ""
    is_percent: bool = False
    digits: int = 0


_UNITS = {
    "cm": "cm|centimeters?|centimetres?", "mm": "mm|millimeters?", "m": "meters?|metres?",
    "km": "km|kilometers?|kilometres?", "in": "inch(?:es)?", "ft": "foot|feet|ft", "yd": "yards?|yd", "mi": "miles?",
    "s": "seconds?|secs?", "min": "minutes?|mins?", "h": "hours?|hrs?", "d": "days?", "wk": "weeks?",
    "mo": "months?", "y": "years?|yrs?", "g": "grams?", "kg": "kg|kilograms?", "lb": "pounds?|lbs?", "oz": "ounces?",
    "l": "liters?|litres?", "ml": "ml|milliliters?", "usd": "dollars?|usd", "cent": "cents?", "deg": "degrees?",
    "rad": "radians?", "unit": "units?", "mph": "mph|miles per hour", "kmh": "km/h", "ms": "m/s",
}  # fmt: skip
_UNIT_NAMES = [(re.compile(pattern, re.IGNORECASE), name) for name, pattern in _UNITS.items()]
_KNOWN = "|".join(_UNITS.values())
_UNIT = re.compile(
    rf"(?P<value>.*?[\d}})!a-zA-Z])[ ]+(?P<unit>(?:(?:square|sq\.?|cubic|cu\.?) )?(?:{_KNOWN})\.?(?: ?\^ ?\{{?[23]\}}?)?)",
    re.IGNORECASE | re.DOTALL,
)
_THING = re.compile(r"(?P<value>[-+]?[\d.,/]+(?:\\frac\{\d+\}\{\d+\})?) (?P<unit>[a-z]{3,}(?: [a-z]{3,})?)")
_NO_UNIT = re.compile(
    r"\b(?:not|no|none|if|or|and|for|mod|modulo|thousand|million|billion|trillion|hundred|dozen|percent|to|is|are|"
    r"prime|primes|odd|even|only|possible|impossible|otherwise|pi|sqrt|sin|cos|tan|log|exp|choose|factorial|per|than|"
    r"least|most|solutions?|the|times|plus|minus|over|squared|cubed|half|halves|thirds?|quarters?)\b"
)
_SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALED = re.compile(rf"([-+]?[\d.]+) ({'|'.join(_SCALES)})(?: (.*))?")
_MIXED = re.compile(r"([-+]?) ?(\d+) ?\\frac ?(?:\{(\d+)\} ?\{(\d+)\}|(\d)(\d))")
_MIXED_SLASH = re.compile(r"([-+]?) ?(\d+) (\d+)/(\d+)()()")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot|overbar) ?(?:\{(\d+)\}|(\d))")
_SCIENTIFIC = re.compile(r"(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,4})")
_DECIMAL = re.compile(r"[-+]?\d*\.\d+")
_NAMES = re.compile(
    r"(?<![\\a-zA-Z])(" + "|".join(sorted([*FUNCTION_NAMES, "pi", "infty"], key=len, reverse=True)) + r")(?![a-zA-Z])"
)
_DEGREE = re.compile(r"\^ ?(?:\\circ|\{ ?\\circ ?\})")
_DEGREES = re.compile(rf"(\d+(?:\.\d+)?|\\?[a-zA-Z]+) ?(?:{_DEGREE.pattern})")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_SHORT_WORDS = frozenset({"all", "any", "odd", "the", "for", "are", "not", "yes", "and", "mod", "one", "two", "six"})


def read_value(text: str) -> Value | None:
    """The value that a normalised text names, or None."""
    if not text or len(text) > MAX_LENGTH or has_dots(text):
        return None
    text, unit = _split_unit(join_thousands(strip_braces(text)))
    if _DEGREE.search(text) and not _TRIGONOMETRY.search(text):
        unit = unit or "deg"
    is_percent = False
    if found := re.search(r"\\?%$|(?<![a-zA-Z])percent$", text):
        text, is_percent = text[: found.start()].strip(), True
    scale = 1
    if found := _SCALED.fullmatch(text):
        text, scale, unit = found[1], _SCALES[found[2]], unit or found[3] or ""
    try:
        exact = _read_exact(text)
    except (UnreadableError, ArithmeticError, TypeError, AttributeError, ValueError):
        return None
    if exact is None or not isinstance(exact, sympy.Expr):
        return None
    digits = len(text.strip("+-").replace(".", "").lstrip("0")) if _DECIMAL.fullmatch(text) else 0
    return Value(exact * scale / (100 if is_percent else 1), unit, is_percent, digits)


def _split_unit(text: str) -> tuple[str, str]:
    found = _UNIT.fullmatch(text) or _THING.fullmatch(text)
    if found is None or _NO_UNIT.search(found["unit"].lower()):
        return text, ""
    value = found["value"].strip()
    if re.fullmatch(r"[a-zA-Z ]+", value) and len(value) > 2:
        return text, ""
    return value, _unit_name(found["unit"])


def _unit_name(text: str) -> str:
    """One name for the spellings of a unit."""
    text = re.sub(r"[\s.]+", " ", text).strip().lower()
    power = ""
    if found := re.search(r" ?\^ ?\{?([23])\}?$", text):
        text, power = text[: found.start()], found[1]
    if found := re.match(r"(square|sq|cubic|cu) ", text):
        text, power = text[found.end() :], "2" if found[1].startswith("sq") else "3"
    for pattern, name in _UNIT_NAMES:
        if pattern.fullmatch(text):
            return name + power
    return text.removesuffix("s") + power


def _read_exact(text: str) -> Any | None:
    if (program := parse_program(text)) is not None:
        return program
    if (found := _MIXED.fullmatch(text) or _MIXED_SLASH.fullmatch(text)) is not None:
        above, below = int(found[3] or found[5]), int(found[4] or found[6])
        if 0 < above < below:
            size = int(found[2]) + sympy.Rational(above, below)
            return -size if found[1] == "-" else size
    names = [word for word in _WORD.findall(text) if word not in FUNCTION_NAMES]
    if any(len(word) > 3 or word.lower() in _SHORT_WORDS for word in names):
        return None
    return read_latex(_as_latex(text))


def _as_latex(text: str) -> str:
    text = _REPEATING.sub(_repeating, text)
    text = _SCIENTIFIC.sub(r"{(\1 \\cdot 10^{\2})}", text) if "\\" not in text else text
    text = _NAMES.sub(r"\\\1 ", text)
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"{(\1 \\cdot \\frac{\\pi}{180})}", text)
    return _DEGREE.sub(" ", text)


def _repeating(found: re.Match[str]) -> str:
    """A decimal with a repeating end as a fraction."""
    whole, start, period = found[1] or "0", found[2], found[3] or found[4]
    shift = sympy.Integer(10) ** len(start)
    value = number(whole + start) / shift + number(period) / (shift * (10 ** len(period) - 1))
    return rf"{{(\frac{{{value.p}}}{{{value.q}}})}}"
