"""What every command shares: how it ends, and the words it takes beside its settings.

Invariant: bad input ends in one line on standard error and exit code 2; a bug keeps its traceback.

Example:
    >>> words = take_options(["--preset", "quickstart", "--actor.lr", "1e-4"], values=("preset",), switches=("help",))
    >>> words.value("preset"), words.has("help"), words.rest
    ('quickstart', False, ('--actor.lr', '1e-4'))
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Protocol

from sao_gym.errors import ConfigError, UserError

Body = Callable[[list[str]], int | None]


class Command(Protocol):
    """A command's `main`; without words it reads those of the process."""

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Returns the exit code."""
        ...


USER_ERROR, INTERRUPTED = 2, 130


def run_command(body: Body) -> Command:
    """Make a command's `main(argv=None) -> exit code` out of its body."""

    @wraps(body)
    def main(argv: Sequence[str] | None = None) -> int:
        try:
            return body(list(sys.argv[1:] if argv is None else argv)) or 0
        except UserError as error:
            print(f"sao-gym: error: {' '.join(str(error).split())}", file=sys.stderr)
            return USER_ERROR
        except BrokenPipeError:
            # Whoever read our output has gone; nothing is left to say, at exit neither.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except KeyboardInterrupt:
            print("sao-gym: interrupted", file=sys.stderr)
            return INTERRUPTED

    return main


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
            found.setdefault(name, []).append(text if has_value else words.pop(0))
        else:
            rest.append(word)
    return Options({name: tuple(given) for name, given in found.items()}, frozenset(seen), tuple(rest))
