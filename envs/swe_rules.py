"""What a patch is applied without: files that decide how tests run, and tests. Honest fixes need none of them.

The rule is about the work tree after the patch was applied, not about the patch's text, so no way to write a diff gets
around it: what it names is put back as the base commit has it. Of the 500 gold patches of SWE-Bench Verified none loses
a file to it.

Example:
    >>> left_out("tests/conftest.py"), left_out("src/flask/app.py")
    ('decides how tests run', '')
"""

import fnmatch
import re
import sys
from collections.abc import Collection

RUNS_TESTS = (
    *(
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "tox.ini",
        "tox.toml",
        "noxfile.py",
        "runtests.py",
        "pytest.toml",
        "pytest.py",
    ),
    *("sitecustomize*", "usercustomize*", "*.pth", "*.egg-link", "*.egg-info", "*.dist-info", ".pytest.toml"),
    *(".git", ".gitattributes", ".gitmodules", ".pdbrc", ".coveragerc", "__pycache__", "*.pyc"),
)
"""Names of files and folders that decide how tests run, or that stand in for others when Python looks for a module."""
IS_TEST = ("test_*.py", "*_test.py", "tests.py", "tests")
"""Names of tests, and of the folder of tests with all that is in it."""
RUNNERS = frozenset(("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "tox", "xdist", "tomli", "attr"))
SOURCE_ROOTS = ("", "src/", "lib/", "test/", "testing/")
"""Folders that stand on Python's path while tests run."""
SETTINGS = ("setup.cfg", "pyproject.toml", "setup.py")
"""Files of which a part decides how tests run; see `changes_the_tests`."""
_HEADER = re.compile(r"^\s*\[+\s*([^\]\n]+?)\s*\]+", re.M)
_TESTING = re.compile(
    r"^(tool:)?pytest|^tool\.pytest|^testenv|^tox|^tool\.tox|pytest11|^aliases$|^options\.entry_points\.pytest"
)


def left_out(path: str, named: Collection[str] = (), base: Collection[str] = ()) -> str:
    """Why a path of the tree is put back, or nothing.

    `named` are files that the evaluation names: those of the test patch, and programs that it starts. `base` are
    modules that the base commit has at the top of a source root.
    """
    parts = path.split("/")
    if any(path == name or name.startswith(f"{path}/") for name in named):
        return "belongs to the tests"
    if any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in RUNS_TESTS):
        return "decides how tests run"
    if any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in IS_TEST):
        return "is a test"
    if shadows(path, base):
        return "stands in for another module"
    return ""


def shadows(path: str, base: Collection[str]) -> bool:
    """Whether a file would be imported in place of Python's own module or a test runner's, and the base has no such."""
    for root in SOURCE_ROOTS:
        if path.startswith(root):
            module = path.removeprefix(root).split("/")[0].split(".")[0]
            is_known = module in sys.stdlib_module_names or module in RUNNERS
            if is_known and f"{root}{module}" not in base and (root or module not in ("test", "lib2to3")):
                return True
    return False


def modules_of(names: Collection[str]) -> set[str]:
    """What the base commit has at the top of source roots, without endings: `src/_pytest`, `setup`."""
    found = set()
    for name in names:
        for root in SOURCE_ROOTS:
            if name.startswith(root):
                found.add(root + name.removeprefix(root).split("/")[0].split(".")[0])
    return found


def changes_the_tests(before: str, after: str) -> bool:
    """Whether two texts of setup.cfg, pyproject.toml or setup.py differ in what decides how tests run."""
    if before.count("pytest11") != after.count("pytest11"):
        return True
    return _sections(before) != _sections(after)


def _sections(text: str) -> list[str]:
    """The sections that are about tests, with their headers."""
    headers = list(_HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    kept = [(head, end) for head, end in zip(headers, ends, strict=False) if _TESTING.search(head[1].strip("\"' "))]
    return [text[head.start() : end].strip() for head, end in kept]


def named_by(script: str, test_patch: str) -> set[str]:
    """Files of a test patch, and files of the tree that the test command starts with a path of their own."""
    found = set(re.findall(r"^diff --git a/(.+) b/.+$", test_patch, re.M))
    found |= set(re.findall(r"^diff --git a/.+ b/(.+)$", test_patch, re.M))
    found |= set(re.findall(r"^(?:---|\+\+\+) [ab]/([^\t\n]+)", test_patch, re.M))
    for line in script.splitlines():
        for word in line.split():
            if line.startswith(("./", "bin/", "PYTHON")) and "/" in word and "=" not in word:
                found.add(word.removeprefix("./"))
                break
    return found
