"""Which tasks of repositories are ones of SWE-Bench Verified: by id, by base commit, by the words of the issue.

Compared with hashes that come along (`swe_verified.tsv`), so training sets are cleaned, and looked at, without the
benchmark's file, and in the same way on every machine. A hash is no copy: an issue cannot be read from it. Issues are equal
if their runs of letters and digits are, without case; titles (first lines) of five words or more count too, so an issue that
was edited since is found. Parts of an issue inside another text are not.

Example:
    >>> Known.of(Task(id="a__b-1", prompt="It fails", info={"swe": {"base_commit": "0" * 40}})).title
    ''
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from sao_gym.protocols import Task, TaskSet
from sao_gym.tasks.overlap import Overlap

FILE = "swe_verified.tsv"
TITLE_WORDS = 5
SHOWN = 3
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A task by what gives it away: id in small letters, and hashes (12 hexadecimal digits) of the rest; empty is none."""

    id: str
    commit: str
    issue: str
    title: str

    @classmethod
    def of(cls, task: Task) -> "Known":
        """What gives this task away."""
        commit = str(task.info.get("swe", task.info).get("base_commit") or "").lower()
        words = _words(task.prompt)
        title = _words(next((line for line in task.prompt.splitlines() if line.strip()), ""))
        return cls(
            id=task.id.lower(),
            commit=_digest(commit),
            issue=_digest(" ".join(words)),
            title=_digest(" ".join(title)) if len(title) >= TITLE_WORDS else "",
        )


@dataclass(frozen=True, slots=True)
class Shared:
    """A task of a training set that is one of the benchmark's, and by what it was known."""

    task_id: str
    benchmark_id: str
    by: str


def shared_with_verified(tasks: TaskSet | Iterable[Task]) -> tuple[Shared, ...]:
    """The tasks that are ones of SWE-Bench Verified, in their order."""
    return _shared(_each(tasks), stored_issues())


def _shared(tasks: Iterable[Task], known: Iterable[Known]) -> tuple[Shared, ...]:
    """A task is known by the first of id, base commit, issue and title that it has in common."""
    indexes = {key: {value: one.id for one in known if (value := getattr(one, key))} for key in _WORDS_FOR}
    found = []
    for task in tasks:
        here = Known.of(task)
        for key, words in _WORDS_FOR.items():
            if (other := indexes[key].get(getattr(here, key))) is not None:
                found.append(Shared(task.id, other, words))
                break
    return tuple(found)


_WORDS_FOR = {"id": "its id", "commit": "its base commit", "issue": "its issue text", "title": "its issue's title"}


def describe_shared(shared: Sequence[Shared], total: int, benchmark: str = "SWE-Bench Verified") -> str:
    """One sentence; empty where nothing is shared."""
    if not shared:
        return ""
    listed = ", ".join(f"{one.task_id} ({one.by})" for one in shared[:SHOWN])
    rest = f" and {len(shared) - SHOWN} more" if len(shared) > SHOWN else ""
    return f"{len(shared)} of {total} training tasks are of {benchmark}: {listed}{rest}"


def swe_overlaps(benchmark: Sequence[Task], training: TaskSet | Sequence[Task]) -> tuple[Overlap, ...]:
    """Tasks of repositories that are in both sets. Issues share stock phrases of their forms, so runs of words say nothing."""
    known = [Known.of(task) for task in benchmark]
    by_benchmark: dict[str, list[Shared]] = {}
    for one in _shared(_each(training), known):
        by_benchmark.setdefault(one.benchmark_id, []).append(one)
    return tuple(
        Overlap(
            benchmark_id=task.id,
            training_ids=tuple(one.task_id for one in by_benchmark[task.id.lower()]),
            words=by_benchmark[task.id.lower()][0].by,
            is_exact=True,
        )
        for task in benchmark
        if task.id.lower() in by_benchmark
    )


def are_of_repositories(tasks: TaskSet | Sequence[Task]) -> bool:
    """Whether every task says which repository it is about."""
    return all("swe" in task.info for task in _each(tasks))


@cache
def stored_issues() -> tuple[Known, ...]:
    """What comes along about SWE-Bench Verified."""
    text = (files("sao_gym.tasks") / FILE).read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines())
    return tuple(Known(id=one, commit=commit, issue=issue, title=title) for one, commit, issue, title in rows)


def line_of(task: Task) -> str:
    """The line of the file that a task of the benchmark has."""
    known = Known.of(task)
    return "\t".join((known.id, known.commit, known.issue, known.title))


def _each(tasks: TaskSet | Iterable[Task]) -> Iterable[Task]:
    return tasks if isinstance(tasks, Iterable) else (tasks[index] for index in range(len(tasks)))


def _words(text: str) -> list[str]:
    return _WORD.findall((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12] if text else ""
