"""Where the tests find a real SGLang server: an environment that tests/sglang_cpu/install.sh makes once per machine.

SAO_GYM_SGLANG_PYTHON names a python that has SGLang; else the environment lies in the cache folder.
"""

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[2] / "sglang_cpu" / "install.sh"
CPU_ARGS = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--mem-fraction-static",
    "0.05",
    "--max-total-tokens",
    "20000",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
]


def sglang_python() -> str:
    """Skips the test where no environment can be had."""
    if given := os.environ.get("SAO_GYM_SGLANG_PYTHON"):
        return given
    if shutil.which("python3.11") is None:
        pytest.skip("SGLang's environment needs python3.11 (or name one that has it: SAO_GYM_SGLANG_PYTHON)")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sao-gym" / "sglang-cpu"
    home.parent.mkdir(parents=True, exist_ok=True)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = INSTALL.read_text() + INSTALL.with_name("requirements.txt").read_text()
        if not (home / "made").is_file() or (home / "made").read_text() != wanted:
            made = subprocess.run([str(INSTALL), str(home)], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"SGLang's environment could not be made: {made.stderr[-500:]}")
            (home / "made").write_text(wanted)
    return str(home / "bin" / "python")
