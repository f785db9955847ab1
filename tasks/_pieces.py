r"""Texts that are several answers in one: a value for each condition, a value with both signs.

Only texts are taken apart here; what the parts mean is `_reading`'s.

Example:
    >>> split_pieces("1 if n is odd, otherwise 2"), expand_signs(r"1 \pm x")
    ([('1', 'n is odd'), ('2', 'otherwise')], ['1 + x', '1 - x'])
"""

import re

from sao_gym.tasks._answers import split_top
from sao_gym.tasks._relations import RELATION

MAX_SIGNS = 4
OTHERWISE = "otherwise"
SIGNS = re.compile(r"\\(?:pm|mp)(?![a-zA-Z])")
_CASES = re.compile(r"(.*?)\\begin\{cases\}(.*)\\end\{cases\}", re.DOTALL)
_OTHERWISE = re.compile(r",? ?(?:otherwise|else|in all other cases|for all other \w+)[ ,:]*", re.IGNORECASE)
_IN_BRACKETS = rf"([^()]+) ?\(([^()]*(?:{RELATION})[^()]*)\)"
_TWICE = re.compile(rf"{_IN_BRACKETS},? {_IN_BRACKETS}")
_BETWEEN = r"[,;]|(?<![\\a-zA-Z])and(?![a-zA-Z])"


def split_pieces(text: str) -> list[tuple[str, str]]:
    r"""(value, condition) of `A if C, B otherwise`, of `\begin{cases}` and of `A (C) B (D)`; else nothing."""
    if found := _CASES.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\", found[2]) if row.strip()]
        return [(row[0].strip(" ,"), clean(row[1])) for row in rows] if all(len(row) == 2 for row in rows) else []
    if found := _TWICE.fullmatch(text):
        return [(found[1], clean(found[2])), (found[3], clean(found[4]))]
    return _spoken(text) if re.search(r"(?<![a-zA-Z\\])(?:if|otherwise)(?![a-zA-Z])", text) else []


def _spoken(text: str) -> list[tuple[str, str]]:
    rest = ""
    if last := _OTHERWISE.search(text):
        rest, text = text[last.end() :].strip(" ,."), text[: last.start()].strip(" ,;")
        if not rest:  # the value stands before "otherwise"
            parts, found = split_top(text, _BETWEEN)
            if not found:
                return []
            rest, text = parts[-1], text[: text.rindex(parts[-1])].rstrip(" ,;").removesuffix("and")
    pairs = []
    for part in split_top(text, _BETWEEN)[0]:
        value, _, condition = part.partition(" if ")
        if not condition:
            return []
        pairs.append((value.strip(), clean(condition)))
    return [*pairs, (rest, OTHERWISE)] if rest else pairs


def clean(condition: str) -> str:
    """A condition without the words that introduce it, and without articles."""
    text = condition.strip(" ,.")
    text = re.sub(r"^(?:if|when|for|where)(?![a-zA-Z])", "", text).strip()
    if _OTHERWISE.fullmatch(text):
        return OTHERWISE
    text = re.sub(r"(?<![\\a-zA-Z])(?:the|an|is|are|a(?= [a-z]{3}))(?![a-zA-Z])", " ", text)
    return re.sub("isoceles", "isosceles", re.sub(r"\s+", " ", text)).strip()


def expand_signs(text: str) -> list[str]:
    r"""A value with \pm as its values; with \mp beside it the signs go together, else each goes alone."""
    if not SIGNS.search(text):
        return [text]
    if re.search(r"\\mp(?![a-zA-Z])", text):
        upper = re.sub(r"\\mp(?![a-zA-Z])", "-", re.sub(r"\\pm(?![a-zA-Z])", "+", text))
        lower = re.sub(r"\\mp(?![a-zA-Z])", "+", re.sub(r"\\pm(?![a-zA-Z])", "-", text))
        return [upper, lower]
    texts = [text]
    for _ in range(min(len(SIGNS.findall(text)), MAX_SIGNS)):
        texts = [re.sub(r"\\pm(?![a-zA-Z])", sign, one, count=1) for one in texts for sign in ("+", "-")]
    return texts
