"""`python -m sao_gym.sft` and `pretrain_critic` as people run them: real processes, environments and sandboxes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sao_gym.chat import make_chat
from sao_gym.commands.base import Command
from sao_gym.commands.pretrain_critic import main as pretrain_critic
from sao_gym.commands.sft import main as sft
from sao_gym.jsonl import write_jsonl
from sao_gym.messages import Message
from sao_gym.models import load_policy
from sao_gym.parquet import read_trajectories
from sao_gym.trainer.critic import load_critic
from sao_gym.weights import module_tensors, weight_hash

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--new", "qwen3_tiny", "--new.layers", "1", "--new.hidden", "32", "--new.heads", "2", "--demos", "24")
SHORT = ("--max-turns", "2", "--max-tokens", "8", "--engine.context-length", "512")


def process(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A policy after three steps, and what the command printed."""
    folder = tmp_path_factory.mktemp("sft") / "start"
    trial = ("--eval-every", "2", "--eval-episodes", "3", "--trial.greedy", *SHORT)
    words = ("--steps", "3", "--batch-size", "8", "--lr", "1e-3", "--out", str(folder))
    done = process("sao_gym.sft", "--env", "arithmetic", *TINY, *words, *trial)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_sft_writes_a_policy_that_loads(start: tuple[Path, str]) -> None:
    folder, printed = start
    policy = load_policy(folder)
    chat = make_chat(policy.tokenizer)
    facts = manifest(folder)
    assert weight_hash(module_tensors(policy.model)) == facts["weight_hash"]
    assert (facts["steps"], facts["seed"], facts["trajectories"]) == (3, 0, 24)
    assert len(facts["data_hash"]) == 64
    ids = chat.prompt([Message.user("a=1+2; a+3=?")])
    assert policy.tokenizer.decode(ids) == "<|user|>a=1+2; a+3=?<|end|><|assistant|>"
    assert ids.max() < policy.model.config.vocab_size
    # A trial every second step and after the last one, then a greedy one.
    assert [line.split(":")[0] for line in printed.splitlines() if "success" in line] == [
        "step     2",
        "step     3",
        "greedy",
    ]
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3
    assert losses[2] < losses[0]


def test_one_seed_gives_one_policy(start: tuple[Path, str], tmp_path: Path) -> None:
    """The same seed again, without trials: sampling does not touch what is learnt."""
    hashes = []
    for seed in ("0", "1"):
        words = ("--steps", "3", "--batch-size", "8", "--lr", "1e-3", "--seed", seed, "--out", str(tmp_path / seed))
        assert sft(["--env", "arithmetic", *TINY, *words]) == 0
        hashes.append(manifest(tmp_path / seed)["weight_hash"])
    assert hashes[0] == manifest(start[0])["weight_hash"] != hashes[1]


def test_fine_tuning_on_chats_and_on_trajectories(start: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = start
    chats = tmp_path / "chats.jsonl"
    record = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    write_jsonl(chats, [record] * 4)
    words = ("--steps", "4", "--batch-size", "4", "--lr", "1e-2", "--model", str(folder))
    assert sft([*words, "--data", str(chats), "--out", str(tmp_path / "tuned")]) == 0
    facts = manifest(tmp_path / "tuned")
    first = json.loads((tmp_path / "tuned" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["tokens"] == 4 * len(make_chat(load_policy(folder).tokenizer).write(Message.assistant("ho")))  # type: ignore[attr-defined]
    assert facts["final_loss"] < first["loss"]
    assert facts["weight_hash"] != manifest(folder)["weight_hash"]


def test_critic_is_pretrained_and_read_back(start: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = start
    out = tmp_path / "critic"
    words = ("--episodes", "12", "--max-epochs", "2", "--lr", "1e-3", "--batch-size", "4", "--model", str(folder))
    done = process("sao_gym.pretrain_critic", "--env", "arithmetic", *words, "--out", str(out), *SHORT)
    assert done.returncode == 0, done.stderr
    assert "explained variance" in done.stdout
    _, provenance = load_critic(out, like=load_policy(folder).model)
    assert provenance["policy_weight_hash"] == manifest(folder)["weight_hash"]
    assert (provenance["env"], provenance["policy_version"], provenance["seed"]) == ("arithmetic", 0, 0)
    assert len(provenance["tasks_hash"]) == 64
    episodes = read_trajectories(out / "episodes.parquet")
    assert len(episodes) == provenance["episodes"] == provenance["episodes_fitted"] + provenance["episodes_held_out"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--steps", "3"), "out must be given"),
        (("--out", "x"), "--model FOLDER or --new"),
        (("--out", "x", "--new", "qwen3_tiny", "--model", "y"), "--model FOLDER or --new"),
        (("--out", "x", "--new", "gpt_tiny"), "gpt_tiny"),
        (("--out", "x", "--new", "qwen3_tiny", "--data", "t.parquet"), "give --model"),
        (("--out", "x", "--new", "qwen3_tiny", "--stop-at-success", "0.4"), "--eval-every"),
        (("--out", "x", "--new", "qwen3_tiny", "--demo-wrong-share", "1.5"), "wrong_share"),
        (("--out", "x", "--model", "no_such_folder"), "no_such_folder"),
        (("--out", "x", "--new", "qwen3_tiny", "--env", "python_math"), "no demonstrations"),
    ],
)
def test_bad_words_are_one_sentence(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sft(list(words)) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_critic_needs_a_policy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert pretrain_critic(["--out", str(tmp_path / "c")]) == 2
    assert "--model FOLDER" in capsys.readouterr().err


@pytest.mark.parametrize("command", [sft, pretrain_critic])
def test_help_teaches(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--help"]) == 0
    printed = capsys.readouterr().out
    assert "--out" in printed
    assert "must be given" in printed
