"""What `sao_gym.feedback` is told wrongly, and what it shows; tests/e2e/test_feedback.py has its work."""

from contextlib import closing
from pathlib import Path

import pytest

from sao_gym.commands.feedback import main
from sao_gym.feedback import FeedbackBook, ServedState


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["answer"], "there is no 'answer'; take serve, status, delete, rollback"),
        (["status"], "status takes the folder of a run first"),
        (["status", "{run}", "x"], "takes the folder of a run alone, got also x"),
        (["status", "{run}"], "holds no feedback.sqlite: give the folder of a run that served an application"),
        (["status", "{run}", "--fast"], "status does not know --fast"),
        (["delete", "{run}"], "delete takes the names of episodes"),
        (["delete", "{run}", "--again", "x"], "delete does not know"),
        (["rollback", "{run}"], "the number of a version, got no version"),
        (["rollback", "{run}", "last"], "the number of a version, got last"),
        (["rollback", "{run}", "1", "2"], "the number of a version, got 1 2"),
        (["rollback", "{run}", "1"], "holds no run"),
        (["delete", "{run}", "x"], "holds no run"),
        (["serve", "--resume", "{run}"], "holds no run"),
        (["serve", "--env", "arithmetic"], "serve is for the environment feedback, so leave --env out"),
    ],
)
def test_bad_words_get_one_sentence(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("{run}", str(tmp_path)) for word in words]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert said in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["delete", "--help"]):
        assert main(words) == 0
        assert "x-sao-episode" in capsys.readouterr().out
    assert main(["serve", "--help"]) == 0
    assert "--feedback.port" in capsys.readouterr().out


def test_status_says_what_became_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with closing(FeedbackBook(tmp_path / "feedback.sqlite")) as book:
        for name in "abcde":
            book.open(name, row=1)
        book.end("a", ServedState.SCORED, score=1.0)
        book.end("b", ServedState.SCORED, score=0.0, why="no place was free")
        book.end("c", ServedState.EXPIRED, why="no feedback came within 600 s")
        book.delete("d")
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "5 episodes served",
        "  open     1",
        "  scored   2   not trained: 1 no place was free",
        "  expired  1   not trained: 1 no feedback came within 600 s",
        "  deleted  1",
        "mean score 0.500 of 2",
    ]
