"""The terminal environment's own tasks: one small library, broken in one place per task.

Invariants: without the patch a task's check fails and with it it passes; train and held-out tasks break different
places; what is compared with is in no file that the agent's code can read.

Example:
    >>> tasks = terminal_tasks("heldout")
    >>> tasks.name, len(tasks)
    ('terminal-heldout', 2)
"""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from sao_gym.errors import ConfigError
from sao_gym.protocols import Task, TaskSet
from sao_gym.tasks.base import ListTaskSet

EXAMPLE = Path(__file__).with_name("terminal_example.txtar")
CHECK_FILE = ".check/run.py"
RUNNER = '''\
"""Evaluate expressions in a process of their own and compare what comes back; the expected values come on stdin."""

import ctypes
import json
import os
import subprocess
import sys

CHILD = """
import contextlib, io, json, os, sys
expressions = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, os.getcwd())
from shelf import days, money, report, search, store
said = []
for expression in expressions:
    try:
        said.append(repr(eval(expression)))
    except Exception as error:
        said.append(type(error).__name__)
os.write(answer, json.dumps(said).encode())
"""
ctypes.CDLL(None).prctl(4, 0)  # whoever is asked for the answers cannot look into who knows them
cases = json.load(sys.stdin)
given = os.readlink("/proc/self/fd/0")
if os.path.isfile(given):
    os.truncate(given, 0)
asked = json.dumps([case[0] for case in cases])
done = subprocess.run(
    [sys.executable, "-I", "-B", "-c", CHILD], input=asked.encode(), capture_output=True, timeout=15
)
try:
    said = json.loads(done.stdout)
except ValueError:
    sys.exit("nothing that can be compared came back: " + done.stderr.decode(errors="replace")[-500:])
wrong = [case[0] for case, value in zip(cases, said) if case[1] != value]
if len(said) != len(cases) or wrong:
    sys.exit(f"{len(wrong)} of {len(cases)} cases differ, e.g. {wrong[:1]}")
print(f"{len(cases)} cases as expected")
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """`right` of a file becomes `wrong`; `cases` maps expressions to what they must give, as Python prints it."""

    name: str
    file: str
    right: str
    wrong: str
    report: str
    cases: Mapping[str, str]


SPLITS: Mapping[str, tuple[Bug, ...]] = {
    "train": (
        Bug(
            name="negative_amounts",
            file="shelf/money.py",
            right="{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}",
            wrong="{sign}{cents // 100}.{abs(cents) % 100:02d}",
            report="format_cents shows amounts below zero wrongly: -5 comes out as '--1.05' where '-0.05' is meant.",
            cases={
                "money.format_cents(-5)": "'-0.05'",
                "money.format_cents(-12345)": "'-123.45'",
                "money.format_cents(-100)": "'-1.00'",
                "money.format_cents(0)": "'0.00'",
                "money.format_cents(1999)": "'19.99'",
            },
        ),
        Bug(
            name="one_digit",
            file="shelf/money.py",
            right='int(part.ljust(2, "0") or "0")',
            wrong='int(part or "0")',
            report="parse_cents reads '3.5' as 305 cents; it should be 350.",
            cases={
                "money.parse_cents('3.5')": "350",
                "money.parse_cents('3.05')": "305",
                "money.parse_cents('0.9')": "90",
                "money.parse_cents('-0.5')": "-50",
                "money.parse_cents('7')": "700",
                "money.parse_cents('1.234')": "ValueError",
                "money.parse_cents('x')": "ValueError",
            },
        ),
        Bug(
            name="leap_years",
            file="shelf/days.py",
            right="year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
            wrong="year % 4 == 0 and year % 100 != 0",
            report="A loan of 28 February 2000 was due one day early: add_days does not know 29 February 2000.",
            cases={
                "days.is_leap(2000)": "True",
                "days.is_leap(1900)": "False",
                "days.is_leap(2024)": "True",
                "days.add_days((2000, 2, 28), 1)": "(2000, 2, 29)",
                "days.add_days((2100, 2, 28), 1)": "(2100, 3, 1)",
            },
        ),
        Bug(
            name="new_year",
            file="shelf/days.py",
            right="year, month = year + 1, 1",
            wrong="month = 1",
            report="Loans that run past the end of a year are due in the year that they began in (see add_days).",
            cases={
                "days.add_days((2023, 12, 25), 14)": "(2024, 1, 8)",
                "days.add_days((2023, 12, 31), 1)": "(2024, 1, 1)",
                "days.add_days((2023, 1, 1), 800)": "(2025, 3, 11)",
                "days.days_late((2024, 1, 2), (2023, 12, 30))": "0",
            },
        ),
        Bug(
            name="semicolons",
            file="shelf/store.py",
            right='line.rsplit(";", 2)',
            wrong='line.split(";")',
            report="read_loans fails on a title that holds a semicolon, such as 'Night; and Day;Ada;3'.",
            cases={
                "[tuple(x) for x in store.read_loans('Night; and Day;Ada;3')]": "[('Night; and Day', 'Ada', 3)]",
                "[tuple(x) for x in store.read_loans('# a\\n\\nDune ; Ada ; 3\\n')]": "[('Dune', 'Ada', 3)]",
                "store.read_loans('a;b;c')": "ValueError",
            },
        ),
        Bug(
            name="wide_cells",
            file="shelf/report.py",
            right="for row in [head, *rows]) for i in range(len(head))",
            wrong="for row in rows or [head]) for i in range(len(head))",
            report="Columns of a table do not line up when a column's head is longer than all its cells.",
            cases={
                "report.table(['title', 'day'], [['A', '1']])": "'title  day\\nA      1'",
                "report.table(['a', 'b'], [['long', 'x']])": "'a     b\\nlong  x'",
                "report.table(['a', 'b'], [])": "'a  b'",
            },
        ),
    ),
    "heldout": (
        Bug(
            name="pages",
            file="shelf/search.py",
            right="start = (number - 1) * size",
            wrong="start = number * size - 10",
            report="page shows the wrong items when the size is not 10: page 2 of size 3 begins before page 1 does.",
            cases={
                "search.page(list(range(9)), 2, size=3)": "[3, 4, 5]",
                "search.page(list(range(25)), 3)": "[20, 21, 22, 23, 24]",
                "search.page(list(range(4)), 9, size=2)": "[]",
                "search.page(list(range(30)), 1, size=12)": "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]",
            },
        ),
        Bug(
            name="shares",
            file="shelf/money.py",
            right="[share + 1] * rest + [share] * (people - rest)",
            wrong="[share + rest] + [share] * (people - 1)",
            report="split_evenly gives all that is left over to the first person; no two shares may differ by more than a cent.",
            cases={
                "money.split_evenly(100, 3)": "[34, 33, 33]",
                "money.split_evenly(101, 3)": "[34, 34, 33]",
                "money.split_evenly(5, 7)": "[1, 1, 1, 1, 1, 0, 0]",
                "money.split_evenly(-5, 3)": "[-1, -2, -2]",
            },
        ),
    ),
}
PROMPT = """\
The folder {workdir} holds a small Python library, shelf. A user reports:

{report}

Find the cause and mend it in the library's code; what the docstrings say is what is meant. `python3 -m unittest` runs
the tests that there are. When you are done, answer without a tool call."""


@lru_cache(maxsize=4)
def terminal_tasks(split: Literal["train", "heldout"] = "train") -> TaskSet:
    """The packaged tasks of a split. Raises ConfigError for another word."""
    if split not in SPLITS:
        raise ConfigError(f"split must be 'train' or 'heldout', got {split!r}")
    return ListTaskSet(f"terminal-{split}", [task_of(bug) for bug in SPLITS[split]])


def task_of(bug: Bug, workdir: str = "/workspace") -> Task:
    """A task whose folder is the library with one bug; its answer is the patch that mends it."""
    right = example_files()
    if right[bug.file].count(bug.right) != 1:
        raise ConfigError(
            f"the bug {bug.name!r} does not fit the packaged library: {bug.right!r} must stand there once"
        )
    wrong = right[bug.file].replace(bug.right, bug.wrong)
    info: dict[str, Any] = {
        "workdir": workdir,
        "files": {**right, bug.file: wrong},
        "check": {
            "command": f"python3 -I -B {CHECK_FILE}",
            "files": {CHECK_FILE: RUNNER},
            "stdin": json.dumps(list(bug.cases.items())),
            "expect": f"^{len(bug.cases)} cases as expected$",
            "timeout_s": 30.0,
        },
    }
    prompt = PROMPT.format(workdir=workdir, report=bug.report)
    return Task(id=f"shelf-{bug.name}", prompt=prompt, answer=patch_text(bug.file, wrong, right[bug.file]), info=info)


def patch_text(path: str, before: str, after: str) -> str:
    """A unified diff that `git apply` and `patch -p1` take."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(lines)


@cache
def example_files() -> Mapping[str, str]:
    """The packaged library, whole and right: text by path."""
    return read_txtar(EXAMPLE.read_text(encoding="utf-8"))


def read_txtar(text: str) -> dict[str, str]:
    """Files of one text: each begins with a line `-- path --`; what stands before the first is a remark."""
    files: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("-- ") and line.rstrip().endswith(" --"):
            current = files.setdefault(line.rstrip()[3:-3], [])
        else:
            current.append(line)
    return {path: "".join(lines) for path, lines in files.items()}
