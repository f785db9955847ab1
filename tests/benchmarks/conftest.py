"""The benchmarks import each other as plain modules, as they do when they are run as scripts."""

import sys
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")
if FOLDER not in sys.path:
    sys.path.append(FOLDER)


@pytest.fixture(scope="session")
def benchmarks_folder() -> Path:
    """Where the scripts lie."""
    return Path(FOLDER)
