"""What a sandbox may spend, what a cell answers, and which promises hold on this machine.

Example:
    >>> SandboxLimits(cell_timeout_s=5.0).output_bytes
    16384
"""

from dataclasses import dataclass, fields

from sao_gym.errors import ConfigError

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Bounds of one session; every one of them is in force, or `Guarantees` says that it is not.

    `memory_bytes` bounds the address space of each process and the resident sum of all. `processes` counts the
    policy's own. `cpu_s` bounds each process over its life, `tmp_bytes` each of /tmp and /dev/shm.
    """

    memory_bytes: int = 1024 * MIB
    processes: int = 32
    cpu_s: int = 120
    output_bytes: int = 16384
    cell_timeout_s: float = 10.0
    tmp_bytes: int = 64 * MIB
    startup_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = int if field.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
                expected = "a whole number" if kind is int else "a number"
                raise ConfigError(f"sandbox limit {field.name} is {value!r}; give {expected} above 0")


@dataclass(frozen=True, slots=True)
class CellResult:
    """What one cell left.

    `output` is what the model is shown: stdout and stderr merged, the repr of a last bare expression, a short
    traceback, and a note where something was cut or lost. `truncated` counts the bytes left out. After `timed_out`
    or `died` the Python state is lost; the session goes on with a fresh one.
    """

    output: str
    timed_out: bool = False
    truncated: int = 0
    died: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantees:
    """Which promises hold for a pool on this machine, for a manifest or a person to read."""

    isolated: bool
    processes_hidden: bool
    disk_bounded: bool
    network_cut: bool
    host_files_hidden: bool
    system_calls_filtered: bool
    memory: str
    processes: str

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each promise that does not hold."""
        missing = {
            "runs code of the policy directly on this machine": self.isolated,
            "shows the command lines of this machine's other processes": self.processes_hidden,
            "bounds each file that is written, not all together": self.disk_bounded,
            "leaves the network open": self.network_cut,
            "leaves the host's files readable, and writable where the user may write": self.host_files_hidden,
            "does not filter system calls": self.system_calls_filtered,
        }
        return tuple(f"The Python sandbox {text}." for text, holds in missing.items() if not holds)
