"""Scaffolds by name: `shell` is the environment's own tools, which we step; the others are agent programs.

Example:
    >>> make_scaffold("shell", 4) is None
    True
"""

import functools
import importlib
from typing import Any

from sao_gym.errors import ConfigError
from sao_gym.protocols import Scaffold

PROGRAMS = {
    "openhands": "sao_gym.envs.scaffolds.openhands:OpenHandsScaffold",
    "mini": "sao_gym.envs.scaffolds.mini:MiniScaffold",
}
SHELL = "shell"


def make_scaffold(name: str, size: int) -> Scaffold | None:
    """The agent program behind a name, for `size` episodes at a time; None for `shell`. Raises ConfigError."""
    if name == SHELL:
        return None
    target = PROGRAMS.get(name, name)
    module, _, attribute = target.partition(":")
    if not (module and attribute):
        raise ConfigError(
            f"there is no scaffold {name!r}; give {SHELL}, {', '.join(PROGRAMS)}, or package.module:Class, which is made "
            "with size="
        )
    try:
        found: Any = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the scaffold {name!r} cannot be had ({error})") from error
    made: Scaffold = found(size=size)
    return made
