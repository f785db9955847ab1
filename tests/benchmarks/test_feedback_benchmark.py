"""benchmarks/feedback.py, small: real sockets, a ledger on the disk, and its own account of what was accepted."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "feedback.py"


def test_every_accepted_feedback_is_in_the_ledger() -> None:
    command = [sys.executable, str(BENCHMARK), "--episodes", "160", "--side", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["ok"]
    assert figures["episodes"] == 160
    assert figures["accepted"] + figures["not_admitted"] == 160
    assert figures["accepted"] >= 100
    assert figures["busy_ms"]["median"] > figures["gateway_busy_ms"]["low"] > 0
