"""What a sandbox with a shell is asked to be, and what every backend promises; nothing here knows a backend.

A spec is data: the same one makes a container, a box on this machine, or a sandbox elsewhere.

Example:
    >>> SandboxSpec(image="python:3.12", env={"CI": "1"}).limits.processes
    256
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from sao_gym.errors import ConfigError
from sao_gym.protocols import ExecResult, Sandbox

MIB = 1024 * 1024
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellLimits:
    """Bounds of one sandbox; a backend that cannot keep one says so.

    `memory_bytes` bounds the resident sum of all processes, `cpus` is a share of cores, `disk_bytes` bounds all that is
    written, `output_bytes` what one command's stdout may show, and as much again its stderr; `file_bytes` bounds one
    file read or written through the sandbox.
    """

    memory_bytes: int = 2048 * MIB
    processes: int = 256
    cpus: float = 1.0
    disk_bytes: int = 1024 * MIB
    output_bytes: int = 32768
    file_bytes: int = 256 * MIB
    startup_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            kind = int if entry.type is int else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind) or not value > 0:
                expected = "a whole number" if kind is int else "a number"
                raise ConfigError(f"sandbox limit {entry.name} is {value!r}; give {expected} above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """One sandbox: `image` names an image (docker), a template (e2b) or a folder with an unpacked root (local).

    An empty `image` is the backend's own default. `workdir` is where commands start; it is made if it is not there.
    `env` is all that commands see beside PATH, HOME and LANG. `user` empty is the backend's own choice. `label` is a
    word that names the sandbox in listings, such as the episode.
    """

    image: str = ""
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    network: bool = False
    label: str = ""
    limits: ShellLimits = field(default_factory=ShellLimits)

    def __post_init__(self) -> None:
        if not self.workdir.startswith("/") or "\0" in self.workdir:
            raise ConfigError(f"workdir of a sandbox is {self.workdir!r}; give an absolute path")
        check_env(self.env)


def check_env(env: Mapping[str, str]) -> None:
    """Raises ConfigError for names and values that no program can be given."""
    for name, value in env.items():
        if not _NAME.fullmatch(name) or not isinstance(value, str) or "\0" in value:
            raise ConfigError(
                f"environment variable {name!r} of a sandbox is {value!r}; give a name of letters, digits and _, and text"
            )


class ShellSandbox(Sandbox, Protocol):
    """A Sandbox that runs programs: each command in a fresh `bash -c`, in its own process group, with nothing on stdin.

    A command that outlasts its limit is killed with all that it started, what it had written is kept, and the next
    command works at once. What a command leaves in the background lives on until `close`.
    """

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
        ...

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float = 30.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run argv, or a string as `bash -c`, in `cwd` (the spec's workdir), with `env` over the spec's.

        Commands of one sandbox run one after another. Raises SandboxError if the sandbox itself failed; whatever a
        command does is a result.
        """
        ...

    async def is_alive(self) -> bool:
        """Whether the sandbox answers now; never raises."""
        ...
