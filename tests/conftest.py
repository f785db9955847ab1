"""Fixtures that every part of the suite shares."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden" / "golden.json"


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
