"""maj@k against counting every choice of k samples."""

import itertools
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import hypergeom

from sao_gym.errors import ConfigError
from sao_gym.majority import Votes, maj_at_k, mean_maj_at_k, vote_classes

Task = tuple[list[int | None], list[bool], int]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    classes = draw(st.lists(st.sampled_from([None, 0, 1, 2, 3]), min_size=1, max_size=8))
    right = draw(st.lists(st.booleans(), min_size=len(classes), max_size=len(classes)))
    if draw(st.booleans()):
        right = [name == 0 for name in classes]
    return classes, right, draw(st.integers(1, len(classes)))


def counted(classes: list[int | None], is_right: list[bool], k: int) -> Fraction:
    """The mean over every choice of k samples, in exact arithmetic."""
    judged: dict[int, list[bool]] = {}
    for name, right in zip(classes, is_right, strict=True):
        if name is not None:
            judged.setdefault(name, []).append(right)
    total, choices = Fraction(0), list(itertools.combinations(classes, k))
    for chosen in choices:
        votes = Counter(name for name in chosen if name is not None)
        winners = [name for name, count in votes.items() if count == max(votes.values())]
        for name in winners:
            total += Fraction(sum(judged[name]), len(judged[name])) / len(winners)
    return total / len(choices)


@given(tasks())
def test_it_is_the_share_of_choices(task: Task) -> None:
    assert maj_at_k(*task).value == pytest.approx(float(counted(*task)), abs=1e-12)


@given(tasks())
def test_one_vote_is_the_share_of_right_answers(task: Task) -> None:
    classes, right, _ = task
    answered = [ok for name, ok in zip(classes, right, strict=True) if name is not None and ok]
    assert maj_at_k(classes, right, 1).value == pytest.approx(len(answered) / len(classes))


def test_known_values() -> None:
    assert maj_at_k([0, 0, 1], [True, True, False], 3).value == 1.0
    assert maj_at_k([0, 1, 1], [True, False, False], 3).value == 0.0
    assert maj_at_k([0, 1], [True, False], 2).value == pytest.approx(0.5), "ties are split evenly"
    assert maj_at_k([0, None, None, None], [True, False, False, False], 4).value == 1.0, "silence has no vote"
    assert maj_at_k([None, None], [False, False], 2).value == 0.0, "nobody answers, nothing is right"
    assert maj_at_k([0] * 16, [True] * 16, 7).value == pytest.approx(1.0)
    # 16 samples, 6 right, the wrong ones scattered: the majority finds what most samples miss
    scattered = maj_at_k([0] * 6 + list(range(1, 11)), [True] * 6 + [False] * 10, 16)
    assert scattered.value == 1.0


def test_large_tasks_are_counted_too() -> None:
    """200 samples, 60 % right against one wrong answer: a hypergeometric tail."""
    value = maj_at_k([0] * 120 + [1] * 80, [True] * 120 + [False] * 80, 101).value
    assert value == pytest.approx(hypergeom(200, 120, 101).sf(50), abs=1e-12)
    with pytest.raises(ConfigError, match="at most 1000"):
        maj_at_k([0] * 1001, [True] * 1001, 3)


def test_undefined_says_why() -> None:
    result = maj_at_k([0, 0], [True, True], 4)
    assert (result.value, result.n_tasks, result.n_left_out) == (None, 0, 1)
    assert result.reason == "maj@4 needs at least 4 scored samples of a task, there are 2"
    assert maj_at_k([], [], 1).value is None
    with pytest.raises(ConfigError, match="k >= 1"):
        maj_at_k([0], [True], 0)
    with pytest.raises(ConfigError, match="1 answers and 2 verdicts"):
        maj_at_k([0], [True, False], 1)


def test_the_mean_says_over_how_many() -> None:
    by_task = {
        "a": Votes(classes=(0, 0, 1, 0), is_right=(True, True, False, True)),
        "b": Votes(classes=(0, 1, 1, 1), is_right=(True, False, False, False)),
        "c": Votes(classes=(0, 0), is_right=(True, True)),
    }
    result = mean_maj_at_k(by_task, 4)
    assert (result.value, result.n_tasks, result.n_left_out) == (0.5, 2, 1)
    assert result.reason == "1 of 3 tasks have fewer than 4 scored samples"
    assert mean_maj_at_k({}, 1).value is None


def test_answers_become_classes() -> None:
    """Right answers are one class whatever their spelling; wrong ones are compared; None has none."""
    asked = []

    def same(first: str, second: str) -> bool:
        asked.append((first, second))
        return float(first) == float(second)

    votes = vote_classes(["5", "1/2", "0.5", None, "5.0", "7"], [False, True, True, False, False, False], same)
    assert votes == Votes(classes=(0, 1, 1, None, 0, 2), is_right=(False, True, True, False, False, False))
    assert asked == [("5", "5.0"), ("5", "7")]
    assert vote_classes(["x", "x ", "x"], [False] * 3).classes == (0, 1, 0)
    with pytest.raises(ConfigError, match="one verdict per answer"):
        vote_classes(["x"], [])
