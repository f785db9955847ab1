"""The newcomer's command, whole, and the same training on two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sao_gym.commands.quickstart import read_gain
from sao_gym.jsonl import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("quickstart") / "q"
    done = run("sao_gym.quickstart", "--out", str(out))
    assert done.returncode == 0, done.stderr[-2000:]
    return out, done.stdout


def test_the_agent_gets_better(quickstart: tuple[Path, str]) -> None:
    out, said = quickstart
    gain = read_gain(out / "run")
    assert 0.35 <= gain.before <= 0.65
    assert gain.after >= gain.before + 0.25
    assert (out / "run" / "curves.png").stat().st_size > 10_000
    for expected in ("an episode of the last batch", "action 0", "before", "sao_gym.explain"):
        assert expected in said


def test_no_trained_token_passes_the_bound(quickstart: tuple[Path, str]) -> None:
    """Trap 12 in a real run: at most 2 versions old, and old ones do occur."""
    steps = [r for _, r in read_jsonl(quickstart[0] / "run" / "metrics.jsonl") if "event" not in r]
    assert max(step["staleness_max"] for step in steps) <= 2
    assert sum(step["staleness_max"] > 0 for step in steps) >= 0.3 * len(steps)
    assert all(step["reward_mass_error"] == 0 for step in steps)


@pytest.mark.parametrize(
    "launch",
    [
        ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"],
        ["torch.distributed.run", "--nproc_per_node", "2"],
    ],
    ids=["accelerate", "torchrun"],
)
def test_two_ranks_train_together(launch: list[str], quickstart: tuple[Path, str], tmp_path: Path) -> None:
    """Trap 35: the manifest says how many ranks there really were. The commands are those of docs/runtime.md."""
    words = ["--preset", "quickstart", "--model", str(quickstart[0] / "start"), "--out", str(tmp_path / "run")]
    words += ["--steps", "3", "--batch-size", "16", "--critic.only-steps", "1", "--no-evaluation.at-ends"]
    done = run(*launch, "-m", "sao_gym.train", *words, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["ranks"] == 2
    steps = [r for _, r in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert [step["policy_version"] for step in steps] == [0, 1, 2]
    assert all(step["publish_failures"] == 0 for step in steps)
