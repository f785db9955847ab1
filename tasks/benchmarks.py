"""Benchmarks by name: which problems, where they come from, and whether they are the ones that are meant.

Invariant: what is loaded is compared with the rows that are known, and every difference and every repair is said;
none is refused. Ids and order are the same wherever the rows came from. The project ships no copy of any problem.

Example:
    >>> BENCHMARKS["beyond_aime"].n_rows, BENCHMARKS["beyond_aime"].samples
    (100, 4)
    >>> loaded = load_benchmark("aime2025", data=Path("my_data"))  # doctest: +SKIP
    >>> loaded.tasks[0].id, loaded.differences  # doctest: +SKIP
    ('aime2025-I-1', ())
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sao_gym.errors import ConfigError, RegistryError, TaskFileError
from sao_gym.protocols import Task
from sao_gym.registry import spec
from sao_gym.tasks._benchmark_list import BENCHMARKS, Benchmark
from sao_gym.tasks._files import read_records
from sao_gym.tasks._fingerprints import aligned, content_hash, differences, stored
from sao_gym.tasks._repairs import Repair, repaired
from sao_gym.tasks.base import ListTaskSet, tasks_from_records
from sao_gym.tasks.hub import Record, read_hub
from sao_gym.tasks.swe import as_swe_tasks
from sao_gym.tools import nearest

__all__ = ["BENCHMARKS", "Benchmark", "LoadedBenchmark", "Repair", "environment_of", "find_benchmark", "load_benchmark"]
DATA_VARIABLE = "SAO_GYM_DATA"
VERSIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"imo_answerbench": MappingProxyType({"v1": "imo_answerbench_v1", "v2": "imo_answerbench"})}
)
"""Benchmarks that exist in more than one version, and the name of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedBenchmark:
    """A benchmark's tasks, with what there is to say about them.

    `source` is a file or the place on the Hub, `file_hash` the SHA-256 of the file (None from the Hub), `content_hash`
    of what the rows say. `differences` are sentences; none, and the rows are those that are known.
    """

    benchmark: Benchmark
    tasks: ListTaskSet
    source: str
    content_hash: str
    differences: tuple[str, ...] = ()
    repairs: tuple[Repair, ...] = ()
    file_hash: str | None = None

    def take(self, limit: int | None = None, *, seed: int = 0) -> tuple[Task, ...]:
        """All tasks, or `limit` of them drawn by `seed`, in the benchmark's order.

        The first tasks are no sample: BeyondAIME is sorted by its answers. A larger limit keeps what a smaller drew.
        """
        if limit is not None and limit < 1:
            raise ConfigError(f"a limit of {limit} tasks leaves nothing to evaluate; give at least 1")
        drawn = sorted(self.tasks, key=lambda task: hashlib.sha256(f"{seed}:{task.id}".encode()).digest())[:limit]
        chosen = {task.id for task in drawn}
        return tuple(task for task in self.tasks if task.id in chosen)

    def facts(self) -> dict[str, Any]:
        """What a manifest says about the data, as JSON has it."""
        return {
            "benchmark": self.benchmark.name,
            "source": self.source,
            "revision": self.benchmark.revision,
            "rows": len(self.tasks),
            "content_hash": self.content_hash,
            "expected_content_hash": self.benchmark.content_hash,
            "file_hash": self.file_hash,
            "differences": list(self.differences),
            "repairs": [asdict(repair) for repair in self.repairs],
            "licence": self.benchmark.licence,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """Rows of one source, before anything was done to them."""

    records: Iterable[Record]
    source: str
    file_hash: str | None = None


def find_benchmark(name: str, version: str | None = None) -> Benchmark:
    """The benchmark of this name and version. Raises ConfigError, with the nearest names."""
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}; {nearest(name, list(BENCHMARKS), what='benchmark')}")
    if version is None:
        return BENCHMARKS[name]
    versions = VERSIONS.get(name)
    if versions is None:
        raise ConfigError(f"benchmark {name!r} has no versions, got {version!r}; leave the version away")
    if version not in versions:
        raise ConfigError(f"benchmark {name!r} has no version {version!r}; give {' or '.join(versions)}")
    return BENCHMARKS[versions[version]]


def environment_of(benchmark: Benchmark) -> str:
    """The environment that runs a benchmark unless another is named. Raises ConfigError where there is none yet."""
    try:
        return spec(benchmark.environment).id
    except RegistryError as error:
        raise ConfigError(
            f"benchmark {benchmark.name!r} runs in the environment {benchmark.environment!r}, which this version does "
            "not have yet; its tasks can be loaded, and run with --env in an environment of your own"
        ) from error


def load_benchmark(name: str, *, data: Path | None = None, version: str | None = None) -> LoadedBenchmark:
    """A benchmark from `data` (its file, or a folder that holds it), else the folder SAO_GYM_DATA, else the Hub.

    Raises ConfigError for names, TaskFileError where there is nothing to read.
    """
    benchmark = find_benchmark(name, version)
    rows = _find(benchmark, data)
    repairs: list[Repair] = []
    given = tasks_from_records(benchmark.name, _mended(benchmark, rows.records, repairs), where=rows.source)
    expected = stored(benchmark.name)
    named = aligned(list(given), expected)
    tasks = (
        as_swe_tasks(benchmark.name, named, rows.source)
        if benchmark.is_of_repositories
        else ListTaskSet(benchmark.name, named)
    )
    found = content_hash(tasks, benchmark.graded)
    return LoadedBenchmark(
        benchmark=benchmark,
        tasks=tasks,
        source=rows.source,
        content_hash=found,
        differences=() if found == benchmark.content_hash else _told(benchmark, tasks, found),
        repairs=tuple(repairs),
        file_hash=rows.file_hash,
    )


def _told(benchmark: Benchmark, tasks: ListTaskSet, found: str) -> tuple[str, ...]:
    """Why a content hash is another one; first whose rows these are, if they are another's."""
    others = [other.name for other in BENCHMARKS.values() if other.content_hash == found]
    hint = (f"these are the rows of {others[0]}, not of {benchmark.name}",) if others else ()
    told = differences(list(tasks), stored(benchmark.name), benchmark.graded)
    return (*hint, *told) or (f"the content hash is {found}, {benchmark.content_hash} was expected",)


# -- where the rows come from


def _find(benchmark: Benchmark, data: Path | None) -> _Rows:
    if data is not None:
        path = _file_in(benchmark, Path(data)) if Path(data).is_dir() else Path(data)
        if path is None:
            raise TaskFileError(
                f"{data} holds no file of {benchmark.name}; expected {' or '.join(benchmark.files)} in it"
            )
        return _file(path)
    folder = os.environ.get(DATA_VARIABLE)
    path = _file_in(benchmark, Path(folder)) if folder else None
    if path is not None:
        return _file(path)
    missed = f"{DATA_VARIABLE}={folder} holds no {benchmark.files[0]}, and " if folder else ""
    try:
        parts = [read_hub(place) for place in benchmark.hub]
    except (ConfigError, TaskFileError) as error:
        raise TaskFileError(
            f"{missed}{error}; for {benchmark.name} give --data PATH, a folder with {benchmark.files[0]} or the file "
            f"itself, or name the folder in {DATA_VARIABLE}"
        ) from error
    records = (record for part in parts for record in part.records)
    return _Rows(records=records, source=", ".join(part.source for part in parts))


def _file_in(benchmark: Benchmark, folder: Path) -> Path | None:
    return next((folder / name for name in benchmark.files if (folder / name).is_file()), None)


def _file(path: Path) -> _Rows:
    try:
        file_hash = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise TaskFileError(
            f"cannot read {path}: {error.strerror}; give a benchmark's file, or a folder that holds it"
        ) from error
    return _Rows(records=read_records(path), source=str(path), file_hash=file_hash)


# -- what is done to them


def _mended(benchmark: Benchmark, records: Iterable[Record], repairs: list[Repair]) -> Iterator[Record]:
    """Rows under our own column names and without known defects; what was repaired is added to `repairs`."""
    for place, record in records:
        if not isinstance(record, Mapping):
            yield place, record  # refused with its place where tasks are made
            continue
        row, made = repaired(_renamed(benchmark, record))
        repairs.extend(made)
        yield place, row


def _renamed(benchmark: Benchmark, record: Mapping[str, Any]) -> dict[str, Any]:
    """A row with the columns of its source named as ours; texts of problems without space around them."""
    names = {theirs: ours for theirs, ours in benchmark.columns.items() if theirs in record and ours not in record}
    row = {names.get(name, name): value for name, value in record.items()}
    if benchmark.graded:  # a patch is used as it is
        return row
    return {name: value.strip() if isinstance(value, str) else value for name, value in row.items()}
