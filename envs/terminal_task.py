"""What a terminal task says: which folder in which image, and how the result is checked.

All of it stands in the task's `info`, as JSON has it:

    image       image, template or root folder; unset: the backend's own
    workdir     the folder that the work is done in (/workspace)
    files       {path: text} of that folder, and/or
    folder      {"file": PATH of a .tar.gz, "sha256": HEX}
    check       {"command": TEXT, "files": {path: text} | "folder": {...}, "stdin": TEXT, "expect": REGEX, "timeout_s": S,
                 "in_place": BOOL}
    protect     patterns of files that are put back as they were before the check

Example:
    >>> task = Task(id="t", prompt="Make it pass.", info={"files": {"a": ""}, "check": {"command": "test -s a"}})
    >>> TerminalTask.of(task).check.command
    'test -s a'
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sao_gym.envs.sandboxes.tree import Tree, laid_over, read_pack, tree_of_texts
from sao_gym.errors import TaskFileError
from sao_gym.protocols import Task

WORKDIR = "/workspace"
PROTECTED = (
    "conftest.py",
    "test_*.py",
    "*_test.py",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "noxfile.py",
    "sitecustomize*",
    "usercustomize*",
    "*.pth",
    "pytest",
    "pytest.*",
    "_pytest",
    "unittest",
    "unittest.*",
)
"""What decides how tests run: put back as the task has it, and taken away where the task has none."""
COMPILED = ("__pycache__", "*.pyc", ".pytest_cache")
"""Never carried to a check: compiled code may be other than its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A command that exits with 0 if the task is done; `expect` must then also match its output (multi-line regex).

    `tree` is put in only for the check. `in_place` runs it in the agent's own sandbox, for results outside the work
    folder; else the work folder alone is carried to a fresh one, and nothing that the agent did elsewhere counts.
    """

    command: str
    tree: Tree = field(default_factory=dict)
    stdin: str = ""
    expect: str = ""
    timeout_s: float = 200.0
    in_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalTask:
    """A task read and checked."""

    image: str
    workdir: str
    tree: Tree
    check: Check
    protect: tuple[str, ...]

    @classmethod
    def of(cls, task: Task, folders: Path | None = None) -> "TerminalTask":
        """Read a task; packed folders are looked for in `folders`, where given. Raises TaskFileError."""
        info = task.info
        where = f"task {task.id!r}"
        _refuse_unknown(where, info, ("image", "workdir", "files", "folder", "check", "protect"))
        checked = info.get("check")
        if not isinstance(checked, Mapping) or not isinstance(checked.get("command"), str):
            raise TaskFileError(
                f"{where} has no check: its info needs check = {{command = ...}}, which exits with 0 if it is done"
            )
        workdir = _typed(where, info, "workdir", str, WORKDIR)
        if not workdir.startswith("/") or workdir.rstrip("/") in ("", "/tmp", "/usr", "/etc", "/root"):
            raise TaskFileError(f"{where} works in {workdir!r}; give a folder of its own, such as {WORKDIR}")
        protect = info.get("protect", PROTECTED)
        if not isinstance(protect, Sequence) or isinstance(protect, str):
            raise TaskFileError(f"{where}: protect must be a list of patterns, got {protect!r}")
        return cls(
            image=_typed(where, info, "image", str, ""),
            workdir=workdir.rstrip("/"),
            tree=_tree(where, info, folders),
            check=_check(where, checked, folders),
            protect=tuple(str(pattern) for pattern in protect),
        )


def _check(where: str, given: Mapping[str, Any], folders: Path | None) -> Check:
    where = f"{where}, check"
    _refuse_unknown(where, given, ("command", "files", "folder", "stdin", "expect", "timeout_s", "in_place"))
    timeout_s = given.get("timeout_s", 200.0)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise TaskFileError(f"{where}: timeout_s must be a number of seconds above 0, got {timeout_s!r}")
    expect = _typed(where, given, "expect", str, "")
    try:
        re.compile(expect)
    except re.error as error:
        raise TaskFileError(f"{where}: expect {expect!r} is no regular expression ({error})") from error
    return Check(
        command=given["command"],
        tree=_tree(where, given, folders),
        stdin=_typed(where, given, "stdin", str, ""),
        expect=expect,
        timeout_s=float(timeout_s),
        in_place=_typed(where, given, "in_place", bool, False),
    )


def _tree(where: str, given: Mapping[str, Any], folders: Path | None) -> Tree:
    """The files that are named, over the packed folder."""
    texts = tree_of_texts(_typed(where, given, "files", Mapping, {}))
    packed = given.get("folder")
    if packed is None:
        return texts
    if not isinstance(packed, Mapping) or {"file", "sha256"} != set(packed):
        raise TaskFileError(f"{where}: folder must be {{file = PATH, sha256 = HEX}}, got {packed!r}")
    path = Path(str(packed["file"]))
    return laid_over(read_pack(folders / path.name if folders else path, str(packed["sha256"])), texts)


def _typed(where: str, given: Mapping[str, Any], key: str, kind: Any, default: Any) -> Any:
    value = given.get(key, default)
    if not isinstance(value, kind):
        raise TaskFileError(f"{where}: {key} must be of the kind {kind.__name__}, got {value!r}")
    return value


def _refuse_unknown(where: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    if unknown := [key for key in given if key not in known]:
        raise TaskFileError(
            f"{where} says {unknown[0]!r}, which a terminal task does not know; it knows {', '.join(known)}"
        )
