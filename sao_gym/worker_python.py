"""Finds a Python for a worker environment, and uv to build it with.

Looked at in this order: this process's own Python, `python3.X` on PATH, pyenv's versions, what uv knows. A candidate counts
only once it has said its version itself: a shim may stand for nothing.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sao_gym.errors import ConfigError

Version = tuple[int, int]
NEWEST_MINOR = 14
PROBE_S = 30.0


def version_of(python: str | Path) -> Version | None:
    """(major, minor) as an interpreter says it; None where it is none."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=PROBE_S, check=False)
        major, minor = (int(word) for word in done.stdout.split())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return (major, minor) if done.returncode == 0 else None


def find_python(oldest: Version, *, given: str | None = None, uv: Path | None = None) -> tuple[Path, Version]:
    """A Python of at least `oldest`; `given` is taken or refused. Raises ConfigError."""
    wanted = ".".join(map(str, oldest))
    if given is not None:
        path = Path(shutil.which(given) or given).absolute()
        version = version_of(path)
        if version is None:
            raise ConfigError(f"{given} is no Python that runs; give the path of an interpreter")
        if version < oldest:
            raise ConfigError(f"{given} is Python {version[0]}.{version[1]}, and {wanted} or newer is needed")
        return path, version
    for path in candidates(oldest, uv):
        version = version_of(path)
        if version is not None and version >= oldest:
            return path, version
    raise ConfigError(
        f"no Python {wanted} or newer was found: not this one, not on PATH, not in pyenv, not in uv; install one (with apt, "
        f"pyenv install {wanted}, or uv python install {wanted}), or give its path with --python"
    )


def candidates(oldest: Version, uv: Path | None = None) -> Iterator[Path]:
    """Interpreters that may do, the likeliest first."""
    if sys.version_info[:2] >= oldest:
        yield Path(sys.executable)
    names = [f"python{oldest[0]}.{minor}" for minor in range(oldest[1], NEWEST_MINOR + 1)]
    for name in (*names, "python3", "python"):
        if found := shutil.which(name):
            yield Path(found)
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for name in names:
        yield from sorted(root.glob(f"{name.removeprefix('python')}.*/bin/python"))
    if uv is not None and (known := _known_to_uv(uv, oldest)):
        yield known


def _known_to_uv(uv: Path, oldest: Version) -> Path | None:
    command = [str(uv), "python", "find", "--no-python-downloads", f">={oldest[0]}.{oldest[1]}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return Path(done.stdout.strip()) if done.returncode == 0 and done.stdout.strip() else None


def find_uv(home: Path) -> Path:
    """The program uv from PATH, or installed into `home` from the package index. Raises ConfigError."""
    if found := shutil.which("uv"):
        return Path(found)
    own = home / "uv" / "bin" / "uv"
    if not own.exists():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(home / "uv")],
            [str(home / "uv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                said = " ".join((done.stderr or done.stdout).split())[-400:]
                raise ConfigError(f"uv is not on PATH and could not be installed ({said}); install uv and try again")
    return own
