"""What a task of a repository says: an issue, the image with the repository as it was then, and how a fix is judged.

A task's prompt is the issue text, its answer the gold patch; the rest stands under `swe` in its `info`, as JSON has it
(the names are those of SWE-Bench's rows, in small letters):

    instance_id    name of the instance; unset: the task's id
    repo           owner/name
    base_commit    the commit that the issue was written about
    version        the project's version, as the set has it
    image          image of a container; with the backend local the path of an unpacked root folder
    eval_script    bash program that puts the tests in and runs them
    log_parser     name of the parser of what it prints
    eval_type      how the parser's verdicts are read (pass_and_fail)
    test_patch     diff that the tests come in; its files are never the agent's to change
    fail_to_pass   tests that only a fix makes pass
    pass_to_pass   tests that must go on passing
    workdir        where the repository is (/testbed)

Further keys are the task set's own and are passed over.

Example:
    >>> said = {"repo": "a/b", "base_commit": "0" * 40, "image": "x", "eval_script": "true", "log_parser": "p",
    ...         "fail_to_pass": ["t"], "pass_to_pass": []}
    >>> SweTask.of(Task(id="a__b-1", prompt="It fails.", info={"swe": said})).workdir
    '/testbed'
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sao_gym.errors import TaskFileError
from sao_gym.protocols import Task

WORKDIR = "/testbed"
EVAL_TYPE = "pass_and_fail"
SHARED_FOLDERS = ("", "/tmp", "/usr", "/etc", "/root", "/home", "/var", "/opt", "/dev", "/proc", "/sys")
"""Where no repository can be: other things are there too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweTask:
    """A task read and checked. `gold` is the gold patch, empty where the set has none."""

    instance_id: str
    repo: str
    base_commit: str
    version: str
    image: str
    eval_script: str
    log_parser: str
    eval_type: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    workdir: str
    gold: str

    @classmethod
    def of(cls, task: Task) -> "SweTask":
        """Read a task. Raises TaskFileError, which names the task and what is missing."""
        where = f"task {task.id!r}"
        said = task.info.get("swe")
        if not isinstance(said, Mapping):
            raise TaskFileError(
                f"{where} is about no repository: its info needs swe = {{repo, base_commit, image, ...}}"
            )
        fail_to_pass = _names(where, said, "fail_to_pass")
        if not fail_to_pass:
            raise TaskFileError(f"{where} has no test in fail_to_pass, so any patch would pass; leave the task out")
        workdir = _text(where, said, "workdir", WORKDIR).rstrip("/")
        if workdir in SHARED_FOLDERS or not workdir.startswith("/"):
            raise TaskFileError(
                f"{where} has its repository in {workdir!r}; give a folder of its own, such as {WORKDIR}"
            )
        return cls(
            instance_id=_text(where, said, "instance_id", task.id),
            repo=_text(where, said, "repo"),
            base_commit=_text(where, said, "base_commit"),
            version=_text(where, said, "version", ""),
            image=_text(where, said, "image"),
            eval_script=_text(where, said, "eval_script"),
            log_parser=_text(where, said, "log_parser"),
            eval_type=_text(where, said, "eval_type", EVAL_TYPE),
            test_patch=_text(where, said, "test_patch", ""),
            fail_to_pass=fail_to_pass,
            pass_to_pass=_names(where, said, "pass_to_pass"),
            workdir=workdir,
            gold=task.answer,
        )


def _text(where: str, said: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A text; without a default it must be there and not be empty."""
    value = said.get(key, default)
    if value is None or (value == "" and default is None):
        raise TaskFileError(f"{where} does not say {key}: its info needs swe.{key}, text that is not empty")
    if not isinstance(value, str) or "\0" in value:
        raise TaskFileError(f"{where}: swe.{key} must be text without NUL, got {value!r:.80}")
    return value


def _names(where: str, said: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = said.get(key)
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise TaskFileError(f"{where}: swe.{key} must be a list of names of tests, got {value!r:.80}")
    return tuple(value)
