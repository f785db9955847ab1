"""`python -m sao_gym.train --env terminal` as people run it: real sandboxes, real learner; only the model is tiny."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from sao_gym.commands.train import main
from sao_gym.models import tiny_qwen3
from sao_gym.parquet import read_trajectories
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.stream import Outcome

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def train(out: Path, *words: str) -> Path:
    command = [sys.executable, "-m", "sao_gym.train", "--env", "terminal", "--out", str(out), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    return out


def metrics(run: Path) -> Sequence[dict[str, object]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_scripted_run_needs_no_model_and_learns_what_it_is_shown(tmp_path: Path) -> None:
    run = train(tmp_path / "r", "--engine", "scripted", "--steps", "3")
    steps = metrics(run)
    assert [step["reward_mean"] for step in steps] == [1.0, 1.0, 1.0]
    assert [step["policy_version"] for step in steps] == [0, 1, 2]
    assert len({step["weight_hash"] for step in steps}) == 3
    rows = read_trajectories(run / "trajectories" / "step_000003.parquet")
    assert all(row.outcome == Outcome.terminated() and row.n_turns == 2 for row in rows)
    assert all(min(stream.behavior_logprobs.min() for stream in row.streams) < -1 for row in rows), "the model's own"


def test_completions_of_a_file_are_said(tmp_path: Path) -> None:
    script = tmp_path / "turns.jsonl"
    script.write_text('"I do nothing."\n')
    run = train(tmp_path / "r", "--engine", "scripted", "--engine.completions", str(script), "--steps", "2")
    assert [step["reward_mean"] for step in metrics(run)] == [0.0, 0.0]


def test_a_run_with_the_local_engine(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    model = tiny_qwen3(len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=8192)
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    run = train(
        tmp_path / "r", "--model", str(tmp_path / "m"), "--steps", "2", "--max-tokens", "16", "--max-turns", "2"
    )
    assert [step["step"] for step in metrics(run)] == [1, 2]
    assert all(step["rows"] == 4 for step in metrics(run))


def test_a_killed_trainer_leaves_no_sandbox_and_its_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "r"
    words = ["--env", "terminal", "--engine", "scripted", "--steps", "4", "--checkpoint.every", "1", "--out", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "sao_gym.train", *words], cwd=ROOT, env=environment)
    held: set[int] = set()
    until = time.monotonic() + 200
    while time.monotonic() < until and process.poll() is None:
        held |= below(process.pid)
        if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text().count("\n") >= 2:
            break
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert held, "it had sandboxes"
    until = time.monotonic() + 5
    while any(alive(pid) for pid in held) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in held if alive(pid)]
    done = subprocess.run(
        [sys.executable, "-m", "sao_gym.train", "--resume", str(run)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    steps = metrics(run)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    rows = [row for file in sorted((run / "trajectories").iterdir()) for row in read_trajectories(file)]
    assert len({row.uid for row in rows}) == len(rows) == 16, "each episode was trained once"


def below(pid: int) -> set[int]:
    """Sandboxes that a process has started, and what runs in them."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {child for child in found - {pid} if b"bwrap" in words_of(child)}


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    return b"bwrap" in words_of(pid)


@pytest.mark.parametrize("words", [("--rollout-only",), ("--evaluation.every", "1")])
def test_where_a_script_cannot_speak_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str]
) -> None:
    assert main(["--env", "terminal", "--engine", "scripted", "--out", str(tmp_path / "r"), *words]) == 2
    assert "a scripted engine speaks in training alone" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()
