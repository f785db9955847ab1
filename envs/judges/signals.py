"""What can be counted about a text without understanding it: the ways in which judges are commonly gamed.

Example:
    >>> found = signals("Write a poem about rain.", "Rain, rain, rain, rain.", words_asked=40)
    >>> found.words, found.distinct_share, found.length_ratio
    (4, 0.25, 0.1)
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_STOPWORDS = (
    "a about after all also an and any are as at be because been before but by can could did do does down each few for "
    "from had has have he her here him his how i if in into is it its just let like me more most my no not of off on one "
    "only or other our out over own she should so some such than that the their them then there these they this those "
    "through to too under until up us very was we were what when where which who why will with would you your "
    "write please words word some use about take keep short long"
)
_STOP = frozenset(_STOPWORDS.split())
_N = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """Figures of one text.

    `length_ratio`: words for each that was asked for, 0 where no length was. `distinct_share`: different words in the
    first 100. `repetition`: share of word triples that stood there before. `echo`: share of runs of five words that
    are the request's. `on_topic`: 1 if it shares a word stem with the request, else 0. `letters`: share of letters and spaces among the characters.
    """

    words: int
    length_ratio: float
    distinct_share: float
    repetition: float
    echo: float
    on_topic: float
    letters: float


def words_of(text: str) -> list[str]:
    """The words, in lower case, with a plain apostrophe."""
    return [word.lower().replace("\u2019", "'") for word in WORD.findall(text)]


def content_stems(words: Sequence[str]) -> set[str]:
    """What the words are about: the first letters of those that are no function words."""
    return {word[:5] for word in words if len(word) > 2 and word not in _STOP}


def signals(request: str, text: str, *, words_asked: float = 0) -> Signals:
    """Count."""
    words = words_of(text)
    first = words[:100]
    signs = [sign for sign in text if not sign.isspace()]
    return Signals(
        words=len(words),
        length_ratio=len(words) / words_asked if words_asked else 0.0,
        distinct_share=len(set(first)) / len(first) if first else 0.0,
        repetition=_repetition(words),
        echo=_shared(words_of(request), words),
        on_topic=float(bool(content_stems(words) & content_stems(words_of(request)))),
        letters=sum(sign.isalpha() for sign in signs) / len(signs) if signs else 0.0,
    )


def _repetition(words: Sequence[str]) -> float:
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1.0 - len(set(triples)) / len(triples) if triples else 0.0


def _shared(request: Sequence[str], words: Sequence[str]) -> float:
    """Share of the text's words that lie in a run of five which the request holds too."""
    known = Counter(tuple(request[i : i + _N]) for i in range(len(request) - _N + 1))
    covered = set[int]()
    for i in range(len(words) - _N + 1):
        if tuple(words[i : i + _N]) in known:
            covered.update(range(i, i + _N))
    return len(covered) / len(words) if words else 0.0
