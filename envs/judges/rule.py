"""RuleJudge: a transparent scorer of styles and of degenerate text, for studies without a network.

The style is the one with most marks for its length, if it is clear; the quality is 1 unless the text is degenerate in a way
that can be counted. It understands nothing: it cannot tell a good text from a middling one, nor one about something else, and a
text may be made for it.

Example:
    >>> judge = RuleJudge()
    >>> verdict = judge.read("Write a poem about rain.", "Lo, the rain doth fall, and thou, my heart, art wet as it.",
    ...                      ("cute", "classical"))
    >>> verdict.label, verdict.quality
    ('classical', True)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sao_gym.envs.judges.markers import Reading, read
from sao_gym.envs.judges.signals import Signals, signals, words_of
from sao_gym.errors import ConfigError
from sao_gym.protocols import Verdict
from sao_gym.writing_styles import PLAIN

VERSION = "rule-1"
_PASSAGE = 12
"""Words of a passage."""
_SIGNS = re.compile(r"(?:[^\w\s]\s*|\d\s*){24}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Where the lines are drawn.

    A style needs `style_marks` for a text of `style_words` words (of a longer one more, with the root of its length), and
    `style_lead` times as many as the next. At most `mark_share` of the words may be marks.
    """

    min_words: int = 8
    max_words: int = 1200
    min_distinct: float = 0.4
    max_repetition: float = 0.3
    max_echo: float = 0.6
    min_letters: float = 0.6
    mark_share: float = 0.6
    style_marks: float = 1.5
    style_words: int = 40
    style_lead: float = 1.2

    def __post_init__(self) -> None:
        if not 1 <= self.min_words <= self.max_words or self.style_words < 1 or self.style_lead < 1:
            raise ConfigError("rules need 1 <= min_words <= max_words, style_words >= 1 and style_lead >= 1")


class RuleJudge:
    """Implements `sao_gym.protocols.Judge`."""

    def __init__(self, rules: Rules | None = None) -> None:
        self.rules = rules or Rules()

    @property
    def version(self) -> str:
        """The rules' version; other rules than the usual ones are part of it."""
        return VERSION if self.rules == Rules() else f"{VERSION}:{self.rules}"

    async def judge(self, request: str, text: str, labels: Sequence[str]) -> Verdict:
        """See `read`."""
        return self.read(request, text, labels)

    async def close(self) -> None:
        """Nothing to free."""

    def read(self, request: str, text: str, labels: Sequence[str]) -> Verdict:
        """The verdict; it is a function of the arguments alone."""
        found = signals(request, text)
        readings = read(text)
        scores = {style: reading.weight for style, reading in readings.items()}
        label = self._label({name: scores.get(name, 0.0) for name in labels}, found.words)
        problems = self._problems(request, text, found, readings)
        shown = ", ".join(f"{name} {score:.1f}" for name, score in sorted(scores.items()))
        return Verdict(
            quality=not problems, label=label, judge=self.version, problems=problems, detail=f"marks: {shown}"
        )

    def _label(self, scores: Mapping[str, float], words: int) -> str:
        rules = self.rules
        first, *rest = sorted(scores, key=lambda name: -scores[name])
        second = scores[rest[0]] if rest else 0.0
        needed = rules.style_marks * max(1.0, words / rules.style_words) ** 0.5
        is_clear = scores[first] >= needed and scores[first] >= rules.style_lead * second
        return first if is_clear else PLAIN

    def _problems(self, request: str, text: str, found: Signals, readings: Mapping[str, Reading]) -> tuple[str, ...]:
        """What is wrong, in the whole and in any passage of it: a bad text is not mended by plain words around it."""
        rules, words = self.rules, words_of(text)
        marked = [reading.flags for reading in readings.values()]
        echoes = found.echo * found.words
        tests = {
            "too_short": found.words < rules.min_words,
            "too_long": found.words > rules.max_words,
            "few_words": found.distinct_share < rules.min_distinct or has_passage_of_few_words(words),
            "repetition": found.repetition > rules.max_repetition,
            "echo": found.echo > rules.max_echo or echoes > max(1.5 * len(words_of(request)), _PASSAGE),
            "signs": found.letters < rules.min_letters or _SIGNS.search(text) is not None,
            "style_words_only": any(
                share(flags) > rules.mark_share or has_passage_of_marks(flags) for flags in marked if flags
            ),
        }
        return tuple(name for name, is_so in tests.items() if is_so)


def style_scores(text: str) -> dict[str, float]:
    """Weight of the different marks of every style in a text: a mark that comes back counts half as much again."""
    return {style: reading.weight for style, reading in read(text).items()}


def has_passage_of_few_words(words: Sequence[str]) -> bool:
    """Whether twelve words in a row are four different ones or fewer."""
    return any(len(set(words[i : i + _PASSAGE])) <= _PASSAGE // 3 for i in range(len(words) - _PASSAGE + 1))


def has_passage_of_marks(flags: Sequence[bool]) -> bool:
    """Whether all of twelve words in a row, but one, are marks of one style."""
    return any(sum(flags[i : i + _PASSAGE]) >= _PASSAGE - 1 for i in range(len(flags) - _PASSAGE + 1))


def share(flags: Sequence[bool]) -> float:
    """Share of the words that are marks: near 1 for style words without content."""
    return sum(flags) / len(flags)
