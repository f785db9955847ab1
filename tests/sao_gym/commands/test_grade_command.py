"""`sao-gym grade`: a score, why, and exit code 0 whatever the score."""

import io

import pytest

from sao_gym.commands.main import main as sao_gym


@pytest.mark.parametrize(
    ("gold", "response", "score"),
    [("70", r"So \boxed{070}.", "1"), (r"\frac{1}{2}", r"\boxed{0.5}", "1"), ("-5", r"\boxed{5}", "0"), ("5", "", "0")],
)
def test_grade(gold: str, response: str, score: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sao_gym(["grade", gold, response]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == ["score", "passed", "method", "why"]
    assert lines[0][1] == score
    assert lines[1][1] == ("yes" if score == "1" else "no")


def test_response_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("I say\n\\boxed{42}\n"))
    assert sao_gym(["grade", "42", "-"]) == 0
    assert capsys.readouterr().out.startswith("score   1\n")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert sao_gym(["grade", "--help"]) == 0
    assert "GOLD RESPONSE" in capsys.readouterr().out
    assert sao_gym(["grade", "42"]) == 2
    assert "got 1 words" in capsys.readouterr().err
