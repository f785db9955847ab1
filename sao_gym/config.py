"""Configuration: nested frozen dataclasses, TOML presets and dotted flags, with the origin of every value.

Torch-free, and knows no particular command. Defaults give way to the preset, the preset to files, files to flags, and
of one flag given twice the last wins. Invariants: an unknown key, a wrong type, and a value that the user set but
nothing will read are errors that name the key and where it came from.

Example:
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     steps: int = setting(10, help="batches to train on", alias="steps")
    ...     check: bool = setting(True, help="check promises")
    >>> run = resolve(Run, overrides=["--steps", "3", "--no-check"])
    >>> run.config, str(run.origins["steps"])
    (Run(steps=3, check=False), 'user')
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from sao_gym.config_read import Given, read_file, read_flags
from sao_gym.config_schema import InertRule, Origin, Resolved, Schema, Setting, setting, value_at
from sao_gym.config_text import dump, find_preset, help_text, preset_names
from sao_gym.errors import ConfigError, InvariantError

__all__ = [
    "Change",
    "InertRule",
    "Origin",
    "Resolved",
    "Schema",
    "Setting",
    "changes",
    "dump",
    "find_preset",
    "help_text",
    "preset_names",
    "resolve",
    "setting",
    "value_at",
]

T = TypeVar("T")


def resolve(
    cls: type[T],
    *,
    preset: Path | None = None,
    files: Sequence[Path] = (),
    overrides: Sequence[str] = (),
    rules: Sequence[InertRule] = (),
) -> Resolved[T]:
    """Build a configuration. Raises ConfigError for what cannot be used, or would have no effect.

    `overrides` are command-line words. `rules` say which keys nothing reads in which set-up: such a key is an error
    where the user set it, and marked in the dump where a preset or a default did. A dump read back as `preset`
    gives an equal configuration.
    """
    schema = Schema.of(cls)
    given: dict[str, Given] = {}
    sources = [read_file(schema, preset, Origin.PRESET)] if preset else []
    sources += [read_file(schema, path, Origin.USER) for path in files]
    sources.append(read_flags(schema, overrides))
    for item in (item for source in sources for item in source):
        given[item.key] = item
    config: T = _build(schema, cls, "", given)
    resolved = Resolved(
        config=config,
        origins={key: given[key].origin if key in given else leaf.source for key, leaf in schema.settings.items()},
        wheres={key: item.where for key, item in given.items()},
        inert=_inert(schema, config, rules),
    )
    _refuse_inert(resolved)
    return resolved


def _build(schema: Schema, cls: type[T], prefix: str, given: Mapping[str, Given]) -> T:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = prefix + field.name
        if key in schema.sections:
            values[field.name] = _build(schema, schema.sections[key], key + ".", given)
        elif key in given:
            values[field.name] = given[key].value
        elif schema.settings[key].default is dataclasses.MISSING:
            raise ConfigError(f"{key} must be given: {schema.settings[key].flag} ({schema.settings[key].help})")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(_located(str(error), prefix, given)) from error


def _located(message: str, prefix: str, given: Mapping[str, Given]) -> str:
    """The message of a section's own check, with its section and the sources of the values that it names."""
    words = set(re.findall(r"\w+", message))
    wheres = [
        item.where
        for key, item in given.items()
        if key.startswith(prefix) and "." not in key[len(prefix) :] and key[len(prefix) :] in words
    ]
    where = f" (from {', '.join(wheres)})" if wheres and wheres[0] not in message else ""
    return (message if not prefix or prefix in message else prefix + message) + where


def _inert(schema: Schema, config: object, rules: Sequence[InertRule]) -> dict[str, str]:
    inert: dict[str, str] = {}
    for rule in rules:
        keys = [key for key in schema.settings if key == rule.key or key.startswith(rule.key + ".")]
        if not keys:
            raise InvariantError(f"the rule for {rule.key!r} names no setting")
        if rule.when(config):
            inert.update(dict.fromkeys(keys, rule.reason))
    return inert


def _refuse_inert(resolved: Resolved[T]) -> None:
    for key, reason in resolved.inert.items():
        if resolved.origins[key] is Origin.USER:
            where = resolved.wheres[key]
            raise ConfigError(f"{where}: {key} would have no effect, because {reason}; leave it out or change that")


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that differs between two configurations."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.after!r}"


def changes(before: T, after: T) -> list[Change]:
    """The settings in which two configurations of one class differ, in the order of the class."""
    pairs = ((key, value_at(before, key), value_at(after, key)) for key in Schema.of(type(before)).settings)
    return [Change(key, old, new) for key, old, new in pairs if old != new]
