"""The files of a work tree in a sandbox: what is there, what changed since, and their bytes. git is not asked.

Whoever works in a sandbox may have changed git, its settings and its records; the kernel's time of a file's last change
he cannot set. So a file counts as changed if that time, its size, mode or time of writing is another, or if it was not
there before; then its bytes are compared.

Example:
    before = await list_files(box, "/testbed")
    ...
    changed, gone = differences(before, await list_files(box, "/testbed"))
    archive = await pack_files(box, "/testbed", sorted(changed))
"""

import secrets
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from sao_gym.envs.sandboxes.spec import MIB, ShellSandbox
from sao_gym.errors import SandboxError
from sao_gym.protocols import ExecResult

FILES_S = 120.0
LISTED_BYTES = 48 * MIB
CACHES = (
    *("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".eggs"),
    *("*.pyc", "*.pyo", ".coverage"),
)
"""What tools leave behind wherever they run; never looked at."""
_LIST = r"""
: >NAME.now && cd PLACE &&
find . \( -name .git CACHES \) -prune -o \( -type f -o -type l \) -printf '%y%m %s %T@ %C@ %P\0' | head -c MOST >NAME &&
find NAME.now -printf '%C@'
code=$?; rm -f NAME.now; exit $code
"""
_PACK = "cd PLACE && { tar --null --no-recursion --hard-dereference -T - -cf NAME; [[ $? -lt 2 || -s NAME ]]; }"
"""A file that goes or changes meanwhile makes tar complain; what it took is what there is."""


class FilesError(Exception):
    """A work tree that cannot be listed or packed though its sandbox works: what was done in there is the trouble."""


@dataclass(frozen=True, slots=True)
class Stat:
    """A file or link: kind and mode, size in bytes, time of writing, time of the last change (s, ns)."""

    mode: str
    size: int
    written: str
    changed: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Files and links of a work tree by path, caches and .git aside, and the sandbox's time when they were listed."""

    files: Mapping[str, Stat]
    now: tuple[int, int]


async def list_files(box: ShellSandbox, workdir: str) -> Listing:
    """What is in a work tree. Raises FilesError where there is too much of it, SandboxError."""
    name = new_name()
    caches = " ".join(f"-o -name {shlex.quote(pattern)}" for pattern in CACHES)
    command = _LIST.replace("PLACE", shlex.quote(workdir)).replace("NAME", name).replace("CACHES", caches)
    done = await box.exec(command.replace("MOST", str(LISTED_BYTES)), cwd="/", timeout_s=FILES_S)
    data = await _taken(box, name, done, "listed")
    if len(data) >= LISTED_BYTES:
        raise FilesError("the repository's folder holds too many files to be listed")
    files = {}
    for record in data.split(b"\0")[:-1]:
        mode, size, written, changed, path = record.split(b" ", 4)
        place = path.decode("utf-8", "surrogateescape")
        files[place] = Stat(mode.decode(), int(size), written.decode(), _time(changed.decode()))
    return Listing(files=files, now=_time(done.stdout))


def differences(before: Listing, after: Listing) -> tuple[dict[str, int], dict[str, int]]:
    """(paths that may have changed, paths that are gone), each with the bytes that it takes to say so, at most."""
    changed = {}
    for path, stat in after.files.items():
        old = before.files.get(path)
        if old is None or stat.changed >= before.now or _outside(old) != _outside(stat):
            changed[path] = max(stat.size, old.size if old else 0)
    gone = {path: stat.size for path, stat in before.files.items() if path not in after.files}
    return changed, gone


async def pack_files(box: ShellSandbox, workdir: str, paths: Collection[str]) -> bytes:
    """A tar archive of files of a work tree. Raises FilesError, SandboxError."""
    name = new_name()
    command = _PACK.replace("PLACE", shlex.quote(workdir)).replace("NAME", name)
    done = await box.exec(command, cwd="/", timeout_s=FILES_S, stdin=joined(f"./{path}" for path in paths))
    return await _taken(box, name, done, "packed")


async def free_disk(box: ShellSandbox, workdir: str, since: tuple[int, int], size_bytes: int) -> None:
    """Remove files above a size that were written since: they are not carried, and may have filled the disk."""
    places = " ".join((shlex.quote(workdir), "/tmp", "/var/tmp", "/root", "/home", "/dev/shm"))
    command = f"find {places} -type f -size +{size_bytes}c -newerct @{since[0]} -delete 2>/dev/null; true"
    await box.exec(command, cwd="/", timeout_s=FILES_S)


async def _taken(box: ShellSandbox, name: str, done: ExecResult, verb: str) -> bytes:
    """The file that a command wrote. A sandbox that works makes FilesError of what went wrong."""
    if done.exit_code or done.timed_out:
        why = "it took too long" if done.timed_out else " ".join(done.stderr.split())[-300:]
        raise FilesError(f"the repository's folder could not be {verb}: {why or f'exit code {done.exit_code}'}")
    try:
        data = await box.read(name)
    except SandboxError as error:
        if await box.is_alive():
            raise FilesError(f"the repository's folder could not be {verb}: {error}") from error
        raise
    await box.exec(["rm", "-f", name], cwd="/")
    return data


def new_name() -> str:
    """Path of a file inside that nobody has yet."""
    return f"/tmp/.sao-gym-{secrets.token_hex(8)}"


def joined(paths: Iterable[str]) -> bytes:
    """Paths as programs read them, each ended by NUL."""
    return b"".join(path.encode("utf-8", "surrogateescape") + b"\0" for path in paths)


def _outside(stat: Stat) -> tuple[str, int, str]:
    return stat.mode, stat.size, stat.written


def _time(text: str) -> tuple[int, int]:
    """Seconds and nanoseconds of what find prints, in full."""
    seconds, _, rest = text.strip().partition(".")
    return int(seconds), int(rest[:9].ljust(9, "0") or 0)
