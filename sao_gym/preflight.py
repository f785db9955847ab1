"""What must be there before a run starts, as a list of checks: each is one thing, found or missing, with what brings it.

A check starts nothing and takes no longer than a few seconds. Environments add their own by a function that the registry
names (`EnvSpec.preflight`); `commands.preflight` has those that every run needs.

Example:
    >>> print(table([Check.ok("model", "start, 7 tensors"), Check.missing("tasks", "none", "--tasks FILE")]))
    model  ok       start, 7 tensors
    tasks  MISSING  none -> --tasks FILE
"""

import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol
from urllib.parse import urlsplit

from sao_gym.protocols import TaskSet

GIB = 1 << 30


class CheckState(StrEnum):
    """`unknown` keeps no run from starting: it cannot be found out from here, or not before something else is there."""

    OK = "ok"
    MISSING = "MISSING"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing: what was found, and, where it is missing, the command or setting that brings it."""

    name: str
    state: CheckState
    found: str
    remedy: str = ""

    @classmethod
    def ok(cls, name: str, found: str) -> "Check":
        """It is there."""
        return cls(name=name, state=CheckState.OK, found=found)

    @classmethod
    def missing(cls, name: str, found: str, remedy: str) -> "Check":
        """It is not there, and without it the run fails."""
        return cls(name=name, state=CheckState.MISSING, found=found, remedy=remedy)

    @classmethod
    def unknown(cls, name: str, found: str, remedy: str = "") -> "Check":
        """It cannot be told."""
        return cls(name=name, state=CheckState.UNKNOWN, found=found, remedy=remedy)

    @property
    def is_missing(self) -> bool:
        """Whether the run would fail for it."""
        return self.state is CheckState.MISSING


class Preflight(Protocol):
    """An environment's own checks, from its tasks (None where they cannot be had) and its options."""

    def __call__(self, tasks: TaskSet | None, options: Mapping[str, Any]) -> Sequence[Check]:
        """The checks, in the order that they are shown in."""
        ...


def table(checks: Sequence[Check]) -> str:
    """One line a check."""
    widths = [max((len(text) for text in column), default=0) for column in ([c.name for c in checks], CheckState)]
    return "\n".join(
        f"{one.name.ljust(widths[0])}  {one.state.ljust(widths[1])}  {one.found}{f' -> {one.remedy}' if one.remedy else ''}"
        for one in checks
    )


def reaches(url: str, timeout_s: float = 2.0) -> bool:
    """Whether something takes connections at the host of `url` now; a name that is looked up for longer counts as no."""
    parts = urlsplit(url)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    answered: list[bool] = []

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", port), timeout_s).close()
            answered.append(True)
        except OSError:
            answered.append(False)

    thread = threading.Thread(target=connect, daemon=True)  # a look-up of a name heeds no time limit
    thread.start()
    thread.join(timeout_s + 0.5)
    return bool(answered and answered[0])


def gib(size_bytes: float) -> str:
    """A size for people."""
    if size_bytes < GIB:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / GIB:.1f} GiB" if size_bytes < 10 * GIB else f"{size_bytes / GIB:,.0f} GiB"
