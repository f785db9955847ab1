"""The environment of an application: nobody steps it, and whoever tries is told how it is used."""

import asyncio
import socket
from pathlib import Path

import pytest

from sao_gym.budgets import Budgets
from sao_gym.commands.eval import main as evaluate
from sao_gym.commands.train import main as train
from sao_gym.errors import ConfigError
from sao_gym.models import tiny_qwen3
from sao_gym.registry import make
from sao_gym.tasks.places import feedback_places
from sao_gym.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = train_tokenizer(["hello"] * 4, vocab_size=270)
    tiny_qwen3(len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=256).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_places_are_tasks_without_a_prompt() -> None:
    places = make("feedback", count=5).unwrapped.tasks  # type: ignore[attr-defined]
    assert [place.id for place in places] == [f"place-{n}" for n in range(5)]
    assert {place.prompt for place in places} == {""}
    assert len(feedback_places()) == 4096
    for wrong in (0, -1, 1.5, True, "7"):
        with pytest.raises(ConfigError, match="at least 1; got"):
            feedback_places(wrong)  # type: ignore[arg-type]


def test_nobody_steps_it() -> None:
    env = make("feedback", count=2)
    for act in (lambda: env.reset(seed=0), lambda: asyncio.run(env.unwrapped.play("http://x", Budgets()))):  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"cannot be stepped; begin with python -m sao_gym\.feedback serve"):
            act()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--group-size", "2"], "an application asks once, so there are no groups"),
        (["--engine", "scripted"], "a scripted engine does not know what an application will ask"),
        (["--evaluation.every", "5"], "has no tasks of its own to evaluate on: name some by evaluation.bench"),
        (["--feedback.port", "70000"], "feedback.port = 70000: give a number from 0 to 65535"),
        (["--feedback.deadline_s", "0"], "feedback.deadline_s = 0"),
        (["--feedback.host", "0.0.0.0"], "listens on loopback or a unix socket alone"),
        (["--feedback.key_env", "NOT_SET_AT_ALL"], "names NOT_SET_AT_ALL, which is not set"),
        (["--tasks", "x.jsonl"], "an application brings what it asks"),
        (["--rollout.wall_clock_s", "5"], "an application takes its time"),
        (["--rollout-only"], "--rollout-only has nothing to ask: an application brings that"),
    ],
)
def test_what_cannot_be_is_said(
    words: list[str], said: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = ["--env", "feedback", "--model", str(tiny_model), "--out", str(tmp_path / "r"), "--feedback.port", "0"]
    assert train([*start, *words]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert said in errors[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_is_taken_is_said_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        start = ["--env", "feedback", "--model", str(tiny_model), "--out", str(tmp_path / "r"), "--feedback.port", port]
        assert train(start) == 2
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_settings_of_feedback_are_for_it_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(["--env", "arithmetic", "--feedback.port", "1", "--out", str(tmp_path / "r")]) == 2
    assert "env.name is not feedback" in capsys.readouterr().err


def test_it_is_not_evaluated(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(["--env", "feedback", "--model", str(tiny_model), "--out", str(tmp_path / "e"), "--n", "1"]) == 2
    assert "cannot be stepped; begin with python -m sao_gym.feedback serve" in capsys.readouterr().err
