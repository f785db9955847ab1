r"""Views and changes of one text file's bytes: what was not asked to change keeps every byte.

Lines end with LF, or CR LF where the file's first line does; a file without a final line break stays without one.

Example:
    >>> edited(b"a\r\nb\r\n", "f", "replace", text="x\ny", old="a").data
    b'x\r\ny\r\nb\r\n'
    >>> edited(b"a", "f", "insert", text="b", line=1).data
    b'a\nb'
"""

from dataclasses import dataclass

SHOWN_AROUND = 3
LINE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Edited:
    """The new bytes (None: nothing changes) and what the policy is told."""

    data: bytes | None
    said: str


def decoded(data: bytes, path: str) -> tuple[str, str]:
    """(text, "") of a file, or ("", what is wrong with it)."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return "", (
            f"Error: {path} is no UTF-8 text (byte {error.start} in line {line}); this tool reads and writes UTF-8 alone, "
            "so use bash: python3 or sed for its encoding, xxd to look at bytes"
        )
    if "\0" in text:
        return "", f"Error: {path} holds NUL bytes, so it is no text file; use bash (file, xxd, strings)"
    return text, ""


def numbered(data: bytes, path: str, start: int | None, end: int | None, max_chars: int) -> str:
    """Lines `start` to `end` of a file with their numbers, or what to do instead."""
    text, problem = decoded(data, path)
    if problem:
        return problem
    if not text:
        return f"{path} is empty"
    lines = text.removesuffix("\n").split("\n")
    first, last = start or 1, len(lines) if end is None or end == -1 else end
    if not 1 <= first <= len(lines) or last < first:
        return f"Error: lines {first} to {last} of {path} cannot be shown: it has {len(lines)} lines; give 1 <= start <= end"
    shown: list[str] = []
    used = 0
    for number in range(first, min(last, len(lines)) + 1):
        line = f"{number:6}\t{_short(lines[number - 1].removesuffix(chr(13)))}"
        used += len(line) + 1
        if shown and used > max_chars:
            shown.append(f"[... {min(last, len(lines)) - number + 1} more lines; view again with start = {number} ...]")
            break
        shown.append(line)
    notes = []
    if "\r\n" in text:
        notes.append("lines end with CR LF, which replace and insert keep")
    if not text.endswith("\n"):
        notes.append("no line break at the end of the file")
    return "\n".join(shown) + (f"\n[{'; '.join(notes)}]" if notes else "")


def edited(
    data: bytes, path: str, command: str, *, text: str | None, old: str | None = None, line: int | None = None
) -> Edited:
    """The file after a `replace` or an `insert`. Never raises on what a policy may ask."""
    if text is None:
        return Edited(
            None, f"Error: {command} needs text, what is to stand there" + " (may be empty)" * (command == "replace")
        )
    content, problem = decoded(data, path)
    if problem:
        return Edited(None, problem)
    return _replaced(content, path, old, text) if command == "replace" else _inserted(content, path, line, text)


def _replaced(content: str, path: str, old: str | None, new: str) -> Edited:
    if not old:
        return Edited(None, "Error: replace needs old, the exact text that is to go")
    count = content.count(old)
    if not count and "\r\n" in content and "\r\n" not in old:
        old, new = old.replace("\n", "\r\n"), new.replace("\r\n", "\n").replace("\n", "\r\n")
        count = content.count(old)
    elif "\r\n" in content and "\r" not in new:
        new = new.replace("\n", "\r\n") if "\r\n" in _first_line(content) else new
    if not count:
        return Edited(None, f"Error: the text to replace does not stand in {path}{_near(content, old)}")
    if count > 1:
        where = ", ".join(str(number) for number in _lines_of(content, old)[:10])
        return Edited(
            None, f"Error: the text to replace stands {count} times in {path} (lines {where}); add lines around it"
        )
    if new == old:
        return Edited(None, f"Error: old and text are the same, so nothing would change in {path}")
    start = content.index(old)
    made = content[:start] + new + content[start + len(old) :]
    first = content.count("\n", 0, start) + 1
    return _done(made, path, first, first + new.count("\n"))


def _inserted(content: str, path: str, line: int | None, new: str) -> Edited:
    ends = "\r\n" if "\r\n" in _first_line(content) else "\n"
    lines = content.split("\n")
    total = len(lines) - (lines[-1] == "")
    if line is None or not 0 <= line <= total:
        return Edited(None, f"Error: insert needs start, the line to insert after: 0 to {total} in {path}, got {line}")
    new = new.replace("\r\n", "\n")
    new = (new if ends == "\n" else new.replace("\n", ends)).removesuffix(ends)
    before, after = "\n".join(lines[:line]) + "\n" * (line > 0), "\n".join(lines[line:])
    if line == total and content and not content.endswith("\n"):
        made = content + ends + new
    else:
        made = before + new + ends + after
    return _done(made, path, line + 1, line + 1 + new.count("\n"))


def _done(made: str, path: str, first: int, last: int) -> Edited:
    """The new bytes, and a look at the place."""
    lines = made.removesuffix("\n").split("\n")
    low, high = max(first - SHOWN_AROUND, 1), min(last + SHOWN_AROUND, len(lines))
    if high - low > 40:
        high = low + 40
    view = "\n".join(f"{n:6}\t{_short(lines[n - 1].removesuffix(chr(13)))}" for n in range(low, high + 1))
    try:
        data = made.encode("utf-8")
    except UnicodeEncodeError:
        return Edited(
            None, "Error: the text holds half of a character pair, which no file can; write the character itself"
        )
    return Edited(data, f"Changed {path}. Lines {low} to {high} now:\n{view}")


def _first_line(content: str) -> str:
    return content[: content.find("\n") + 1]


def _lines_of(content: str, old: str) -> list[int]:
    found, at = [], content.find(old)
    while at >= 0:
        found.append(content.count("\n", 0, at) + 1)
        at = content.find(old, at + 1)
    return found


def _near(content: str, old: str) -> str:
    """Half a sentence about the likeliest mistake."""
    squeezed = " ".join(old.split())
    for number, line in enumerate(content.split("\n"), start=1):
        if squeezed and squeezed.split("\n")[0] == " ".join(line.split()):
            return f"; line {number} is the same but for its spaces, so view it and copy it exactly"
    first = next((line.strip() for line in old.split("\n") if line.strip()), "")
    same = [number for number, line in enumerate(content.split("\n"), start=1) if first and first in line]
    if same:
        return f"; its first line stands in line {same[0]}, but what follows differs: view the file and copy it exactly"
    return "; view the file and copy the text exactly, with its spaces"


def _short(line: str) -> str:
    return line if len(line) <= LINE_CHARS else f"{line[:LINE_CHARS]}[... {len(line) - LINE_CHARS} more characters ...]"
