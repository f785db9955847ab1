"""Who holds a sandbox, written so that a later process can tell whether the holder still lives.

A process id alone is used again by others; with its start time and the boot it belongs to, it is not. What cannot be
told from here (another machine, another container's process ids) counts as alive: nobody removes what may be in use.

Example:
    >>> is_alive(owner())
    True
    >>> is_alive(Owner(machine=owner().machine, boot="a boot of long ago", space=owner().space, pid=1, started=1))
    False
"""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A process: machine's name, boot id, namespace of process ids, process id, start time in clock ticks since boot."""

    machine: str
    boot: str
    space: str
    pid: int
    started: int

    def __str__(self) -> str:
        return f"{self.machine}/{self.boot}/{self.space}/{self.pid}/{self.started}"


def owner() -> Owner:
    """The running process."""
    pid = os.getpid()
    return Owner(machine=platform.node(), boot=_boot(), space=_space(), pid=pid, started=_started(pid) or 0)


def parse_owner(text: str) -> Owner | None:
    """The owner that `str` wrote, None where `text` is something else."""
    parts = text.split("/")
    if len(parts) != 5 or not (parts[3].isdecimal() and parts[4].isdecimal()):
        return None
    return Owner(machine=parts[0], boot=parts[1], space=parts[2], pid=int(parts[3]), started=int(parts[4]))


def is_alive(holder: Owner) -> bool:
    """Whether the holder lives, or may live where it cannot be seen from here."""
    if holder.machine != platform.node():
        return True
    if holder.boot != _boot():
        return False
    return holder.space != _space() or _started(holder.pid) == holder.started


def _started(pid: int) -> int | None:
    """Start time of a process (0 where the system has no /proc), None where it is gone or a zombie."""
    if not Path("/proc/self/stat").exists():
        return 0 if _answers(pid) else None
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def _space() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink()).strip("pid:[]")
    except OSError:
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
