"""The marks by which the rule judge knows a style: words, turns of phrase, signs. English alone.

A mark counts once, and half as much again if it comes back; more of the same adds nothing.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Marks:
    """Words (weight 1), phrases (weight 1.5) and patterns (weight 1) of one style. `*` ends a word that may go on."""

    words: str
    phrases: tuple[str, ...]
    patterns: tuple[str, ...]


MARKS: Mapping[str, Marks] = MappingProxyType(
    {
        "academic": Marks(
            words="furthermore moreover consequently thus hence therefore whereas nevertheless nonetheless accordingly "
            "hypothes* empiric* methodolog* theoretic* significan* correlat* literature findings evidence data analys* "
            "conceptual* framework* paradigm* phenomen* respectively notably primarily demonstrat* indicat* suggest* "
            "constitut* subsequent* context* perspective* implication* variable* parameter* examin* investigat* "
            "approximately quantitativ* qualitativ* contemporary discourse mechanism* underlying robust postulat* "
            "characteri* facilitat* attribut* predominantly conversely albeit i.e e.g cf notion factors distinguish* "
            "relevant observ* systematic* functional* process* substantial* interact* typical* sociolog* normative",
            phrases=(
                "et al",
                "in conclusion",
                "in contrast",
                "with respect to",
                "in terms of",
                "it may be",
                "it is argued",
                "can be understood",
                "may be regarded",
                "to some extent",
                "further research",
                "this paper",
                "this study",
                "present study",
                "on the one hand",
                "the extent to which",
                "as a result of",
                "is defined as",
                "in this regard",
                "play a role",
                "plays a role",
                "has been shown",
                "may therefore be",
            ),
            patterns=(
                r"\(\w+(?: et al\.)?,? \d{4}\)",
                r"\[\d+\]",
                r";",
                r"\b\w{5,}(?:isation|ization|ological|ivity|ability)\b",
            ),
        ),
        "cute": Marks(
            words="yay hehe hihi teehee aww awww teeny tiny wee itty fluffy snuggl* cuddl* cuddly cozy sweetie sweetheart "
            "cutie cute yummy nom tummy bunny bunnies kitty kitten* puppy teddy hug hugs kiss kisses sparkl* giggl* "
            "squee eep nya uwu owo pwease smol boop wiggl* adorable darling sunshine rainbow* cupcake* pinky twinkl* "
            "oopsie whee bye-bye nap sleepy little squishy toasty cheeky pawsome mwah smooch* hooray woohoo doggy birdie",
            phrases=(
                "so much fun",
                "super duper",
                "pretty please",
                "happy dance",
                "my dear little",
                "oh my gosh",
                "love love",
            ),
            patterns=(
                r"~",
                r"\b\w*([aeiouy])\1{2,}\w*\b",
                r"[!]{2,}|!(?:[^!]*!){2}",
                r"\(?\^[_.o-]?\^\)?|:3|<3|:-?\)|\(=?\^|>_<|:D",
                "[\u2661\u2665\u2764\u2728\u2606\u2605\u266a\u266b\U0001f300-\U0001faff]",
                r"\b(\w{3,6})[ -]\1\b",
            ),
        ),
        "chuunibyou": Marks(
            words="kukuku kuku mwahaha muahaha fuhaha behold tremble abyss abyssal forbidden sealed seal unseal* mortal* "
            "fool fools foolish cursed curse* darkness shadow* crimson ancient destiny fated prophecy prophesied awaken* "
            "power powers realm demon* dragon* chosen apocalyp* eternal void infernal bloodline obsidian unleash* summon* "
            "incantation phantom* doom doomed vengeance abomination netherworld underworld chaos almighty bow kneel "
            "reincarnat* grimoire arcane wicked hellfire overlord oblivion cataclysm* scythe flames vessel pact sigil",
            phrases=(
                "dark flame",
                "right arm",
                "left arm",
                "right eye",
                "left eye",
                "evil eye",
                "true name",
                "true form",
                "true power",
                "the organization",
                "the organisation",
                "my veins",
                "chains of fate",
                "none can",
                "no one can stop",
                "you dare",
                "i alone",
                "lord of",
                "king of darkness",
                "within me",
                "before me",
                "of the night",
                "hidden power",
            ),
            patterns=(
                r"\b(?:HA ?){2,}|\b(?:ha){3,}\b",
                r"\u2020|\u2620|\u26a1",
                r"\b(?:I am|I, the|I,) [^.!?]{0,40}\b(?:of|who)\b",
            ),
        ),
        "classical": Marks(
            words="thou thee thy thine ye hath doth dost hast art wilt shalt shouldst wouldst canst 'tis 'twas 'twere o'er "
            "ne'er e'er e'en ere lo hark hearken verily forsooth prithee methinks mayhap perchance anon wherefore whence "
            "whither hither thither yonder yore unto whilst betwixt amidst oft naught aught nigh alas sooth doth fain fair "
            "maiden* swain beauteous woe befall* behoove* begat hence- endeth cometh goeth saith quoth knoweth giveth taketh "
            "sire goodly bespoke thrice erstwhile henceforth therein thereof bade hallowed vale zephyr bosom tarry spake",
            phrases=(
                "gentle reader",
                "i pray thee",
                "i pray you",
                "fare thee well",
                "days of yore",
                "good sir",
                "your humble servant",
                "dear reader",
                "long ago there",
                "it came to pass",
                "pray tell",
                "be it known",
                "hear ye",
                "would that",
                "so it was that",
            ),
            patterns=(
                r"\b[a-z]{3,}(?:eth|est)\b(?<!best)(?<!rest)(?<!test)(?<!guest)(?<!honest)(?<!forest)(?<!interest)(?<!teeth)",
                r"\bO [A-Z]?[a-z]+",
                r"\b\w+'d\b",
            ),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Finder:
    """One style's marks, ready to be looked for."""

    words: re.Pattern[str]
    stems: tuple[str, ...]
    phrases: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def marks(self, text: str) -> Counter[str]:
        """How often each mark stands in a text; phrases and words in any case."""
        lower = text.replace("\u2019", "'").lower()
        found = Counter(self._mark(match[0]) for match in self.words.finditer(lower))
        for pattern in self.patterns:
            found[pattern.pattern] = sum(1 for _ in pattern.finditer(text))
        return +found

    def marked_words(self, text: str) -> int:
        """How many words lie in a mark that is a word or a phrase."""
        lower = text.replace("\u2019", "'").lower()
        return sum(match[0].count(" ") + 1 for match in self.words.finditer(lower))

    def weight(self, mark: str) -> float:
        """What a mark is worth."""
        return 1.5 if mark in self.phrases else 1.0

    def _mark(self, word: str) -> str:
        return next((stem for stem in self.stems if word.startswith(stem)), word)


@lru_cache(maxsize=1)
def finders() -> Mapping[str, Finder]:
    """A finder for every style."""
    return MappingProxyType({style: _finder(marks) for style, marks in MARKS.items()})


def _finder(marks: Marks) -> Finder:
    words = [word.removesuffix("*") for word in marks.words.split()]
    stems = tuple(word.removesuffix("*") for word in marks.words.split() if word.endswith("*"))
    # Longer ones first: of two marks that begin at one place the longer is meant.
    either = "|".join(
        re.escape(mark) + (r"\w*" if mark in stems else "")
        for mark in sorted({*words, *marks.phrases}, key=lambda mark: (-len(mark), mark))
    )
    return Finder(
        words=re.compile(rf"(?<![\w'])(?:{either})(?!\w)"),
        stems=stems,
        phrases=frozenset(marks.phrases),
        patterns=tuple(re.compile(pattern) for pattern in marks.patterns),
    )
