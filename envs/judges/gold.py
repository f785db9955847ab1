"""Texts that were labelled by hand, to hold a judge against: ours, or a file of yours.

`gold-1` (60 texts) was written after the rule judge and changed nothing about it; `seen-1` (135) was looked at while its marks
were chosen. A file holds JSON lines with `request`, `text`, `style` (or plain) and `quality` (0 or 1).

Example:
    >>> len(read_gold()), read_gold()[0].style
    (60, 'academic')
"""

from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from sao_gym.errors import TaskFileError
from sao_gym.jsonl import read_jsonl
from sao_gym.writing_styles import PLAIN, STYLES

OURS = ("gold-1", "seen-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """A text, and what a person says of it."""

    request: str
    text: str
    style: str
    quality: bool


def read_gold(source: str | Path = "gold-1") -> tuple[Labelled, ...]:
    """One of our sets, or a file. Raises TaskFileError."""
    if source in OURS:
        with as_file(files("sao_gym.envs.judges").joinpath(f"{source}.jsonl")) as path:
            return _read(path)
    return _read(Path(source))


def _read(path: Path) -> tuple[Labelled, ...]:
    found = tuple(_labelled(f"{path}, line {number}", record) for number, record in read_jsonl(path))
    if not found:
        raise TaskFileError(f"{path} holds no labelled texts; it needs at least one line")
    return found


def _labelled(where: str, record: Any) -> Labelled:
    given = record if isinstance(record, dict) else {}
    request, text, style, quality = (given.get(name) for name in ("request", "text", "style", "quality"))
    if not isinstance(request, str) or not isinstance(text, str):
        raise TaskFileError(f"{where}: expected an object with text under request and text")
    if style not in (*STYLES, PLAIN) or quality not in (0, 1):
        raise TaskFileError(
            f"{where}: style must be one of {', '.join((*STYLES, PLAIN))} and quality 0 or 1, got {style!r} and {quality!r}"
        )
    return Labelled(request=request, text=text, style=str(style), quality=bool(quality))
