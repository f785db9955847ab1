"""An agent of one's own, in a file of its own, as people train and evaluate it: `--env agent.py:make`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sao_gym.models import tiny_qwen3
from sao_gym.parquet import read_trajectories
from sao_gym.policy_loading import byte_tokenizer

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

AGENT = """
import httpx
from sao_gym.black_box import BlackBoxEnv
from sao_gym.protocols import Task
from sao_gym.stream import Score


async def agent(task: Task, base_url: str) -> str:
    messages = [{"role": "user", "content": task.prompt}]
    async with httpx.AsyncClient(base_url=base_url, timeout=600) as client:
        for _ in range(2):
            reply = (await client.post("/chat/completions", json={"model": "policy", "messages": messages})).json()
            if "choices" not in reply:
                break
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return messages[-2]["content"] or ""


def grade(gold: str, answer: str) -> Score:
    return Score(value=float(len(answer) % 2), passed=bool(len(answer) % 2))


def make() -> BlackBoxEnv:
    return BlackBoxEnv([Task(id=str(n), prompt=f"{n}?") for n in range(40)], agent=agent, grader=grade)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    tokenizer = byte_tokenizer()
    model = tiny_qwen3(len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=1024)
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    return tmp_path


def run(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]


def test_it_trains(folder: Path) -> None:
    sizes = ("--steps", "2", "--batch-size", "4", "--rollout.max-in-flight", "8", "--max-tokens", "8")
    run(
        folder, "sao_gym.train", "--env", "agent.py:make", "--model", "m", *sizes, "--critic-init", "cold", "--out", "r"
    )
    rows = read_trajectories(folder / "r" / "trajectories" / "step_000001.parquet")
    assert len(rows) == 4
    assert all(row.n_action > 0 and row.score is not None for row in rows)
    assert all("gateway" in row.info and "response" in row.info for row in rows)


def test_it_is_evaluated(folder: Path) -> None:
    words = ("--model", "m", "--n", "1", "--limit", "4", "--max-tokens", "8", "--out", "e")
    run(folder, "sao_gym.eval", "--env", "agent.py:make", *words)
    assert json.loads((folder / "e" / "results.json").read_text())
