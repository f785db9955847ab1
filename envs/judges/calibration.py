"""How far a judge can be trusted: against labels by hand, asked again, with the styles in another order, with longer texts.

Invariant: a text that could not be judged is counted as such and enters no share; every share says over how many texts.

Example:
    found = await calibrate(RuleJudge, read_gold())
    found.style.value, found.style.n, found.kappa
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sao_gym.envs.judges.gold import Labelled
from sao_gym.envs.judges.signals import words_of
from sao_gym.errors import GradingError
from sao_gym.protocols import Judge, Verdict
from sao_gym.statistics import Interval, wilson_interval
from sao_gym.writing_styles import PLAIN, STYLES

Pairs = Sequence[tuple[Labelled, Verdict]]
_FILLER = (
    "After that we went home and had supper at the usual time.",
    "Nothing else happened on that day.",
    "The next morning it was cold, so Peter lit the stove and made coffee.",
    "Anna came by at ten with the papers from the office.",
    "There was a bill for the water and a card from her brother in Leeds.",
    "We put both on the shelf.",
    "Later somebody called about the car, but it had been sold in May.",
    "The shop on the corner was open again, with new people behind the counter.",
    "They had bread, milk, soap and string.",
    "In the evening the lights went out for an hour, and we played cards.",
    "Peter won twice.",
    "On Sunday the bus did not run, which made the walk to the station a long one.",
    "Everyone had a seat on the train.",
    "By then the rain had stopped, and it was dry for the rest of the week.",
)
"""Plain sentences about nothing; none of them is said twice."""


@dataclass(frozen=True, slots=True)
class Share:
    """`hits` of `n`, with a 95 % interval; `value` is None where there is nothing to count."""

    hits: int
    n: int

    @property
    def value(self) -> float | None:
        """The share."""
        return self.hits / self.n if self.n else None

    @property
    def interval(self) -> Interval:
        """Wilson's."""
        return wilson_interval(self.hits, self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was found.

    `style` and `quality`: agreement with the labels; `named`: of the texts given a style, those given the right one; `kappa`:
    agreement on style beyond chance (Cohen 1960), None where chance leaves no room. `flips`: verdicts that differ when asked
    again. `order_flips`: styles that differ with the list turned round; `first_excess`: how much more often the style that
    is listed first is named than it should be. `padding_gains`: bad texts that turn good with plain sentences added;
    `padding_flips`: verdicts that differ then. `confusion`: how often each (label, verdict) of styles came.
    """

    judge: str
    texts: int
    errors: Mapping[str, int]
    style: Share
    named: Share
    kappa: float | None
    quality: Share
    flips: Share
    order_flips: Share
    first_excess: float
    padding_gains: Share
    padding_flips: Share
    confusion: Mapping[tuple[str, str], int]


@dataclass(slots=True)
class _Asked:
    """Verdicts of one way to ask, by text; None where there was none."""

    verdicts: list[Verdict | None]
    errors: Counter[str] = field(default_factory=Counter)


async def calibrate(make: Callable[[], Judge], gold: Sequence[Labelled]) -> Calibration:
    """Ask about every text four times: twice alike, with the styles turned round, and with a longer text.

    `make` gives a judge that remembers nothing of the others. Raises ApiError, ConfigError.
    """
    labels = tuple(STYLES)
    base = await _ask(make(), gold, labels)
    again = await _ask(make(), gold, labels)
    turned = await _ask(make(), gold, labels[::-1])
    padded = await _ask(make(), [_padded(one) for one in gold], labels)
    pairs = _pairs(gold, base)
    named = [(one, verdict) for one, verdict in pairs if verdict.label != PLAIN]
    judge = make()
    version = judge.version
    await judge.close()
    return Calibration(
        judge=version,
        texts=len(gold),
        errors=dict(base.errors + again.errors + turned.errors + padded.errors),
        style=_share([verdict.label == one.style for one, verdict in pairs]),
        named=_share([verdict.label == one.style for one, verdict in named]),
        kappa=_kappa(pairs),
        quality=_share([verdict.quality == one.quality for one, verdict in pairs]),
        flips=_differing(base, again),
        order_flips=_share([a.label != b.label for a, b in _both(base, turned)]),
        first_excess=(_excess(pairs, labels[0]) + _excess(_pairs(gold, turned), labels[-1])) / 2,
        padding_gains=_share(
            [
                b.quality
                for one, a, b in zip(gold, base.verdicts, padded.verdicts, strict=True)
                if a and b and not a.quality
            ]
        ),
        padding_flips=_differing(base, padded),
        confusion=dict(Counter((one.style, verdict.label) for one, verdict in pairs)),
    )


async def _ask(judge: Judge, gold: Sequence[Labelled], labels: Sequence[str]) -> _Asked:
    asked = _Asked([None] * len(gold))

    async def one(index: int) -> None:
        try:
            asked.verdicts[index] = await judge.judge(gold[index].request, gold[index].text, labels)
        except GradingError as error:
            asked.errors[error.kind] += 1

    try:
        await asyncio.gather(*(one(index) for index in range(len(gold))))
    finally:
        await judge.close()
    return asked


def _padded(one: Labelled) -> Labelled:
    """The same text with plain sentences after it: as many words again, and three sentences at least."""
    added: list[str] = []
    for sentence in _FILLER:
        if len(added) >= 3 and len(words_of(" ".join(added))) >= len(words_of(one.text)):
            break
        added.append(sentence)
    return Labelled(request=one.request, text=" ".join([one.text, *added]), style=one.style, quality=one.quality)


def _pairs(gold: Sequence[Labelled], asked: _Asked) -> Pairs:
    return [(one, verdict) for one, verdict in zip(gold, asked.verdicts, strict=True) if verdict is not None]


def _both(first: _Asked, second: _Asked) -> list[tuple[Verdict, Verdict]]:
    return [(a, b) for a, b in zip(first.verdicts, second.verdicts, strict=True) if a is not None and b is not None]


def _differing(first: _Asked, second: _Asked) -> Share:
    return _share([(a.label, a.quality) != (b.label, b.quality) for a, b in _both(first, second)])


def _share(hits: Sequence[bool]) -> Share:
    return Share(sum(hits), len(hits))


def _excess(pairs: Pairs, style: str) -> float:
    """Share of the verdicts that name a style, less the share of the texts that are in it."""
    if not pairs:
        return 0.0
    return sum((verdict.label == style) - (one.style == style) for one, verdict in pairs) / len(pairs)


def _kappa(pairs: Pairs) -> float | None:
    if not pairs:
        return None
    mine, theirs = Counter(one.style for one, _ in pairs), Counter(verdict.label for _, verdict in pairs)
    chance = sum(mine[style] * theirs[style] for style in mine) / len(pairs) ** 2
    agreed = sum(one.style == verdict.label for one, verdict in pairs) / len(pairs)
    return None if chance == 1 else (agreed - chance) / (1 - chance)
