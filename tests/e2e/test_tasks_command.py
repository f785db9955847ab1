"""`sao-gym tasks new` as people use it: a folder, a check and a patch become a task that the environment takes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sao_gym.commands.main import main
from sao_gym.envs.terminal import apply_patch_command
from sao_gym.messages import Message, ToolCall
from sao_gym.registry import make
from sao_gym.tasks.base import load_tasks

PATCH = """--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def double(x):
-    return x + x + 1
+    return x + x
"""
TEST = (
    "import unittest, calc\n\n\nclass T(unittest.TestCase):\n    def test(self):\n        assert calc.double(4) == 8\n"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "hidden").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("[core]\n")
    (folder / "calc.py").write_text("def double(x):\n    return x + x + 1\n")
    (folder / "test_calc.py").write_text(TEST)
    (folder / "hidden/test_more.py").write_text(TEST)
    (folder / "run").write_text("#!/bin/sh\necho hi\n")
    (folder / "run").chmod(0o755)
    (tmp_path / "fix.diff").write_text(PATCH)
    (tmp_path / "issue.txt").write_text("double is wrong.\n")
    return folder


def words(project: Path, **changes: str) -> list[str]:
    given = {
        "from": str(project),
        "check": "python3 -m unittest && ./run && cd hidden && PYTHONPATH=.. python3 -m unittest",
        "patch": str(project.parent / "fix.diff"),
        "instruction": f"@{project.parent / 'issue.txt'}",
        "out": str(project.parent / "t.jsonl"),
        "hidden": "hidden/*",
        "timeout": "30",
        **changes,
    }
    return ["tasks", "new", *(word for key, text in given.items() if text for word in (f"--{key}", text))]


@pytest.mark.slow
def test_a_folder_becomes_tasks(project: Path) -> None:
    assert main(words(project)) == 0
    assert main(words(project)) == 0, "the same again is one more task"
    tasks = load_tasks(project.parent / "t.jsonl")
    assert [task.id for task in tasks] == ["project", "project-2"]
    assert tasks[0].prompt == "double is wrong."
    assert tasks[0].answer == PATCH
    store = project.parent / "t.files"
    moved = project.parent / "moved"
    store.rename(moved)
    env = make("terminal", tasks=str(project.parent / "t.jsonl"), folders=str(moved))

    def act(command: str) -> str:
        call = ToolCall(id="c", name="bash", arguments={"command": command})
        return str(env.step(Message.assistant(tool_calls=(call,)))[0][0].content)

    env.reset(options={"task_id": "project-2"})
    assert act("find . -type f | sort; ./run") == "./calc.py\n./run\n./test_calc.py\nhi\n[exit code 0]"
    act(apply_patch_command(PATCH))
    assert env.step("Done.")[1] == 1.0
    env.reset(options={"task_id": "project"})
    assert env.step("Done.")[1] == 0.0
    env.close()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which must refuse with one line and exit code 2."""

    def refuse(argv: list[str]) -> str:
        capsys.readouterr()
        assert main(argv) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("sao-gym: error: ")
        return line

    return refuse


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"from": "/no/such"}, "is no folder"),
        ({"patch": ""}, "needs --patch"),
        ({"patch": "/no/such.diff"}, "cannot be read: No such file"),
        ({"instruction": "@/no/such"}, "--instruction /no/such cannot be read"),
        ({"out": "t.txt"}, "must end in .jsonl"),
        ({"hidden": "no/*"}, "names no file"),
        ({"timeout": "soon"}, "no number of seconds"),
        ({"backend": "dokcer"}, "no sandbox backend"),
        ({"id": "a/b"}, "letters, digits"),
        ({"expect": "("}, "no regular expression"),
        ({"unknown": "x"}, "does not know '--unknown'"),
    ],
)
def test_bad_input_is_one_sentence(
    project: Path, refused: Callable[..., str], changes: dict[str, str], said: str
) -> None:
    assert said in refused(words(project, **changes))
    assert not (project.parent / "t.jsonl").exists()
    assert not (project.parent / "t.files").exists()


def test_a_check_that_passes_already_or_never_is_refused(project: Path, refused: Callable[..., str]) -> None:
    assert "passes on the folder as it is" in refused(words(project, check="true"))
    assert "does not pass with the patch" in refused(words(project, check="false"))
    (project.parent / "fix.diff").write_text(PATCH.replace("x + x + 1", "y"))
    assert "does not apply" in refused(words(project))
    assert not (project.parent / "t.jsonl").exists()
    assert not (project.parent / "t.files").exists()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "new", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in ("from", "check", "patch", "instruction", "out", "hidden", "expect"))
    assert main(["tasks"]) == 0
    assert main(["tasks", "old"]) == 2
