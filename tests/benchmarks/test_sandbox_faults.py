"""Episodes among random kills: each is accounted for once, and nothing is left. Fewer of them than the benchmark runs."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def backend(request: pytest.FixtureRequest) -> list[str]:
    """The benchmark's words for a backend."""
    if request.param == "local":
        return ["--backend", "local"]
    docker, docker_image = pytest.importorskip("docker"), pytest.importorskip("docker_image")
    with closing(docker.from_env()) as client:
        if reason := docker_image.missing_image(client):
            pytest.skip(reason)
    return ["--backend", "docker", "--image", docker_image.IMAGE]


@pytest.mark.slow
def test_no_kill_leaves_anything_or_loses_an_episode(backend: list[str]) -> None:
    command = [
        sys.executable,
        "benchmarks/sandbox_faults.py",
        *backend,
        "--episodes",
        "30",
        "--trainers",
        "3",
        "--seed",
        "5",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["ok"], record
    assert record["ended"]["none: graded 1"] == record["ended"]["inside: graded 1"] == 10
    assert record["ended"].get("outside: error", 0) > 0
    assert (done.returncode, record["left"]) == (0, [])
