"""Diffs read on this machine: the names that they give, and what they make of a file."""

import difflib
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.envs.swe_diff import paths_of, read_diff

LINES = st.lists(st.sampled_from([b"", b"a", b"b", b" a", b"-a", b"+a", b"--- a", b"\xe9", b"x\r"]), max_size=12)


def unified(before: bytes, after: bytes, tmp_path: Path, *flags: str) -> bytes:
    """What git says of two files."""
    (tmp_path / "before").write_bytes(before)
    (tmp_path / "after").write_bytes(after)
    command = ["git", "diff", "--no-index", "--text", *flags, "before", "after"]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).stdout


@settings(max_examples=30)
@given(before=LINES, after=LINES, ends=st.tuples(st.booleans(), st.booleans()), context=st.integers(0, 3))
def test_a_diff_of_git_makes_what_git_compared(
    tmp_path_factory: pytest.TempPathFactory,
    before: list[bytes],
    after: list[bytes],
    ends: tuple[bool, bool],
    context: int,
) -> None:
    old, new = (b"\n".join(lines) + (b"\n" if end else b"") for lines, end in zip((before, after), ends, strict=True))
    diff = unified(old, new, tmp_path_factory.mktemp("diff"), f"-U{context}")
    if old == new:
        assert not diff
        return
    (change,) = read_diff(diff)
    assert change.applied(old) == new


def test_lines_that_moved_are_found_and_others_are_not() -> None:
    text = [f"{n}\n" for n in range(20)]
    diff = "".join(difflib.unified_diff(text, [*text[:10], "new\n", *text[10:]], "a/f", "b/f")).encode()
    (change,) = read_diff(diff)
    assert change.applied(b"one more\n" + "".join(text).encode()) is not None
    assert change.applied(b"other\n") is None


NAMES = {
    "plain": (b"diff --git a/m.py b/m.py\n--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-a\n+b\n", {"m.py"}),
    "without git's line": (
        b"--- a/m.py\t2020\n+++ b/m.py\t2020\n@@ -1 +1 @@\n-a\n+b\n--- x\n+++ y\n",
        {"m.py", "x", "y"},
    ),
    "new": (b"diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+b\n", {"n"}),
    "empty and new": (b"diff --git a/e b/e\nnew file mode 100644\nindex 0000000..e69de29\n", {"e"}),
    "gone": (b"diff --git a/n b/n\ndeleted file mode 100644\n--- a/n\n+++ /dev/null\n@@ -1 +0,0 @@\n-b\n", {"n"}),
    "renamed": (b"diff --git a/x y b/z\nsimilarity index 100%\nrename from x y\nrename to z\n", {"x y", "z"}),
    "with a space": (b"diff --git a/a b b/a b\nold mode 100644\nnew mode 100755\n", {"a b"}),
    "quoted": (
        b'diff --git "a/\\303\\251" "b/\\303\\251"\n--- "a/\\303\\251"\n+++ "b/\\303\\251"\n@@ -1 +1 @@\n-a\n+b\n',
        {"é"},
    ),
    "a header in a hunk": (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n--- a/g\n-x\n+++ b/g\n+y\n", {"f"}),
    "nothing": (b"words\n", set()),
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name: str) -> None:
    diff, paths = NAMES[name]
    assert paths_of(diff) == paths


def test_binary_parts_are_no_text() -> None:
    (change,) = read_diff(b"diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIc\n\n")
    assert not change.is_text


def test_every_patch_of_the_benchmark_fits_what_it_was_made_for(data_dir: Path) -> None:
    """Of the files only the patches are here, so each hunk is held against the lines that it says were there."""
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(data_dir / "swe_verified.parquet", columns=["patch", "test_patch"]).to_pylist()
    for row in rows:
        for diff in map(str.encode, row.values()):
            changes = read_diff(diff)
            assert sum(len(change.hunks) for change in changes) == diff.count(b"\n@@ -")
            assert json.dumps(sorted(paths_of(diff)))
            for change in changes:
                lines: list[bytes] = []
                for hunk in change.hunks:
                    lines += [b"line\n"] * (hunk.start - len(lines))
                    lines += hunk.before
                assert change.applied(b"".join(lines)) is not None
