"""maj@k: how often the answer that most of k samples agree on is right.

Invariant: the value is the expectation over every choice of k of a task's samples, counted and not drawn. Tied answers
win equally often. A sample without an answer is one of the k and votes for nothing; if none of the k has an answer,
nothing is right. As with pass@k, k > n is undefined: None with a reason.

Example:
    >>> votes = vote_classes(["4", "4", "5", None], [True, True, False, False])
    >>> votes.classes
    (0, 0, 1, None)
    >>> maj_at_k(votes.classes, votes.is_right, 3).value
    0.75
"""

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sao_gym.errors import ConfigError
from sao_gym.statistics import AtK, mean_at_k

MOST_SAMPLES = 1000
"""Of one task; beyond, the number of choices leaves float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Votes:
    """A task's scored samples as votes: the class of each one's answer (None: no answer), and whether it is right."""

    classes: tuple[Hashable | None, ...]
    is_right: tuple[bool, ...]


def vote_classes(
    answers: Sequence[str | None],
    is_right: Sequence[bool],
    is_same: Callable[[str, str], bool] = operator.eq,
) -> Votes:
    """Number the answers by equality. None is no answer.

    Right answers equal the gold answer, hence each other; only the wrong ones are compared, each with the first of
    every class before it. Raises ConfigError where the two do not have the same length.
    """
    _check_lengths(answers, is_right)
    firsts: list[tuple[str, bool]] = []
    classes: list[int | None] = []
    for answer, right in zip(answers, is_right, strict=True):
        if answer is None:
            classes.append(None)
            continue
        known = (
            index
            for index, (first, is_first_right) in enumerate(firsts)
            if (is_first_right if right else not is_first_right and is_same(first, answer))
        )
        index = next(known, len(firsts))
        if index == len(firsts):
            firsts.append((answer, bool(right)))
        classes.append(index)
    return Votes(classes=tuple(classes), is_right=tuple(bool(right) for right in is_right))


def maj_at_k(classes: Sequence[Hashable | None], is_right: Sequence[bool], k: int) -> AtK:
    """Expected success of the majority among k of one task's n samples; ties are split evenly.

    `classes` [n] names the answer of each sample, None for no answer. A class whose samples were judged differently
    counts as right by their share. Raises ConfigError for unequal lengths, k < 1 or more than `MOST_SAMPLES` samples.
    """
    _check_lengths(classes, is_right)
    n = len(classes)
    if k < 1 or n > MOST_SAMPLES:
        raise ConfigError(f"maj@k needs k >= 1 and at most {MOST_SAMPLES} samples of a task, got k={k}, n={n}")
    if k > n:
        reason = f"maj@{k} needs at least {k} scored samples of a task, there are {n}"
        return AtK(k=k, value=None, n_tasks=0, n_left_out=1, reason=reason)
    judged: dict[Hashable, list[bool]] = {}
    for name, right in zip(classes, is_right, strict=True):
        if name is not None:
            judged.setdefault(name, []).append(bool(right))
    sizes = [len(verdicts) for verdicts in judged.values()]
    wins = {size: _wins(size, sizes, n - sum(sizes), k) for size in set(sizes) if any(map(any, judged.values()))}
    value = sum(wins[len(verdicts)] * sum(verdicts) / len(verdicts) for verdicts in judged.values() if any(verdicts))
    return AtK(k=k, value=min(float(value), 1.0), n_tasks=1, n_left_out=0)


def mean_maj_at_k(tasks: Mapping[str, Votes], k: int) -> AtK:
    """Mean of maj@k over tasks; says how many tasks have too few scored samples and are left out."""
    return mean_at_k([maj_at_k(votes.classes, votes.is_right, k) for votes in tasks.values()], k)


def _wins(size: int, sizes: Sequence[int], silent: int, k: int) -> float:
    """Probability that one class of `size` wins among k of all samples, `silent` of them without an answer."""
    others = list(sizes)
    others.remove(size)
    total = 0.0
    for votes in range(1, min(size, k) + 1):
        ways = _others_at_most(others, votes, k - votes)  # [votes of the others, classes tied with us]
        rest = np.array([float(math.comb(silent, k - votes - cast)) for cast in range(k - votes + 1)])
        share = 1 / (1 + np.arange(ways.shape[1]))
        total += math.comb(size, votes) * float(rest @ ways @ share)
    return total / math.comb(sum(sizes) + silent, k)


def _others_at_most(sizes: Sequence[int], most: int, room: int) -> npt.NDArray[np.float64]:
    """Ways [room + 1, ties + 1] in which the classes cast 0..room votes, none above `most`, so many equal to it."""
    ways = np.zeros((room + 1, min(len(sizes), room // most) + 1))
    ways[0, 0] = 1.0
    for size in sizes:
        after = ways.copy()
        for cast in range(1, min(size, most, room) + 1):
            chosen = math.comb(size, cast)
            if cast == most:
                after[cast:, 1:] += chosen * ways[:-cast, :-1]
            else:
                after[cast:] += chosen * ways[:-cast]
        ways = after
    return ways


def _check_lengths(answers: Sequence[object], is_right: Sequence[bool]) -> None:
    if len(answers) != len(is_right):
        raise ConfigError(f"there are {len(answers)} answers and {len(is_right)} verdicts; give one verdict per answer")
