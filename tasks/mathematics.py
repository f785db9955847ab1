"""Mathematics with a final answer: task files, and a few examples that need no file.

Example:
    >>> math_tasks()[0].answer
    '233168'
"""

import os
from collections.abc import Mapping

from sao_gym.protocols import Task
from sao_gym.tasks.base import ListTaskSet, load_tasks

_EXAMPLES = (
    ("Find the sum of all positive integers below 1000 that are divisible by 3 or by 5.", "233168"),
    ("How many primes are there below 2000?", "303"),
    ("Find the remainder when $2^{1000}$ is divided by $1009$.", "942"),
    ("Find the sum of the decimal digits of $100!$.", "648"),
    ("How many ways are there to write 60 as an ordered sum of two primes?", "12"),
    ("Solve $3x + 7 = 9$ for $x$.", r"\frac{2}{3}"),
    ("How many subsets of $\\{1, 2, \\dots, 12\\}$ hold no two consecutive integers?", "377"),
    ("Find the least positive integer with exactly 20 positive divisors.", "240"),
)


def math_tasks(path: str | os.PathLike[str] | None = None, mapping: Mapping[str, str] | None = None) -> ListTaskSet:
    """The tasks of a file (see `tasks.base.load_tasks`), or the built-in examples. Raises TaskFileError."""
    return load_tasks(path, mapping) if path is not None else example_tasks()


def example_tasks() -> ListTaskSet:
    """A handful of problems that a few lines of Python settle."""
    return ListTaskSet(
        "math-examples",
        [Task(id=f"example-{i}", prompt=prompt, answer=answer) for i, (prompt, answer) in enumerate(_EXAMPLES)],
    )
