"""A real checkpoint through the command that users type: SmolLM2-135M-Instruct on mathematics with the Python tool."""

import subprocess
import sys
from pathlib import Path

import pytest

from sao_gym.jsonl import read_jsonl
from sao_gym.parquet import read_trajectories


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_smollm2_trains_on_mathematics(smollm2_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    """The checkpoint's own template ignores tools, so ours is used over its ChatML tokens."""
    run = tmp_path / "run"
    words = ["--env", "python_math", "--model", str(smollm2_dir), "--tasks", str(data_dir / "math_train_sample.jsonl")]
    words += ["--steps", "2", "--batch-size", "4", "--max-tokens", "256", "--max-turns", "2"]
    words += ["--critic.only-steps", "1", "--out", str(run)]
    done = subprocess.run([sys.executable, "-m", "sao_gym.train", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [record for _, record in read_jsonl(run / "metrics.jsonl")]
    assert [step["policy_version"] for step in steps] == [0, 1]
    assert all(step["reward_mass_error"] == 0 for step in steps)
    assert steps[1]["actor_updates"] == 1
    assert steps[1]["publish_failures"] == 0
    # One version behind, in float32: engine and learner agree but for the one update of 1e-6.
    assert abs(steps[1]["ratio_p50"] - 1) < 1e-3
    rows = read_trajectories(run / "trajectories" / "step_000002.parquet")
    assert all(row.n_action and row.n_turns <= 2 for row in rows)
