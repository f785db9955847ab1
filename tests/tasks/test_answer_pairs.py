"""The hand-written pairs of answers: at least 95 % right, no false accept, in both orders; and what decides them."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sao_gym.tasks._equality import find
from sao_gym.tasks.grading import close_graders, grade_answer, grade_answer_async, score_response_async


def load() -> list[tuple[str, str, str, bool]]:
    """(kind, left, right, whether they are equal)."""
    rows, kind = [], ""
    for line in Path(__file__).with_name("answer_pairs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("%"):
            kind = line.strip("% ")
        elif line.strip():
            left, sign, right = re.split(r"  +([=#])  +", line)
            rows.append((kind, left, right, sign == "="))
    return rows


PAIRS = load()


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    yield
    close_graders()


def test_the_list_is_long_and_has_both_kinds() -> None:
    assert len(PAIRS) >= 150
    assert sum(equal for *_, equal in PAIRS) >= 75
    assert sum(not equal for *_, equal in PAIRS) >= 75
    assert len({(left, right) for _, left, right, _ in PAIRS}) == len(PAIRS)


def test_pairs_are_judged_as_a_person_would() -> None:
    async def grade_all() -> list[bool]:
        pairs = [pair for _, left, right, _ in PAIRS for pair in ((left, right), (right, left))]
        return [score.passed for score in await asyncio.gather(*(grade_answer_async(*pair) for pair in pairs))]

    passed = asyncio.run(grade_all())
    wanted = [equal for *_, equal in PAIRS for _ in range(2)]
    wrong = [PAIRS[i // 2] for i, (said, want) in enumerate(zip(passed, wanted, strict=True)) if said != want]
    assert not [pair for pair in wrong if not pair[3]], "a false accept"
    assert len(wrong) <= 0.05 * len(wanted), wrong


@pytest.mark.parametrize(
    ("gold", "answer", "value", "method"),
    [
        ("70", r"\boxed{070}", 1.0, "integer"),
        ("70", "71", 0.0, "integer"),
        ("70", "", 0.0, "none"),
        (r"\frac{1}{2}", r"$\dfrac{1}{2}$", 1.0, "spelling"),
        (r"\frac{1}{2}", "0.5", 1.0, "symbolic"),
        (r"\frac{1}{2}", "words that say nothing", 0.0, "symbolic"),
        ("odd $n$", r"\text{all odd } n", 1.0, "table"),
        ("no solutions", "7", 0.0, "table"),
        ("taking the empty card", "taking no card", 0.0, "undecided"),
        ("7", "2^{4^{8^{16}}}", 0.0, "undecided"),
    ],
)
def test_a_score_says_how_it_was_reached(gold: str, answer: str, value: float, method: str) -> None:
    for left, right in ((gold, answer), (answer, gold)) if answer else ((gold, answer),):
        score = grade_answer(left, right)
        assert (score.value, score.method) == (value, method), score


async def test_a_judge_is_asked_where_no_rule_decides() -> None:
    asked: list[tuple[str, str, str]] = []

    def judge(gold: str, answer: str, problem: str) -> bool:
        asked.append((gold, answer, problem))
        return "empty" in answer

    async def slow_judge(gold: str, answer: str, problem: str) -> bool:
        await asyncio.sleep(0)
        return judge(gold, answer, problem)

    gold = "taking the empty card"
    for one in (judge, slow_judge):
        right = await score_response_async(gold, r"\boxed{\text{she takes the empty card}}", judge=one, problem="Who?")
        wrong = await grade_answer_async(gold, "she takes the full card", judge=one)
        assert [(right.value, right.method), (wrong.value, wrong.method)] == [(1.0, "judge"), (0.0, "judge")]
    assert asked[0] == (gold, r"\text{she takes the empty card}", "Who?")
    before = len(asked)
    assert (await grade_answer_async("70", "71", judge=judge)).method == "integer"
    assert (await grade_answer_async("odd n", "even n", judge=judge)).method == "table"
    assert (await score_response_async("70", "no box", judge=judge)).method == "none"
    assert len(asked) == before, "a judge is asked nothing that a rule decides"
    without = await grade_answer_async(gold, "she takes the empty card")
    assert (without.value, without.method) == (0.0, "undecided")


@pytest.mark.parametrize(
    "text", [r"\frac{", "(((", r"\sqrt[", "{" * 500, "a_{b_{c_{", r"\begin{cases} 1", "|" * 99, "x" * 1999]
)
def test_broken_answers_are_no_answers(text: str) -> None:
    for gold in ("7", "x+1", "odd n", "(1,2)", r"\{1,2\}", "x<3"):
        for left, right in ((gold, text), (text, gold)):
            assert find(left, right).verdict != "equal"
