"""Tasks of repositories: an issue to solve, judged by the project's tests; SWE-Bench Verified and sets with its columns.

Trained on unless another set is named: SWE-Gym (2438 rows of 11 projects), without what is in SWE-Bench Verified, which is
the held-out split. A set that was named is taken as it is: what it has of Verified is said as its `contamination`, in the
log, the manifest and every line of metrics, unless `decontaminate` takes it out.

Example:
    make_tasks("swe_verified", split="heldout")                   # SWE-Bench Verified
    make_tasks("swe_verified", tasks="rows.parquet", limit=100)   # rows with SWE-Bench's columns
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sao_gym.errors import ConfigError, TaskFileError
from sao_gym.protocols import Task
from sao_gym.tasks._files import read_records
from sao_gym.tasks._swe_overlap import Shared, describe_shared, shared_with_verified
from sao_gym.tasks._swe_rows import COLUMNS, OFFICIAL_IMAGES, SWE_GYM_IMAGES, task_of_row
from sao_gym.tasks.base import ListTaskSet
from sao_gym.tasks.hub import HubPath, Record, is_hub_path, parse_hub_path, read_hub

BENCHMARK = "swe_verified"


SOURCES: Mapping[str, HubPath] = MappingProxyType(
    {
        "swe_gym": HubPath(repo="SWE-Gym/SWE-Gym", split="train"),
        "swe_gym_lite": HubPath(repo="SWE-Gym/SWE-Gym-Lite", split="train"),
    }
)
"""Sets on the Hub that go by a word; SWE-Bench Verified is `swe_verified`."""
TRAINED_ON = "swe_gym"
IMAGES: Mapping[str, str] = MappingProxyType(
    {
        "swe-gym/": SWE_GYM_IMAGES,
        "swe-bench/swe-bench": OFFICIAL_IMAGES,
        "princeton-nlp/swe-bench": OFFICIAL_IMAGES,
    }
)
"""How images are named in sets on the Hub, by how the set's name begins."""
NO_TEST = "without a test that only a fix makes pass"


class SweTaskSet(ListTaskSet):
    """Tasks of repositories; `left_out` says how many rows were not taken, and why."""

    def __init__(
        self, name: str, tasks: Iterable[Task], *, source: str = "", left_out: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(name, tasks)
        self.source = source or name
        self.left_out = dict(left_out or {})

    @cached_property
    def shared(self) -> tuple[Shared, ...]:
        """Those of SWE-Bench Verified among them."""
        return shared_with_verified(self)

    @property
    def contamination(self) -> str:
        """What makes results on SWE-Bench Verified worth nothing for who trains on these; empty where nothing does."""
        return describe_shared(self.shared, len(self))

    @property
    def facts(self) -> dict[str, Any]:
        """What a manifest says of the set."""
        return {"source": self.source, "left_out": self.left_out, "shared_with_swe_verified": len(self.shared)}


def swe_tasks(
    tasks: str | os.PathLike[str] | None = None,
    split: Literal["train", "heldout"] = "train",
    mapping: Mapping[str, str] | None = None,
    images: str = "",
    decontaminate: bool | None = None,
    limit: int | None = None,
    data: str | None = None,
) -> SweTaskSet:
    """Tasks of repositories.

    `tasks`: `swe_gym` (also if unset), `swe_gym_lite`, `swe_verified`, a file (JSON lines, parquet) or
    `hf:owner/name:split`; the split heldout is SWE-Bench Verified whatever they are. `mapping` says which column holds a
    field (see `_swe_rows.COLUMNS`), `images` is a pattern such as `owner/prefix.{id_1776}:latest` for rows without an
    image. `decontaminate` leaves out what is in SWE-Bench Verified; unset: of the sets that go by a word. `limit` draws so
    many, the same ones every time. `data` is the benchmark's file or its folder. Raises ConfigError, TaskFileError.
    """
    if split not in ("train", "heldout"):
        raise ConfigError(f"split must be 'train' or 'heldout', got {split!r}")
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigError(f"limit is {limit!r}; give how many tasks to take, at least 1")
    if unknown := [key for key in mapping or {} if key not in COLUMNS]:
        raise ConfigError(f"unknown field {unknown[0]!r} in a column mapping; fields: {', '.join(COLUMNS)}")
    name = BENCHMARK if split == "heldout" else TRAINED_ON if tasks is None else os.fspath(tasks)
    if name == BENCHMARK:
        made = _verified(data or "", os.environ.get("SAO_GYM_DATA", ""))
    else:
        made = _rows(name, _state(name), tuple((mapping or {}).items()), images)
    cleaned = name in SOURCES if decontaminate is None else decontaminate and split == "train"
    return _chosen(made, cleaned, limit)


def as_swe_tasks(name: str, tasks: Iterable[Task], source: str = "") -> SweTaskSet:
    """The tasks of a benchmark as tasks of repositories; what they say stays beside. Raises TaskFileError."""
    return SweTaskSet(name, (_of_benchmark(task, name) for task in tasks), source=source)


def _of_benchmark(task: Task, where: str) -> Task:
    row = {**task.info, "id": task.id, "prompt": task.prompt, "answer": task.answer}
    made = task_of_row(row, f"{where}, {task.id}", {}, OFFICIAL_IMAGES)
    return Task(id=task.id, prompt=task.prompt, answer=task.answer, info={**task.info, **made.info})


def drawn(tasks: Iterable[Task], limit: int | None) -> tuple[Task, ...]:
    """`limit` tasks in their order, the same ones every time; a larger limit keeps what a smaller drew."""
    tasks = tuple(tasks)
    ranked = sorted(tasks, key=lambda task: hashlib.sha256(f"0:{task.id}".encode()).digest())[:limit]
    chosen = {task.id for task in ranked}
    return tuple(task for task in tasks if task.id in chosen)


@lru_cache(maxsize=8)
def _chosen(made: SweTaskSet, decontaminate: bool, limit: int | None) -> SweTaskSet:
    if not decontaminate and limit is None:
        return made
    out = {one.task_id for one in made.shared} if decontaminate else set()
    kept = [task for task in made if task.id not in out]
    if not kept:
        raise TaskFileError(
            f"every task of {made.name} is of SWE-Bench Verified, so decontaminate leaves none; leave it out, and the run is "
            "marked as contaminated"
        )
    left_out = {**made.left_out, **({"of SWE-Bench Verified": len(out)} if out else {})}
    name = made.name if limit is None else f"{made.name}-{limit}"
    return SweTaskSet(name, drawn(kept, limit), source=made.source, left_out=left_out)


@lru_cache(maxsize=2)
def _verified(data: str, _folder: str) -> SweTaskSet:
    """The benchmark; kept by where its file is looked for."""
    from sao_gym.tasks.benchmarks import load_benchmark  # it makes its tasks with what stands here

    made = load_benchmark(BENCHMARK, data=Path(data) if data else None).tasks
    if not isinstance(made, SweTaskSet):
        raise TypeError(f"{BENCHMARK} was loaded as a {type(made).__name__}")
    return made


def _state(name: str) -> tuple[int, ...]:
    """What changes when a file does, so that a changed one is read again."""
    if name in SOURCES or is_hub_path(name):
        return ()
    try:
        status = Path(name).stat()
    except OSError as error:
        words = ", ".join((BENCHMARK, *SOURCES))
        raise TaskFileError(
            f"cannot read {name}: {error.strerror}; give a task file, hf:owner/name:split, or one of {words}"
        ) from error
    return status.st_mtime_ns, status.st_size, status.st_ino


@lru_cache(maxsize=8)
def _rows(name: str, _state: tuple[int, ...], mapping: tuple[tuple[str, str], ...], images: str) -> SweTaskSet:
    records, source = _read(name)
    columns = dict(mapping)
    tasks: dict[str, Task] = {}
    left_out: dict[str, int] = {}
    for place, row in records:
        where = f"{name}, {place}"
        if not isinstance(row, Mapping):
            raise TaskFileError(f"{where}: expected a JSON object, got {type(row).__name__}")
        task = task_of_row(row, where, columns, images or _image_pattern(name))
        if task.id in tasks:
            raise TaskFileError(f"{where}: the id {task.id!r} is given twice")
        if not task.info["swe"].get("fail_to_pass"):
            left_out[NO_TEST] = left_out.get(NO_TEST, 0) + 1
        else:
            tasks[task.id] = task
    if not tasks:
        raise TaskFileError(f"{name} holds no task that can be graded; it needs rows with fail_to_pass")
    return SweTaskSet(Path(name).stem if Path(name).suffix else name, tasks.values(), source=source, left_out=left_out)


def _read(name: str) -> tuple[Iterable[Record], str]:
    if name in SOURCES or is_hub_path(name):
        found = read_hub(SOURCES[name] if name in SOURCES else parse_hub_path(name))
        return found.records, found.source
    return read_records(Path(name)), name


def _image_pattern(name: str) -> str:
    """How images are named in a set that is known; empty for the others."""
    place = SOURCES.get(name) or (parse_hub_path(name) if is_hub_path(name) else None)
    repo = place.repo.lower() if place else ""
    return next((pattern for start, pattern in IMAGES.items() if repo.startswith(start)), "")
