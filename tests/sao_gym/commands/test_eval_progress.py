"""Progress of an evaluation: plain lines where nobody watches, a bar with the time left on a terminal."""

import io
import sys

import pytest

from sao_gym.commands.eval_progress import EvalProgress
from sao_gym.evaluation import EpisodeResult
from sao_gym.stream import OutcomeStatus


def result(index: int, *, passed: bool | None) -> EpisodeResult:
    if passed is None:
        return EpisodeResult(uid=f"{index}", task_id="t", attempt=0, outcome=OutcomeStatus.ERROR, stage="step")
    return EpisodeResult(
        uid=f"{index}", task_id="t", attempt=0, outcome=OutcomeStatus.TERMINATED, value=float(passed), passed=passed
    )


def test_plain_lines_at_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with EvalProgress("aime2025", 40) as progress:
        for index in range(40):
            progress(result(index, passed=None if index == 3 else index % 2 == 0))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("aime2025: 4/40 episodes, 2 passed of 3 scored, 1 errors, eta ")
    assert lines[-1].startswith("aime2025: 40/40 episodes")
    assert lines[-1].endswith("eta 0 s")


def test_what_was_kept_counts_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    with EvalProgress("aime2025", 10, kept=8) as progress:
        progress(result(8, passed=True))
    assert capsys.readouterr().err.startswith("aime2025: 9/10 episodes, 1 passed of 1 scored")


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    with EvalProgress("aime2025", 2) as progress:
        for index in range(2):
            progress(result(index, passed=True))
    assert "2/2" in terminal.getvalue()
    assert "2 passed of 2 scored, 0 errors" in terminal.getvalue()
