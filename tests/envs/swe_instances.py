r"""Instances of SWE-Bench for the tests, made of public packages: a root folder each, the same as a Docker image.

Each root is this Debian's own packages (see `docker_image`), a shim that activates environments as conda does, an
environment `testbed` with pytest, and a repository at /testbed: HEAD is the base commit, and as in a careless image
the commits that came later, a tag, a remote and the reflog are still there.

    row = tiny_row(image=str(tiny_root(root_folder, tmp_path / "tiny")))
    task = task_of(row)              # a Task as the task set makes them
"""

import contextlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sao_gym.protocols import Task

SITE = "opt/miniconda3/envs/testbed/lib/python3.11/site-packages"
BIN = "opt/miniconda3/envs/testbed/bin"
TOOLS = ("pytest", "pluggy", "iniconfig", "packaging", "pygments", "setuptools", "pip")
ACTIVATE = """\
conda() {
  case "$1" in
    activate) export PATH="/opt/miniconda3/envs/$2/bin:$PATH" CONDA_DEFAULT_ENV="$2" ;;
  esac
}
"""
PIP_CONF = "[global]\nno-index = true\nno-build-isolation = false\ndisable-pip-version-check = true\n"
IDENTITY = ("-c", "user.name=dev", "-c", "user.email=dev@localhost", "-c", "commit.gpgsign=false")

# ---------------------------------------------------------------- the tiny repository: m.py adds numbers, wrongly

TINY_ID = "tiny__adder-1"
TINY_FILES = {
    "m.py": (
        'def add(a, b):\n    """Sum of two numbers."""\n    return a - b\n\n\n'
        "def double(a):\n    return 2 * a\n\n\nPI = 3\n"
    ),
    "tests/test_m.py": "from m import double\n\n\ndef test_double():\n    assert double(2) == 4\n",
    "setup.py": 'from setuptools import setup\n\nsetup(name="adder", version="1.0", py_modules=["m"])\n',
    "setup.cfg": "[metadata]\ndescription = adds\n",
    "README.md": "Adds numbers.\n",
    ".gitignore": "__pycache__/\n*.egg-info/\n.pytest_cache/\n",
}
TINY_GOLD = """\
diff --git a/m.py b/m.py
--- a/m.py
+++ b/m.py
@@ -1,6 +1,6 @@
 def add(a, b):
     \"\"\"Sum of two numbers.\"\"\"
-    return a - b
+    return a + b
 
 
 def double(a):
"""
TINY_TEST_PATCH = """\
diff --git a/tests/test_m.py b/tests/test_m.py
--- a/tests/test_m.py
+++ b/tests/test_m.py
@@ -1,5 +1,9 @@
-from m import double
+from m import add, double
 
 
 def test_double():
     assert double(2) == 4
+
+
+def test_add():
+    assert add(2, 3) == 5
"""
NO_OP = """\
diff --git a/README.md b/README.md
--- a/README.md
+++ b/README.md
@@ -1 +1 @@
-Adds numbers.
+Adds numbers
"""
SCRIPT = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff {base}
source /opt/miniconda3/bin/activate
conda activate testbed
{install}git checkout {base} tests/test_m.py
git apply -v - <<'EOF_114329324912'
{test_patch}
EOF_114329324912
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
git checkout {base} tests/test_m.py
"""
INSTALL = "python -m pip install -e .\n"


def tiny_root(root_folder: Path, place: Path) -> Path:
    """The tiny repository in a root folder of its own."""
    root = new_root(root_folder, place)
    repository = root / "testbed"
    for name, text in TINY_FILES.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    commit_history(repository, TINY_GOLD)
    (root / SITE / "__editable__.adder.pth").write_text("/testbed\n")
    return root


def tiny_row(image: str, *, install: bool = False, command: str = "pytest -rA tests/test_m.py", **over: Any) -> Any:
    """A row as SWE-Bench has it; `install` also installs the repository, as official scripts do, in seconds more."""
    base = tiny_base()
    script = SCRIPT.format(
        base=base, install=INSTALL if install else "", test_patch=TINY_TEST_PATCH.rstrip("\n"), command=command
    )
    return {
        "repo": "tiny/adder",
        "instance_id": TINY_ID,
        "base_commit": base,
        "patch": TINY_GOLD,
        "test_patch": TINY_TEST_PATCH,
        "problem_statement": "add(2, 3) returns -1, it should be 5.",
        "hints_text": "",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps(["tests/test_m.py::test_add"]),
        "PASS_TO_PASS": json.dumps(["tests/test_m.py::test_double"]),
        "eval_script": script,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "image": image,
        **over,
    }


def task_of(row: Mapping[str, Any]) -> Task:
    """A task as the task set makes it of a row."""
    names = ("instance_id", "repo", "base_commit", "version", "image", "eval_script", "log_parser", "eval_type")
    said = {name: row[name] for name in (*names, "test_patch")}
    said["fail_to_pass"] = json.loads(row["FAIL_TO_PASS"])
    said["pass_to_pass"] = json.loads(row["PASS_TO_PASS"])
    return Task(id=row["instance_id"], prompt=row["problem_statement"], answer=row["patch"], info={"swe": said})


# ---------------------------------------------------------------- Flask 2.2.3, which takes flask-5014's patches

FLASK_ID = "pallets__flask-5014"
FLASK_WHEELS = (
    *("Werkzeug==2.2.3", "Jinja2==3.1.4", "itsdangerous==2.1.2", "click==8.1.7", "MarkupSafe==2.1.5"),
    *("pytest==8.3.5", "pluggy==1.5.0", "iniconfig==2.0.0"),  # its tests use what pytest 9 has no more
)


def flask_root(root_folder: Path, place: Path, cache: Path) -> Path:
    """Flask's source distribution as the repository, Werkzeug as it was then in the environment.

    Fetched once with pip into `cache`. Raises CalledProcessError where no package index is reachable.
    """
    if not list(cache.glob("Flask-2.2.3*")):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache)]
        subprocess.run([*pip, "--no-build-isolation", "--no-binary", "Flask", "Flask==2.2.3"], check=True, timeout=300)
    site = cache / "site"
    if not (site / "done").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", str(site)]
        subprocess.run([*pip, *FLASK_WHEELS], check=True, timeout=300)
        (site / "done").touch()
    root = new_root(root_folder, place, tools=("packaging", "pygments", "setuptools", "pip"))
    shutil.copytree(site, root / SITE, dirs_exist_ok=True, ignore=shutil.ignore_patterns("bin", "done", "*.so"))
    with tarfile.open(next(iter(cache.glob("Flask-2.2.3*")))) as archive:
        archive.extractall(place / "sdist", filter="data")
    shutil.copytree(place / "sdist/Flask-2.2.3", root / "testbed", dirs_exist_ok=True)
    shutil.rmtree(place / "sdist")
    commit_history(root / "testbed", None)
    return root


def flask_row(root: Path, official: Mapping[str, Any], image: str) -> Any:
    """The official row with the base commit and the image that there are here, and the tests that the sdist has."""
    base = git(root / "testbed", "rev-parse", "HEAD").strip()
    script = official["eval_script"].replace(official["base_commit"], base)
    return {**official, "base_commit": base, "image": image, "eval_script": script}


# ---------------------------------------------------------------- roots and repositories


def new_root(root_folder: Path, place: Path, tools: Sequence[str] = TOOLS) -> Path:
    """A root folder that shares the files of `root_folder`, with an environment and an empty /testbed."""
    place.mkdir(parents=True, exist_ok=True)
    place.chmod(0o755)
    root = place / "root"
    subprocess.run(["cp", "-al", str(root_folder), str(root)], check=True)
    shutil.rmtree(root / "testbed", ignore_errors=True)
    for folder in ("testbed", SITE, BIN, "etc", "opt/miniconda3/bin"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "opt/miniconda3/bin/activate").write_text(ACTIVATE)
    (root / "etc/pip.conf").write_text(PIP_CONF)
    for name in ("python", "python3"):
        (root / BIN / name).symlink_to("/usr/bin/python3")
    environment = "home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11.2\n"
    (root / BIN / "../pyvenv.cfg").write_text(environment)
    for name in tools:
        copy_package(name, root / SITE)
    write_program(root / BIN / "pytest", "import sys\n\nimport pytest\n\nsys.exit(pytest.main())\n")
    return root


def write_program(path: Path, code: str) -> None:
    """A console script of the environment."""
    path.write_text(f"#!/{BIN}/python\n{code}")
    path.chmod(0o755)


def copy_package(name: str, site: Path) -> None:
    """Copy an installed pure-Python package, compiled files too: they hold with the times of their sources."""
    for entry in importlib.metadata.files(name) or ():
        if ".." not in entry.parts:
            target = site / entry
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                shutil.copy2(entry.locate(), target)


def git(repository: Path, *arguments: str, text: str = "") -> str:
    """What a git command prints."""
    return git_bytes(repository, *arguments, data=text.encode()).decode()


def git_bytes(repository: Path, *arguments: str, data: bytes = b"") -> bytes:
    """The same in bytes; dates are fixed, so that commits have the same names everywhere."""
    date = {"GIT_AUTHOR_DATE": "2023-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2023-01-01T00:00:00Z"}
    environment = {**os.environ, **date, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    done = subprocess.run(
        ["git", *IDENTITY, *arguments], cwd=repository, env=environment, input=data, capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"git {' '.join(arguments)}: {done.stderr.decode()}")
    return done.stdout


def patch_of(root: Path, place: Path, files: Mapping[str, str | None]) -> bytes:
    """The diff that an agent would leave that wrote these files and took away those that are None."""
    place = place / "work"
    git(place.parent, "clone", "-q", "--no-local", str(root / "testbed"), str(place))
    git(place, "checkout", "-q", tiny_base())
    for name, text in files.items():
        if text is None:
            (place / name).unlink()
        else:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
    git(place, "add", "-A", "-f")
    return git_bytes(place, "diff", "--binary", "HEAD")


def commit_history(repository: Path, fix: str | None) -> str:
    """A base commit with a tag, and after it the fix with another one, left in branches, a remote and the reflog."""
    git(repository, "init", "-q", "-b", "main")
    git(repository, "add", "-A", "-f")
    git(repository, "commit", "-q", "-m", "As it was")
    git(repository, "tag", "v1.0")
    base = git(repository, "rev-parse", "HEAD").strip()
    if fix is not None:
        git(repository, "apply", "--index", "-", text=fix)
        git(repository, "commit", "-q", "-m", "Fix it")
        git(repository, "tag", "v1.1")
        git(repository, "remote", "add", "origin", "https://example.org/adder.git")
        git(repository, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(repository, "checkout", "-q", "--detach", base)
    return base


@cache
def tiny_base() -> str:
    """The name of the tiny repository's base commit."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in TINY_FILES.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return commit_history(Path(folder), None)


def import_root(root: Path, name: str) -> str:
    """The same root as a Docker image; returns its name."""
    import docker

    with contextlib.closing(docker.from_env()) as client:
        archive = root.parent / "packed.tar"
        subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
        repository, _, tag = name.partition(":")
        client.api.import_image(str(archive), repository=repository, tag=tag or "latest", changes=["WORKDIR /testbed"])
        archive.unlink()
    return name
