"""What every command shares: how it ends, and the words it takes beside its settings.

Invariant: bad input, and a disk that refuses, end in one line on standard error and exit code 2; a bug keeps its
traceback.

Example:
    >>> words = take_options(["--preset", "quickstart", "--actor.lr", "1e-4"], values=("preset",), switches=("help",))
    >>> words.value("preset"), words.has("help"), words.rest
    ('quickstart', False, ('--actor.lr', '1e-4'))
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

from sao_gym.errors import ConfigError, UserError

Body = Callable[[list[str]], int | None]


class Command(Protocol):
    """A command's `main`; without words it reads those of the process."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Returns the exit code."""
        ...


USER_ERROR, INTERRUPTED = 2, 130
REFUSALS = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EACCES,
        errno.EPERM,
        errno.EIO,
        errno.EFBIG,
        errno.ENAMETOOLONG,
        errno.EMFILE,
    }
)
"""What no program can help: full, read-only or failing disks, missing rights, names too long, too many open files."""


def run_command(body: Body) -> Command:
    """Make a command's `main(argv=None) -> exit code` out of its body."""

    @wraps(body)
    def main(argv: Sequence[str] | None = None) -> int:
        try:
            with lasting_output():
                return body(list(sys.argv[1:] if argv is None else argv)) or 0
        except UserError as error:
            print(f"sao-gym: error: {' '.join(str(error).split())}", file=sys.stderr)
            return USER_ERROR
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            place = f" ({error.filename})" if error.filename else ""
            print(
                f"sao-gym: error: the system refused to read or write{place}: {error.strerror}; mend that and start "
                "again, a run with --resume",
                file=sys.stderr,
            )
            return USER_ERROR
        except KeyboardInterrupt:
            print("sao-gym: interrupted", file=sys.stderr)
            return INTERRUPTED

    return main


@contextmanager
def lasting_output() -> Iterator[None]:
    """A run outlives whoever read its output: standard streams that break, or were closed, take words and drop them."""
    before = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream or nowhere)) for stream in before)
        try:
            yield
            sys.stdout.flush()
        finally:
            sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream that turns silent when its reader has gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._gone(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._gone(error)

    def _gone(self, error: OSError) -> None:
        """The descriptor leads nowhere from now on, so that what stands in buffers does not fail again at exit."""
        with suppress(OSError, ValueError):  # a stream that has no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        if not isinstance(error, BrokenPipeError):
            raise error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@dataclass(frozen=True, slots=True)
class Options:
    """A command's own words, and the rest, which are settings."""

    values: Mapping[str, tuple[str, ...]]
    switches: frozenset[str]
    rest: tuple[str, ...]

    def value(self, name: str) -> str | None:
        """The value of an option; of one given twice, the last."""
        return self.values[name][-1] if name in self.values else None

    def all(self, name: str) -> tuple[str, ...]:
        """Every value of an option that may be repeated, in order."""
        return self.values.get(name, ())

    def has(self, name: str) -> bool:
        """Whether a switch was given."""
        return name in self.switches


def take_options(
    argv: Sequence[str],
    *,
    values: Sequence[str] = (),
    switches: Sequence[str] = (),
    positionals: bool = False,
) -> Options:
    """Take `--name VALUE` of `values`, `--name` of `switches` (`-h` is `--help`), and leave the rest in order.

    With `positionals`, leading words that are no flags are kept under the name "". Raises ConfigError.
    """
    found: dict[str, list[str]] = {}
    seen: set[str] = set()
    rest: list[str] = []
    words = list(argv)
    while positionals and words and not words[0].startswith("-"):
        found.setdefault("", []).append(words.pop(0))
    while words:
        word = words.pop(0)
        name, has_value, text = ("help" if word == "-h" else word.removeprefix("--")).partition("=")
        is_flag = word.startswith("--") or word == "-h"
        if is_flag and name in switches and not has_value:
            seen.add(name)
        elif is_flag and name in values:
            if not has_value and (not words or words[0].startswith("--")):
                raise ConfigError(f"--{name} needs a value")
            value = text if has_value else words.pop(0)
            if not value:  # most often a shell variable that is not set
                raise ConfigError(f"--{name} needs a value, and got an empty one")
            found.setdefault(name, []).append(value)
        else:
            rest.append(word)
    return Options({name: tuple(given) for name, given in found.items()}, frozenset(seen), tuple(rest))
