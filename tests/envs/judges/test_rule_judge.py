"""The rule judge: what it knows of texts that were labelled by hand, and how it meets texts that are made for it."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.envs.judges.gold import read_gold
from sao_gym.envs.judges.rule import RuleJudge, Rules, style_scores
from sao_gym.envs.judges.signals import signals
from sao_gym.errors import ConfigError
from sao_gym.writing_styles import PLAIN, STYLES

LABELS = tuple(STYLES)
JUDGE = RuleJudge()
FILLER = " The bus was on time and the shop had bread, so we went home and made soup for the two of us."
REQUEST = "Write a letter to a neighbour who looked after the tomato plants for a month."


def test_on_texts_that_it_had_not_seen_it_is_often_silent_and_seldom_wrong() -> None:
    """The figures that docs/writing.md reports: half of the subtle texts are called plain; what is named is right."""
    gold = read_gold()
    good = [one for one in gold if one.quality]
    assert (len(gold), len(good)) == (60, 54)
    found = [(one, JUDGE.read(one.request, one.text, LABELS)) for one in gold]
    assert all(verdict.quality == one.quality for one, verdict in found)
    named = [(one, verdict) for one, verdict in found if one.quality and verdict.label != PLAIN]
    assert len(named) == 25
    assert sum(verdict.label == one.style for one, verdict in named) == 23
    assert sum(verdict.label == one.style for one, verdict in found if one.quality) == 29


def test_on_texts_that_were_seen_while_it_was_made() -> None:
    gold = [one for one in read_gold("seen-1") if one.quality]
    assert len(gold) == 117
    assert all(JUDGE.read(one.request, one.text, LABELS).label == one.style for one in gold)
    assert min(Counter(one.style for one in gold).values()) >= 13


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "too_short"),
        ("Dear neighbour, thanks.", "too_short"),
        ("tomato " * 40, "few_words"),
        ("The plants are well and we thank you. " * 6, "repetition"),
        (REQUEST, "echo"),
        (f"{REQUEST} {REQUEST.lower()}", "echo"),
        ("cute fluffy tiny bunny kitty hug kiss yay yummy sweetie teddy puppy", "style_words_only"),
        ("a1 b2 c3 d4 e5 f6 g7 h8 i9 " + "#!?%&= " * 30, "signs"),
        ("tomato " * 14 + FILLER * 9, "few_words"),
        ("cute fluffy tiny bunny kitty hug kiss yay yummy sweetie teddy puppy. " + FILLER * 9, "style_words_only"),
        (f"{REQUEST} {REQUEST} {FILLER * 9}", "echo"),
        ("! # ? % " * 9 + FILLER * 9, "signs"),
        ("word " * 10 + " ".join(f"word{n}" for n in range(1300)), "too_long"),
    ],
)
def test_degenerate_texts_have_quality_0(text: str, problem: str) -> None:
    found = JUDGE.read(REQUEST, text, LABELS)
    assert not found.quality
    assert problem in found.problems


def test_length_alone_buys_no_style() -> None:
    """A text with marks here and there loses its style as plain words are added, and never gains one."""
    marked = "Lo, the tomatoes thou didst water are ripe."
    assert JUDGE.read(REQUEST, marked + FILLER, LABELS).label == "classical"
    assert JUDGE.read(REQUEST, marked + FILLER * 40, LABELS).label == PLAIN
    assert JUDGE.read(REQUEST, FILLER * 40, LABELS).label == PLAIN


def test_one_mark_again_and_again_is_not_many() -> None:
    assert style_scores("thou and so on")["classical"] == 1.0
    assert style_scores("thou and so on " * 2)["classical"] == style_scores("thou and so on " * 30)["classical"] == 1.5
    assert JUDGE.read(REQUEST, "thou and so on " * 30, LABELS).label == PLAIN


def test_only_styles_that_are_asked_about_are_named() -> None:
    text = "Lo, the tomatoes thou didst water are ripe, and my heart doth rejoice, good neighbour."
    assert JUDGE.read(REQUEST, text, ("cute", "academic")).label == PLAIN


def test_two_styles_at_once_are_none() -> None:
    text = "Yay, hehe, thou fluffy bunny! Lo, my heart doth snuggle unto thee, hooray, methinks, forsooth!"
    assert JUDGE.read(REQUEST, text, LABELS).label == PLAIN


@given(st.text(max_size=300), st.text(max_size=300))
def test_any_text_can_be_read(request: str, text: str) -> None:
    found = JUDGE.read(request, text, LABELS)
    assert found == JUDGE.read(request, text, LABELS)
    assert found.label in (*LABELS, PLAIN)
    counted = signals(request, text, words_asked=40)
    for share in (counted.distinct_share, counted.repetition, counted.echo, counted.letters, counted.on_topic):
        assert 0.0 <= share <= 1.0


def test_a_long_text_is_read_in_no_time() -> None:
    """Patterns that backtrack would take minutes for these."""
    for text in ("a" * 50_000, "I am " * 10_000, "HA " * 20_000, "x-" * 20_000, "'d" * 20_000, "!" * 50_000):
        JUDGE.read(text[:2000], text, LABELS)


def test_other_rules_are_another_judge() -> None:
    assert RuleJudge(Rules(min_words=3)).version != JUDGE.version
    with pytest.raises(ConfigError):
        Rules(min_words=9, max_words=8)


async def test_the_coroutine_says_the_same() -> None:
    assert await JUDGE.judge(REQUEST, "Some words.", LABELS) == JUDGE.read(REQUEST, "Some words.", LABELS)
    await JUDGE.close()
