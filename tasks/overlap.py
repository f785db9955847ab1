r"""Prompts that a benchmark shares with training tasks: equal texts, and runs of ten words.

Words are runs of letters and digits, without case; spacing, dollar signs and other marks do not count, so the same
problem in another notation is found. Ten numbers and single letters in a row are notation: a run needs a word with two
letters. Stock phrases ("where m and n are relatively prime positive integers") are a known cause of false alarms:
hence every overlap says which words were shared. Text without spaces between words (Chinese, say) is compared by its
runs between marks. Time and memory grow with the number of words, and with the number of pairs that overlap.

Example:
    >>> training = [Task(id="t1", prompt="One two three four, five six seven eight nine ten.")]
    >>> benchmark = [Task(id="b1", prompt="Zero one two three $four$ five six seven eight nine TEN eleven")]
    >>> (overlap,) = find_overlaps(benchmark, training)
    >>> overlap.training_ids, overlap.words
    (('t1',), 'one two three four five six seven eight nine ten')
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sao_gym.errors import ConfigError
from sao_gym.protocols import Task, TaskSet

RUN = 10
"""This many words in a row are an overlap."""
ENDLESS = 10_000_000
"""A set of more tasks than this is not compared."""
_WORD = re.compile(r"[^\W_]+")
_MARKS = re.compile(r"\\[()\[\]]|\$")
_SIGN = re.compile(r"[^\W_]+|\S")
Words = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What one prompt of the benchmark shares, and with which training tasks, in their order.

    `words` are the longest run that was found, or the whole prompt where a text is equal (`is_exact`).
    """

    benchmark_id: str
    training_ids: tuple[str, ...]
    words: str
    is_exact: bool


@dataclass(slots=True)
class _Found:
    """What is known so far of one prompt of the benchmark."""

    training_ids: list[str] = field(default_factory=list)
    words: Words = ()
    is_exact: bool = False

    def add(self, training_id: str, words: Words, *, is_exact: bool) -> None:
        self.training_ids.append(training_id)
        if (is_exact, len(words)) > (self.is_exact, len(self.words)):
            self.words, self.is_exact = words, is_exact


def find_overlaps(
    benchmark: TaskSet | Sequence[Task], training: TaskSet | Sequence[Task], *, run: int = RUN
) -> tuple[Overlap, ...]:
    """Prompts of `benchmark` that share their text, or `run` words in a row, with a prompt of `training`.

    Raises ConfigError for a set that is as good as endless.
    """
    index = _Index(benchmark, run)
    found: dict[int, _Found] = {}
    for task in _tasks(training):
        words = _words(task.prompt)
        equal = index.equal(task.prompt, words)
        shared = index.shared(words)
        for number in sorted({*equal, *shared}):
            run_words = words if number in equal else shared[number]
            found.setdefault(number, _Found()).add(task.id, run_words, is_exact=number in equal)
    return tuple(
        Overlap(
            benchmark_id=index.ids[number],
            training_ids=tuple(one.training_ids),
            words=" ".join(one.words),
            is_exact=one.is_exact,
        )
        for number, one in sorted(found.items())
    )


def describe_overlaps(
    overlaps: Sequence[Overlap],
    *,
    benchmark: str = "the benchmark",
    training: str = "the training tasks",
    limit: int = 3,
) -> str:
    """One sentence: how many prompts overlap, and the first `limit` with what they share."""
    if not overlaps:
        return f"no prompt of {benchmark} shares its text or a run of {RUN} words with {training}"
    told = "; ".join(_told(one) for one in overlaps[:limit])
    rest = f"; and {len(overlaps) - limit} more" if len(overlaps) > limit else ""
    prompts = "1 prompt" if len(overlaps) == 1 else f"{len(overlaps)} prompts"
    return f"{prompts} of {benchmark} overlap{'s' if len(overlaps) == 1 else ''} {training}: {told}{rest}"


def _told(one: Overlap) -> str:
    others = f" and {len(one.training_ids) - 1} more" if len(one.training_ids) > 1 else ""
    who = f"{one.training_ids[0]}{others}"
    if one.is_exact:
        return f"{one.benchmark_id} is the text of {who}"
    words = one.words.split()
    quoted = " ".join(words[:RUN]) + (" ..." if len(words) > RUN else "")
    return f'{one.benchmark_id} shares {len(words)} words with {who} ("{quoted}")'


class _Index:
    """Texts and runs of words of a benchmark, each with the prompts that hold it."""

    def __init__(self, tasks: TaskSet | Sequence[Task], run: int) -> None:
        if run < 1:
            raise ConfigError(f"a run of {run} words says nothing; give at least 1")
        self.ids: list[str] = []
        self._run = run
        self._texts: dict[Words, list[tuple[int, Words]]] = {}  # words -> prompts of these words, with all their signs
        self._places: dict[Words, dict[int, int]] = {}  # run -> prompt -> where it stands there first
        for number, task in enumerate(_tasks(tasks)):
            self.ids.append(task.id)
            words = _words(task.prompt)
            self._texts.setdefault(words, []).append((number, _signs(task.prompt)))
            is_word = [sum(map(str.isalpha, word)) > 1 for word in words]
            for place, gram in enumerate(_grams(words, run)):
                if any(is_word[place : place + run]):
                    self._places.setdefault(gram, {}).setdefault(number, place)

    def equal(self, prompt: str, words: Words) -> set[int]:
        """Prompts with the same text."""
        near = self._texts.get(words)
        return {number for number, signs in near if signs == _signs(prompt)} if near else set()

    def shared(self, words: Words) -> dict[int, Words]:
        """Prompts that share a run with `words`, each with the longest one; a run that stands twice may end early."""
        longest: dict[int, tuple[int, int]] = {}  # prompt -> (length, end in words)
        ending: dict[
            tuple[int, int], int
        ] = {}  # (prompt, place there) -> length of the run whose last gram stands there
        for start, gram in enumerate(_grams(words, self._run)):
            places = self._places.get(gram)
            if places is None:
                ending = {}
                continue
            ending = {(n, place): ending.get((n, place - 1), self._run - 1) + 1 for n, place in places.items()}
            for (number, _), length in ending.items():
                longest[number] = max(longest.get(number, (0, 0)), (length, start + self._run))
        return {number: words[end - length : end] for number, (length, end) in longest.items()}


def _tasks(tasks: TaskSet | Sequence[Task]) -> Iterator[Task]:
    if len(tasks) > ENDLESS:
        raise ConfigError(
            f"a task set of {len(tasks)} tasks is as good as endless and cannot be compared; give a finite one"
        )
    return (tasks[index] for index in range(len(tasks)))


def _grams(words: Words, run: int) -> Iterator[Words]:
    return zip(*(words[start:] for start in range(run)), strict=False)


def _words(text: str) -> Words:
    return tuple(_WORD.findall(_folded(text)))


def _signs(text: str) -> Words:
    """Words and every other sign but spacing and marks of mathematics: what is alike in equal texts."""
    return tuple(_SIGN.findall(_MARKS.sub(" ", _folded(text))))


def _folded(text: str) -> str:
    return (text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold()
