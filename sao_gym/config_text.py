"""A configuration as text: the resolved one with the origin of each value, and the help of a command.

Invariant: `dump` writes TOML that `resolve` reads back to an equal configuration; None is the word "null".
"""

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sao_gym.config_schema import Origin, Resolved, Schema, Setting, value_at
from sao_gym.errors import ConfigError

T = TypeVar("T")


def dump(resolved: Resolved[T]) -> str:
    """The whole configuration as TOML, each value with its origin and, where nothing reads it, why."""
    schema = Schema.of(type(resolved.config))
    blocks = []
    for section in schema.sections:
        lines = [f"[{section}]"] if section else []
        for leaf in _members(schema, section):
            value = toml_value(value_at(resolved.config, leaf.key))
            note = str(resolved.origins[leaf.key])
            if leaf.key in resolved.wheres and resolved.origins[leaf.key] is Origin.USER:
                note += f" ({resolved.wheres[leaf.key]})"
            if leaf.key in resolved.inert:
                note += f"; inert: {resolved.inert[leaf.key]}"
            note = " ".join(note.split())
            lines.append(f"{leaf.key.rpartition('.')[2]} = {value}".ljust(44) + f"  # {note}")
        blocks.append("\n".join(lines))
    return "\n\n".join(block for block in blocks if block) + "\n"


def toml_value(value: Any) -> str:
    """A value on one line of TOML."""
    if value is None:
        return '"null"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        if _holds_none(value):
            return toml_value(json.dumps(value))
        return "{" + ", ".join(f"{_quoted(str(k))} = {toml_value(v)}" for k, v in value.items()) + "}"
    return _quoted(str(value))


def _holds_none(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_none(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_holds_none(item) for item in value)
    return value is None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def help_text(cls: type, command: str, presets: Sequence[str] = (), options: Sequence[tuple[str, str]] = ()) -> str:
    """The help of a command whose settings are `cls`: one line each, by section, with default and origin.

    `options` are (flag, help) pairs of what the command takes beside its settings.
    """
    schema = Schema.of(cls)
    summary = (cls.__doc__ or "").strip().splitlines()
    lines = [f"usage: {command} [--preset NAME] [--key value ...]", "", *summary[:1], ""]
    if presets:
        lines.append(f"presets: {', '.join(presets)}")
    lines.append("A setting is --section.key value; switches are --key and --no-key; null unsets.")
    lines.append("In brackets: the default and whose it is (paper, or ours).")
    if options:
        lines += ["", "options", *(_entry(flag, text) for flag, text in options)]
    for section, kind in schema.sections.items():
        about = (kind.__doc__ or "").strip().splitlines()[:1] if section else []
        members = list(_members(schema, section))
        if members:
            lines += ["", "  ".join([section or "run", *about])]
            lines += [_entry(_flags(leaf), f"{leaf.help} [{_default(leaf)}]") for leaf in members]
    return "\n".join(lines) + "\n"


def _members(schema: Schema, section: str) -> Iterator[Setting]:
    return (leaf for leaf in schema.settings.values() if leaf.key.rpartition(".")[0] == section)


def _flags(leaf: Setting) -> str:
    full = "--" + leaf.key.replace("_", "-")
    return full if leaf.flag == full else f"{leaf.flag}, {full}"


def _default(leaf: Setting) -> str:
    if leaf.default is dataclasses.MISSING:
        return "must be given"
    value = "unset" if leaf.default is None else toml_value(leaf.default).strip('"')
    return f"{value}, {leaf.source}"


def _entry(flags: str, text: str) -> str:
    head = f"  {flags}".ljust(40)
    return head + (" " if len(head) > 40 else "") + " ".join(textwrap.dedent(text).split())


def find_preset(folder: Path, name: str) -> Path:
    """A preset by its name in `folder`, or a TOML file by its path. Raises ConfigError with the names there are."""
    if name.endswith(".toml"):
        return Path(name)
    path = folder / f"{name}.toml"
    if not path.is_file():
        names = ", ".join(preset_names(folder)) or "none"
        raise ConfigError(f"there is no preset {name!r}; presets: {names}, or give the path of a .toml file")
    return path


def preset_names(folder: Path) -> list[str]:
    """Names of the presets in a folder."""
    return sorted(path.stem for path in folder.glob("*.toml"))
