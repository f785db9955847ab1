"""The grader over whole benchmark sets: every gold against itself, against every other, and against mutations of it.

The checks are those of `benchmarks/grading.py`; an independent evaluation says which different golds are equal.
"""

import asyncio
import importlib
import os
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from sao_gym.tasks.grading import GradingLimits, close_graders, grade_answer, score_response_async


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    yield
    close_graders()


@pytest.fixture(scope="module")
def grading() -> ModuleType:
    return importlib.import_module("grading")


@pytest.fixture(scope="module")
def data() -> Path:
    folder = os.environ.get("SAO_GYM_DATA")
    if folder is None:
        pytest.skip("SAO_GYM_DATA does not name a folder with the benchmarks")
    return Path(folder)


def test_pairs_are_right_and_a_wrong_one_would_be_seen(grading: ModuleType) -> None:
    pairs = grading.load_pairs()
    assert len(pairs) >= 150
    twisted = grading.Pair(kind="fractions", left="1/2", right="0.5", equal=False)
    assert grading.wrong_pairs([pairs[0], twisted]) == [twisted]


def test_the_independent_check_tells_equal_from_different(grading: ModuleType) -> None:
    assert grading.is_truly_equal(r"\frac{1}{2}", "0.5")
    assert grading.is_truly_equal("$n=4k+3$", "All numbers of the form $4k+3$")
    assert not grading.is_truly_equal(r"\frac{1}{2}", "0.51")
    assert not grading.is_truly_equal("odd $n$", "even $n$")


def test_mutations_are_the_same_for_the_same_seed_and_of_every_kind(grading: ModuleType) -> None:
    golds = ["(1, 2, 3)", r"\frac{2025}{101}", "4, 5", "[-6,5]", "2^{10}+1", "x<3", "12"]
    made = list(grading.mutations(golds, 200, seed=1))
    assert made == list(grading.mutations(golds, 200, seed=1))
    assert {pair.kind for pair in made} >= {"digit", "sign", "exponent", "bracket", "order", "drop", "operator"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_gold_of_a_set_is_taken_for_another(grading: ModuleType, data: Path) -> None:
    golds = {name: grading.load_golds(data, name) for name in grading.BENCHMARKS}
    for name in grading.BENCHMARKS:
        assert grading.false_accepts(*grading.what_to_cross(golds, name)) == [], name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_mutated_gold_is_taken_for_the_gold(grading: ModuleType, data: Path) -> None:
    golds = [gold for name in grading.BENCHMARKS for gold in grading.load_golds(data, name)]
    assert [pair for pair in grading.mutations(golds, 1000, seed=0) if grading.accepts(pair.left, pair.right)] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_training_gold_matches_itself(grading: ModuleType, data: Path) -> None:
    assert grading.unmatched(grading.load_golds(data, grading.TRAINING)) == []


def fuzzed(draw: random.Random, depth: int = 0) -> str:
    """A random answer: nested LaTeX, towers, factorials, lists, code, broken text."""
    if depth > 6 or draw.random() < 0.2:
        return draw.choice(["1", "x", "10^9", r"\pi", "n!", "0", "-2", "e", r"\infty", ",", r"\pm", "9" * 30, "{", ")", "",
                            r"\text{or}", "=", "<", r"\ldots", "é", "\u2028", "\x00", "%", "$", "𝟙"])  # fmt: skip
    one, other = fuzzed(draw, depth + 1), fuzzed(draw, depth + 1)
    return draw.choice([
        rf"\frac{{{one}}}{{{other}}}", rf"{{{one}}}^{{{other}}}", rf"\sqrt[{one}]{{{other}}}", f"({one}, {other})",
        f"{one}!", rf"\binom{{{one}}}{{{other}}}", rf"\{{{one} : {other}\}}", f"{one} + {other}", f"{one}^{other}^{one}",
        rf"\log_{{{one}}}({other})", rf"[{one}, {other})", rf"{one} \cup {other}", f"{one} and {other}", f"{one} {other}",
        rf"\begin{{pmatrix}} {one} \\ {other} \end{{pmatrix}}", f"f({one}) = {other}", rf"\left\lfloor {one} \right.",
        f"__import__('os').system('{one}')", f"{one} if {other}, otherwise {one}", rf"\text{{all {one} except {other}}}",
        rf"\boxed{{{one}}} \boxed{{{other}}}", f"{one} \\pmod {{{other}}}", f"lambda: {one}", f"{one}**{other}**{other}",
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3000)
async def test_fuzzed_answers_crash_nothing_and_leave_memory_flat() -> None:
    draw = random.Random(0)
    golds = ("7", r"\frac{1}{2}", "x+1", "(1, 2)", "1, 2", "x<3", "odd $n$", "f(x)=x+c")
    huge = ["9" * 1_000_000, r"\frac{1}{" * 100_000, "(" * 1_000_000, "x+" * 500_000, "1," * 500_000]
    answers = huge + [fuzzed(draw)[:4000] for _ in range(10_000 - len(huge))]
    limits = GradingLimits(cpu_s=0.2)

    async def grade_some(texts: list[str]) -> list[float]:
        pairs = [(draw.choice(golds), rf"\boxed{{{text}}}") for text in texts]
        scores = await asyncio.gather(*(score_response_async(*pair, limits) for pair in pairs))
        assert all(score.method for score in scores)
        return [score.value for score in scores]

    await grade_some(answers[:500])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = [value for start in range(500, 10_000, 100) for value in await grade_some(answers[start : start + 100])]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024
    assert sum(values) < 0.02 * len(values), "hardly any of this is an answer"
    assert grade_answer("5", r"\frac{10}{2}").passed
