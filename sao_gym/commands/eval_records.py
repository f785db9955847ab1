"""What an evaluation keeps in its folder while it runs, and what of that can be gone on with.

Invariants: an episode's raw record is on the disk before its line in samples.jsonl; what was cut is said and run again,
never read as a result. When all is done, `episodes.log` becomes `trajectories.parquet`, in order.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sao_gym.commands.eval_targets import Recorded, Target
from sao_gym.episode_log import EpisodeLog
from sao_gym.errors import RunFolderError, TaskFileError
from sao_gym.evaluation import EpisodeResult
from sao_gym.jsonl import append_jsonl, dump_line, read_jsonl
from sao_gym.parquet import read_in_parts, read_uids, write_in_parts
from sao_gym.protocols import Task
from sao_gym.runfolder import MANIFEST, RunFolder, write_whole
from sao_gym.stream import OutcomeStatus, Trajectory

RESULTS, SAMPLES, TRAJECTORIES = "results.json", "samples.jsonl", "trajectories.parquet"
EPISODES, TASKS, REPORT = "episodes.log", "tasks.jsonl", "report.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Results by uid that stand, how many episodes had ended in an error, and sentences about what was cut or missing."""

    results: Mapping[str, EpisodeResult]
    n_error: int
    problems: tuple[str, ...]


class EvalRecords:
    """The records of one evaluation, in a folder that this process holds."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @cached_property
    def log(self) -> EpisodeLog:
        """Episodes as they ended."""
        return EpisodeLog(self._file(EPISODES))

    def _file(self, name: str) -> Path:
        return self.folder.file(name)

    # While it runs

    def begin(self, targets: Sequence[Target]) -> None:
        """Keep the tasks, golds included: an evaluation is gone on with and graded again on what it asked."""
        lines = (
            json.dumps(
                {"bench": target.name, "id": t.id, "prompt": t.prompt, "answer": t.answer, "info": dict(t.info)},
                default=str,
            )
            for target in targets
            for t in target.tasks
        )
        write_whole(self._file(TASKS), "".join(line + "\n" for line in lines))

    def keep_episode(self, trajectory: Trajectory) -> None:
        """Keep an episode's raw record; it outlives this process from here on."""
        self.log.append(trajectory)

    def keep_result(self, bench: str, result: EpisodeResult) -> None:
        """Keep an episode's line, after its raw record."""
        append_jsonl(self._file(SAMPLES), sample_record(bench, result))

    # What an earlier run left

    def recorded(self) -> dict[str, Recorded]:
        """By benchmark, what the run took. Raises RunFolderError where it did not come that far."""
        facts = self.manifest()["benchmarks"]
        tasks: dict[str, list[Task]] = {name: [] for name in facts}
        for _, row in read_jsonl(self._file(TASKS)):
            task = Task(id=row["id"], prompt=row["prompt"], answer=row["answer"], info=row["info"])
            tasks.setdefault(row["bench"], []).append(task)
        return {name: Recorded(facts=facts[name], tasks=tuple(tasks[name])) for name in facts}

    def manifest(self) -> dict[str, Any]:
        """What the run was made with. Raises RunFolderError."""
        try:
            found = json.loads(self._file(MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _no_evaluation(self.folder.path) from error
        if "benchmarks" not in found or not self._file(TASKS).is_file():
            raise _no_evaluation(self.folder.path)
        return dict(found)

    def recover(self) -> Recovered:
        """What stands: a readable line, a whole raw record, no error.

        Nothing is changed, but that the cut end of a log is cut off, and a parquet file that cannot be read put aside.
        """
        problems, kept = [], self._raw_uids()
        problems += self.log.problems
        results: dict[str, EpisodeResult] = {}
        for number, line in _lines(self._file(SAMPLES)):
            try:
                result = EpisodeResult.from_record(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):
                problems.append(f"{SAMPLES}, line {number}: cut, or no result")
                continue
            results[result.uid] = result
        for uid in [uid for uid in results if uid not in kept]:
            problems.append(f"{SAMPLES}: episode {uid} has a line and no raw record")
            del results[uid]
        failed = [uid for uid, result in results.items() if result.outcome is OutcomeStatus.ERROR]
        standing = {uid: result for uid, result in results.items() if uid not in failed}
        return Recovered(results=standing, n_error=len(failed), problems=tuple(problems))

    def _raw_uids(self) -> frozenset[str]:
        path = self._file(TRAJECTORIES)
        try:
            whole = read_uids(path) if path.exists() else ()
        except TaskFileError as error:
            self.log.problems.append(f"{TRAJECTORIES}: cannot be read ({error})")
            path.rename(path.with_name(path.name + ".damaged"))
            whole = ()
        return self.log.uids | frozenset(whole)

    def go_on(self, targets: Sequence[Target], recovered: Recovered) -> None:
        """Make the files hold what stands alone, before more is added."""
        path = self._file(TRAJECTORIES)
        if path.exists():
            for trajectory in read_in_parts(path):
                if trajectory.uid not in self.log.uids:
                    self.log.append(trajectory)
        self.write_samples({target.name: [recovered.results.get(uid) for uid in target.uids()] for target in targets})

    # When all is done

    def write_samples(self, results: Mapping[str, Iterable[EpisodeResult | None]]) -> None:
        """Write samples.jsonl anew, in order."""
        lines = (
            dump_line(sample_record(bench, result)) for bench, found in results.items() for result in found if result
        )
        write_whole(self._file(SAMPLES), "".join(lines))

    def gather(self, targets: Sequence[Target]) -> None:
        """Turn the log into one parquet file, in order."""
        if self.log.uids:
            write_in_parts(self._file(TRAJECTORIES), self.log.read(uid for each in targets for uid in each.uids()))
        self.log.remove()

    def episodes(self) -> Iterator[Trajectory]:
        """Every raw record, in order; of an evaluation that did not end, those that it has. Raises TaskFileError."""
        path = self._file(TRAJECTORIES)
        logged = self.log.uids
        if path.exists():
            yield from (one for one in read_in_parts(path) if one.uid not in logged)
        yield from self.log.read(sorted(logged))


def sample_record(bench: str, result: EpisodeResult) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {"bench": bench, **result.to_record()}


def read_samples(path: Path) -> dict[str, list[EpisodeResult]]:
    """The results of a finished evaluation by benchmark, in order. Raises TaskFileError."""
    found: dict[str, list[EpisodeResult]] = {}
    for number, record in read_jsonl(path):
        try:
            found.setdefault(record["bench"], []).append(EpisodeResult.from_record(record))
        except (ValueError, KeyError, TypeError) as error:
            raise TaskFileError(f"{path}, line {number}: no result of an evaluation ({error!r})") from error
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    data = path.read_bytes() if path.exists() else b""
    return ((number, line) for number, line in enumerate(data.split(b"\n"), start=1) if line.strip())


def _no_evaluation(path: Path) -> RunFolderError:
    return RunFolderError(
        f"{path} holds no evaluation that can be gone on with (no {MANIFEST} with benchmarks, or no {TASKS}): give the "
        "folder that --out named, or start again with a new one"
    )
