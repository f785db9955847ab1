r"""JSON lines, read and written one way by every part that keeps such files.

Invariant: a line ends at LF and nowhere else. U+2028, U+2029, U+0085 and other characters that some libraries take
for line ends are text; a UTF-8 BOM, CRLF, blank lines and a missing last newline do no harm. What is written is read
back equal, and a broken line is one sentence with file, line and column.

Example:
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_jsonl(Path(folder) / "a.jsonl", [{"x": "\u2028"}, {"x": "\x0b"}])
    ...     list(read_jsonl(Path(folder) / "a.jsonl"))
    [(1, {'x': '\u2028'}), (2, {'x': '\x0b'})]
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sao_gym.errors import TaskFileError
from sao_gym.runfolder import write_or_undo

BOM = b"\xef\xbb\xbf"
# Harmless for this reader; escaped so that readers which split at them can use our files as well.
_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def read_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, Any]]:
    """(line number, value) of each line that is not blank; numbers count LF lines from 1. Raises TaskFileError."""
    path = Path(path)
    try:
        data = path.open("rb")
    except OSError as error:
        raise TaskFileError(f"cannot read {path}: {error.strerror}; give the path of a JSON lines file") from error
    with data:
        for number, line in enumerate(data, start=1):
            if number == 1:
                line = line.removeprefix(BOM)
            if line.strip():
                yield number, _value(path, number, line)


def dump_line(value: Any) -> str:
    """One JSON value as a line, LF included. Raises TypeError or ValueError on what JSON cannot say."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=True)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form
        text = json.dumps(value, ensure_ascii=True)
    return text.translate(_LINE_ENDS) + "\n"


def write_jsonl(path: str | os.PathLike[str], values: Iterable[Any]) -> None:
    """Write one line per value, replacing the file."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(dump_line(value) for value in values)


def append_jsonl(path: str | os.PathLike[str], value: Any) -> None:
    """Add one line; a file without a final newline gets it first, so that no two records share a line.

    Raises OSError where the disk refuses; the file is then as it was.
    """
    line = dump_line(value).encode()
    with Path(path).open("ab+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        write_or_undo(file.fileno(), line, size)


def _value(path: Path, number: int, line: bytes) -> Any:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise TaskFileError(
            f"{path}, line {number}, column {error.start + 1}: not UTF-8 ({error.reason}); save the file as UTF-8"
        ) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TaskFileError(
            f"{path}, line {number}, column {error.pos + 1}: {error.msg[:1].lower() + error.msg[1:]}; "
            "each line must hold one JSON value"
        ) from error
    except RecursionError as error:
        raise TaskFileError(f"{path}, line {number}, column 1: nested too deeply to be read") from error
