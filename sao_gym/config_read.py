"""Files and flags as values for settings: each value keeps the file or the flag that gave it.

Invariant: a key that no setting has is an error here, with the nearest valid one; a value's type is checked where it
is read, so the message names its source.
"""

import json
import math
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

import msgspec

from sao_gym.config_schema import Origin, Schema, Setting
from sao_gym.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Given:
    """One value that a file or a flag gave to a key."""

    key: str
    value: Any
    origin: Origin
    where: str


def read_file(schema: Schema, path: Path, origin: Origin) -> list[Given]:
    """Settings of a TOML file. Raises ConfigError if it cannot be read, or holds a key or type that does not fit."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also a number too long, tables too deep
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return list(_walk(schema, table, "", path, origin))


def _walk(schema: Schema, table: dict[str, Any], prefix: str, path: Path, origin: Origin) -> Iterator[Given]:
    for name, value in table.items():
        key = prefix + name
        where = f"{path}, key {key}"
        if key in schema.sections and isinstance(value, dict):
            yield from _walk(schema, value, key + ".", path, origin)
        elif key in schema.sections:
            raise ConfigError(f"{where}: {key} is a section of settings, got {value!r}; write [{key}]")
        elif key in schema.settings:
            leaf = schema.settings[key]
            value = None if value == "null" and leaf.is_optional else value
            if isinstance(value, str) and leaf.holds(dict) and not leaf.holds(str):
                value = _structured(value)
            yield Given(key, convert(leaf, value, where), origin, where)
        else:
            raise schema.unknown(key, where)


def read_flags(schema: Schema, flags: Sequence[str]) -> list[Given]:
    """Settings of `--key value`, `--key=value`, `--switch` and `--no-switch`, in order; the last of a key wins."""
    given: list[Given] = []
    rest = list(flags)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"unexpected argument {word!r}: settings are given as --key value")
        name, has_value, text = word[2:].partition("=")
        where = f"--{name}"
        leaf, inner, is_negated = _find(schema, name)
        if is_negated and has_value:
            raise ConfigError(f"{where} takes no value: write {where} or {leaf.flag}={text}")
        if not has_value:
            text = _take(leaf, is_negated, inner, rest, where)
        value = _inner(given, leaf, inner, text) if inner else _parse(leaf, text)
        given.append(Given(leaf.key, convert(leaf, value, where, lax=True), Origin.USER, where))
    return given


def _find(schema: Schema, name: str) -> tuple[Setting, str, bool]:
    """(setting, key inside it where it is a table, whether the flag says no)."""
    key = name.replace("-", "_")
    key = schema.aliases.get(key, key)
    if key in schema.settings:
        return schema.settings[key], "", False
    if key.startswith("no_"):
        other = schema.aliases.get(key[3:], key[3:])
        if other in schema.settings and schema.settings[other].is_switch:
            return schema.settings[other], "", True
    for leaf in schema.settings.values():
        if leaf.holds(dict) and key.startswith(leaf.key + "."):
            return leaf, key[len(leaf.key) + 1 :], False
    if key in schema.sections:
        inside = [other for other in schema.settings if other.startswith(key + ".")]
        raise ConfigError(f"--{name} is a section of settings: name one of them, {', '.join(inside)}")
    raise schema.unknown(key, f"--{name}")


def _take(leaf: Setting, is_negated: bool, inner: str, rest: list[str], where: str) -> str:
    if leaf.is_switch and not inner:
        if not is_negated and rest and rest[0].lower() in ("true", "false"):
            return rest.pop(0)
        return "false" if is_negated else "true"
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{where} needs a value ({leaf.type_name})")
    return rest.pop(0)


def _parse(leaf: Setting, text: str) -> Any:
    if leaf.is_optional and text.lower() in ("null", "none"):
        return None
    if leaf.holds(list, tuple, dict) and text[:1] in "[{":
        return _structured(text)
    if leaf.holds(float) and not leaf.holds(str, int):
        return _number(text)
    if leaf.holds(list, tuple) and not leaf.holds(str):
        return [part for part in text.split(",") if part]
    return text


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _inner(given: list[Given], leaf: Setting, inner: str, text: str) -> dict[str, Any]:
    """The table of `leaf` as flags have it so far, with one key more."""
    before = next((item.value for item in reversed(given) if item.key == leaf.key), leaf.default)
    value = _structured(text)
    return {**(before if isinstance(before, dict) else {}), inner: value}


def _structured(text: str) -> Any:
    """JSON, else a TOML value, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    # dates have no JSON form, and several lines are no one value: both are text
    return table["value"] if len(table) == 1 and not isinstance(table["value"], date | time) else text


def convert(leaf: Setting, value: Any, where: str, *, lax: bool = False) -> Any:
    """`value` as the setting's type. Raises ConfigError that names source, value and type.

    `lax` also reads numbers and true/false from text, as flags give them.
    """
    try:
        converted = msgspec.convert(value, leaf.type, strict=not lax)
    except msgspec.ValidationError as error:
        detail = f" ({error})" if isinstance(value, dict | list) else ""
        raise ConfigError(f"{where}: {leaf.key} is {leaf.type_name}, got {value!r}{detail}") from error
    if isinstance(converted, int) and not -(2**63) <= converted < 2**63:
        raise ConfigError(f"{where}: {leaf.key} is a whole number of at most 64 bits, got {converted}")
    if isinstance(converted, float) and math.isnan(converted):
        raise ConfigError(f"{where}: {leaf.key} is a number, got nan")
    if leaf.choices and converted not in leaf.choices:
        names = ", ".join(str(choice) for choice in leaf.choices)
        raise ConfigError(f"{where}: {leaf.key} is one of {names}, got {converted!r}")
    return converted
