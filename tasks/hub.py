"""Data sets of the Hugging Face Hub as rows, through the `datasets` library.

Invariant: what was read is named exactly: repository, configuration, split, and the commit where the library tells it.
The library is imported when a data set is read, and not before.

Example:
    >>> parse_hub_path("hf:openai/gsm8k@e53f048:main:train")
    HubPath(repo='openai/gsm8k', config='main', split='train', revision='e53f048')
    >>> print(parse_hub_path("hf:owner/name"))
    hf:owner/name
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sao_gym.errors import ConfigError, TaskFileError
from sao_gym.preflight import reaches

Record = tuple[str, Any]
"""The place of a row, for messages, and what stands there."""
PREFIX = "hf:"
HUB = "https://huggingface.co"
_PATH = re.compile(r"hf:(?P<repo>[^:@]+)(@(?P<revision>[^:@]+))?(:(?P<first>[^:@]+))?(:(?P<second>[^:@]+))?")
_COMMIT = re.compile(r"@([0-9a-f]{40})/")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPath:
    """A data set on the Hub, or a folder laid out like one. None: the set's only one, or its newest revision."""

    repo: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return PREFIX + ":".join(filter(None, (self.repo + at, self.config, self.split)))


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRows:
    """Rows with their places, and `source`: the path that was read, with its commit where that is known."""

    records: tuple[Record, ...]
    source: str


def is_hub_path(path: str | os.PathLike[str]) -> bool:
    """Whether this names a data set on the Hub."""
    return str(path).startswith(PREFIX)


def parse_hub_path(text: str) -> HubPath:
    """`hf:owner/name[@revision][:config][:split]`; one word after the name is the split. Raises ConfigError."""
    match = _PATH.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} names no data set on the Hub; expected hf:owner/name[@revision][:config][:split]")
    first, second = match["first"], match["second"]
    config, split = (first, second) if second else (None, first)
    return HubPath(repo=match["repo"], config=config, split=split, revision=match["revision"])


def read_hub(path: HubPath) -> HubRows:
    """Every row of one split. Raises ConfigError, or TaskFileError where the set cannot be had."""
    data = _split(path, _load(path))
    commits = {match[1] for name in data.info.download_checksums or {} if (match := _COMMIT.search(name))}
    if Path(path.repo).is_dir():  # the library takes a folder of this name first
        source = f"the folder {Path(path.repo).absolute()}, in place of {path}"
    else:
        source = f"{path} (commit {', '.join(sorted(commits)) or 'unknown'})"
    return HubRows(records=tuple(_rows(data)), source=source)


def _rows(data: Any) -> Iterator[Record]:
    return ((f"row {number}", dict(row)) for number, row in enumerate(data, start=1))


def _load(path: HubPath) -> Any:
    """All splits of a data set, by name."""
    if find_spec("datasets") is None:
        raise ConfigError(f"reading {path} needs the datasets library; install sao-gym[hub], or give a file")
    if not (Path(path.repo).is_dir() or _is_kept(path.repo) or _is_reachable()):
        raise TaskFileError(  # the library would try for most of a minute before it says so
            f"cannot read {path} from the Hub, which does not answer, and no copy is kept on this machine; give a local file"
        )
    import datasets  # costs seconds, and is an optional extra

    try:
        return datasets.load_dataset(path.repo, path.config, revision=path.revision)
    except Exception as error:  # whatever the library, its network client or a broken file raises
        reason = " ".join(str(error).split("\n")[:2])  # a missing configuration: the second line lists them
        raise TaskFileError(
            f"cannot read {path} from the Hub ({type(error).__name__}: {reason[:300]}); check the name, or where "
            "there is no way to the Hub give a local file"
        ) from error


def _is_kept(repo: str) -> bool:
    """Whether the library has a copy of this set, under a name much like the set's own."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    plain = re.sub(r"[^a-z0-9]", "", repo.lower())
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return any(re.sub(r"[^a-z0-9]", "", name.lower()) == plain for name in names)


def _is_reachable() -> bool:
    """Whether the Hub, or the proxy that leads there, takes connections."""
    proxies = (os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    return reaches(next(filter(None, proxies), None) or os.environ.get("HF_ENDPOINT") or HUB)


def _split(path: HubPath, splits: Any) -> Any:
    names = list(splits)
    if path.split is None and len(names) == 1:
        return splits[names[0]]
    if path.split not in names:
        asked = f"has no split {path.split!r}" if path.split else "has more than one split, and none was named"
        raise ConfigError(f"{path} {asked}; it has {', '.join(names)}: give hf:{path.repo}:SPLIT")
    return splits[path.split]
