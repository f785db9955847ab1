"""`sao-gym workers`: environments of other programs, made, listed and taken away."""

import os
import sys
from pathlib import Path

from sao_gym.commands.base import run_command, take_options
from sao_gym.errors import ConfigError
from sao_gym.workers import KINDS, find, install, kind_of, remove, workers_home

USAGE = """\
usage: sao-gym workers list
       sao-gym workers install NAME [--python PYTHON | --existing PLACE]
       sao-gym workers remove NAME

Agent programs and inference servers run in environments of their own, since what they pin collides with what sao-gym needs.

  openhands   OpenHands; needs Python 3.12 or newer
  mini        mini-swe-agent; needs Python 3.10 or newer
  sglang      an SGLang environment that you made: --existing names its folder or its python

install makes the environment from the lock that comes with sao-gym (or registers the one at PLACE), and imports what it is
for before it says that it is there. It is also done by itself when a program is first needed. They are kept in
$SAO_GYM_WORKERS, else in ~/.cache/sao-gym/workers.
"""


@run_command
def main(argv: list[str]) -> int:
    """Entry point of `sao-gym workers`."""
    if not argv or argv[0] in ("-h", "--help") or argv[1:] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    verb, options = argv[0], take_options(argv[1:], values=("python", "existing"), switches=())
    if verb not in ("list", "install", "remove"):
        raise ConfigError(f"sao-gym workers knows no {verb!r}; it does list, install NAME and remove NAME")
    if len(options.rest) != (verb != "list"):
        raise ConfigError(f"sao-gym workers {verb} takes {'no name' if verb == 'list' else 'one name'}; see --help")
    if verb == "list":
        _list()
        return 0
    name = kind_of(options.rest[0]).name
    if verb == "remove":
        print(f"{name}: {'removed' if remove(name) else 'there was nothing to remove'}")
        return 0
    if options.value("python") and options.value("existing"):
        raise ConfigError(
            "--python says what to make an environment with, --existing takes one as it is; give one of them"
        )
    made = install(name, python=options.value("python"), existing=options.value("existing"), say=_say)
    print(f"{name}: {made.python} (Python {made.version})")
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _list() -> None:
    print(f"environments in {workers_home()}")
    for name, kind in KINDS.items():
        found = find(name)
        if found is None:
            print(f"  {name:<10} not installed   {kind.about}")
            continue
        size = f", {_size(found.python.parents[1]) >> 20} MiB" if found.lock_hash else ", given"
        print(f"  {name:<10} Python {found.version}{size}   {found.python}")


def _size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(
        entry.lstat().st_size for root, _, names in os.walk(folder) for entry in (Path(root, name) for name in names)
    )


if __name__ == "__main__":
    sys.exit(main())
