"""The marks by which the rule judge knows a style: words, turns of phrase, signs. English alone.

A mark counts once, and half as much again if it comes back; more of the same adds nothing.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Marks:
    """Words (weight 1), phrases (1.5) and patterns (1) of one style. `*` ends a word that may go on.

    `dense` is a pattern of words, and the share of a text's words that counts as one mark of weight 1.5.
    """

    words: str
    phrases: tuple[str, ...]
    patterns: tuple[str, ...]
    dense: tuple[str, float] | None = None


DENSE = "(density)"
_WORD = re.compile(r"'?\w+(?:['.-]\w+)*")
_LATIN = (
    r"\b[a-z]{3,}(?:tion|tions|sion|ment|ments|ity|ities|ance|ence|ism|ology|ative|ical|ally|ised|ized|ular|ively)\b"
)
MARKS: Mapping[str, Marks] = MappingProxyType(
    {
        "academic": Marks(
            words="furthermore moreover consequently thus hence therefore whereas nevertheless nonetheless accordingly "
            "hypothes* empiric* methodolog* theoretic* significan* correlat* literature finding findings evidence data "
            "analys* conceptual* framework* paradigm* phenomen* respectively notably primarily demonstrat* indicat* "
            "suggest* constitut* subsequent* context* perspective* implication* variable* parameter* examin* investigat* "
            "approximately quantitativ* qualitativ* contemporary discourse mechanism* underlying robust postulat* "
            "characteri* facilitat* attribut* predominantly conversely albeit i.e e.g cf notion factor factors distinguish* "
            "relevant observation* systematic* functional* process* substantial* interact* typical* sociolog* normative "
            "considerabl* moderate* negligible comparable hypothet* classif* preliminary proposed survey relation* "
            "distribut* structur* function* experiment* replicat* measure* effect effects evaluat* assess* argument* "
            "inhibit* utili* consumption expenditure liability specif* discrepancy appropriate condition* adequate "
            "exemplar* illustrat* emerg* circulat* distinction formal refer* situat* symbol* narrative persuasive econom* "
            "increase* decrease* reduce* reduction* correspond* estimate* permit* favour* limited saturation outcome "
            "inhabitant* prefer* relies rely element* component* derive* depend* exhibit* comprise* consist* determin* "
            "influence* occur* require* result results rather namely roughly exceed* frequen* average ratio degree extent "
            "critique dialectic* ontolog* epistem* cognitive ecological linguistic historiograph* premise* inference",
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
                "for instance",
                "in question",
                "by reference to",
                "in favour of",
                "in the form of",
                "rather than",
                "with regard to",
                "the question of whether",
                "draws on",
            ),
            patterns=(
                r"\(\w+(?: (?:et al\.|and \w+))?,? \d{4}\)",
                r"\[\d+\]",
                r";",
                r"\b\w{5,}(?:isation|ization|ological|ivity|ability)\b",
                r"\b(?:is|are|was|were|be|been) (?:\w+ly )?\w{3,}(?:ed|wn|ght)\b",
            ),
            dense=(_LATIN, 0.08),
        ),
        "cute": Marks(
            words="yay yippee hehe hihi teehee aww awww ahhh teeny tiny wee itty fluffy snuggl* cuddl* cuddly cozy cosy "
            "sweetie sweetheart cutie cute cutest yummy nom tummy bunny bunnies kitty kitten* puppy teddy hug hugs kiss "
            "kisses kissies sparkl* giggl* squee eep nya uwu owo pwease smol boop wiggl* adorable darling sunshine rainbow* "
            "cupcake* pinky twinkl* oopsie whee wheee bye-bye nap sleepy little squishy squish* toasty cheeky pawsome mwah "
            "smooch* hooray woohoo doggy birdie xoxo snoozy snooz* fuzzy tootsies duckie blankie* munch* itsy eensy buddies "
            "buddy waddl* tiptoe oopsy whoopsie bitty mousie toadie birdies froggy piggy lamby ducky grampy granny mommy "
            "hop hoppity hippity zippy buzzy wobbly bumblers honeybees cookie cookies candy lollipop popcorn pillows jammies "
            "comfiest bestest phew brrr glitter plump rosy snug pretty promise thankies fairy tutu bow purred purr mittens "
            "bouncy peek-a-boo peekaboo bubbles fluff pink marshmallow* sprinkles sugarplum honey cuppa scary babies dearest "
            "tinkle jingle pitter-patter lullaby cheeks nosie tickl* happy fun",
            phrases=(
                "so much fun",
                "super duper",
                "super fun",
                "pretty please",
                "please please",
                "happy dance",
                "my dear little",
                "oh my gosh",
                "oh em gee",
                "love love",
                "best friends",
                "la la",
                "hand in hand",
                "to bits",
                "once upon a time",
                "good-night",
                "miss you",
            ),
            patterns=(
                r"~",
                r"\b[A-Za-z]*([aeiouyhmr])\1{2,}[a-z]*\b",
                r"!{2,}|\?!|!(?:[^!]*!){2}",
                r"\(?\^[_.o-]?\^\)?|:3|<3|:-?\)|\(=?\^|>_<|:D",
                "[\u2661\u2665\u2764\u2728\u2606\u2605\u266a\u266b\U0001f300-\U0001faff]",
                r"\b([a-z]{3,6})[ -]\1\b",
            ),
        ),
        "chuunibyou": Marks(
            words="kukuku kuku mwahaha muahaha fuhaha behold tremble abyss abyssal forbidden sealed seal unseal* mortal* "
            "fool fools foolish cursed curse* darkness shadow* crimson ancient destiny fated prophecy prophesied awaken* "
            "power powers realm realms demon* dragon* chosen apocalyp* eternal void infernal bloodline obsidian unleash* "
            "summon* incantation phantom* doom doomed vengeance abomination netherworld underworld chaos almighty kneel "
            "reincarnat* reborn grimoire arcane wicked hellfire overlord oblivion cataclysm* scythe flames flame vessel pact "
            "sigil blood rune* hell hells gods god fate ominous eons demonic ritual slumber* defeated limiter immortal* "
            "sorcer* ley leyline banish* nemesis rival warrior* omen* relic fiend* dominion sword swords blade throne soul "
            "souls aura beast tome disciples disciple weaklings weakling humans human slew slain war wars battle command "
            "commands army armies volcano lightning thunder iron fangs duel duels leviathan hydra phoenix serpent titan* "
            "impossible dreadful dare gatekeeper gate portal dimension* hunted survivors master wield* comet pawn pawns moons "
            "midnight wings steel exile* prisoner prison shattered ruin ruins ash ashes oath sworn secret chains kingdom "
            "conquer* enemy enemies hero villain* technique released release strength fades circle elder wand spell spells",
            phrases=(
                "dark flame",
                "right arm",
                "left arm",
                "right hand",
                "left hand",
                "right eye",
                "left eye",
                "evil eye",
                "red eye",
                "true name",
                "true form",
                "second form",
                "true power",
                "the organization",
                "the organisation",
                "my veins",
                "my mind",
                "chains of fate",
                "none can",
                "no one can stop",
                "you dare",
                "dare you",
                "i alone",
                "lord of",
                "king of darkness",
                "within me",
                "before me",
                "of the night",
                "hidden power",
                "another world",
                "former life",
                "the council",
                "the agency",
                "burst into flames",
                "thousand years",
                "so it has begun",
                "at last",
                "my powers",
                "my true",
                "my command",
                "my own hands",
                "these hands",
                "their world",
                "the world",
            ),
            patterns=(
                r"\b(?:HA ?){2,}|\b(?:ha){3,}\b|\bHa!|\bHeh\b",
                r"\u2020|\u2620|\u26a1",
                r"\b[A-Z]\w+ of (?:the )?[A-Z]\w+",
                r"(?<=[a-z,] )the (?:[A-Z][a-z]{2,} ?){1,3}",
                r"\b(?:I am|I, the|I,) [^.!?]{0,40}\b(?:of|who)\b",
            ),
        ),
        "classical": Marks(
            words="thou thee thy thine ye hath doth dost hast art wilt shalt shouldst wouldst canst 'tis 'twas 'twere o'er "
            "ne'er e'er e'en ere lo hark hearken verily forsooth prithee methinks mayhap perchance anon wherefore whence "
            "whither hither thither yonder yore unto whilst betwixt amidst oft naught aught nigh alas sooth fain fair "
            "maiden* swain beauteous woe befall* behoove* begat hence- quoth saith spake "
            "sire goodly bespoke thrice erstwhile henceforth therein thereof bade hallowed vale zephyr bosom tarry "
            "upon fourscore eventide dwelt trow sup musing worthy worthies homeward betook morrow countenance brethren "
            "whoso whosoever whensoever therefor heretofore noontide gather'd lute galleons mariner wont seemly parish "
            "entreat madam sixpence lieth kindred brake mocked dismay ungrateful steadfast becalmed humble commend eve "
            "appointed afflicted lament* deem* behold'st ofttimes twain beseech* vouchsafe* gentlemen gentleman lady ladies "
            "lord hearty partake mirth merry merrily slumber bethink durst didst ought drew stirred sorrow* noble virtue* "
            "fare pray nay yea whom",
            phrases=(
                "gentle reader",
                "i pray thee",
                "i pray you",
                "fare thee well",
                "days of yore",
                "good sir",
                "your humble servant",
                "my humble",
                "dear reader",
                "long ago there",
                "it came to pass",
                "pray tell",
                "be it known",
                "be it made known",
                "hear ye",
                "would that",
                "so it was that",
                "of old",
                "did this day",
                "this day",
                "is become",
                "are fled",
                "were come",
                "is come",
                "there lived a",
                "a certain",
                "the pleasure of your company",
                "good people",
                "made answer",
                "was it",
                "yet must",
                "yet when",
                "save his",
                "in all save",
                "i make bold",
                "no small",
            ),
            patterns=(
                r"\b(?!teeth|beneath|seventh|length|breath|wealth|health)[a-z]{3,}eth\b",
                r"\b[a-z]{3,}(?:edst|est) (?:thou|not|me|thy)\b|\bthat \w+est\b",
                r"\bO [A-Z]?[a-z]+",
                r"\b\w{2,}'d\b(?<!I'd)(?<!he'd)(?<!she'd)(?<!we'd)(?<!they'd)(?<!you'd)",
                r"\bdid (?:gather|appear|stand|enter|send|bear|speak|come|fall|lie|weep|sing|rise|cry|go|bow|walk)\b",
                r"(?:^|[;,.] )(?:much|great|many|small|never|yet|then|so|a \w+) (?:was|were|is|are|did|have|had) (?:I|he|she|they|we|the|there|it)\b",
            ),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was found of one style: how often each mark stands there, and for each word whether it lies in one."""

    counts: Counter[str]
    flags: list[bool]

    @property
    def weight(self) -> float:
        """The marks' weight together: one that comes back counts half as much again."""
        return sum(_weight(mark) * (1.0 if count == 1 else 1.5) for mark, count in self.counts.items())


@dataclass(frozen=True, slots=True)
class Index:
    """Marks by word: (style, mark) of whole words and of stems; (style, words of the phrase) by a phrase's first word."""

    words: Mapping[str, list[str]]
    stems: Mapping[str, list[str]]
    phrases: Mapping[str, list[tuple[str, tuple[str, ...]]]]
    longest: int


def read(text: str) -> dict[str, Reading]:
    """All styles' marks in a text."""
    plain = text.replace("\u2019", "'")
    lower = plain.lower()
    words = [word.removesuffix("'s") for word in _WORD.findall(lower)]
    found = {style: Reading(Counter(), [False] * len(words)) for style in MARKS}
    for place, word in enumerate(words):
        for style, mark, length in _marks_at(words, place, word):
            found[style].counts[mark] += 1
            found[style].flags[place : place + length] = [True] * length
    for style, (patterns, dense) in _patterns().items():
        counts = found[style].counts
        counts.update({pattern.pattern: n for pattern in patterns if (n := sum(1 for _ in pattern.finditer(plain)))})
        if dense is not None and words and len(dense[0].findall(lower)) / len(words) >= dense[1]:
            counts[DENSE] = 1
    return found


def _marks_at(words: Sequence[str], place: int, word: str) -> Iterator[tuple[str, str, int]]:
    """(style, mark, words) of the marks that begin at a word: of each style's the longest."""
    index = _index()
    best: dict[str, tuple[str, int]] = {}
    for end in range(min(len(word), index.longest), 2, -1):
        for style in index.stems.get(word[:end], ()):
            best.setdefault(style, (word[:end], 1))
    best |= dict.fromkeys(index.words.get(word, ()), (word, 1))
    for style, phrase in index.phrases.get(word, ()):
        length = best[style][1] if style in best else 0
        if len(phrase) > length and tuple(words[place : place + len(phrase)]) == phrase:
            best[style] = (" ".join(phrase), len(phrase))
    return ((style, mark, length) for style, (mark, length) in best.items())


def _weight(mark: str) -> float:
    return 1.5 if (" " in mark and mark in _phrases()) or mark == DENSE else 1.0


@lru_cache(maxsize=1)
def _phrases() -> frozenset[str]:
    return frozenset(phrase for marks in MARKS.values() for phrase in marks.phrases)


@lru_cache(maxsize=1)
def _index() -> Index:
    words: dict[str, list[str]] = {}
    stems: dict[str, list[str]] = {}
    phrases: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for style, marks in MARKS.items():
        for word in dict.fromkeys(marks.words.split()):
            (stems if word.endswith("*") else words).setdefault(word.removesuffix("*"), []).append(style)
        for phrase in marks.phrases:
            said = tuple(_WORD.findall(phrase))
            phrases.setdefault(said[0], []).append((style, said))
    return Index(words, stems, phrases, max(len(stem) for stem in stems))


@lru_cache(maxsize=1)
def _patterns() -> Mapping[str, tuple[tuple[re.Pattern[str], ...], tuple[re.Pattern[str], float] | None]]:
    return {
        style: (
            tuple(re.compile(pattern) for pattern in marks.patterns),
            None if marks.dense is None else (re.compile(marks.dense[0]), marks.dense[1]),
        )
        for style, marks in MARKS.items()
    }
