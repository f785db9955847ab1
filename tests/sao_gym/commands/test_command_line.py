"""The command-line shell: exit codes, the listing, a command's own words."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sao_gym.commands.base import run_command, take_options
from sao_gym.commands.main import COMMANDS, main
from sao_gym.errors import ConfigError, InvariantError, ModelError


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    for entry in COMMANDS:
        assert f"  {entry.name}" in out
        assert entry.about in out


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "sao-gym: error: there is no command 'trian'; did you mean train?\n"
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sao-gym 0.")


def test_how_a_command_ends(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> int:
        @run_command
        def body(argv: list[str]) -> int:
            raise error

        return body([])

    assert fail(ModelError("no model\n  in x")) == 2
    assert capsys.readouterr().err == "sao-gym: error: no model in x\n"
    assert fail(KeyboardInterrupt()) == 130
    with pytest.raises(InvariantError):
        fail(InvariantError("a bug keeps its traceback"))
    assert run_command(lambda argv: None)([]) == 0
    assert run_command(lambda argv: len(argv))(["a", "b", "c"]) == 3


def test_own_words() -> None:
    words = take_options(
        ["RUN", "--out=x=y", "--actor.lr", "1", "-h", "--config", "a", "--config", "b", "--learn-only"],
        values=("out", "config"),
        switches=("help", "learn-only"),
        positionals=True,
    )
    assert words.all("") == ("RUN",)
    assert (words.value("out"), words.value("config"), words.all("config")) == ("x=y", "b", ("a", "b"))
    assert words.has("help")
    assert words.has("learn-only")
    assert words.rest == ("--actor.lr", "1")
    assert words.value("resume") is None
    with pytest.raises(ConfigError, match="--out needs a value"):
        take_options(["--out", "--check"], values=("out",))


def test_an_empty_value_is_a_missing_one() -> None:
    with pytest.raises(ConfigError, match=r"--out needs a value, and got an empty one"):
        take_options(["--out", ""], values=("out",))
    with pytest.raises(ConfigError, match=r"--out needs a value"):
        take_options(["--out="], values=("out",))


TALK = """
import os, sys
from sao_gym.commands.base import run_command

@run_command
def main(argv):
    print("one", flush=True)
    os.read(int(argv[0]), 1)
    print("two", flush=True)
    sys.stdout.isatty()
    print("three")
    with open(argv[1], "w") as file:
        file.write("done")

raise SystemExit(main())
"""


def test_a_run_outlives_the_reader_of_its_output(tmp_path: Path) -> None:
    """A training piped into something that ends (head, a lost terminal) must not stop, least of all with exit code 0."""
    gate, opener = os.pipe()
    command = [sys.executable, "-c", TALK, str(gate), str(tmp_path / "end")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(gate,)) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert run.stdout.readline() == b"one\n"
        run.stdout.close()
        os.write(opener, b"x")
        assert run.stderr.read() == b""
        assert run.wait() == 0
    assert (tmp_path / "end").read_text() == "done"


def test_closed_and_full_outputs(tmp_path: Path) -> None:
    gate, opener = os.pipe()
    os.write(opener, b"xx")
    shell = f"'{sys.executable}' -c '{TALK}' {gate} '{tmp_path / 'end'}'"
    closed = subprocess.run(["sh", "-c", shell + " >&-"], capture_output=True, pass_fds=(gate,), check=False)
    assert (closed.returncode, closed.stderr) == (0, b"")
    assert (tmp_path / "end").read_text() == "done"
    full = subprocess.run(["sh", "-c", shell + " >/dev/full"], capture_output=True, pass_fds=(gate,), check=False)
    assert full.returncode == 2
    assert full.stderr.startswith(b"sao-gym: error: the system refused to read or write: No space left")
    assert full.stderr.count(b"\n") == 1


def test_a_disk_that_refuses_is_one_sentence_and_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: OSError) -> int:
        @run_command
        def body(argv: list[str]) -> int:
            raise error

        return body([])

    assert fail(OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl")) == 2
    assert "(runs/a/metrics.jsonl): No space left" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        fail(FileNotFoundError(errno.ENOENT, "No such file", "x"))
