"""The quickstart on real SGLang servers, by the command that users type: each transport, and kill -9 of a server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "sao_gym" / "engines"))
from sglang_environment import CPU_ARGS, sglang_python

from sao_gym.jsonl import read_jsonl
from sao_gym.ledger import Ledger, RowStatus

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
BATCH = 16


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small policy that has begun to imitate."""
    folder = tmp_path_factory.mktemp("start") / "start"
    words = ["--preset", "quickstart", "--new", "qwen3_tiny", "--out", str(folder), "--steps", "60"]
    words += ["--trial.every", "100", "--trial.after", "100"]
    subprocess.run([sys.executable, "-m", "sao_gym.sft", *words], check=True, capture_output=True)
    return folder


def command(start: Path, run: Path, *, steps: int, servers: int, transport: str, kv: str = "recompute") -> list[str]:
    words = ["--preset", "quickstart", "--model", str(start), "--out", str(run), "--steps", str(steps)]
    words += ["--batch-size", str(BATCH), "--critic.only-steps", "1", "--rollout.max-in-flight", str(2 * BATCH)]
    words += ["--evaluation.at-ends", "false", "--engine", "sglang", "--engine.kv", kv, "--deadline-s", "300"]
    words += ["--engine.sglang.servers", str(servers), "--engine.sglang.transport", transport]
    words += ["--engine.sglang.python", sglang_python(), "--engine.sglang.args", json.dumps(CPU_ARGS)]
    return [sys.executable, "-m", "sao_gym.train", *words]


def environment() -> dict[str, str]:
    return {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}


def lines(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [record for _, record in read_jsonl(path) if "policy_version" in record] if path.exists() else []


def check(run: Path, steps: int) -> list[dict[str, Any]]:
    """Every row admitted was trained or stands ready; nothing was lost; engine and learner agree to 1e-5."""
    found = lines(run)
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert found[-1]["policy_version"] == steps - 1
    parities = [line["parity_canary_max"] for line in found if line["parity_canary_n"]]
    assert parities
    assert max(parities) < 1e-5
    ledger = Ledger(run / "ledger.sqlite")
    rows = ledger.rows()
    ledger.close()
    assert sum(row.status is RowStatus.TRAINED for row in rows) == steps * BATCH
    assert not [row for row in rows if row.failures or row.status is RowStatus.DROPPED]
    return found


@pytest.mark.parametrize(("transport", "kv"), [("disk", "recompute"), ("tensor", "in_place"), ("distributed", "abort")])
def test_the_quickstart_trains_on_servers(start: Path, tmp_path: Path, transport: str, kv: str) -> None:
    run = tmp_path / "run"
    words = command(start, run, steps=5, servers=1, transport=transport, kv=kv)
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    found = check(run, 5)
    assert found[-1]["engine_requests"] > 0
    assert found[-1]["engine_servers_taken_out"] == 0
    assert found[-1]["staleness_max"] > 0, "publication met episodes in flight"


def servers_of(run: Path) -> Iterator[tuple[int, str]]:
    """(process, command line) of each server of the run, keepers aside."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"sglang.launch_server" in words and b"-m" in words[:3] and any(str(run).encode() in word for word in words):
            yield int(path.parent.name), b" ".join(words).decode()


def test_kill_9_of_a_server_costs_no_trajectory_and_it_comes_back(start: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = command(start, run, steps=1000, servers=2, transport="distributed")

    def until(servers: int) -> None:
        """Wait for a step after the second with so many servers in service."""
        while not any(line["step"] > 2 and line["engine_servers_in_service"] == servers for line in lines(run)[-1:]):
            assert training.poll() is None, (tmp_path / "out").read_text()[-3000:]
            time.sleep(0.05)

    with (tmp_path / "out").open("w") as out:
        training = subprocess.Popen(words, stdout=out, stderr=out, env=environment())
        try:
            until(2)
            victims = list(servers_of(run))
            assert len(victims) == 2
            os.kill(victims[0][0], signal.SIGKILL)
            until(1)
            until(2)
            training.send_signal(signal.SIGTERM)
            assert training.wait(120) == 0, (tmp_path / "out").read_text()[-3000:]
        finally:
            training.kill()
            training.wait()
    check(run, len(lines(run)))
    assert "is started again" in (tmp_path / "out").read_text()
    assert not list(servers_of(run)), "servers end with their run"
