"""What a task of a repository must say."""

from typing import Any

import pytest

from sao_gym.envs.swe_task import SweTask
from sao_gym.errors import TaskFileError
from sao_gym.protocols import Task

SAID: dict[str, Any] = {
    "repo": "pallets/flask",
    "base_commit": "7ee9ceb71e868944a46e1ff00b506772a53a4f1d",
    "image": "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest",
    "eval_script": "#!/bin/bash\n",
    "log_parser": "parse_log_flask",
    "fail_to_pass": ["tests/test_blueprints.py::test_empty_name_not_allowed"],
    "pass_to_pass": [],
}


def task(**swe: Any) -> Task:
    return Task(
        id="pallets__flask-5014", prompt="Require a non-empty name", answer="diff", info={"swe": {**SAID, **swe}}
    )


def test_what_is_not_said_has_the_benchmarks_own_value() -> None:
    said = SweTask.of(task(hints="passed over"))
    assert (said.instance_id, said.workdir, said.eval_type) == ("pallets__flask-5014", "/testbed", "pass_and_fail")
    assert (said.gold, said.test_patch, said.pass_to_pass) == ("diff", "", ())


@pytest.mark.parametrize(
    ("swe", "words"),
    [
        *(
            ({key: None}, f"does not say {key}")
            for key in ("repo", "base_commit", "image", "eval_script", "log_parser")
        ),
        ({"image": ""}, "not be empty|not empty"),
        ({"fail_to_pass": []}, "any patch would pass"),
        ({"fail_to_pass": '["a"]'}, "list of names"),
        ({"pass_to_pass": None}, "list of names"),
        ({"workdir": "/tmp/"}, "folder of its own"),
        ({"workdir": "testbed"}, "folder of its own"),
        ({"version": 3}, "must be text"),
        ({"eval_script": "a\0b"}, "without NUL"),
    ],
)
def test_what_is_missing_is_named_with_the_task(swe: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskFileError, match=words) as caught:
        SweTask.of(task(**swe))
    assert "pallets__flask-5014" in str(caught.value)


def test_a_task_of_another_kind_is_refused() -> None:
    with pytest.raises(TaskFileError, match="is about no repository"):
        SweTask.of(Task(id="t", prompt="2 + 2?"))
