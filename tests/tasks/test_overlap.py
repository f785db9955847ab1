"""Overlaps of a benchmark with training tasks: found whatever the notation, and no false ones."""

import random
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.errors import ConfigError
from sao_gym.protocols import Task
from sao_gym.tasks.arithmetic import arithmetic_tasks
from sao_gym.tasks.base import ListTaskSet, load_tasks
from sao_gym.tasks.overlap import RUN, Overlap, describe_overlaps, find_overlaps

TEN = "one two three four five six seven eight nine ten"


def tasks(*prompts: str, prefix: str = "t") -> list[Task]:
    return [Task(id=f"{prefix}{i}", prompt=prompt) for i, prompt in enumerate(prompts)]


def overlap(benchmark: str, *training: str) -> Overlap | None:
    found = find_overlaps(tasks(benchmark, prefix="b"), tasks(*training))
    return found[0] if found else None


def test_ten_words_overlap_and_nine_do_not() -> None:
    nine = TEN.removesuffix(" ten")
    assert overlap(f"a {TEN} b", f"c {TEN} d") == Overlap(
        benchmark_id="b0", training_ids=("t0",), words=TEN, is_exact=False
    )
    assert overlap(f"a {nine} b", f"c {nine} d") is None
    assert overlap(TEN, TEN.replace("five six", "six five")) is None


def test_notation_does_not_hide_a_problem() -> None:
    first = r"Let $x_1$ and $x_{2}$ be the roots of $x^2 - 7x + 1 = 0$. Find \(x_1^3 + x_2^3\)."
    other = r"let x_{1} AND x_{2} be the Roots of \[x^{2}-7x+1=0,\] find x_{1}^{3}+x_{2}^{3}"
    found = overlap(first, other)
    assert found is not None
    assert not found.is_exact
    assert found.words.split()[:3] == ["let", "x", "1"]


def test_short_texts_overlap_when_they_are_equal_and_only_then() -> None:
    assert overlap("What is  $2+2$?", "no", "what is 2+2?") == Overlap(
        benchmark_id="b0", training_ids=("t1",), words="what is 2 2", is_exact=True
    )
    assert overlap("What is 2+2?", "What is 2-2?") is None  # signs are no words, and still they count


def test_ten_numbers_in_a_row_are_no_words() -> None:
    assert overlap("of 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and", "as 0 1 2 3 4 5 6 7 8 9 or") is None
    assert overlap("let $a_1, a_2, a_3, a_4, a_5, a_6$", "if $a_1 a_2 a_3 a_4 a_5 a_6$") is None
    assert overlap("digits 0, 1, 2, 3, 4, 5, 6, 7, 8, 9", "digits 0 1 2 3 4 5 6 7 8 9") is not None


def test_the_longest_run_is_said_and_every_training_task_is_named() -> None:
    long = f"{TEN} eleven twelve thirteen"
    found = overlap(f"x {long} y", f"a {TEN} b", "nothing", f"{long} again", TEN)
    assert found is not None
    assert (found.training_ids, found.words) == (("t0", "t2", "t3"), long)


def test_an_equal_text_is_said_before_a_longer_run() -> None:
    found = overlap(TEN, f"{TEN}!", TEN, f"zero {TEN} eleven")
    assert found is not None
    assert (found.training_ids, found.words, found.is_exact) == (("t0", "t1", "t2"), TEN, True)


words = st.lists(st.sampled_from(["aa", "bb", "cc"]), max_size=40)


def runs(prompt: list[str], run: int) -> set[tuple[str, ...]]:
    return {tuple(prompt[i : i + run]) for i in range(len(prompt) - run + 1)}


@given(
    benchmark=st.lists(words, min_size=1, max_size=4),
    training=st.lists(words, min_size=1, max_size=4),
    run=st.integers(1, 6),
)
def test_it_finds_what_a_plain_search_finds(benchmark: list[list[str]], training: list[list[str]], run: int) -> None:
    """Few different words, so that runs repeat within a prompt."""
    found = find_overlaps(
        tasks(*map(" ".join, benchmark), prefix="b"), tasks(*map(" ".join, training), prefix="t"), run=run
    )
    expected = {
        f"b{i}": tuple(f"t{j}" for j, t in enumerate(training) if b == t or runs(b, run) & runs(t, run))
        for i, b in enumerate(benchmark)
    }
    assert {one.benchmark_id: one.training_ids for one in found} == {key: ids for key, ids in expected.items() if ids}
    for one in found:
        shared, b = one.words.split(), benchmark[int(one.benchmark_id[1:])]
        assert one.is_exact == (b in training)
        if one.is_exact:
            assert shared == b
        else:
            assert len(shared) >= run
            assert any({tuple(shared)} & runs(b, len(shared)) & runs(t, len(shared)) for t in training)


def test_an_overlap_is_the_same_both_ways_round() -> None:
    left, right = tasks(f"a {TEN} b", "other", prefix="l"), tasks("none", f"{TEN} z", prefix="r")
    (there,), (back,) = find_overlaps(left, right), find_overlaps(right, left)
    assert (there.benchmark_id, *there.training_ids) == (*back.training_ids, back.benchmark_id)
    assert there.words == back.words


def test_a_set_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="as good as endless"):
        find_overlaps(tasks(TEN), arithmetic_tasks(pool=None))
    assert find_overlaps(arithmetic_tasks("heldout", pool=64), arithmetic_tasks("train", pool=64)) == ()


def test_one_sentence_says_who_overlaps_with_whom() -> None:
    found = find_overlaps(
        tasks(f"a {TEN} eleven", "What?", TEN, f"{TEN} 4", prefix="b"), tasks(f"{TEN} eleven", "what?", "x " + TEN)
    )
    text = describe_overlaps(found, benchmark="aime2025", training="train.jsonl", limit=2)
    assert text == (
        f'4 prompts of aime2025 overlap train.jsonl: b0 shares 11 words with t0 and 1 more ("{TEN} ..."); '
        "b1 is the text of t1; and 2 more"
    )
    assert (
        describe_overlaps(found[1:2]) == "1 prompt of the benchmark overlaps the training tasks: b1 is the text of t1"
    )
    assert describe_overlaps(()).startswith("no prompt of the benchmark shares its text or a run of 10 words")


BENCHMARKS = ("aime2024", "aime2025", "aime2026", "hmmt_feb_2025", "hmmt_nov_2025", "beyond_aime", "imo_answerbench")


def test_the_training_sample_overlaps_no_benchmark(data_dir: Path) -> None:
    """It was filtered that way; so a false alarm here would be ours."""
    training = load_tasks(data_dir / "math_train_sample.jsonl")
    swe = load_tasks(data_dir / "swe_verified.parquet", {"id": "instance_id", "prompt": "problem_statement"})
    names = (*BENCHMARKS, "imo_answerbench_v1")
    every = [task for name in names for task in load_tasks(data_dir / f"{name}.jsonl")]
    assert find_overlaps([*every, *swe], training) == ()


def test_planted_problems_are_found_and_nothing_else(data_dir: Path) -> None:
    """Every twentieth problem among the training tasks, in other notation: these and no others are found."""
    sample = list(load_tasks(data_dir / "math_train_sample.jsonl"))[:2000]
    for name in BENCHMARKS:
        benchmark = load_tasks(data_dir / f"{name}.jsonl")
        chosen = list(benchmark)[::20]
        planted = [Task(id=f"planted-{t.id}", prompt=re.sub(r"\$", " ", t.prompt).upper()) for t in chosen]
        found = find_overlaps(benchmark, ListTaskSet("train", [*sample, *planted]))
        pairs = {one.benchmark_id: one.training_ids for one in found}
        assert {task.id for task in chosen} <= set(pairs)
        for task_id, training_ids in pairs.items():
            assert all(one.startswith("planted-") for one in training_ids)
            assert f"planted-{task_id}" in training_ids or task_id not in {task.id for task in chosen}


def test_a_phrase_that_all_share_costs_no_more_than_the_pairs() -> None:
    """40 prompts against 1,000: every pair is found, and each names the phrase."""
    found = find_overlaps(
        tasks(*(f"{i} {TEN} q{i}" for i in range(40)), prefix="b"), tasks(*(f"p{i} {TEN} r{i}" for i in range(1000)))
    )
    assert len(found) == 40
    assert all(len(one.training_ids) == 1000 and len(one.words.split()) == RUN for one in found)


def test_ten_thousand_training_tasks_against_four_hundred_take_seconds() -> None:
    """Comparing each with each would take 4 million comparisons of 60 words."""
    draw = random.Random(0)
    vocabulary = [f"word{letter}{digit}" for letter in "abcdefghijklmnopqrst" for digit in range(100)]
    prompts = [" ".join(draw.choices(vocabulary, k=60)) for _ in range(10_400)]
    benchmark, training = tasks(*prompts[:400], prefix="b"), tasks(*prompts[400:], f"x {prompts[7]} y")
    start = time.process_time()
    found = find_overlaps(benchmark, training)
    assert time.process_time() - start < 10
    assert [(one.benchmark_id, one.training_ids) for one in found] == [("b7", ("t10000",))]
