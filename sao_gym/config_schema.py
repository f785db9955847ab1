"""What a configuration class can be told: its settings by dotted key, their types, defaults and short flags.

Invariant: a schema is read from nested frozen dataclasses alone; nothing about a particular command is known here.

Example:
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Optimizer:
    ...     lr: float = setting(1e-6, help="learning rate", source="paper")
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     steps: int = setting(10, help="batches", alias="steps")
    ...     actor: Optimizer = dataclasses.field(default_factory=Optimizer)
    >>> sorted(Schema.of(Run).settings)
    ['actor.lr', 'steps']
"""

import copy
import dataclasses
import difflib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sao_gym.errors import ConfigError, InvariantError

T = TypeVar("T")
_META = "sao_gym.setting"


class Origin(StrEnum):
    """Who decided a value: the paper or us (a default), a preset, or the user."""

    PAPER = "paper"
    OURS = "ours"
    PRESET = "preset"
    USER = "user"


@dataclass(frozen=True, slots=True)
class _Meta:
    help: str
    source: Origin
    alias: str | None
    choices: tuple[Any, ...]


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    source: Literal["paper", "ours"] = "ours",
    alias: str | None = None,
    choices: Sequence[Any] = (),
) -> Any:
    """A dataclass field that a command line can set. Without a default it must be given.

    `source` says whose the default is, `alias` is a short flag (`batch-size`), `choices` are the only values allowed.
    """
    meta = _Meta(help, Origin(source), alias.lstrip("-") if alias else None, tuple(choices))
    if isinstance(default, dict | list | set):
        return dataclasses.field(default_factory=partial(copy.deepcopy, default), metadata={_META: meta})
    return dataclasses.field(default=default, metadata={_META: meta})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One leaf of a configuration class. `default` is `dataclasses.MISSING` where a value must be given."""

    key: str
    type: Any
    default: Any
    help: str = ""
    source: Origin = Origin.OURS
    alias: str | None = None
    choices: tuple[Any, ...] = ()

    @property
    def flag(self) -> str:
        """The flag that help and messages name."""
        return "--" + (self.alias or self.key.replace("_", "-"))

    @property
    def is_optional(self) -> bool:
        """Whether None is a value."""
        return type(None) in _members(self.type)

    @property
    def is_switch(self) -> bool:
        """Whether the flag needs no value."""
        return set(_members(self.type)) <= {bool, type(None)}

    def holds(self, *kinds: type) -> bool:
        """Whether one of the types it may have is one of `kinds`."""
        return any((get_origin(member) or member) in kinds for member in _members(self.type))

    @property
    def type_name(self) -> str:
        """The type in words a person reads."""
        names = [_name(member) for member in _members(self.type)]
        return " or ".join(dict.fromkeys(names))


def _members(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _name(kind: Any) -> str:
    if kind is type(None):
        return "null"
    if get_origin(kind) is Literal:
        return " or ".join(str(value) for value in get_args(kind))
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a table"}
    plain |= {list: "a list", tuple: "a list"}
    outer = get_origin(kind) or kind
    return plain.get(outer, getattr(outer, "__name__", str(kind)))


@dataclass(frozen=True, slots=True)
class Schema:
    """All settings of a configuration class by dotted key, its sections, and the short flags."""

    cls: type
    settings: Mapping[str, Setting]
    sections: Mapping[str, type]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, root: type) -> "Schema":
        """Read a dataclass. Raises InvariantError if two settings want one short flag."""
        settings: dict[str, Setting] = {}
        sections: dict[str, type] = {"": root}
        _collect(root, "", settings, sections)
        aliases: dict[str, str] = {}
        for leaf in settings.values():
            if leaf.alias is None:
                continue
            name = leaf.alias.replace("-", "_")
            if name in aliases or (name in settings and name != leaf.key):
                raise InvariantError(f"two settings share the flag --{leaf.alias}")
            aliases[name] = leaf.key
        return cls(root, settings, sections, aliases)

    def nearest(self, key: str) -> str:
        """A clause that names the valid keys closest to `key`, with a leading space; empty where none is close."""
        section, _, leaf = key.rpartition(".")
        near = difflib.get_close_matches
        leaves = {other: other.rpartition(".")[2] for other in self.settings}
        close = [other for other, name in leaves.items() if name == leaf]
        if not close and section and section in self.sections:
            inside = {name: other for other, name in leaves.items() if other.startswith(section + ".")}
            close = [inside[name] for name in near(leaf, inside, n=2, cutoff=0.5)]
        elif not close:
            close = near(key, [*self.settings, *self.aliases], n=2, cutoff=0.7)
        if not close:
            ends = {name: other for other, name in leaves.items()}
            close = [ends[name] for name in near(leaf, ends, n=2, cutoff=0.6)]
        full = list(dict.fromkeys(self.aliases.get(name, name) for name in close))
        return f" Did you mean {' or '.join(full[:2])}?" if full else ""

    def unknown(self, key: str, where: str) -> ConfigError:
        """The error for a key that does not exist."""
        section, _, _ = key.rpartition(".")
        close = self.nearest(key)
        if not close:
            inside = [name for name in self.settings if name.rpartition(".")[0] == section]
            close = f" Keys there: {', '.join(inside)}." if inside and section else " See --help for the list."
        return ConfigError(f"{where}: there is no setting {key!r}.{close}")


def _collect(cls: type, prefix: str, settings: dict[str, Setting], sections: dict[str, type]) -> None:
    if not dataclasses.is_dataclass(cls):
        raise InvariantError(f"a configuration is a dataclass, got {cls!r}")
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key, kind = prefix + field.name, hints[field.name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            sections[key] = kind
            _collect(kind, key + ".", settings, sections)
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        meta = field.metadata.get(_META, _Meta("", Origin.OURS, None, ()))
        settings[key] = Setting(
            key=key,
            type=kind,
            default=default,
            help=meta.help,
            source=meta.source,
            alias=meta.alias,
            choices=meta.choices,
        )


@dataclass(frozen=True, slots=True)
class InertRule:
    """Says when nothing reads a key, or a section: `reason` names the setting that disables it."""

    key: str
    when: Callable[[Any], bool]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Generic[T]):
    """A configuration and where each of its values comes from.

    `origins` has every key; `wheres` says which file or flag gave a value (defaults have none); `inert` maps the
    keys that nothing reads to the reason.
    """

    config: T
    origins: Mapping[str, Origin]
    wheres: Mapping[str, str]
    inert: Mapping[str, str]


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config
