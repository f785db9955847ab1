r"""Known defects of benchmark files, each repaired alone and with its reason.

Invariant: a row is changed only where the defect itself is seen, so a copy that was mended elsewhere stays as it is.
Nothing is copied from an older file. In particular number_theory-048 has no repair: its new answer `ab \leq e^3` is
right and the older one was wrong (with u = 2^p x the condition is 4^u = u + 1, so x is 0 or negative; as p grows,
x (ln(ab) - 3) >= 0 asks for ab <= e^3, and by the inequality of the means that is enough).

Example:
    >>> record, (repair,) = repaired({"id": "imo-bench-geometry-004", "answer": "45752"})
    >>> record["answer"], repair.raw, record["answer_raw"]
    ('4, 5', '45752', '45752')
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One cell that was changed, or that the file says was changed before; `raw` is what stood there."""

    id: str
    column: str
    raw: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defect:
    """What is wrong with a row, and how to mend it: the new cells, none where the row is in order."""

    reason: str
    mend: Callable[[Row], dict[str, str]]


def repaired(row: Row) -> tuple[dict[str, Any], tuple[Repair, ...]]:
    """The row without its known defect, and what was changed; an old answer is kept as `answer_raw`."""
    known = DEFECTS.get(str(row.get("id")))
    if known is None:
        return dict(row), ()
    raw = row.get("answer_raw")
    if isinstance(raw, str):  # mended before it came here, and the file says so
        return dict(row), (_repair(known, row, "answer", raw, str(row.get("answer"))),)
    cells = known.mend(row)
    mended = {**row, **cells, **({"answer_raw": row["answer"]} if "answer" in cells else {})}
    return mended, tuple(_repair(known, row, name, str(row.get(name) or ""), value) for name, value in cells.items())


def _repair(known: _Defect, row: Row, column: str, raw: str, value: str) -> Repair:
    return Repair(id=str(row["id"]), column=column, raw=raw, value=value, reason=known.reason)


def _undated(row: Row) -> dict[str, str]:
    return {"answer": "4, 5"} if row.get("answer") == "45752" else {}


def _closed(row: Row) -> dict[str, str]:
    answer = row.get("answer")
    return {"answer": answer + "$"} if isinstance(answer, str) and answer.count("$") % 2 else {}


def _unquoted(row: Row) -> dict[str, str]:
    problem = row.get("problem")
    if isinstance(problem, str) and len(problem) > 1 and problem[0] == problem[-1] == '"':
        return {"problem": problem[1:-1].replace('""', '"').strip()}
    return {}


def _shifted(row: Row) -> dict[str, str]:
    """The answer was swallowed by the problem, and every later cell moved one to the left."""
    match = re.fullmatch(r'(.*?)\s*,\s*"?(\$[^$]+\$)"?', str(row.get("problem")), re.DOTALL)
    if match is None or row.get("answer") != "Algebra":
        return {}
    moved = {"category": row["answer"], "subcategory": row.get("category"), "origin": row.get("subcategory")}
    return {"problem": match[1], "answer": match[2], **{name: str(cell) for name, cell in moved.items() if cell}}


_UNCLOSED = _Defect(reason="the last $ of the answer is missing", mend=_closed)
DEFECTS: Mapping[str, _Defect] = MappingProxyType(
    {
        "imo-bench-algebra-036": _Defect(
            reason="a quotation mark in the wrong place put the answer into the problem and moved the later cells",
            mend=_shifted,
        ),
        "imo-bench-algebra-097": _UNCLOSED,
        "imo-bench-geometry-004": _Defect(
            reason='a spreadsheet took "4, 5" for the 5th of April 2025 and kept its serial number', mend=_undated
        ),
        "imo-bench-geometry-096": _UNCLOSED,
        "imo-bench-number_theory-055": _Defect(reason="the problem was quoted twice", mend=_unquoted),
    }
)
