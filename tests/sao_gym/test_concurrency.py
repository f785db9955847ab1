"""benchmarks/concurrency.py in small: an episode costs no more where many wait beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.alone
def test_many_episodes_wait_side_by_side() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "benchmarks/concurrency.py", "--widths", "10", "300", "--episodes", "900"]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=250, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    assert figures["ok"] is True
    assert figures["episode_s"].keys() == {"10", "300"}
    assert all(3.0 < seconds < 10.0 for seconds in figures["episode_s"].values()), "the waiting is real"
