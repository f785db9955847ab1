"""The command-line shell: exit codes, the listing, a command's own words."""

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
