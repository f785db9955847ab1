"""The folder of one run: who holds it, its configuration, its manifest, its metrics.

Invariants: one process at a time holds a folder, by an advisory lock that its death releases; a refusal touches
nothing; files appear whole or not at all, and a metrics line is written by one call.

Example:
    >>> import tempfile
    >>> with RunFolder.create(Path(tempfile.mkdtemp())) as run:
    ...     run.append_metrics({"step": 1, "loss": float("nan")})
    ...     run.read_metrics()
    [{'step': 1, 'loss': None}]
"""

import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sao_gym.errors import RunFolderError

LOCK, CONFIG, MANIFEST, METRICS = "lock", "config.toml", "manifest.json", "metrics.jsonl"


def default_path(name: str, now: datetime) -> Path:
    """runs/<name>-<UTC time>, for a preset or an environment called `name` and a time in UTC."""
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.") or "run"
    return Path("runs") / f"{slug}-{now:%Y%m%d-%H%M%S}"


class RunFolder:
    """A run folder that this process holds. Made by `create` or `open_for_resume`; close it, or use `with`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        self._marks: dict[str, Any] = {}

    @classmethod
    def create(cls, path: Path) -> "RunFolder":
        """Hold a new folder. Raises RunFolderError if it is in use, holds a run, or holds anything else."""
        # Whoever holds a folder locked it before putting anything in: so contents first, then the lock.
        if problem := _occupied(path):
            _refuse_held(path)
            raise RunFolderError(problem)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunFolderError(f"cannot make the run folder {path}: {error.strerror}") from error
        lock = _acquire(path)
        if problem := _occupied(path):
            os.close(lock)
            raise RunFolderError(problem)
        return cls(path, lock)

    @classmethod
    def open_for_resume(cls, path: Path) -> "RunFolder":
        """Hold the folder of an earlier run. Raises RunFolderError if it holds none, or is in use."""
        if not path.is_dir():
            raise RunFolderError(f"there is no run folder {path}: --resume takes the folder of an earlier run")
        if not (path / CONFIG).is_file():
            raise RunFolderError(f"{path} holds no run (no {CONFIG}): --resume takes the folder of an earlier run")
        return cls(path, _acquire(path))

    def close(self) -> None:
        """Let go of the folder; idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def file(self, name: str) -> Path:
        """Path of a file of this run."""
        return self.path / name

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration as `config.toml`; from here on the folder holds a run."""
        write_whole(self.file(CONFIG), text)

    def write_manifest(self, facts: Mapping[str, Any]) -> None:
        """Keep what the run was made with (versions, hashes, seeds) as `manifest.json`."""
        write_whole(self.file(MANIFEST), json.dumps(_finite(facts), indent=2, allow_nan=False) + "\n")

    def mark(self, **fields: Any) -> None:
        """Have every line of metrics from here on say this too."""
        self._marks |= fields

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to `metrics.jsonl`; numbers that JSON lacks become null."""
        line = (json.dumps(_finite({**record, **self._marks}), allow_nan=False) + "\n").encode()
        descriptor = os.open(self.file(METRICS), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            write_or_undo(descriptor, line, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All whole lines of `metrics.jsonl`; a line that a crash cut short is left out."""
        path = self.file(METRICS)
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in lines if line.strip()]

    def rewind_metrics(self, step: int) -> None:
        """Drop the metrics of steps after `step`, and a line that was cut short: they belong to a lost timeline."""
        kept = [record for record in self.read_metrics() if record.get("step", 0) <= step]
        write_whole(self.file(METRICS), "".join(json.dumps(record) + "\n" for record in kept))


@contextmanager
def new_folder(path: Path, *, drafts: Sequence[str] = ()) -> Iterator[RunFolder]:
    """A new folder, held; one that never came to hold a run is taken away again, with `drafts` if they lie in it."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    folder = RunFolder.create(path)
    try:
        yield folder
    finally:
        if not folder.file(CONFIG).exists():
            for name in (*drafts, LOCK):
                folder.file(name).unlink(missing_ok=True)
            for made in missing if not any(path.iterdir()) else ():
                with suppress(OSError):  # somebody else put something there meanwhile
                    made.rmdir()
        folder.close()


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old one or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with draft.open("w", encoding="utf-8", newline="\n") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_or_undo(descriptor: int, data: bytes, size: int) -> None:
    """Append `data` to a file of `size` bytes, all of it or none. Raises OSError where the disk refuses."""
    rest = memoryview(data)
    try:
        while rest:  # a disk that is nearly full takes a part, and says why at the next write
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.ftruncate(descriptor, size)
        raise


def _occupied(path: Path) -> str | None:
    """Why a new run cannot have this folder, going by what lies in it."""
    if path.exists() and not path.is_dir():
        return f"{path} is a file: give a new folder with --out"
    names = sorted(item.name for item in path.iterdir()) if path.exists() else []
    if CONFIG in names:
        return f"{path} already holds a run: go on with it by --resume {path}, or give a new folder with --out"
    others = [name for name in names if name != LOCK and not name.startswith(LOCK + ".")]
    if not others:
        return None
    return f"{path} is not empty and holds no run (it has {', '.join(others[:3])}): give a new folder with --out"


def _refuse_held(path: Path) -> None:
    try:
        descriptor = os.open(path / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        _flock(descriptor, path, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """Descriptor of the folder's locked lock file, which says our pid.

    A new lock file is linked into place when it is locked and written, so nobody ever sees it empty.
    """
    draft = path / f"{LOCK}.{os.getpid()}"
    try:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise RunFolderError(f"cannot write in the run folder {path}: {error.strerror}") from error
    try:
        _flock(descriptor, path)
        _write_pid(descriptor)
        os.link(draft, path / LOCK)
        return descriptor
    except FileExistsError:
        os.close(descriptor)
    finally:
        draft.unlink(missing_ok=True)
    descriptor = os.open(path / LOCK, os.O_RDWR)
    try:
        _flock(descriptor, path)
    except RunFolderError:
        os.close(descriptor)
        raise
    _write_pid(descriptor)
    return descriptor


def _flock(descriptor: int, path: Path, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise RunFolderError(f"cannot lock the run folder {path}: {error.strerror}") from error
        pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
        raise RunFolderError(
            f"{path} is in use by process {pid}: wait for it to end, or give a new folder with --out"
        ) from error


def _write_pid(descriptor: int) -> None:
    os.pwrite(descriptor, f"{os.getpid():<31}\n".encode(), 0)


def _finite(value: Any) -> Any:
    """The value in JSON's terms: what is no finite number becomes None, arrays' scalars become plain ones."""
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str | int | None):
        return value
    return _finite(value.item()) if hasattr(value, "item") else str(value)
