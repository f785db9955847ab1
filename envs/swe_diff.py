r"""A unified diff read on this machine: which files it names, and what it makes of them. Nothing of it goes anywhere.

Example:
    >>> diff = b"diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b\n"
    >>> (change,) = read_diff(diff)
    >>> change.old, change.new, change.applied(b"a\n")
    ('m.py', 'm.py', b'b\n')
"""

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_END = b"\\"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """Lines with their ends that are looked for from line `start` (0: the first), and what comes in their place."""

    start: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChange:
    """One file of a diff. `old` is empty for a new file, `new` for one that goes; `is_text` without binary parts."""

    old: str
    new: str
    hunks: tuple[Hunk, ...]
    is_text: bool = True

    def applied(self, data: bytes) -> bytes | None:
        """The file after the change, None where a hunk does not fit; lines may have moved, but must be as they were."""
        lines = data.splitlines(keepends=True) if b"\r" not in data else re.findall(rb"[^\n]*\n|[^\n]+", data)
        made: list[bytes] = []
        done = 0
        for hunk in self.hunks:
            place = _find(lines, hunk.before, done, hunk.start)
            if place is None:
                return None
            made += [*lines[done:place], *hunk.after]
            done = place + len(hunk.before)
        return b"".join([*made, *lines[done:]])


def read_diff(diff: bytes) -> tuple[FileChange, ...]:
    """The files of a diff, as git writes it or plain; what is none is passed over."""
    return tuple(change for part in _parts(diff) if (change := _read_file(part)).old or change.new)


def paths_of(diff: bytes) -> frozenset[str]:
    """Every path that a diff names, old and new."""
    return frozenset(path for change in read_diff(diff) for path in (change.old, change.new) if path)


def _parts(diff: bytes) -> Iterator[Sequence[bytes]]:
    """Lines of each file; a header inside of a hunk is none."""
    part: list[bytes] = []
    left = [0, 0]
    for line in re.findall(rb"[^\n]*\n|[^\n]+", diff):
        is_inside = any(n > 0 for n in left)
        starts = line.startswith(b"diff --git ") or (
            line.startswith(b"--- ") and any(each.startswith((b"--- ", b"@@ ")) for each in part)
        )
        if not is_inside and starts and part:
            yield part
            part = []
        part.append(line)
        if is_inside:
            _count(line, left)
        elif found := _HUNK.match(line):
            left = [int(found[2] or 1), int(found[4] or 1)]
    if part:
        yield part


def _count(line: bytes, left: list[int]) -> None:
    """Take a line of a hunk off the numbers of old and new lines that are still to come."""
    if line[:1] in (b" ", b"-", b"\n", b"\r"):
        left[0] -= 1
    if line[:1] in (b" ", b"+", b"\n", b"\r"):
        left[1] -= 1


def _read_file(part: Sequence[bytes]) -> FileChange:
    names = {"old": "", "new": ""}
    hunks: list[Hunk] = []
    is_text = True
    index = 0
    while index < len(part):
        line = part[index]
        index += 1
        if found := _HUNK.match(line):
            hunk, index = _read_hunk(part, index, found)
            hunks.append(hunk)
        elif not hunks:
            is_text = is_text and not line.startswith((b"GIT binary patch", b"Binary files"))
            _read_header(line, names)
    return FileChange(old=names["old"], new=names["new"], hunks=tuple(hunks), is_text=is_text)


def _read_header(line: bytes, names: dict[str, str]) -> None:
    """Take what a header line says of the names; later lines say it better than the first."""
    if line.startswith(b"diff --git "):
        names["old"], names["new"] = _both(line[11:].rstrip(b"\r\n"))
    elif line.startswith(b"--- "):
        names["old"] = _name(line[4:])
    elif line.startswith(b"+++ "):
        names["new"] = _name(line[4:])
    elif line.startswith(b"new file mode"):
        names["old"] = ""
    elif line.startswith(b"deleted file mode"):
        names["new"] = ""
    elif line.startswith((b"rename from ", b"copy from ")):
        names["old"] = _unquoted(line.split(b" ", 2)[2].rstrip(b"\r\n"))
    elif line.startswith((b"rename to ", b"copy to ")):
        names["new"] = _unquoted(line.split(b" ", 2)[2].rstrip(b"\r\n"))


def _read_hunk(part: Sequence[bytes], index: int, found: re.Match[bytes]) -> tuple[Hunk, int]:
    left = [int(found[2] or 1), int(found[4] or 1)]
    start = max(int(found[1]) - (left[0] > 0), 0)
    before: list[bytes] = []
    after: list[bytes] = []
    last: tuple[list[bytes], ...] = ()
    while index < len(part) and (any(n > 0 for n in left) or part[index].startswith(_NO_END)):
        line = part[index]
        index += 1
        if line.startswith(_NO_END):
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            continue
        _count(line, left)
        kind, text = (b" ", line) if line[:1] in (b"\n", b"\r") else (line[:1], line[1:])
        last = {b"-": (before,), b"+": (after,), b" ": (before, after)}.get(kind, ())
        for side in last:
            side.append(text)
    return Hunk(start=start, before=tuple(before), after=tuple(after)), index


def _find(lines: Sequence[bytes], wanted: Sequence[bytes], first: int, likely: int) -> int | None:
    """Where `wanted` stands in `lines` from `first` on, nearest to `likely`."""
    places = range(first, len(lines) - len(wanted) + 1)
    for place in sorted(places, key=lambda place: abs(place - likely)):
        if tuple(lines[place : place + len(wanted)]) == tuple(wanted):
            return place
    return None


def _both(text: bytes) -> tuple[str, str]:
    """The two names of `diff --git A B`, which say the same path where no other line tells."""
    if text.startswith(b'"') or text.endswith(b'"'):
        found = re.fullmatch(rb'("(?:[^"\\]|\\.)*"|\S+) ("(?:[^"\\]|\\.)*"|\S+)', text)
        return (_name(found[1]), _name(found[2])) if found else ("", "")
    half = len(text) // 2
    if text[half : half + 1] == b" " and text[2:half] == text[half + 3 :]:
        return _name(text[:half]), _name(text[half + 1 :])
    old, _, new = text.partition(b" b/")
    return _name(old), _name(b"b/" + new) if new else ""


def _name(text: bytes) -> str:
    """A path of a header without its first folder; empty for /dev/null."""
    name = _unquoted(text.rstrip(b"\r\n").partition(b"\t")[0])
    return "" if name == "/dev/null" else name.partition("/")[2] if name[:2] in ("a/", "b/") else name


def _unquoted(text: bytes) -> str:
    if len(text) > 1 and text.startswith(b'"') and text.endswith(b'"'):
        text = codecs.escape_decode(text[1:-1])[0]
    return text.decode("utf-8", "surrogateescape")
