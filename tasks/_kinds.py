"""What kinds of answers there are: the records that `_reading` makes of texts and `_equality` compares."""

from dataclasses import dataclass
from typing import Any

import sympy

from sao_gym.tasks._prose import Description
from sao_gym.tasks._values import Value


@dataclass(frozen=True, slots=True)
class Words:
    """Words that the table knows."""

    description: Description


@dataclass(frozen=True, slots=True)
class Opaque:
    """What no rule can read; equal only to the same spelling."""

    text: str


@dataclass(frozen=True, slots=True)
class Items:
    """Several answers: `brackets` is "" or "{}" where order does not count, "()" or "[]" where it does."""

    items: tuple["Reading", ...]
    brackets: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One interval of a set of reals; a single point has equal, closed ends."""

    low: Any
    low_closed: bool
    high: Any
    high_closed: bool


@dataclass(frozen=True, slots=True)
class RealSet:
    """Intervals and points, from brackets or from a solved inequality in `variable`."""

    parts: tuple[Part, ...]
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class Definition:
    """`x = 5`, `f(x) = x + 1`: a name, the arguments it is given for, and what it is."""

    name: str
    arguments: tuple[str, ...]
    value: "Reading"


@dataclass(frozen=True, slots=True)
class Relation:
    """An equation or inequality that is not solved: `left operator 0`. Operators are =, <, <=."""

    operator: str
    left: Any


@dataclass(frozen=True, slots=True)
class Congruence:
    """`7 (mod 13)`."""

    residue: Any
    modulus: Any
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A matrix, or with the fence "v" a determinant."""

    rows: tuple[tuple["Reading", ...], ...]
    fence: str


@dataclass(frozen=True, slots=True)
class Pieces:
    """A value for each condition; "otherwise" is a condition too."""

    pieces: tuple[tuple["Reading", "Reading"], ...]


@dataclass(frozen=True, slots=True)
class Conditioned:
    """An answer with a remark on its letters: `2^k for k >= 0`."""

    answer: "Reading"
    condition: "Reading"


@dataclass(frozen=True, slots=True)
class Builder:
    """`{(a, b) : ab <= 1}`."""

    element: str
    condition: "Reading"


Reading = (
    Value
    | Words
    | Opaque
    | Items
    | RealSet
    | Definition
    | Relation
    | Congruence
    | Grid
    | Pieces
    | Conditioned
    | Builder
)
ALL_REALS = RealSet((Part(-sympy.oo, False, sympy.oo, False),))
POSITIVE_REALS = RealSet((Part(sympy.Integer(0), False, sympy.oo, False),))
