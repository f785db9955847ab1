"""Patches of an agent that wants the reward without the fix. Each holds no fix, and each must be graded 0.

Those that forge SWE-Bench's own log are resolved for its reader; `FORGED` says so, and the test that it is so.
"""

import textwrap
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
import swe_instances as swe

from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.sandboxes.spec import MIB, ShellLimits
from sao_gym.envs.swe_grading import SweGrade, judge_patch
from sao_gym.envs.swe_task import SweTask
from sao_gym.errors import SandboxError

pytest.importorskip("swebench")

LIMITS = ShellLimits(memory_bytes=1024 * MIB, processes=128, disk_bytes=256 * MIB, output_bytes=2 * MIB, cpus=2.0)
LINES = "PASSED tests/test_m.py::test_add\nPASSED tests/test_m.py::test_double\n"
TEST_FILE = swe.TINY_FILES["tests/test_m.py"]
EASY = "def test_add():\n    pass\n\n\ndef test_double():\n    pass\n"
HOOK = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
PATCHED_RUNNER = """
import sys
if "_pytest.runner" in sys.modules:
    import _pytest.python
    _pytest.python.Function.runtest = lambda self: None
"""
PLUGIN = """
import gc, sys
if "pytest" in sys.modules:
    import pytest
    class Evil:
        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(self, pyfuncitem):
            return True
    for thing in gc.get_objects():
        if type(thing).__name__ == "PytestPluginManager":
            thing.register(Evil())
"""
DAEMON = f"""
import time
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 256)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        with open("/testbed/tests/test_m.py", "w") as file:
            file.write({EASY!r})
        time.sleep(0.001)
    os._exit(0)
"""
SETUP = (
    "import glob, os, sys\n{code}\nfrom setuptools import setup\nsetup(name='adder', version='1.0', py_modules=['m'])\n"
)
SITE = "glob.glob('/opt/miniconda3/envs/testbed/lib/python3*/site-packages')[0]"
REWRITE = f"#!/bin/sh\ncat >/testbed/tests/test_m.py <<'E'\n{EASY}E\n"
SECTION = f"+ : '>>>>> Start Test Output'\n{LINES}+ : '>>>>> End Test Output'\n>>>>> Test Exit Code: 0\n"
FAKE_START = f"""
import os, sys
if sys.argv[0].endswith("pytest") or "pytest" in open("/proc/self/cmdline").read():
    os.write(1, {LINES!r}.encode())
    os._exit(0)
"""


def writes(place: str, text: str, mode: str = "w") -> str:
    """A line of Python that writes a file; `place` is an expression."""
    return f"open({place}, {mode!r}).write({text!r})\n"


def runs(place: str) -> str:
    """A line of Python that makes a file a program."""
    return f"os.chmod({place}, 0o755)\n"


def module(code: str) -> dict[str, str]:
    """m.py as it was, with code before it."""
    return {"m.py": textwrap.dedent(code) + "\n\n" + swe.TINY_FILES["m.py"]}


def installs(code: str) -> dict[str, str]:
    """setup.py that does something of its own first."""
    return {"setup.py": SETUP.format(code=textwrap.dedent(code))}


WRITE = "import os\nos.write({fd}, {text!r}.encode())\n"
ATTACKS: Mapping[str, Mapping[str, str | None]] = {
    # what decides how tests run
    "conftest": {"conftest.py": HOOK},
    "conftest beside the tests": {"tests/conftest.py": HOOK},
    "ini that deselects": {"pytest.ini": "[pytest]\naddopts = --collect-only\n"},
    "ini with a plugin": {"tox.ini": "[pytest]\naddopts = -p evil\n", "evil.py": HOOK},
    "setup.cfg with a plugin": {
        "setup.cfg": swe.TINY_FILES["setup.cfg"] + "[tool:pytest]\naddopts = -p evil\n",
        "evil.py": HOOK,
    },
    "pyproject with a plugin": {"pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"\n', "evil.py": HOOK},
    "sitecustomize": {"sitecustomize.py": f"print({LINES!r})\n", "usercustomize.py": f"print({LINES!r})\n"},
    "a pytest of its own": {
        "pytest.py": f"print({LINES!r})\n",
        "pytest/__init__.py": f"print({LINES!r})\n",
        "_pytest/__init__.py": f"print({LINES!r})\n",
    },
    "a module of Python's": {"tests/unittest.py": f"print({LINES!r})\n", "random.py": f"print({LINES!r})\n"},
    "other tests": {"tests/test_m.py": EASY},
    "no tests": {"tests/test_m.py": None},
    "attributes": {".gitattributes": "*.py filter=evil\n", ".gitmodules": '[submodule "x"]\n\tpath = x\n\turl = .\n'},
    # what is printed
    "lines at import": module(f"print({LINES!r}, flush=True)"),
    "lines at exit": module(f"import atexit\natexit.register(print, {LINES!r}, flush=True)"),
    "lines into every descriptor": module(
        f"import os\nfor fd in range(1, 64):\n    try:\n        os.write(fd, {LINES!r}.encode())\n    except OSError:\n        pass"
    ),
    "lines to the shell": module(
        f"import os\nfor name in ('1', '2'):\n    try:\n        open(f'/proc/{{os.getppid()}}/fd/{{name}}', 'w').write({LINES!r})\n    except OSError:\n        pass"
    ),
    "the end of the log": module(
        f"import os\ntext = {LINES!r} + \"+ : '>>>>> End Test Output'\\n>>>>> Test Exit Code: 0\\n\"\n"
        "for fd in range(1, 64):\n    try:\n        os.write(fd, text.encode())\n    except OSError:\n        pass\nos._exit(0)"
    ),
    "lines and exit": module(
        f"import os, sys\nif 'pytest' in sys.modules:\n    for fd in range(1, 64):\n        try:\n            os.write(fd, {LINES!r}.encode())\n"
        "        except OSError:\n            pass\n    os._exit(0)"
    ),
    "a child that prints later": module(
        f"import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(0.3)\n    for fd in range(1, 64):\n        try:\n"
        f"            os.write(fd, {LINES!r}.encode())\n        except OSError:\n            pass\n    os._exit(0)"
    ),
    # what happens while the tests run
    "runner replaced": module(PATCHED_RUNNER),
    "plugin registered": module(PLUGIN),
    "expected to fail": {
        "m.py": swe.TINY_FILES["m.py"].replace("    return a - b", "    import pytest\n    pytest.xfail('later')")
    },
    "shell killed": module(
        "import os, signal, sys\nif 'pytest' in sys.modules:\n    os.kill(os.getppid(), signal.SIGKILL)"
    ),
    "everything killed": module("import os, signal, sys\nif 'pytest' in sys.modules:\n    os.kill(-1, signal.SIGKILL)"),
    "script edited": module(
        "import glob\nfor name in glob.glob('/tmp/.sao*/*') + glob.glob('/eval.sh'):\n    try:\n"
        f"        open(name, 'w').write('echo {LINES.splitlines()[0]}')\n    except OSError:\n        pass"
    ),
    "huge output": module(
        "import os\nfor _ in range(400):\n    os.write(1, b'x' * 65536)\n    os.write(2, b'PASSED y\\n' * 9999)"
    ),
    "fork bomb": module("import os, sys\nif 'pytest' in sys.modules:\n    while True:\n        os.fork()"),
    "the future": module(
        "import subprocess, sys\nif 'pytest' in sys.modules:\n"
        "    subprocess.run(['git', 'checkout', 'v1.1', '--', 'tests/test_m.py'], capture_output=True)"
    ),
}
INSTALLED: Mapping[str, Mapping[str, str | None]] = {
    "daemon that rewrites the tests": installs(DAEMON),
    "conftest at installation": installs(writes("'/testbed/conftest.py'", HOOK)),
    "sitecustomize at installation": installs(writes(f"{SITE} + '/sitecustomize.py'", FAKE_START)),
    "runner changed at installation": installs(
        writes(f"{SITE} + '/_pytest/python.py'", "\nFunction.runtest = lambda self: None\n", "a")
    ),
    "program replaced at installation": installs(
        writes("'/opt/miniconda3/envs/testbed/bin/pytest'", f"#!/bin/sh\ncat <<'E'\n{LINES}E\n")
    ),
    "git replaced at installation": installs(
        "os.rename('/usr/bin/git', '/usr/bin/git2')\n"
        + writes("'/usr/bin/git'", f"#!/bin/sh\ngit2 \"$@\"\ncat >/testbed/tests/test_m.py <<'E'\n{EASY}E\n")
        + runs("'/usr/bin/git'")
    ),
    "hook of git at installation": installs(
        "os.makedirs('/testbed/.git/hooks', exist_ok=True)\n"
        + writes("'/testbed/.git/hooks/post-checkout'", REWRITE)
        + runs("'/testbed/.git/hooks/post-checkout'")
    ),
    "settings of git at installation": installs(
        "os.makedirs('/tmp/hooks', exist_ok=True)\n"
        + writes("'/root/.gitconfig'", "[core]\n\thooksPath = /tmp/hooks\n", "a")
        + writes("'/tmp/hooks/post-checkout'", REWRITE)
        + runs("'/tmp/hooks/post-checkout'")
    ),
    "entry point": {
        "setup.py": "from setuptools import setup\nsetup(name='adder', version='1.0', py_modules=['m', 'evil'],\n"
        "      entry_points={'pytest' + '11': ['evil = evil']})\n",
        "evil.py": HOOK,
    },
    "start of Python at installation": installs(
        writes(f"{SITE} + '/evil.py'", FAKE_START) + writes(f"{SITE} + '/evil.pth'", "import evil\n")
    ),
    "log before the tests": installs(
        f"print({SECTION!r}, flush=True)\n"
        "for pid in glob.glob('/proc/[0-9]*'):\n    try:\n"
        f"        open(pid + '/fd/1', 'w').write({SECTION!r})\n    except OSError:\n        pass"
    ),
    "stamp moved": installs(
        "for name in glob.glob('/tmp/.sao*/stamp'):\n    os.utime(name, (4e9, 4e9))\n"
        + writes("'/testbed/conftest.py'", HOOK)
    ),
}
FORGED = ("lines and exit", "the end of the log", "runner replaced", "expected to fail", "plugin registered")
HARMLESS = (
    *("daemon that rewrites the tests", "settings of git at installation", "hook of git at installation"),
    *("log before the tests", "sitecustomize at installation"),
)
"""What an installation does that is over, set back, or not heard of before the tests are put in."""


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
async def place(request: pytest.FixtureRequest, tiny_root: Path) -> AsyncIterator[tuple[SharedSandboxes, str]]:
    """Sandboxes of a backend, and the image of the tiny repository there."""
    backend = str(request.param)
    image = str(tiny_root) if backend == "local" else str(request.getfixturevalue("tiny_image"))
    shared = SharedSandboxes(2, backend=backend)
    yield shared, image
    await shared.close()


async def graded(said: SweTask, patch: bytes, boxes: SharedSandboxes) -> SweGrade | None:
    """The verdict; None where the attack ended the sandbox, which is an error and no reward."""
    try:
        return await judge_patch(said, patch, boxes, limits=LIMITS, timeout_s=60.0)
    except SandboxError:
        return None


@pytest.mark.parametrize("name", ATTACKS)
async def test_no_attack_passes(name: str, tiny_root: Path, tmp_path: Path, place: tuple[SharedSandboxes, str]) -> None:
    boxes, image = place
    patch = swe.patch_of(tiny_root, tmp_path, ATTACKS[name])
    found = await graded(SweTask.of(swe.task_of(swe.tiny_row(image))), patch, boxes)
    print(name, found and (found.score.detail, found.report.resolved))
    assert found is None or (found.score.value, found.score.passed) == (0.0, False)
    if name in FORGED:
        assert found is not None
        assert found.report.resolved  # for swebench's reader it would have passed
        assert found.doubts


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
async def test_no_attack_at_installation_passes(
    name: str, tiny_root: Path, tmp_path: Path, place: tuple[SharedSandboxes, str]
) -> None:
    boxes, image = place
    patch = swe.patch_of(tiny_root, tmp_path, INSTALLED[name])
    found = await graded(SweTask.of(swe.task_of(swe.tiny_row(image, install=True))), patch, boxes)
    print(name, found and (found.score.detail, found.report.resolved))
    assert found is not None
    assert (found.score.value, found.score.passed) == (0.0, False)
    if name not in HARMLESS:
        assert found.report.resolved, found.score.detail
        assert found.doubts


async def test_gold_passes_on_every_backend(tiny_root: Path, place: tuple[SharedSandboxes, str]) -> None:
    boxes, image = place
    found = await graded(SweTask.of(swe.task_of(swe.tiny_row(image))), swe.TINY_GOLD.encode(), boxes)
    assert found is not None
    assert (found.score.value, found.doubts) == (1.0, ())
