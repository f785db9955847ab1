"""Episodes among random kills: each is accounted for once, and nothing is left. Fewer of them than the benchmark runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_no_kill_leaves_anything_or_loses_an_episode() -> None:
    command = [sys.executable, "benchmarks/sandbox_faults.py", "--episodes", "30", "--trainers", "3", "--seed", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["ok"], record
    assert record["ended"]["none: graded 1"] == record["ended"]["inside: graded 1"] == 10
    assert record["ended"].get("outside: error", 0) > 0
    assert (done.returncode, record["left"]) == (0, [])
