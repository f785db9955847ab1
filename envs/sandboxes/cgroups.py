"""Groups of processes with bounds that bind whoever runs in them: memory, number of processes, CPU time (cgroup v1, v2).

They exist where the host user may make them, which is root as a rule. A group stands below the one that the trainer runs
in, so that bounds from above go on to hold, and its name says who made it: `reap` removes those whose maker is dead.

Example:
    group = ProcessGroup.make(limits)            # None where groups cannot be made
    ...                                          # processes write their id to group.joins
    group.remove()
"""

import os
import secrets
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sao_gym.envs.sandboxes.owner import is_alive, owner, parse_owner
from sao_gym.envs.sandboxes.spec import ShellLimits

ROOT = Path("/sys/fs/cgroup")
PREFIX = "sao-gym-"
CONTROLLERS = ("memory", "pids", "cpu")
PERIOD_US = 100_000
EXTRA_PROCESSES = 4
"""Bubblewrap's own two, the shell that takes commands, and its supervisor."""


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """One group, as a folder for each controller (v1) or a single one (v2)."""

    folders: tuple[Path, ...]

    @classmethod
    def make(cls, limits: ShellLimits) -> "ProcessGroup | None":
        """A new group with the bounds of `limits`, None where that cannot be had whole."""
        name = f"{PREFIX}{str(owner()).replace('/', '|')}|{secrets.token_hex(4)}"
        group = cls(tuple(folder / name for folder in homes().values()))
        try:
            for controller, home in homes().items():
                (home / name).mkdir()
                for file, text in bounds(controller, limits).items():
                    _write(home / name / file, text)
        except OSError:
            group.remove()
            return None
        return group if group.folders else None

    @property
    def joins(self) -> tuple[str, ...]:
        """Files that a process writes its id to."""
        return tuple(str(folder / "cgroup.procs") for folder in self.folders)

    def remove(self) -> bool:
        """Remove the group; false while a process is left in it."""
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()
        return not any(folder.exists() for folder in self.folders)


def homes() -> dict[str, Path]:
    """Controller -> folder below which a group of it can be made; `unified` is cgroup v2."""
    own = own_groups()
    if (ROOT / "cgroup.controllers").exists():
        home = ROOT / own.get("", "").lstrip("/")
        enabled = _read(home / "cgroup.subtree_control").split()
        return {"unified": home} if set(CONTROLLERS) <= set(enabled) and os.access(home, os.W_OK) else {}
    found = {name: _below(ROOT / name, own.get(name, "/")) for name in CONTROLLERS}
    return found if all(os.access(path, os.W_OK) for path in found.values()) else {}


def own_groups(text: str | None = None) -> dict[str, str]:
    """Controller -> path of the running process's group, from /proc/self/cgroup; the empty name is cgroup v2."""
    lines = (_read(Path("/proc/self/cgroup")) if text is None else text).splitlines()
    parts = (line.split(":", 2) for line in lines)
    return {name: path for _, names, path in parts for name in names.split(",")}


def bounds(controller: str, limits: ShellLimits) -> Mapping[str, str]:
    """File -> text that set the bounds of one controller. What is written to disk is in memory, and counts there too."""
    memory = str(limits.memory_bytes + limits.disk_bytes)
    processes, quota = str(limits.processes + EXTRA_PROCESSES), str(int(limits.cpus * PERIOD_US))
    return {
        "memory": {"memory.limit_in_bytes": memory, "memory.memsw.limit_in_bytes?": memory},
        "pids": {"pids.max": processes},
        "cpu": {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": quota},
        "unified": {
            "memory.max": memory,
            "memory.swap.max?": "0",
            "pids.max": processes,
            "cpu.max": f"{quota} {PERIOD_US}",
        },
    }[controller]


def reap() -> int:
    """End who is left in groups whose maker is dead, and remove them; returns how many are gone.

    Hardly anybody is: a box ends with its maker. But bubblewrap's child, in the moment before it is tied to its parent, waits
    for a mapping that a parent who was killed never writes.
    """
    gone = 0
    for home in homes().values():
        for folder in home.glob(f"{PREFIX}*"):
            maker = parse_owner(folder.name.removeprefix(PREFIX).rpartition("|")[0].replace("|", "/"))
            if maker is not None and not is_alive(maker):
                _end_members(folder)
                with suppress(OSError):
                    folder.rmdir()
                    gone += 1
    return gone


def _end_members(folder: Path) -> None:
    for pid in _read(folder / "cgroup.procs").split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _below(root: Path, path: str) -> Path:
    """A group's folder; the root where the path is told from outside a container."""
    place = root / path.lstrip("/")
    return place if place.is_dir() else root


def _write(path: Path, text: str) -> None:
    """Write a bound; one whose name ends in `?` is not there on every kernel."""
    if not path.name.endswith("?") or (path := path.with_name(path.name[:-1])).exists():
        path.write_text(text, encoding="ascii")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""
