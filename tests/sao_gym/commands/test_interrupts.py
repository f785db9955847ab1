"""Ctrl-C while a command computes: heard at once, exit code 130."""

import signal
from pathlib import Path
from typing import Any

import pytest

from sao_gym.commands.sft import main
from sao_gym.trainer.imitation import Imitation


def test_imitation_hears_the_first_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop turns the signal into a cancellation, which steps that never wait would not see."""
    taken: list[int] = []
    step = Imitation.step

    def interrupted(self: Imitation, rows: Any) -> Any:
        taken.append(len(rows))
        if len(taken) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self, rows)

    monkeypatch.setattr(Imitation, "step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it
    small = ["--new", "qwen3_tiny", "--new.layers", "1", "--new.hidden", "16", "--new.heads", "2", "--demos", "16"]
    words = ["--env", "arithmetic", "--steps", "50", "--batch-size", "4", "--out", str(tmp_path / "policy"), *small]
    try:
        assert main(words) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(taken) == 2
