"""Rows of sets like SWE-Bench's as tasks: forms that differ, what is derived, what is cleaned, what is said."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from sao_gym.envs.swe_task import SweTask
from sao_gym.errors import ConfigError, TaskFileError
from sao_gym.protocols import Task
from sao_gym.registry import make_tasks, register
from sao_gym.tasks import swe
from sao_gym.tasks._swe_overlap import (
    Known,
    describe_shared,
    line_of,
    shared_with_verified,
    stored_issues,
    swe_overlaps,
)
from sao_gym.tasks._swe_rows import OFFICIAL_IMAGES, image_of, names_of, old_files, pytest_script
from sao_gym.tasks.base import load_tasks, save_jsonl
from sao_gym.tasks.benchmarks import load_benchmark
from sao_gym.tasks.swe import drawn, swe_tasks

PATCH = "diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
TEST_PATCH = PATCH.replace("m.py", "tests/test_m.py")
ROW: Mapping[str, Any] = {
    "instance_id": "owner__name-7",
    "repo": "owner/name",
    "base_commit": "a" * 40,
    "patch": PATCH,
    "test_patch": TEST_PATCH,
    "problem_statement": "Numbers come out wrong when they are large\n\nAs shown.",
    "version": "1.0",
    "FAIL_TO_PASS": ["tests/test_m.py::test_x"],
    "PASS_TO_PASS": ["tests/test_n.py::test_y[a b]"],
    "image": "owner/image:1",
}

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A task file of rows, each ROW with changes; None takes a column away."""

    def make(*changes: Mapping[str, Any], name: str = "rows.jsonl") -> str:
        rows = [{key: value for key, value in {**ROW, **change}.items() if value is not None} for change in changes]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return make


def said(path: str, **kwargs: Any) -> Mapping[str, Any]:
    """What the first task of a file says."""
    found: Mapping[str, Any] = swe_tasks(path, **kwargs)[0].info["swe"]
    return found


# -- forms


def test_a_row_says_all_that_an_episode_needs(write: Write) -> None:
    (task,) = swe_tasks(write({}))
    assert (task.id, task.prompt, task.answer) == ("owner__name-7", ROW["problem_statement"], PATCH)
    one = SweTask.of(task)
    assert (one.repo, one.base_commit, one.image, one.test_patch) == (
        "owner/name",
        "a" * 40,
        "owner/image:1",
        TEST_PATCH,
    )
    assert one.fail_to_pass == ("tests/test_m.py::test_x",)
    assert one.pass_to_pass == ("tests/test_n.py::test_y[a b]",)
    assert (one.log_parser, one.eval_type) == ("parse_log_pytest", "pass_and_fail")
    assert json.loads(json.dumps(task.info)) == task.info


@pytest.mark.parametrize("form", [list, json.dumps, repr, tuple])
def test_lists_of_tests_come_as_lists_or_as_text(form: Callable[[Any], Any]) -> None:
    names = ["a.py::t['x']", 'b.py::u["y"]']
    assert names_of(form(names)) == tuple(names)


@pytest.mark.parametrize("wrong", ["a.py::t", 7, None, ["a", 1], "{", "[1]"])
def test_what_is_no_list_of_tests_is_none(wrong: Any) -> None:
    assert names_of(wrong) is None


def test_parquet_and_json_lines_give_the_same_tasks(write: Write, tmp_path: Path) -> None:
    lines = write({})
    parquet.write_table(pa.Table.from_pylist([dict(ROW)]), tmp_path / "rows.parquet")
    packed = swe_tasks(str(tmp_path / "rows.parquet"))
    assert [*packed] == [*swe_tasks(lines)]
    assert packed.content_hash == swe_tasks(lines).content_hash


def test_tasks_that_were_written_are_read_back_equal(write: Write, tmp_path: Path) -> None:
    tasks = swe_tasks(write({}, {"instance_id": "owner__name-8"}))
    save_jsonl(tmp_path / "own.jsonl", tasks)
    assert [*swe_tasks(str(tmp_path / "own.jsonl"))] == [*tasks]


def test_columns_of_another_set_are_named(write: Write) -> None:
    path = write({"image": None, "docker": "a/b:c", "FAIL_TO_PASS": None, "broken": '["t.py::x"]'})
    with pytest.raises(TaskFileError, match="fail_to_pass must be a list of names of tests"):
        swe_tasks(path, mapping={"image": "docker"})
    one = said(path, mapping={"image": "docker", "fail_to_pass": "broken"})
    assert (one["image"], one["fail_to_pass"]) == ("a/b:c", ["t.py::x"])
    with pytest.raises(TaskFileError, match="image should stand under 'dock'; columns there: instance_id"):
        swe_tasks(path, mapping={"image": "dock", "fail_to_pass": "broken"})
    with pytest.raises(ConfigError, match="unknown field 'picture'"):
        swe_tasks(path, mapping={"picture": "docker"})


def test_what_a_set_keeps_in_its_installation_is_found(write: Write) -> None:
    config = {"test_cmd": "pytest -rA --tb=line", "log_parser": "parse_log_pytest_v2"}
    one = said(write({"install_config": config}))
    assert one["log_parser"] == "parse_log_pytest_v2"
    assert "\npytest -rA --tb=line tests/test_m.py tests/test_n.py\n" in one["eval_script"]


def test_images_follow_a_pattern_where_rows_name_none(write: Write) -> None:
    path = write({"image": None})
    with pytest.raises(TaskFileError, match=r"rows.jsonl, line 1: no image under image or image_name"):
        swe_tasks(path)
    assert said(path, images="me/sweb.{id_s}:v1")["image"] == "me/sweb.owner_s_name-7:v1"
    assert image_of(OFFICIAL_IMAGES, "Sphinx__A-1") == "swebench/sweb.eval.x86_64.sphinx_1776_a-1:latest"
    with pytest.raises(ConfigError, match=r"images = 'x-\{ident\}' is no pattern"):
        swe_tasks(path, images="x-{ident}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"base_commit": None}, "line 1: no base_commit under base_commit; say which column"),
        (
            {"base_commit": None, "image": None, "image_name": "x/swesmith.y"},
            "rows of SWE-smith hold the patch that makes",
        ),
        ({"FAIL_TO_PASS": ["test_x (app.Tests)"]}, "has no eval_script, and its test 'test_x .app.Tests.' is no name"),
        ({"eval_script": "true"}, "has an eval_script but no log_parser"),
        ({"problem_statement": ""}, "no prompt under problem_statement"),
        ({"repo": ["a"]}, "repo must be text, got a list"),
    ],
)
def test_what_is_missing_is_said_with_its_place(write: Write, change: Mapping[str, Any], words: str) -> None:
    with pytest.raises(TaskFileError, match=words):
        swe_tasks(write(change))


def test_rows_that_no_test_can_judge_are_left_out_and_counted(write: Write) -> None:
    tasks = swe_tasks(write({}, {"instance_id": "owner__name-8", "FAIL_TO_PASS": []}))
    assert [task.id for task in tasks] == ["owner__name-7"]
    assert tasks.facts["left_out"] == {"without a test that only a fix makes pass": 1}
    with pytest.raises(TaskFileError, match="holds no task that can be graded"):
        swe_tasks(write({"FAIL_TO_PASS": []}, name="none.jsonl"))


def test_a_file_is_read_again_only_when_it_changed(write: Write) -> None:
    path = write({})
    assert swe_tasks(path) is swe_tasks(path)
    first = swe_tasks(path)
    write({"version": "2.0"})
    os.utime(path, (1, 1))
    assert swe_tasks(path)[0].info["swe"]["version"] == "2.0" != first[0].info["swe"]["version"]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"limit": 0}, "limit is 0; give how many tasks"),
        ({"limit": True}, "limit is True"),
        ({"split": "test"}, "split must be 'train' or 'heldout'"),
        ({"tasks": "nowhere.jsonl"}, "cannot read nowhere.jsonl: No such file or directory; give a task file, hf:"),
    ],
)
def test_arguments_that_are_none(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, TaskFileError), match=words):
        swe_tasks(**kwargs)


def test_a_larger_draw_keeps_what_a_smaller_drew(write: Write) -> None:
    path = write(*({"instance_id": f"owner__name-{number}"} for number in range(20)))
    few, more = swe_tasks(path, limit=5), swe_tasks(path, limit=12)
    assert {task.id for task in few} < {task.id for task in more}
    assert [task.id for task in few] != [f"owner__name-{number}" for number in range(5)]
    assert (len(few), few.name, len(drawn(few, 99))) == (5, "rows-5", 5)


# -- the script that is written


def run_script(script: str, folder: Path) -> str:
    """The output of a script in a repository, with activation left out."""
    body = "\n".join(line for line in script.splitlines() if "activate" not in line)
    environment = {**os.environ, "HOME": str(folder.parent)}
    shell = ["bash", "-c", "exec 2>&1; source /dev/stdin"]
    done = subprocess.run(shell, input=body, capture_output=True, text=True, cwd=folder, env=environment, timeout=60)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repo with space"
    (folder / "tests").mkdir(parents=True)
    (folder / "m.py").write_text("x = 1\n")
    (folder / "tests/test_m.py").write_text("x = 1\n")
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "base"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_the_written_script_puts_the_tests_in_and_takes_them_out(repository: Path) -> None:
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=repository, text=True).strip()
    added = (
        "diff --git a/new.py b/new.py\nnew file mode 100644\n--- /dev/null\n+++ b/new.py\n@@ -0,0 +1 @@\n+y = 'EOF'\n"
    )
    one = {
        "workdir": str(repository),
        "base_commit": commit,
        "test_patch": TEST_PATCH + added,
        "fail_to_pass": ["tests/test_m.py::t"],
        "pass_to_pass": ["new.py::t", "tests/test_m.py::u"],
    }
    (repository / "tests/test_m.py").write_text("tampered\n")
    said = run_script(pytest_script(one, "tail -n +1"), repository)
    ran = said.partition(">>>>> Start Test Output")[2].partition("End Test Output")[0]
    assert "x = 2" in ran, "the test patch was over the base"
    assert "y = 'EOF'" in ran
    assert ran.count("tests/test_m.py") == 2, "each file once, in the trace and in what it prints"
    assert (repository / "tests/test_m.py").read_text() == "x = 1\n", "set back"
    assert (repository / "m.py").read_text() == "x = 1\n"


def test_files_that_a_patch_adds_are_not_asked_back() -> None:
    moved = "--- a/old name.py\t2020-01-01\n+++ b/new name.py\n@@ -1 +1 @@\n-a\n+b\n--- /dev/null\n+++ b/added.py\n"
    assert old_files(moved) == ["old name.py"]
    assert old_files("") == []


# -- SWE-Bench Verified


@pytest.fixture(scope="module")
def verified(data_dir: Path) -> Any:
    return load_benchmark("swe_verified", data=data_dir)


def test_every_row_gives_a_spec_an_image_a_script_and_a_parser(verified: Any) -> None:
    utils = pytest.importorskip("swebench.harness.utils")
    parsers = pytest.importorskip("swebench.harness.log_parsers").PARSER_REGISTRY
    assert len(verified.tasks) == 500
    for task in verified.tasks:
        one = SweTask.of(task)
        spec = utils.make_test_spec(dict(task.info) | {"instance_id": task.id})
        assert one.image == spec.image == image_of(OFFICIAL_IMAGES, task.id)
        assert one.log_parser in parsers
        assert [*one.fail_to_pass] == spec.FAIL_TO_PASS
        assert [*one.pass_to_pass] == spec.PASS_TO_PASS
        assert one.eval_script.startswith("#!/bin/bash")
        assert one.test_patch.strip() in one.eval_script
        assert one.base_commit in one.eval_script
        assert (one.gold, one.eval_type) == (task.answer, "pass_and_fail")


def test_all_rows_load_in_seconds(data_dir: Path) -> None:
    began = time.process_time()
    tasks = make_verified(data_dir, limit=499)
    assert len(tasks) == 499
    assert time.process_time() - began < 8


def make_verified(data_dir: Path, **kwargs: Any) -> Any:
    return swe_tasks("swe_verified", data=str(data_dir), **kwargs)


def test_the_stored_hashes_are_those_of_the_rows(verified: Any) -> None:
    lines = ["\t".join((one.id, one.commit, one.issue, one.title)) for one in stored_issues()]
    assert sorted(line_of(task) for task in verified.tasks) == lines


# -- contamination


def of_verified(number: int = 0) -> Known:
    return stored_issues()[number]


def test_the_benchmark_is_known_by_what_it_says(verified: Any, data_dir: Path) -> None:
    assert verified.tasks.contamination.startswith("500 of 500 training tasks are of SWE-Bench Verified: ")
    assert make_verified(data_dir, split="heldout").name == "swe_verified"
    with pytest.raises(TaskFileError, match="decontaminate leaves none"):
        make_verified(data_dir, decontaminate=True)


@pytest.mark.parametrize(
    ("change", "by"),
    [
        (lambda one: {}, ""),
        (lambda one: {"instance_id": one.id.upper()}, "its id"),
        (lambda one: {"base_commit": one.info["base_commit"].upper()}, "its base commit"),
        (lambda one: {"problem_statement": one.prompt.replace(" ", "\n  ").upper()}, "its issue text"),
        (lambda one: {"problem_statement": one.prompt.splitlines()[0] + "\n\nAnother text."}, "its issue's title"),
        (lambda one: {"problem_statement": "x " + one.prompt[:200]}, ""),
    ],
)
def test_a_copy_is_found_by_any_of_its_marks(verified: Any, write: Write, change: Any, by: str) -> None:
    tasks = swe_tasks(write(change(verified.tasks.by_id("django__django-11815")), {"instance_id": "other__one-1"}))
    assert [one.by for one in tasks.shared] == ([by] if by else [])
    cleaned = [
        task.id
        for task in swe_tasks(write({"instance_id": "other__one-1"}, change(verified.tasks[0])), decontaminate=True)
    ]
    assert cleaned[0] == "other__one-1"
    assert len(cleaned) == (1 if by else 2)


def test_what_is_left_out_is_counted(write: Write) -> None:
    path = write({}, {"instance_id": of_verified().id})
    kept = swe_tasks(path, decontaminate=True)
    assert [task.id for task in kept] == ["owner__name-7"]
    assert kept.facts["left_out"] == {"of SWE-Bench Verified": 1}
    assert kept.contamination == ""
    as_given = swe_tasks(path)
    assert len(as_given) == 2
    assert as_given.contamination == describe_shared(shared_with_verified(as_given), 2)
    assert "1 of 2 training tasks are of SWE-Bench Verified: astropy__astropy-12907 (its id)" in as_given.contamination


def test_two_sets_share_tasks_and_no_stock_phrases() -> None:
    form = (
        "I have checked that this issue has not already been reported and I have confirmed this bug exists on main.\n"
    )
    here = [Task(id=f"a__b-{n}", prompt=f"{form}{n}", info={"swe": {"base_commit": f"{n}" * 40}}) for n in range(3)]
    there = [Task(id="c__d-1", prompt=f"{form}x", info={"swe": {"base_commit": "2" * 40}})]
    (found,) = swe_overlaps([*here[:1], here[2]], there)
    assert (found.benchmark_id, found.training_ids) == ("a__b-2", ("c__d-1",))
    assert swe_overlaps(here[:2], [Task(id="c__d-2", prompt=f"y{form}", info={"swe": {}})]) == ()


# -- the set that is trained on


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder where the datasets library looks before it asks the Hub, which does not answer."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.chdir(tmp_path)
    swe._rows.cache_clear()
    yield tmp_path
    swe._rows.cache_clear()


def test_what_training_takes_unless_told_otherwise(hub: Path) -> None:
    (hub / "SWE-Gym/SWE-Gym/data").mkdir(parents=True)
    row = {key: value for key, value in ROW.items() if key != "image"}
    rows = [row | {"instance_id": one} for one in ("getmoto__moto-1", of_verified().id, "Project-MONAI__MONAI-2")]
    parquet.write_table(pa.Table.from_pylist(rows), hub / "SWE-Gym/SWE-Gym/data/train-00000-of-00001.parquet")
    tasks = make_tasks("swe_verified")
    assert isinstance(tasks, swe.SweTaskSet)
    assert [SweTask.of(task).image for task in tasks] == [
        "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-1:latest",
        "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-2:latest",
    ]
    assert (tasks.name, tasks.left_out, tasks.contamination) == ("swe_gym", {"of SWE-Bench Verified": 1}, "")
    assert "SWE-Gym/SWE-Gym" in tasks.source
    assert len(swe_tasks("swe_gym", decontaminate=False)) == 3


def test_a_hub_that_does_not_answer_is_said_at_once(hub: Path) -> None:
    began = time.monotonic()
    with pytest.raises(TaskFileError, match="cannot read hf:SWE-Gym/SWE-Gym:train from the Hub, which does not answer"):
        make_tasks("swe_verified")
    assert time.monotonic() - began < 10


# -- the registry


def test_a_task_factory_may_read_what_tasks_names(write: Write) -> None:
    register("swe_rows_test", entry_point="sao_gym.envs.terminal:TerminalEnv", tasks="sao_gym.tasks.swe:swe_tasks")
    path = write(*({"instance_id": f"owner__name-{number}"} for number in range(4)))
    assert len(make_tasks("swe_rows_test", tasks=path, limit=2)) == 2
    given = load_tasks(write({"id": "x", "prompt": "p"}, name="plain.jsonl"))
    assert make_tasks("swe_rows_test", tasks=given) is given
    with pytest.raises(ConfigError, match="takes no argument 'limits'"):
        make_tasks("swe_rows_test", tasks=path, limits=2)
