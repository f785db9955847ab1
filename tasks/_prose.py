r"""Answers in words: a small table of what they say, so that "all odd n" and "n is odd" are one answer.

A description is a set of kinds of numbers ("prime", "power of 2", "7") and the numbers left out. What the table does
not know is no description: no rule decides it.

Example:
    >>> describe(r"1 and odd prime numbers") == describe(r"\text{all odd primes and } 1")
    True
"""

import re
from dataclasses import dataclass

from sao_gym.tasks._answers import unwrap_text


@dataclass(frozen=True, slots=True)
class Description:
    """Kinds of numbers, and numbers left out of them. Nothing at all is "none"."""

    kinds: frozenset[str]
    without: frozenset[str] = frozenset()


_NUMBER_WORDS = {
    "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10",
}  # fmt: skip
_NONE = re.compile(
    r"(?:there (?:is|are|exists?) )?(?:none|nothing|no (?:such )?(?:(?:positive|real|integer|prime) )*"
    r"(?:solutions?|integers?|numbers?|values?|functions?|primes?|n|x)?(?: exists?)?)(?: (?:works?|satisf(?:y|ies) it))?"
    r"|(?:the )?empty set|\\emptyset|\\\{ *\\\}|does not exist|there (?:do(?:es)? not exist any|are no) (?:such )?\w+"
)
_N = r"(?: (?:positive )?(?:integers?|numbers?|naturals?|n|k|m|x))*"
_WORDS: tuple[tuple[str, str], ...] = (
    (rf"primes?{_N}", "prime"),
    (rf"composites?{_N}", "composite"),
    (rf"(?:positive )?odd(?: positive)?{_N}", "odd"),
    (rf"(?:positive )?even(?: positive)?{_N}", "even"),
    (rf"(?:perfect )?squares?{_N}", "square"),
    (rf"(?:perfect )?cubes?{_N}", "cube"),
    (r"(?:positive (?:integers?|whole numbers?)|natural numbers?|naturals?|counting numbers?)(?: n| k| m)?"
     r"|\\mathbb\{?[zn]\}?(?:[\^_] ?\{? ?(?:\+|>0|\\ge ?1|\*) ?\}?|_\{ ?> ?0 ?\})?(?<!z)(?<!z\})",
     "positive integer"),
    (r"non-?negative integers?|whole numbers?|\\mathbb\{z\}(?:\^\{?\+\}?)?_(?:\{ ?\\ge ?0 ?\}|0)|\\mathbb\{n\}_0",
     "non-negative integer"),
    (r"negative integers?|\\mathbb\{?z\}?(?:[\^_]\{?-\}?|_\{<0\})", "negative integer"),
    (r"integers?|\\mathbb\{?z\}?", "integer"),
    (r"rationals?(?: numbers?)?|\\mathbb\{?q\}?", "rational"),
    (r"irrationals?(?: numbers?)?", "irrational"),
    (r"complex(?: numbers?)?|\\mathbb\{?c\}?", "complex"),
    (r"reals?(?: numbers?| values?)?(?: x)?|\\mathbb\{?r\}?", "real"),
    (r"positive reals?(?: numbers?)?|\\mathbb\{?r\}?(?:[\^_]\{? ?\+ ?\}?|_\{ ?> ?0 ?\})", "positive real"),
)  # fmt: skip
_KINDS = [(re.compile(pattern), kind) for pattern, kind in _WORDS]
_OF = re.compile(r"(?:(?:integer )?(powers?|multiples?) of|(?:(?:n|k|m|x|integers?|numbers?) )?(divisible) by) (\d+)")
_FILLER = re.compile(
    r"\b(?:all|any|every|only|exactly|precisely|just|both|the|a|an|set of|those|values? of|for|which|that|such that|"
    r"if and only if|iff)\b"
)
_IS = re.compile(r"(?:^|\b)(?:positive )?(?:integers? )?[a-z](?: (?:is|are|must be|can be|=|\\in)|\\in) ")
_LEFT_OUT = re.compile(
    r",? ?\(?\b(?:excluding|except(?: for)?|other than|apart from|but not|without|not equal to)\b ?(.+?)\)?$"
)
_JOINED = re.compile(r"\s*(?:,? (?:and|or)(?: also)? |,|;|\\cup)\s*")
_SCALED = re.compile(
    r"(\d+) ?\\?(?:cdot|times)? ?([a-z]) ?[,(]? ?(?:(?:for|where|with) )?(?:all |any |some )?(?:\2 (?:is|being) )?"
    r"(?:an? )?(odd )?primes?(?: number)?s?(?: \2)? ?\)?"
)
_VALUE = re.compile(r"-?\d+")


def describe(answer: str) -> Description | None:
    """What a normalised answer in words says, or None if the table does not know it."""
    text = re.sub(r"[a-zA-Z]{2,}|\b[A-Z]\b", lambda word: word[0].lower(), unwrap_text(answer)).strip(" .,;")
    text = re.sub(r"\b(" + "|".join(_NUMBER_WORDS) + r")\b", lambda word: _NUMBER_WORDS[word[0]], text)
    if _NONE.fullmatch(text):
        return Description(frozenset())
    without: frozenset[str] = frozenset()
    if found := _LEFT_OUT.search(text):
        values = [part.strip(" $\\{}") for part in _JOINED.split(found[1])]
        if not all(map(_VALUE.fullmatch, values)):
            return None
        without, text = frozenset(values), text[: found.start()]
    if re.search(r"\bnon-?zero\b", text):
        without, text = without | {"0"}, re.sub(r"\bnon-?zero ", "", text)
    scaled = {f"{found[1]} times {found[3] or ''}prime" for found in _SCALED.finditer(text)}
    text = _SCALED.sub(" ", text) if scaled else text
    parts = [part.strip() for part in _JOINED.split(text) if part.strip()]
    kinds = [_kind(part) for part in parts]
    if None in kinds or not (scaled or any(kind and not _VALUE.fullmatch(kind) for kind in kinds)):
        return None
    found_kinds = frozenset(kind for kind in kinds if kind) | scaled
    if "odd prime" in found_kinds:
        found_kinds, without = (found_kinds - {"odd prime"}) | {"prime"}, without | {"2"}
    return Description(found_kinds, without)


def _kind(part: str) -> str | None:
    """The kind of number that one part names."""
    part = re.sub(r"\s+", " ", _IS.sub(" ", _FILLER.sub(" ", part))).strip(" :$")
    if _VALUE.fullmatch(part):
        return part
    if re.fullmatch(r"[a-z] (?:odd|even|prime|composite)", part):
        part = part[2:]
    for pattern, kind in _KINDS:
        if pattern.fullmatch(part):
            return kind
    if re.fullmatch(rf"odd primes?{_N}|primes? (?:greater|larger|bigger) than 2|primes? > ?2", part):
        return "odd prime"
    if found := _OF.fullmatch(part):
        return f"{'power' if (found[1] or '').startswith('power') else 'multiple'} of {found[3]}"
    return None
