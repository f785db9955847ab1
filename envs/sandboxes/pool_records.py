"""What a pool of sandboxes may do, and what it has done.

Example:
    >>> PoolSettings(warm=4).tries
    3
"""

import tempfile
from dataclasses import dataclass, fields, replace

from sao_gym.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Bounds of a pool.

    `warm` sandboxes are started ahead of demand, `boots` start side by side, and one that does not start is tried
    `tries` times, `backoff_s` apart at first and twice as long each time. A call waits `queue_timeout_s` at most for a
    free place. A lease ends `lease_timeout_s` after it was handed out, or when nothing was heard of its holder for
    `silence_timeout_s`; `look_s` is how often that is looked at. No sandbox is started while `disk_folder` has less than
    `free_disk_bytes` to spare.
    """

    warm: int = 1
    boots: int = 4
    tries: int = 3
    backoff_s: float = 0.5
    queue_timeout_s: float = 1800.0
    lease_timeout_s: float = 4 * 3600.0
    silence_timeout_s: float = 1800.0
    look_s: float = 5.0
    close_timeout_s: float = 60.0
    disk_folder: str = tempfile.gettempdir()
    free_disk_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, least = getattr(self, entry.name), 0 if entry.name in ("warm", "free_disk_bytes") else 1
            if entry.type is str:
                continue
            kind = int if entry.type is int else (int, float)
            is_number = isinstance(value, kind) and not isinstance(value, bool)
            if not is_number or not (value >= least if entry.type is int else value > 0):
                expected = f"a whole number from {least} on" if entry.type is int else "a number above 0"
                raise ConfigError(f"{entry.name} of a pool of sandboxes is {value!r}; give {expected}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMetrics:
    """Counts and seconds, summed since the pool was made; the last three are how things stand now.

    `boots` are sandboxes that started, in `boot_s` together; `boot_failures` tries that did not. `leases` were handed out
    after `queue_s` of waiting together, `warm_leases` of them from those that stood ready. `replaced` were found dead
    before they were handed out, `taken_back` are leases whose holder was gone or overstayed. `leaks` are sandboxes that
    could not be closed: what the reaper is for.
    """

    boots: int = 0
    boot_s: float = 0.0
    boot_failures: int = 0
    leases: int = 0
    warm_leases: int = 0
    queue_s: float = 0.0
    execs: int = 0
    exec_s: float = 0.0
    replaced: int = 0
    taken_back: int = 0
    leaks: int = 0
    ready: int = 0
    leased: int = 0
    queued: int = 0


class Tally:
    """Counts that several parts of a pool add to."""

    def __init__(self) -> None:
        self.done = PoolMetrics()

    def count(self, **more: float) -> None:
        """Add to counts and seconds by name."""
        self.done = replace(self.done, **{name: getattr(self.done, name) + value for name, value in more.items()})
