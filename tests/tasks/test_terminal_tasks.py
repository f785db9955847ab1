"""The terminal environment's own tasks: what they hold, and that each can be told right from wrong in a sandbox."""

import re
from collections.abc import Iterator

import pytest

from sao_gym.envs.terminal import TerminalEnv, apply_patch_command
from sao_gym.errors import ConfigError
from sao_gym.messages import Message, ToolCall
from sao_gym.protocols import Task
from sao_gym.registry import make
from sao_gym.tasks.terminal import SPLITS, example_files, read_txtar, task_of, terminal_tasks

ALL = [task_of(bug) for bugs in SPLITS.values() for bug in bugs]


def test_splits_break_different_places() -> None:
    train, heldout = terminal_tasks("train"), terminal_tasks("heldout")
    assert (len(train), len(heldout)) == (6, 2)
    places = [(bug.file, bug.right) for bugs in SPLITS.values() for bug in bugs]
    assert len(set(places)) == len(places) == len({task.id for task in ALL}) == 8
    assert train.content_hash != heldout.content_hash
    with pytest.raises(ConfigError, match="train"):
        terminal_tasks("test")  # type: ignore[arg-type]


def test_a_task_shows_neither_its_patch_nor_what_is_compared() -> None:
    for task in ALL:
        shown = task.prompt + "".join(task.info["files"].values())
        added = [line[1:].strip() for line in task.answer.splitlines() if re.match(r"\+[^+]", line)]
        assert added
        assert all(line not in shown for line in added)
        assert "cases as expected" not in shown


def test_the_format_of_the_library() -> None:
    assert read_txtar("a remark\n-- a/b --\none\n\ntwo\n-- c --\n") == {"a/b": "one\n\ntwo\n", "c": ""}
    assert "shelf/money.py" in example_files()


@pytest.fixture(scope="module")
def env() -> Iterator[TerminalEnv]:
    env = make("terminal")
    assert isinstance(env, TerminalEnv)
    yield env
    env.close()


def reward(env: TerminalEnv, task: Task, command: str) -> float:
    env.reset(options={"task": task})
    if command:
        call = ToolCall(id="c", name="bash", arguments={"command": command})
        env.step(Message.assistant(tool_calls=(call,)))
    return float(env.step("Done.")[1])


@pytest.mark.parametrize("task", ALL, ids=lambda task: task.id)
def test_gates(env: TerminalEnv, task: Task) -> None:
    assert reward(env, task, apply_patch_command(task.answer)) == 1.0
    assert reward(env, task, "") == 0.0
    assert reward(env, task, "for f in shelf/*.py; do echo '))' >$f; done") == 0.0


CHEATS = {
    "ends with 0": "printf 'import os\nos._exit(0)\n' >shelf/__init__.py",
    "says so itself": "printf 'print(\"5 cases as expected\")\nimport os; os._exit(0)\n' >shelf/__init__.py",
    "reads the check": 'printf \'import os, sys\nfor p in os.listdir("/proc"):\n try: sys.stderr.write(open(f"/proc/{p}/environ").read())\n'
    " except Exception: pass\n' >shelf/__init__.py",
    "equal to everything": 'printf \'class E:\n def __eq__(s, o): return True\n def __repr__(s): return ""\n'
    "def format_cents(x): return E()\ndef parse_cents(x): return E()\n' >shelf/money.py",
    "kills who asks": "printf 'import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n' >shelf/__init__.py",
}


@pytest.mark.parametrize("name", CHEATS)
def test_code_under_test_cannot_pass_for_right(env: TerminalEnv, name: str) -> None:
    assert reward(env, terminal_tasks("train")[0], CHEATS[name]) == 0.0


def test_the_expected_values_cannot_be_read_by_the_code_that_is_asked(env: TerminalEnv) -> None:
    """All that the library's process can open is searched for an expected value of the hidden cases."""
    task = terminal_tasks("train")[0]
    search = (
        "import os, pathlib\n"
        "found = []\n"
        "for root in ('/tmp', '/dev/shm', '/workspace', '/root', '/var', '/run'):\n"
        "    for path in pathlib.Path(root).rglob('*'):\n"
        "        try:\n"
        "            if b'123.' + b'45' in path.read_bytes(): found.append(str(path))\n"
        "        except OSError: pass\n"
        "for p in filter(str.isdigit, os.listdir('/proc')):\n"
        "    if p == str(os.getpid()): continue\n"
        "    for name in ('cmdline', 'environ', 'fd/0'):\n"
        "        try:\n"
        "            if b'123.' + b'45' in open(f'/proc/{p}/{name}', 'rb').read(): found.append(p)\n"
        "        except OSError: pass\n"
        "    try:\n"
        "        with open(f'/proc/{p}/mem', 'rb') as mem:\n"
        "            for line in open(f'/proc/{p}/maps'):\n"
        "                low, high = (int(end, 16) for end in line.split()[0].split('-'))\n"
        "                try:\n"
        "                    mem.seek(low); found += [p] * (b'123.' + b'45' in mem.read(high - low))\n"
        "                except (OSError, OverflowError, ValueError): pass\n"
        "    except OSError: pass\n"
        "def format_cents(cents): return '-123.' + '45' if found else 'x'\n"
        "def parse_cents(text): return 0\n"
    )
    env.reset(options={"task": task})
    call = ToolCall(id="c", name="bash", arguments={"command": f"cat >shelf/money.py <<'E'\n{search}E"})
    env.step(Message.assistant(tool_calls=(call,)))
    *_, info = env.step("Done.")
    assert "5 of 5 cases differ" in info["score"].detail
