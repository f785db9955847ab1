"""A folder's content on its way in and out of a sandbox: nothing names a place outside, whoever packed it."""

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.envs.sandboxes.tree import (
    Entry,
    laid_over,
    matches,
    read_pack,
    read_tar,
    safe_path,
    tar_of,
    tree_of_folder,
    tree_of_texts,
)
from sao_gym.errors import TaskFileError


def archive(*members: tuple[str, bytes, str], data: bytes = b"x") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, link
            info.size = len(data) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_what_leads_out_stays_behind() -> None:
    packed = archive(
        ("/etc/passwd", tarfile.REGTYPE, ""),
        ("../up", tarfile.REGTYPE, ""),
        ("a/../../up", tarfile.REGTYPE, ""),
        ("out", tarfile.SYMTYPE, "/usr/lib"),
        ("up", tarfile.SYMTYPE, "../.."),
        ("in", tarfile.SYMTYPE, "a/b"),
        ("in/x", tarfile.REGTYPE, ""),
        ("hard", tarfile.LNKTYPE, "/etc/shadow"),
        ("null", tarfile.CHRTYPE, ""),
        ("pipe", tarfile.FIFOTYPE, ""),
        ("./a/b", tarfile.REGTYPE, ""),
    )
    assert read_tar(packed) == {"in": Entry(link="a/b"), "a/b": Entry(b"x")}


def test_an_archive_cannot_grow() -> None:
    """Of a program that the agent put in the place of tar: sparse files, sizes beyond the data, compression."""
    huge = tarfile.TarInfo("huge")
    huge.size = 1 << 40
    sparse = tarfile.TarInfo("sparse")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    head = sparse.tobuf(tarfile.PAX_FORMAT)
    assert read_tar(head + b"0\n".ljust(512, b"\0") + b"\0" * 1024) == {}
    with pytest.raises(tarfile.TarError):
        read_tar(huge.tobuf() + b"\0" * 2048)
    with pytest.raises(tarfile.TarError):
        read_tar(gzip.compress(archive(("a", tarfile.REGTYPE, ""))))


@pytest.mark.parametrize("data", [b"", b"no archive", b"\x1f\x8b broken", archive(("a", tarfile.REGTYPE, ""))[:100]])
def test_what_is_no_archive_is_said(data: bytes) -> None:
    with pytest.raises((tarfile.TarError, ValueError, OSError, EOFError)):
        read_tar(data)


NAMES = st.lists(st.sampled_from(["a", "b", "c.py"]), min_size=1, max_size=3).map("/".join)
ENTRIES = st.one_of(
    st.builds(Entry, st.binary(max_size=5), st.just(""), st.booleans()), st.just(Entry(link="a")), st.just(Entry())
)
TREES = st.dictionaries(NAMES, ENTRIES, max_size=6)


@settings(max_examples=200)
@given(TREES, TREES)
def test_one_tree_over_another_can_always_be_unpacked(
    tmp_path_factory: pytest.TempPathFactory, below: dict[str, Entry], above: dict[str, Entry]
) -> None:
    made = laid_over(below, laid_over({}, above))
    for place, entry in laid_over({}, above).items():
        assert made[place] == entry or (entry == Entry() and any(other.startswith(place) for other in made))
    folder = tmp_path_factory.mktemp("t")
    with tarfile.open(fileobj=io.BytesIO(tar_of(made))) as tar:
        tar.extractall(folder, filter="fully_trusted")
    for place, entry in made.items():
        path = folder / place
        assert (entry.link and os.readlink(path) == entry.link) or (  # noqa: PTH115
            path.read_bytes() == entry.data if entry.data is not None else path.is_dir()
        )
    assert read_tar(tar_of(made)) == made


def test_the_same_tree_is_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "d/.git").mkdir(parents=True)
    (tmp_path / "d/run").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "d/run").chmod(0o755)
    (tmp_path / "d/.git/x").write_bytes(b"")
    (tmp_path / "link").symlink_to("d")
    (tmp_path / "out").symlink_to("/etc")
    tree = tree_of_folder(tmp_path, [".git"])
    assert tree == {"d/run": Entry(b"#!/bin/sh\n", is_executable=True), "link": Entry(link="d")}
    assert tar_of(tree, compress=True) == tar_of(dict(reversed(tree.items())), compress=True)


def test_a_pack_is_the_one_that_was_made(tmp_path: Path) -> None:
    path = tmp_path / "p.tar.gz"
    with pytest.raises(TaskFileError, match="option folders"):
        read_pack(path, "0")
    path.write_bytes(tar_of(tree_of_texts({"a": "b"}), compress=True))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_pack(path, digest) == {"a": Entry(b"b")}
    with pytest.raises(TaskFileError, match="not the one"):
        read_pack(path, "0" * 64)


def test_patterns() -> None:
    assert matches("a/b/test_x.py", ["test_*.py"])
    assert matches("pytest/x/y.py", ["pytest"])
    assert matches("hidden/a/b", ["hidden/*"])
    assert not matches("a/hidden/b", ["hidden/*"])
    assert not matches("my_test_x.py", ["test_*.py"])
    assert [safe_path(name) for name in ("a/./b", "..", "", "/a", "a/../..", "a\0")] == [
        "a/b",
        None,
        None,
        None,
        None,
        None,
    ]
