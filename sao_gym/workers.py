"""Environments of other programs' own: OpenHands, mini-swe-agent, SGLang. Their pins collide with ours and each other's.

An environment is made from a lock that comes with this package, once, in a cache folder (`$SAO_GYM_WORKERS`, else
`$XDG_CACHE_HOME/sao-gym/workers`, else `~/.cache/sao-gym/workers`). Invariants: it is built aside, probed by importing what
it is for, and only then renamed to its place, so a place is whole or not there; its name holds the lock's hash, so another
lock is another environment; two processes that need one build it once.

Example:
    >>> KINDS["openhands"].oldest_python
    (3, 12)
    >>> environment("mini").python           # doctest: +SKIP
    PosixPath('/home/me/.cache/sao-gym/workers/mini-1f0c9f7a2b61/bin/python')
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from sao_gym.errors import ConfigError
from sao_gym.worker_python import Version, find_python, find_uv, version_of

STAMP = "sao-gym-worker.json"
PROBE_S = 300.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """`probe` is what must be importable; without a `lock` an environment is only ever given, never made."""

    name: str
    about: str
    probe: str
    oldest_python: Version
    lock: str = ""

    def lock_text(self) -> str:
        """The lock, one pinned requirement a line. Raises ConfigError for a kind that has none."""
        if not self.lock:
            raise ConfigError(
                f"a {self.name} environment is not made here: install it by its own rules, and then "
                f"sao-gym workers install {self.name} --existing PYTHON"
            )
        return Path(__file__).with_name(self.lock).read_text(encoding="utf-8")


KINDS: Mapping[str, WorkerKind] = MappingProxyType(
    {
        "openhands": WorkerKind(
            name="openhands",
            about="OpenHands: its SDK and tools",
            probe="import openhands.sdk, openhands.tools.terminal, openhands.tools.file_editor",
            oldest_python=(3, 12),
            lock="worker_openhands.lock",
        ),
        "mini": WorkerKind(
            name="mini",
            about="mini-swe-agent",
            probe="import minisweagent.agents.default, minisweagent.models.litellm_model",
            oldest_python=(3, 10),
            lock="worker_mini.lock",
        ),
        "sglang": WorkerKind(
            name="sglang",
            about="an SGLang server's Python, made elsewhere",
            probe="import sglang",
            oldest_python=(3, 10),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """An environment that is there. `lock_hash` is empty for one that was given with its path."""

    kind: str
    python: Path
    version: str
    lock_hash: str = ""


def workers_home() -> Path:
    """The folder that holds the environments."""
    if given := os.environ.get("SAO_GYM_WORKERS"):
        return Path(given).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sao-gym" / "workers"


def kind_of(name: str) -> WorkerKind:
    """Raises ConfigError for a name that stands for none."""
    if name not in KINDS:
        raise ConfigError(f"there is no worker {name!r}; there are {', '.join(KINDS)}")
    return KINDS[name]


def find(name: str) -> WorkerEnvironment | None:
    """The environment of a kind as it is now: the one that was given, else the one made from the present lock."""
    kind = kind_of(name)
    given = _read_stamp(_given_file(kind))
    if given is not None and given.python.exists():
        return given
    return _made(kind) if kind.lock else None


def environment(name: str, *, say: Say | None = None) -> WorkerEnvironment:
    """The environment of a kind; made now if there is none. Raises ConfigError."""
    return find(name) or install(name, say=say)


def install(
    name: str, *, python: str | None = None, existing: str | None = None, say: Say | None = None
) -> WorkerEnvironment:
    """Make an environment from its lock with `python`, or register the one of the interpreter `existing`.

    Does nothing where the lock's own is there, with that Python if one was named. Raises ConfigError.
    """
    kind, tell = kind_of(name), say or (lambda text: None)
    if existing is not None:
        return _register(kind, existing)
    kind.lock_text()
    with _locked(workers_home() / f"{kind.name}.lock"):
        made = _made(kind)
        if made is not None and python is not None:
            _, version = find_python(kind.oldest_python, given=python)
            made = made if made.version == f"{version[0]}.{version[1]}" else None
        if made is None:
            made = _build(kind, python, tell)
        _given_file(kind).unlink(missing_ok=True)
        for old in workers_home().glob(f"{kind.name}-*"):  # of earlier locks, and of builds that died
            if old != _place(kind):
                shutil.rmtree(old, ignore_errors=True)
    return made


def remove(name: str) -> bool:
    """Take every environment of a kind away, and forget a given one; whether there was any."""
    kind, found = kind_of(name), False
    with _locked(workers_home() / f"{kind.name}.lock"):
        for place in (_given_file(kind), *workers_home().glob(f"{kind.name}-*")):
            if place.is_dir():
                shutil.rmtree(place)
                found = True
            elif place.exists():
                place.unlink()
                found = True
    return found


def _place(kind: WorkerKind) -> Path:
    return workers_home() / f"{kind.name}-{_lock_hash(kind)}"


def _lock_hash(kind: WorkerKind) -> str:
    return hashlib.sha256(kind.lock_text().encode()).hexdigest()[:12]


def _given_file(kind: WorkerKind) -> Path:
    return workers_home() / f"{kind.name}.json"


def _made(kind: WorkerKind) -> WorkerEnvironment | None:
    """The environment of the present lock, if it is there and its base Python still is."""
    stamp, python = _read_stamp(_place(kind) / STAMP), _place(kind) / "bin" / "python"
    return replace(stamp, python=python) if stamp is not None and python.exists() else None


def _read_stamp(path: Path) -> WorkerEnvironment | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return WorkerEnvironment(**{**record, "python": Path(record["python"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write_stamp(path: Path, made: WorkerEnvironment) -> None:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    aside.write_text(json.dumps({**asdict(made), "python": str(made.python)}, indent=1) + "\n", encoding="utf-8")
    aside.rename(path)


def _register(kind: WorkerKind, existing: str) -> WorkerEnvironment:
    path = Path(existing)
    path = (path / "bin" / "python" if path.is_dir() else Path(shutil.which(existing) or path)).absolute()
    version = version_of(path)
    if version is None or version < kind.oldest_python:
        wanted = ".".join(map(str, kind.oldest_python))
        raise ConfigError(
            f"{existing} has no Python {wanted} or newer that runs; give an environment's folder or its python"
        )
    _probe(kind, path)
    made = WorkerEnvironment(kind=kind.name, python=path, version=f"{version[0]}.{version[1]}")
    workers_home().mkdir(parents=True, exist_ok=True)
    _write_stamp(_given_file(kind), made)
    return made


def _build(kind: WorkerKind, given: str | None, say: Say) -> WorkerEnvironment:
    """Make the environment aside, probe it, and rename it to its place."""
    home = workers_home()
    uv = find_uv(home)
    interpreter, version = find_python(kind.oldest_python, given=given, uv=uv)
    say(f"making the {kind.name} environment with {interpreter} (Python {version[0]}.{version[1]})")
    place = _place(kind)
    aside = home / f"{kind.name}-building-{secrets.token_hex(4)}"
    lock = Path(__file__).with_name(kind.lock)
    try:
        _call(
            [uv, "venv", "--quiet", "--relocatable", "--python", interpreter, aside],
            "the environment could not be made",
        )
        python = aside / "bin" / "python"
        words: list[str | Path] = [uv, "pip", "install", "--quiet", "--no-deps", "--python", python, "-r", lock]
        _call(words, "the packages could not be installed")
        _probe(kind, python)
        made = WorkerEnvironment(
            kind=kind.name,
            python=place / "bin" / "python",
            version=f"{version[0]}.{version[1]}",
            lock_hash=_lock_hash(kind),
        )
        _write_stamp(aside / STAMP, made)
        shutil.rmtree(place, ignore_errors=True)
        aside.rename(place)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return made


def _call(command: list[str | Path], problem: str) -> None:
    env = dict(os.environ)
    if (index := env.get("PIP_INDEX_URL")) and "UV_DEFAULT_INDEX" not in env:
        env["UV_DEFAULT_INDEX"] = index
    env["UV_PYTHON_DOWNLOADS"] = "never"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise ConfigError(f"{problem}: {' '.join((done.stderr or done.stdout).split())[-800:]}")


def _probe(kind: WorkerKind, python: Path) -> None:
    """Raises ConfigError unless what the kind is for can be imported there."""
    env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    env |= {"OPENHANDS_SUPPRESS_BANNER": "1", "MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": "/tmp"}
    try:
        done = subprocess.run(
            [python, "-c", kind.probe], capture_output=True, text=True, timeout=PROBE_S, check=False, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{python} did not import what {kind.name} needs within {PROBE_S:g} s") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[-400:]
        raise ConfigError(f"{python} cannot be used for {kind.name}: {kind.probe!r} failed ({said})")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock of this machine; waits for whoever builds now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
