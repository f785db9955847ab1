r"""Rows of sets like SWE-Bench's as tasks of a repository: which column says what, and what is written for one that says less.

Sets that share SWE-Bench's columns differ in small things: lists as lists or as JSON text, another name for the image, no
eval script. Names are looked for in `COLUMNS`, first one first. Where a row has no eval script, one is written if all of its
tests are pytest's: activate, put the tests in, run the files that the tests stand in. SWE-Bench's own library writes none
since its version 5, for there each row brings its own.

Example:
    >>> image_of(OFFICIAL_IMAGES, "pallets__flask-5014")
    'swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest'
    >>> names_of('["a.py::t", "a.py::u"]')
    ('a.py::t', 'a.py::u')
"""

import ast
import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sao_gym.errors import ConfigError, TaskFileError
from sao_gym.protocols import Task

COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "id": ("instance_id", "id", "task_id"),
        "prompt": ("problem_statement", "prompt", "problem", "issue"),
        "answer": ("patch", "answer", "gold_patch"),
        "repo": ("repo", "repo_name"),
        "base_commit": ("base_commit",),
        "version": ("version",),
        "image": ("image", "image_name", "docker_image"),
        "eval_script": ("eval_script",),
        "log_parser": ("log_parser",),
        "eval_type": ("eval_type",),
        "test_patch": ("test_patch",),
        "test_command": ("test_command", "test_cmd"),
        "fail_to_pass": ("FAIL_TO_PASS", "fail_to_pass"),
        "pass_to_pass": ("PASS_TO_PASS", "pass_to_pass"),
        "workdir": ("workdir",),
    }
)
"""Where each field is looked for."""
OFFICIAL_IMAGES = "swebench/sweb.eval.x86_64.{id_1776}:latest"
SWE_GYM_IMAGES = "xingyaoww/sweb.eval.x86_64.{id_s}:latest"
"""How images are named where a set's rows do not say it; a name of an image holds neither `__` nor capitals."""
TEST_COMMAND = "pytest -rA --color=no -p no:cacheprovider"
WORKDIR = "/testbed"
_PYTEST_NAME = re.compile(r"[^\s:]+\.py(::.+)?", re.S)
_HEADER = re.compile(r"^--- (?:a/)?(?P<old>[^\t\n]+).*\n\+\+\+ (?:b/)?(?P<new>[^\t\n]+)", re.M)


def image_of(pattern: str, instance_id: str) -> str:
    """`pattern` with {id} as the instance's id in small letters, {id_1776} and {id_s} as its forms without `__`."""
    low = instance_id.lower()
    known = {"id": low, "id_1776": low.replace("__", "_1776_"), "id_s": low.replace("__", "_s_")}
    try:
        return pattern.format(**known)
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"images = {pattern!r} is no pattern; it may hold {{id}}, {{id_1776}} and {{id_s}}"
        ) from error


def names_of(value: Any) -> tuple[str, ...] | None:
    """Names of tests from a list, or from a list as JSON or Python writes it; None for what is neither."""
    if isinstance(value, str):
        value = _listed(value)
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        return None
    return tuple(value)


def _listed(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def task_of_row(row: Mapping[str, Any], where: str, mapping: Mapping[str, str], images: str = "") -> Task:
    """A task from a row; `where` names it in messages, `mapping` says which column holds a field, `images` is a pattern.

    Raises TaskFileError for what a row does not say and cannot be written for it.
    """
    nested = row.get("info")
    if isinstance(nested, Mapping) and isinstance(nested.get("swe"), Mapping):  # one of ours, written to a file
        texts = {key: str(row.get(key) or "") for key in ("id", "prompt", "answer")}
        return Task(**texts, info=dict(nested))
    given = _Row(row, where, mapping)
    instance_id, commit = given.text("id"), given.text("base_commit", hint=_smith_hint(row))
    said: dict[str, Any] = {
        "instance_id": instance_id,
        "repo": given.text("repo"),
        "base_commit": commit,
        "version": given.text("version", ""),
        "image": given.text("image", "") or (image_of(images, instance_id) if images else given.text("image")),
        "eval_type": given.text("eval_type", "") or "pass_and_fail",
        "test_patch": given.text("test_patch", ""),
        "fail_to_pass": list(given.names("fail_to_pass")),
        "pass_to_pass": list(given.names("pass_to_pass")),
    }
    if workdir := given.text("workdir", ""):
        said["workdir"] = workdir
    said |= _script(given, said)
    return Task(id=instance_id, prompt=given.text("prompt"), answer=given.text("answer", ""), info={"swe": said})


def _script(given: "_Row", said: Mapping[str, Any]) -> dict[str, str]:
    """The eval script and the parser of what it prints, as the row has them or as pytest's tests need them."""
    script, parser = given.text("eval_script", ""), given.text("log_parser", "")
    if script and not parser:
        given.fail("has an eval_script but no log_parser; name a parser of swebench, such as parse_log_pytest")
    if script:
        return {"eval_script": script, "log_parser": parser}
    tests = [*said["fail_to_pass"], *said["pass_to_pass"]]
    if any(not _PYTEST_NAME.fullmatch(name) for name in tests):
        odd = next(name for name in tests if not _PYTEST_NAME.fullmatch(name))
        given.fail(
            f"has no eval_script, and its test {odd!r:.80} is no name of pytest's, so none can be written; give a column "
            "with eval_script and one with log_parser"
        )
    command = given.text("test_command", "") or TEST_COMMAND
    written = pytest_script(said, command)
    return {"eval_script": written, "log_parser": parser or "parse_log_pytest"}


def pytest_script(said: Mapping[str, Any], command: str = TEST_COMMAND) -> str:
    """A script that puts the tests of `test_patch` in and runs the files that the tests to look at stand in."""
    folder, commit, patch = said.get("workdir", WORKDIR), said["base_commit"], said["test_patch"]
    names = [*said["fail_to_pass"], *said["pass_to_pass"]]
    files = sorted({name.partition("::")[0] for name in names})
    changed = [found for found in old_files(patch) if found]
    restore = f"git checkout {commit} -- {shlex.join(changed)}" if changed else ":"
    end = f"EOF_{hashlib.sha256(patch.encode()).hexdigest()[:12]}"
    put = [f"git apply -v - <<'{end}'", patch.rstrip("\n"), end] if patch.strip() else []
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        "source /opt/miniconda3/bin/activate",
        "conda activate testbed",
        f"cd {shlex.quote(folder)}",
        f"git config --global --add safe.directory {shlex.quote(folder)}",
        restore,
        *put,
        ": '>>>>> Start Test Output'",
        f"{command} {shlex.join(files)}",
        ": '>>>>> End Test Output'",
        restore,
    ]
    return "\n".join(lines) + "\n"


def old_files(patch: str) -> list[str]:
    """Files of a diff that are there before it, in order."""
    found = (match["old"].strip().strip('"') for match in _HEADER.finditer(patch))
    return list(dict.fromkeys(name.removeprefix("a/") for name in found if name != "/dev/null"))


def _smith_hint(row: Mapping[str, Any]) -> str:
    image = str(row.get("image_name") or row.get("image") or "")
    if "swesmith" not in image:
        return ""
    return "; rows of SWE-smith hold the patch that makes the bug, on branches of their images, which this version does not run"


class _Row:
    """A row by the names of our fields."""

    def __init__(self, row: Mapping[str, Any], where: str, mapping: Mapping[str, str]) -> None:
        self._row, self._where, self._mapping = row, where, mapping

    def fail(self, what: str) -> None:
        """Raises TaskFileError."""
        raise TaskFileError(f"{self._where}: {what}")

    def text(self, field: str, default: str | None = None, *, hint: str = "") -> str:
        """A text; without a default it must be there and not be empty."""
        value = self._value(field)
        if isinstance(value, Sequence) and not isinstance(value, str) and field == "test_command":
            value = " && ".join(map(str, value))
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if value is not None and not isinstance(value, str):
            self.fail(f"{field} must be text, got a {type(value).__name__}")
        if not value and default is None:
            columns = self._mapping.get(field) or " or ".join(COLUMNS[field])
            self.fail(f"no {field} under {columns}{hint or '; say which column holds it with a column mapping'}")
        return str(value or default or "")

    def names(self, field: str) -> tuple[str, ...]:
        """Names of tests."""
        value = self._value(field)
        found = () if value is None and field == "pass_to_pass" else names_of(value)
        if found is None:
            self.fail(f"{field} must be a list of names of tests, or one as JSON text, got {value!r:.80}")
        return found or ()

    def _value(self, field: str) -> Any:
        if field in self._mapping:
            if self._mapping[field] not in self._row:
                listed = ", ".join(map(str, self._row))
                self.fail(f"{field} should stand under {self._mapping[field]!r}; columns there: {listed}")
            return self._row[self._mapping[field]]
        for name in COLUMNS[field]:
            if self._row.get(name) not in (None, ""):
                return self._row[name]
        config = self._row.get("install_config")  # where sets like SWE-rebench keep it
        return (
            next((config[name] for name in COLUMNS[field] if config.get(name)), None)
            if isinstance(config, Mapping)
            else None
        )
