"""What the rows of a benchmark should say, as hashes: enough to name every row that differs, and no copy of any.

Invariants: a hash does not depend on the order of rows, on other columns, on the file's form, on spacing at line ends
or on how a whole number is written. Rows that are the same problems have the same ids wherever they come from.

Example:
    >>> tasks = [Task(id="7", prompt="2+2?", answer="4")]
    >>> aligned(tasks, [Fingerprint.of(Task(id="toy-1", prompt="2+2?", answer="4"), ())])[0].id
    'toy-1'
"""

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from sao_gym.protocols import Task

SHOWN = 10
"""Ids that a difference names before it only counts."""
_WHOLE = re.compile(r"([+-]?)0*(\d+)(\.0*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """A row: its id, the hash of its prompt, and the hash of what grading needs (8 hexadecimal digits each)."""

    id: str
    prompt: str
    gold: str

    @classmethod
    def of(cls, task: Task, graded: Sequence[str]) -> "Fingerprint":
        """The fingerprint of a task; `graded` are columns of its info that grading needs besides the answer."""
        prompt, gold = _said(task, graded)
        return cls(id=task.id, prompt=_digest(prompt)[:8], gold=_digest(gold)[:8])


def content_hash(tasks: Iterable[Task], graded: Sequence[str]) -> str:
    """SHA-256 over ids, prompts and what grading needs, whatever their order."""
    rows = sorted(json.dumps([task.id, *_said(task, graded)]) for task in tasks)
    return _digest("\n".join(rows))


@cache
def stored(name: str) -> tuple[Fingerprint, ...]:
    """The fingerprints of a benchmark, in its own order."""
    text = (files("sao_gym.tasks") / "fingerprints.tsv").read_text(encoding="utf-8")
    _, _, section = text.partition(f"# {name}\n")
    rows = (line.split("\t") for line in section.partition("# ")[0].splitlines())
    return tuple(Fingerprint(id=task_id, prompt=prompt, gold=gold) for task_id, prompt, gold in rows)


def aligned(tasks: Sequence[Task], expected: Sequence[Fingerprint]) -> tuple[Task, ...]:
    """The tasks under the ids and in the order of the fingerprints; rows that match none follow, as they came.

    A row is known by its id, else by its prompt, else, where the numbers of rows are equal, by its place.
    """
    prompts = {one.prompt: one.id for one in expected}
    ids = {one.id: one.id for one in expected}
    by_place = dict(enumerate(ids)) if len(tasks) == len(expected) else {}
    rules: tuple[Callable[[int, Task], str | None], ...] = (
        lambda _, task: ids.get(task.id),
        lambda _, task: prompts.get(Fingerprint.of(task, ()).prompt),
        lambda place, _: by_place.get(place),
    )
    owner: dict[str, int] = {}
    for rule in rules:
        settled = set(owner.values())
        for place, task in enumerate(tasks):
            known = None if place in settled else rule(place, task)
            if known is not None:
                owner.setdefault(known, place)
    named = [replace(tasks[owner[one]], id=one) for one in ids if one in owner]
    settled = set(owner.values())
    return (*named, *(task for place, task in enumerate(tasks) if place not in settled))


def differences(tasks: Sequence[Task], expected: Sequence[Fingerprint], graded: Sequence[str]) -> tuple[str, ...]:
    """What differs from the fingerprints, a sentence each: number of rows, rows missing, added, of another text."""
    here = {task.id: Fingerprint.of(task, graded) for task in tasks}
    there = {one.id: one for one in expected}
    common = [one for one in there if one in here]
    kinds: Mapping[str, Sequence[str]] = {
        "missing": [one for one in there if one not in here],
        "not among the known ones": [one for one in here if one not in there],
        "with another prompt": [one for one in common if here[one].prompt != there[one].prompt],
        "with another answer" if not graded else "with another patch or other tests": [
            one for one in common if here[one].gold != there[one].gold
        ],
    }
    number = [f"{len(tasks)} rows, {len(expected)} were expected"] if len(tasks) != len(expected) else []
    return (*number, *(_listed(ids, what) for what, ids in kinds.items() if ids))


def _listed(ids: Sequence[str], what: str) -> str:
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return f"{len(ids)} row{'s' if len(ids) > 1 else ''} {what}: {', '.join(ids[:SHOWN])}{more}"


def _said(task: Task, graded: Sequence[str]) -> tuple[str, str]:
    answer = task.answer if graded else _plain(task.answer)  # spaces of a patch matter
    gold = [answer, *(_value(task.info.get(name)) for name in graded)]
    return _plain(task.prompt), json.dumps(gold)


def _plain(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFC", text).split())
    whole = _WHOLE.fullmatch(text)
    return text if whole is None else f"{'-' if whole[1] == '-' else ''}{whole[2]}"


def _value(value: Any) -> Any:
    """A cell; lists of tests also as the JSON text that some copies keep them in, and in any order."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return sorted(map(str, value)) if isinstance(value, list) else value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
