"""The tools `bash` and `edit` in a real sandbox on this machine: what a policy may do, and what it is told."""

from collections.abc import AsyncIterator

import pytest

from sao_gym.core import Tool
from sao_gym.envs.sandboxes.local_shell import LocalSandbox
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits
from sao_gym.envs.scaffolds.shell import Shell, ShellView, cut_middle
from sao_gym.errors import ConfigError, SandboxError
from sao_gym.loops import on_background

LIMITS = ShellLimits(memory_bytes=512 * MIB, processes=64, disk_bytes=64 * MIB, output_bytes=MIB)


@pytest.fixture
async def box() -> AsyncIterator[LocalSandbox]:
    box = await on_background(LocalSandbox.start(SandboxSpec(limits=LIMITS)))
    yield box
    await on_background(box.close())


@pytest.fixture
def shell(box: LocalSandbox) -> Shell:
    async def get_box() -> LocalSandbox:
        return box

    return Shell(get_box, ShellView(max_chars=2000))


async def test_folder_and_exported_variables_are_kept(shell: Shell) -> None:
    await shell.bash("mkdir -p a/b; cd a; export WHO=\"it's me\" MORE='1\n2'; plain=1")
    assert await shell.bash('pwd; echo "$WHO:$MORE:$plain"') == "/workspace/a\nit's me:1\n2:\n[exit code 0]"
    assert (await shell.bash("cd b; exit 7")) == "[exit code 7]"
    assert (await shell.bash("pwd")).startswith("/workspace/a/b\n")
    assert await shell.bash("set -e; cd ..; false; echo unreachable") == "[exit code 1]"
    assert (await shell.bash("pwd")).startswith("/workspace/a\n")


async def test_a_folder_that_is_gone_is_said(shell: Shell) -> None:
    await shell.bash("mkdir q; cd q; rmdir ../q")
    said = await shell.bash("pwd")
    assert "the folder is gone" in said
    assert "/workspace\n" in said


async def test_what_a_tool_says_of_itself_names_what_is_kept(shell: Shell) -> None:
    bash, edit = (Tool.from_function(tool).spec for tool in shell.tools)
    assert "kept from call to call" in bash.description
    assert bash.parameters["required"] == ["command"]
    assert edit.parameters["properties"]["command"]["enum"] == ["view", "create", "replace", "insert"]
    assert edit.parameters["required"] == ["command", "path"]


async def test_streams_come_in_their_order_with_the_exit_code(shell: Shell) -> None:
    assert await shell.bash("echo one; echo two >&2; echo three; (exit 5)") == "one\ntwo\nthree\n[exit code 5]"
    assert await shell.bash("true") == "[no output, exit code 0]"


async def test_of_a_long_output_the_middle_is_left_out_by_whole_lines(shell: Shell) -> None:
    said = await shell.bash("seq 1 5000")
    lines = said.splitlines()
    assert len(said) < 2100
    note = next(line for line in lines if "left out" in line)
    shown = [int(line) for line in lines if line.isdecimal()]
    assert note == f"[... {5000 - len(shown)} lines left out ...]"
    assert (shown[0], shown[-1]) == (1, 5000)


async def test_an_endless_output_is_bounded_and_stopped(shell: Shell) -> None:
    said = await shell.bash("yes 0123456789", timeout=1.0)
    assert len(said) < 2500
    assert "bytes more left out" in said
    assert "stopped after 1 s" in said
    assert await shell.bash("echo on") == "on\n[exit code 0]"


async def test_a_time_out_tells_what_was_seen(shell: Shell) -> None:
    said = await shell.bash("echo begun; sleep 60; echo ended", timeout=0.5)
    assert said.startswith("begun\n[stopped after 0.5 s")
    assert "&" in said


async def test_a_background_child_does_not_hold_the_answer_and_lives_on(shell: Shell) -> None:
    said = await shell.bash("(echo $BASHPID >pid; exec sleep 50) & sleep 0.2; echo started", timeout=20.0)
    assert said == "started\n[exit code 0]"
    assert await shell.bash("kill -0 $(cat pid)") == "[no output, exit code 0]"


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("python3", "found no input"),
        ("bash", "found no input"),
        ("python3 -c 'input()'", "stdin is empty"),
        ("nano notes.txt", "edit tool"),
        ("less /etc/passwd", "sed -n"),
        ("top", "there is none"),
    ],
)
async def test_interactive_programs_end_and_get_a_hint(shell: Shell, command: str, hint: str) -> None:
    assert hint in await shell.bash(command, timeout=5.0)


async def test_commands_that_nobody_can_run(shell: Shell) -> None:
    assert "empty" in await shell.bash("  ")
    assert "NUL" in await shell.bash("echo a\0b")
    assert "at most 600" in await shell.bash("true", timeout=1e9)
    assert "above 0" in await shell.bash("true", timeout=-1.0)
    assert "syntax error" in await shell.bash("if true")
    assert "exit code 127" in await shell.bash("no_such_program")


async def test_a_long_command_runs(shell: Shell) -> None:
    text = "x" * 200_000
    assert (await shell.bash(f"cat <<'E' | wc -c\n{text}\nE")).startswith("200001\n")


async def test_a_killed_shell_costs_one_command(shell: Shell) -> None:
    await shell.bash("cd /tmp")
    assert "137" in await shell.bash("kill -9 $$")
    assert (await shell.bash("pwd")).startswith("/tmp\n")


# ---- edit


async def test_create_view_replace_insert(shell: Shell, box: LocalSandbox) -> None:
    assert await shell.edit("create", "d/f.py", text="a\nb\nc\n") == "Created d/f.py (3 lines)."
    assert await shell.edit("view", "d/f.py", start=2, end=2) == "     2\tb"
    assert "     2\tB\n     3\tB2" in await shell.edit("replace", "d/f.py", old="b\n", text="B\nB2\n")
    await shell.edit("insert", "/workspace/d/f.py", text="top", start=0)
    await shell.edit("insert", "d/f.py", text="end\n", start=5)
    assert await on_background(box.read("/workspace/d/f.py")) == b"top\na\nB\nB2\nc\nend\n"
    assert await shell.edit("view", "d") == "f.py"
    assert (await shell.edit("create", "d/f.py", text="x")).startswith("Replaced all of")


async def test_a_link_is_followed_and_modes_stay(shell: Shell, box: LocalSandbox) -> None:
    await shell.bash("printf 'a\\n' >real; chmod 750 real; ln -s real link; ln -s nowhere dangling")
    await shell.edit("replace", "link", old="a", text="b")
    assert (await shell.bash("cat real; stat -c %a real; readlink link")).startswith("b\n750\nreal\n")
    assert "is a link to nowhere" in await shell.edit("view", "dangling")


async def test_bytes_that_no_edit_touches_stay(shell: Shell, box: LocalSandbox) -> None:
    await on_background(box.write("/workspace/w", b"\xef\xbb\xbfone\r\ntwo\x0c\r\n\xe2\x80\xa8three"))
    await shell.edit("replace", "w", old="one\ntwo", text="1\n2")
    assert await on_background(box.read("/workspace/w")) == b"\xef\xbb\xbf1\r\n2\x0c\r\n\xe2\x80\xa8three"


async def test_errors_say_what_to_do(shell: Shell, box: LocalSandbox) -> None:
    await on_background(box.write("/workspace/latin", b"caf\xe9\n"))
    await on_background(box.write("/workspace/twice", b"x = 1\ny = 2\nx = 1\n"))
    await shell.bash("mkfifo pipe")
    assert "create it" in await shell.edit("view", "absent")
    assert "no UTF-8 text (byte 3 in line 1)" in await shell.edit("view", "latin")
    assert "no UTF-8" in await shell.edit("replace", "latin", old="caf", text="x")
    assert "2 times in twice (lines 1, 3)" in await shell.edit("replace", "twice", old="x = 1", text="x")
    assert "line 2 is the same but for its spaces" in await shell.edit("replace", "twice", old="y  =  2", text="x")
    assert "does not stand" in await shell.edit("replace", "twice", old="z", text="x")
    assert "needs old" in await shell.edit("replace", "twice", text="x")
    assert "needs text" in await shell.edit("insert", "twice", start=1)
    assert "0 to 3" in await shell.edit("insert", "twice", text="a", start=9)
    assert "it has 3 lines" in await shell.edit("view", "twice", start=4)
    assert "is a folder" in await shell.edit("create", "/workspace", text="x")
    assert "no regular file" in await shell.edit("view", "pipe")
    assert "Read-only" in await shell.edit("create", "/usr/bin/ls", text="x")
    assert "half of a character pair" in await shell.edit("replace", "twice", old="y", text="\ud800")
    assert "half of a character pair" in await shell.edit("create", "new", text="\ud800")
    assert "without NUL" in await shell.edit("view", "a\0b")
    assert await on_background(box.read("/workspace/twice")) == b"x = 1\ny = 2\nx = 1\n"


async def test_a_sandbox_that_failed_is_no_answer(shell: Shell, box: LocalSandbox) -> None:
    await on_background(box.close())
    with pytest.raises(SandboxError):
        await shell.bash("true")
    with pytest.raises(SandboxError):
        await shell.edit("view", "f")


def test_cut_middle_by_hand() -> None:
    assert cut_middle("ab", 2) == "ab"
    assert cut_middle("a" * 10, 4) == "aa[... 6 characters of this line left out ...]aa"
    assert cut_middle("1\n2\n3\n4\n5\n6\n7\n8", 8) == "1\n2\n[... 4 lines left out ...]\n7\n8"


def test_a_view_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 200"):
        ShellView(max_chars=10)
