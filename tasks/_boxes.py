r"""Where an answer stands in a text: its last box.

Rule: the answer is the last balanced box of the text, `\boxed{...}`, `\boxed x` or `\fbox{...}`; boxes joined only by
a comma, "and", "or" or spaces are one list.

Example:
    >>> extract_boxed(r"So $\boxed{1331}$ and $\boxed{1728}$.")
    '1331, 1728'
"""

import re
from dataclasses import dataclass

MAX_WRAPPERS = 8
_BOX = re.compile(r"\\[bf]box(?![a-zA-Z])|\\boxed(?![a-zA-Z])")
_BARE = re.compile(r"[^\s{}$\\<*]+")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_JOINT = re.compile(
    r"(?:[ \t,;~$]|\n(?!\s*\n)|\band\b|\bor\b|\\[()]|\\q?quad(?![a-zA-Z])|\\[,;: ]|\\text\{\s*(?:and|or)\s*\})*"
)


@dataclass(frozen=True, slots=True)
class Box:
    """One box: where it starts and ends in the text, and what it holds."""

    start: int
    end: int
    content: str


def match_braces(text: str) -> dict[int, int]:
    """Index of each balanced opening brace -> index of its closing one. Escaped braces do not count."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    index = 0
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif character == "{":
            opened.append(index)
        elif character == "}" and opened:
            closing[opened.pop()] = index
        index += 1
    return closing


def _read_box(text: str, braces: dict[int, int], start: int, after: int) -> Box | None:
    while after < len(text) and text[after] in " \t\n":
        after += 1
    if text[after : after + 1] == "{":
        end = braces.get(after)
        return None if end is None else Box(start, end + 1, text[after + 1 : end])
    if found := _BARE.match(text, after):
        content = found.group().rstrip(".,;:)!?")
        return Box(start, after + len(content), content) if content else None
    if found := _COMMAND.match(text, after):
        end = found.end()
        while end in braces:
            end = braces[end] + 1
        return Box(start, end, text[after:end])
    return None


def find_boxes(text: str) -> list[Box]:
    """Every balanced box that is not inside another one, in order."""
    boxes: list[Box] = []
    braces = match_braces(text)
    position = 0
    while found := _BOX.search(text, position):
        box = _read_box(text, braces, found.start(), found.end())
        if box is None:
            position = found.end()
        else:
            boxes.append(box)
            position = max(box.end, found.end())
    return boxes


def unwrap(answer: str) -> str:
    """The content of an answer that is nothing but a box, a few times over at most."""
    for _ in range(MAX_WRAPPERS):
        stripped = answer.strip().strip("$").strip()
        boxes = find_boxes(stripped)
        if len(boxes) != 1 or boxes[0].start != 0 or boxes[0].end != len(stripped):
            break
        answer = boxes[0].content
    return answer.strip()


def extract_boxed(text: str) -> str | None:
    """The answer in a text, or None where it has no balanced box; an empty box is an empty answer."""
    boxes = find_boxes(text)
    if not boxes:
        return None
    first = len(boxes) - 1
    while first > 0 and _JOINT.fullmatch(text, boxes[first - 1].end, boxes[first].start):
        first -= 1
    contents = dict.fromkeys(unwrap(box.content) for box in boxes[first:])
    return ", ".join(contents)
