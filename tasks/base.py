"""Task sets: finite, ordered, with stable ids and a hash of all that they say.

Invariants: ids never repeat; a set is never empty; a set written to a file and read back is equal, hash included.

Example:
    >>> tasks = ListTaskSet("toy", [Task(id="a", prompt="1+1?", answer="2")])
    >>> len(tasks), tasks.by_id("a").answer, tasks.content_hash[:8]
    (1, '2', 'c4adf195')
"""

import base64
import datetime
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from sao_gym.errors import ConfigError, TaskFileError
from sao_gym.jsonl import write_jsonl
from sao_gym.protocols import Task
from sao_gym.tasks._files import read_jsonl_records, read_parquet_records, read_records
from sao_gym.tasks.hub import Record, is_hub_path, parse_hub_path, read_hub

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "problem", "question"),
    "answer": ("answer", "gold", "solution", "expected_answer"),
    "id": ("id", "task_id", "uid"),
}
"""Where the fields of a task are looked for, first name first."""
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class ListTaskSet:
    """Tasks in memory. Raises ConfigError if there are none or if two share an id."""

    def __init__(self, name: str, tasks: Iterable[Task]) -> None:
        self._name = name
        self._tasks = tuple(tasks)
        self._index = {task.id: i for i, task in enumerate(self._tasks)}
        if not self._tasks:
            raise ConfigError(f"task set {name!r} holds no tasks; give it at least one")
        if len(self._index) < len(self._tasks):
            twice = next(task.id for i, task in enumerate(self._tasks) if self._index[task.id] != i)
            raise ConfigError(f"task set {name!r} holds the id {twice!r} twice; ids must differ")
        self._hash = ""

    @property
    def name(self) -> str:
        """Name of the set and its split."""
        return self._name

    @property
    def content_hash(self) -> str:
        """SHA-256 over every field of every task, in order; made when it is first asked for."""
        self._hash = self._hash or hash_tasks(self._tasks)
        return self._hash

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def by_id(self, task_id: str) -> Task:
        """The task with this id. Raises ConfigError if there is none."""
        if task_id not in self._index:
            raise ConfigError(f"task set {self._name!r} of {len(self)} tasks holds no task with the id {task_id!r}")
        return self._tasks[self._index[task_id]]


def hash_tasks(tasks: Iterable[Task]) -> str:
    """SHA-256 over tasks as canonical JSON lines, hexadecimal."""
    digest = hashlib.sha256()
    for task in tasks:
        fields = [task.id, task.prompt, task.answer, dict(task.info)]
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()


def load_tasks(path: str | os.PathLike[str], mapping: Mapping[str, str] | None = None) -> ListTaskSet:
    """Tasks of a file, or of a data set on the Hub under a path like `hf:owner/name:split` (see `hub.parse_hub_path`).

    Files are parquet or CSV where their names end so, else JSON lines; `mapping` as in `load_jsonl`. What has not
    changed is read once per process: every environment of a run asks for the same one. Raises TaskFileError.
    """
    columns = tuple((mapping or {}).items())
    if is_hub_path(path):
        return _load_hub_once(str(path), columns)
    path = Path(path).absolute()
    try:
        status = path.stat()
    except OSError as error:
        raise TaskFileError(f"cannot read {path}: {error.strerror}; give the path of a task file") from error
    return _load_once(path, (status.st_mtime_ns, status.st_size, status.st_ino), columns)


@lru_cache(maxsize=8)
def _load_once(path: Path, state: tuple[int, ...], mapping: tuple[tuple[str, str], ...]) -> ListTaskSet:
    return tasks_from_records(path.stem, read_records(path), dict(mapping), where=str(path))


@lru_cache(maxsize=8)
def _load_hub_once(path: str, mapping: tuple[tuple[str, str], ...]) -> ListTaskSet:
    rows = read_hub(parse_hub_path(path))
    return tasks_from_records(path, rows.records, dict(mapping), where=path)


def load_jsonl(path: str | os.PathLike[str], mapping: Mapping[str, str] | None = None) -> ListTaskSet:
    """Tasks of a JSON lines file.

    `mapping` says which column holds `prompt`, `answer` and `id`; what it leaves out is looked for (see `COLUMNS`).
    Without an id column, a hash of prompt and answer is the id (with a number behind it where a row stands there
    again). Other columns become `info`, as JSON has them. Raises
    TaskFileError, also for a record without a column that `mapping` names.
    """
    path = Path(path)
    return tasks_from_records(path.stem, read_jsonl_records(path), mapping, where=str(path))


def load_parquet(path: str | os.PathLike[str], mapping: Mapping[str, str] | None = None) -> ListTaskSet:
    """Tasks of a parquet file; `mapping` as in `load_jsonl`. Raises TaskFileError."""
    path = Path(path)
    return tasks_from_records(path.stem, read_parquet_records(path), mapping, where=str(path))


def save_jsonl(path: str | os.PathLike[str], tasks: Iterable[Task]) -> None:
    """Write tasks so that `load_jsonl` reads them back equal."""
    write_jsonl(path, ({"id": t.id, "prompt": t.prompt, "answer": t.answer, "info": dict(t.info)} for t in tasks))


def tasks_from_records(
    name: str, records: Iterable[Record], mapping: Mapping[str, str] | None = None, *, where: str
) -> ListTaskSet:
    """A task set from rows; `where` names their source in messages. Raises TaskFileError, ConfigError."""
    mapping = dict(mapping or {})
    unknown = [key for key in mapping if key not in COLUMNS]
    if unknown:
        raise ConfigError(f"unknown task field {unknown[0]!r} in a column mapping; fields: {', '.join(COLUMNS)}")
    tasks: list[Task] = []
    places: dict[str, str] = {}
    copies: Counter[str] = Counter()
    for place, record in records:
        task = _task(where, place, record, mapping, copies)
        if task.id in places:
            raise TaskFileError(f"{where}, {place}: the id {task.id!r} was given at {places[task.id]} already")
        places[task.id] = place
        tasks.append(task)
    if not tasks:
        raise TaskFileError(f"{where} holds no tasks; it needs at least one record")
    return ListTaskSet(name, tasks)


def _task(where: str, place: str, record: Any, mapping: Mapping[str, str], copies: Counter[str]) -> Task:
    if not isinstance(record, dict):
        raise TaskFileError(f"{where}, {place}: expected a JSON object, got {type(record).__name__}")
    columns = {field: _column(where, place, record, field, mapping) for field in COLUMNS}
    prompt_column = columns["prompt"]
    if prompt_column is None or not isinstance(record.get(prompt_column), str):
        wanted = mapping.get("prompt") or " or ".join(COLUMNS["prompt"])
        found = "" if prompt_column is None else f" but a {type(record[prompt_column]).__name__}"
        raise TaskFileError(
            f"{where}, {place}: no text under {prompt_column or wanted}{found}; columns there: "
            f"{', '.join(map(str, record)) or 'none'}. Say which column holds what with a column mapping"
        )
    prompt, answer = record[prompt_column], _text(where, place, record, columns["answer"])
    task_id = _text(where, place, record, columns["id"]) or _hashed_id(prompt, answer, copies)
    info = {key: value for key, value in record.items() if key not in columns.values() and key != "info"}
    nested = record.get("info")
    info.update(nested if isinstance(nested, dict) else {} if nested is None else {"info": nested})
    if _HALF_CHARACTER.search(task_id):
        raise TaskFileError(f"{where}, {place}: the id {task_id!r} holds half a character (a lone surrogate)")
    return Task(id=task_id, prompt=prompt, answer=answer, info={key: _plain(value) for key, value in info.items()})


def _hashed_id(prompt: str, answer: str, copies: Counter[str]) -> str:
    """An id for a row that has none; equal rows are told apart by `copies`, how often each was met."""
    made = hashlib.sha256(f"{prompt}\x1f{answer}".encode(errors="surrogatepass")).hexdigest()[:16]
    copies[made] += 1
    return made if copies[made] == 1 else f"{made}-{copies[made]}"


def _column(where: str, place: str, record: Mapping[str, Any], field: str, mapping: Mapping[str, str]) -> str | None:
    """The column of a field: as mapped, or the first of its names that holds something."""
    if field in mapping:
        if mapping[field] not in record:
            raise TaskFileError(
                f"{where}, {place}: the column mapping says that {field} stands under {mapping[field]!r}; columns "
                f"there: {', '.join(map(str, record)) or 'none'}"
            )
        return mapping[field]
    present = [name for name in COLUMNS[field] if name in record]
    return next((name for name in present if record[name] is not None), present[0] if present else None)


def _plain(value: Any) -> Any:
    """A value of a file as JSON has it, so that a set can be written and read back equal."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _text(where: str, place: str, record: Mapping[str, Any], column: str | None) -> str:
    value = None if column is None else record[column]
    if value is None:
        return ""
    if not isinstance(value, str | int | float | Decimal):
        raise TaskFileError(f"{where}, {place}: {column!r} must be text or a number, got {type(value).__name__}")
    if not isinstance(value, str) and not math.isfinite(value):
        raise TaskFileError(f"{where}, {place}: {column!r} must be text or a finite number, got {value}")
    return str(value)
