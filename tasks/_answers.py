r"""Answers as text: what can be said about them without any algebra.

Example:
    >>> as_integer(r"$1{,}305^\circ$"), normalise(r"\left(\dfrac12\right).")
    ('1305', '(\\frac12)')
"""

import re

_SPACING = re.compile(
    r"(?<!\\)\\[,;:! ]|\\q?quad(?![a-zA-Z])|~|\\displaystyle(?![a-zA-Z])|\\(?:left|right)(?![a-zA-Z])"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-zA-Z*]*\}")
_UNIT = re.compile(r"\\(?:text|mathrm)\s*\{\s*[a-zA-Z]+\.?\s*\}\s*$")
_DOTS = re.compile(r"\\(?:ldots|cdots|dots|dotsc|dotsb|hdots)(?![a-zA-Z])|\.\.\.+|…")
_INTEGER = re.compile(r"([+-]?)(\d+|\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+)")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_NAMES = frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "arcsin",
        "arccos",
        "arctan",
        "sinh",
        "cosh",
        "tanh",
        "log",
        "exp",
        "sqrt",
        "max",
        "min",
        "gcd",
        "lcm",
        "mod",
        "det",
        "dim",
        "inf",
        "sup",
        "lim",
        "pi",
        "factorial",
        "binom",
        "frac",
    ]
)
_NONE = frozenset(
    {"none", "no solution", "no solutions", "no such number", "no such numbers", r"\emptyset", r"\varnothing"}
)
_NONE_PATTERN = re.compile(
    r"(?:there (?:is|are) )?no (?:such |positive |real )*(?:integers?|numbers?|values?|solutions?)(?: exists?)?"
)
_POSITIVE = frozenset(
    {
        "positive integers", "natural numbers", "all positive integer",
        r"\mathbb{z}^+", r"\mathbb{z}^{+}", r"\mathbb{z}_+", r"\mathbb{z}_{+}", r"\mathbb{z}_{>0}", r"\mathbb{z}_{\ge1}",
        r"\mathbb{n}", r"n\in\mathbb{n}", r"n\in\mathbb{z}^+", r"n\in\mathbb{z}^{+}", r"n\in\mathbb{z}_{>0}", r"n\ge1",
    }
)  # fmt: skip


def normalise(answer: str) -> str:
    """The same answer with spacing commands, outer dollars, a full stop and spelling variants of commands gone."""
    text = answer.replace(r"\$", "").strip().strip("$").strip()
    text = _SPACING.sub(" ", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    text = text.replace("−", "-").replace("π", r"\pi ").replace("∞", r"\infty ")
    text = re.sub(r"\\leq(?![a-zA-Z])", r"\\le", text)
    text = re.sub(r"\\geq(?![a-zA-Z])", r"\\ge", text)
    text = re.sub(r"\s+", " ", text).strip()
    while text.endswith(".") and not _DOTS.search(text[-3:]):
        text = text[:-1].strip().rstrip("$").strip()
    return text


def as_integer(answer: str) -> str | None:
    """The integer that an answer is, as canonical digits, or None."""
    text = normalise(answer).replace("{,}", "").replace("$", "")
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|°", "", text).strip()
    found = _INTEGER.fullmatch(text.replace("- ", "-"))
    if found is None:
        return None
    digits = found[2].replace(",", "").replace(" ", "").lstrip("0") or "0"
    return "-" + digits if found[1] == "-" and digits != "0" else digits


def space_commas(answer: str, other: str) -> str:
    """`100,200` as `100, 200` where the other answer says that a list is meant."""
    if re.search(r",\s", other) and _GROUPED.fullmatch(answer):
        return answer.replace(",", ", ")
    return answer


def unwrap_text(answer: str) -> str:
    r"""The answer with `\text{...}` and its kin replaced by their words."""
    return _TEXT.sub(r" \1 ", answer)


def join_list(answer: str) -> str:
    """The answer with "and" and "or" between values replaced by commas."""
    return re.sub(r"\s*,?\s*\b(?:and|or)\b\s*", ", ", unwrap_text(answer)).strip(" ,")


def without_unit(answer: str) -> str:
    r"""A value without the one word in `\text{}` behind it."""
    value = _UNIT.sub("", answer).strip()
    return value if re.search(r"\d|\\", value) else answer


def has_dots(answer: str) -> bool:
    """Whether part of the answer is left to the reader."""
    return _DOTS.search(answer) is not None


def words(answer: str) -> list[str]:
    """Words of three letters and more that are no function's name."""
    found = _WORD.findall(unwrap_text(_ENVIRONMENT.sub(" ", answer)).replace("$", " "))
    return [word for word in found if word not in _NAMES]


def spelling(answer: str) -> str:
    """One spelling for answers that differ in nothing but typesetting."""
    text = _DOTS.sub("...", unwrap_text(normalise(answer)).replace("$", ""))
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", re.sub(r"\{(\w)\}", r"\1", text).strip())


def meaning(answer: str) -> str:
    """One spelling for a prose answer: lower case, no filler, a name of its own for "none" and "all positive"."""
    text = re.sub(r"[\s]+", " ", unwrap_text(normalise(answer)).replace("$", "")).strip(" .").lower()
    text = re.sub(r"^(?:for )?(?:all|any|every) (?:the )?", "", text)
    text = re.sub(r"^(?:(?:positive )?(?:integers?|numbers?) )?of the form ", "", text)
    if text in _NONE or _NONE_PATTERN.fullmatch(text):
        return "none"
    if text in _POSITIVE or text.replace(" ", "") in _POSITIVE:
        return "positive integers"
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def expand_signs(answer: str) -> str:
    r"""A list in which every value with \pm or \mp stands as two values."""
    if r"\pm" not in answer and r"\mp" not in answer and "±" not in answer:
        return answer
    values = []
    for value in split_list(answer.replace("±", r"\pm ")):
        upper = re.sub(r"\\mp(?![a-zA-Z])", "-", re.sub(r"\\pm(?![a-zA-Z])", "+", value))
        lower = re.sub(r"\\mp(?![a-zA-Z])", "+", re.sub(r"\\pm(?![a-zA-Z])", "-", value))
        values += list(dict.fromkeys([re.sub(r"^\s*\+", "", upper), lower]))
    return ", ".join(values)


def align_brackets(left: str, right: str) -> tuple[str, str]:
    """Both answers in brackets where one is a tuple and the other a bare list: the order then counts."""
    if is_tuple(left) and len(split_list(right)) > 1:
        return left, f"({right})"
    if is_tuple(right) and len(split_list(left)) > 1:
        return f"({left})", right
    return left, right


def is_tuple(answer: str) -> bool:
    """Whether an answer is one pair of round brackets with commas in it."""
    if not (answer.startswith("(") and answer.endswith(")")) or len(split_list(answer)) > 1:
        return False
    return len(split_list(answer[1:-1])) > 1


def is_set(answer: str) -> bool:
    """Whether an answer is written in braces."""
    return answer.startswith(r"\{") and answer.endswith(r"\}")


def split_list(answer: str) -> list[str]:
    """The values of a list: what stands between the commas outside all brackets."""
    values, depth, start = [], 0, 0
    for index, character in enumerate(answer):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            values.append(answer[start:index].strip())
            start = index + 1
    return [*values, answer[start:].strip()]
