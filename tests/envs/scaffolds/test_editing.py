"""Edits of bytes: only what was asked for changes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.envs.scaffolds.editing import edited, numbered


@pytest.mark.parametrize(
    ("before", "line", "text", "after"),
    [
        (b"", 0, "a", b"a\n"),
        (b"a", 1, "b", b"a\nb"),
        (b"a", 0, "b", b"b\na"),
        (b"a\n", 1, "b", b"a\nb\n"),
        (b"a\n", 1, "b\n", b"a\nb\n"),
        (b"a\r\nb\r\n", 1, "x\ny", b"a\r\nx\r\ny\r\nb\r\n"),
        (b"a\r\nb", 2, "x", b"a\r\nb\r\nx"),
        (b"a\nb\n", 1, "", b"a\n\nb\n"),
    ],
)
def test_insert(before: bytes, line: int, text: str, after: bytes) -> None:
    assert edited(before, "f", "insert", text=text, line=line).data == after


@pytest.mark.parametrize(
    ("before", "old", "text", "after"),
    [
        (b"a\nb", "b", "c", b"a\nc"),
        (b"a\nb\n", "a\nb\n", "", b""),
        (b"a\r\nb\r\n", "a\r\nb", "x", b"x\r\n"),
        (b"a\r\nb\r\n", "a", "x\ny", b"x\r\ny\r\nb\r\n"),
        (b"a\nb\r\nc\n", "a", "x\ny", b"x\ny\nb\r\nc\n"),
        ("é\n".encode(), "é", "ü", "ü\n".encode()),
    ],
)
def test_replace(before: bytes, old: str, text: str, after: bytes) -> None:
    assert edited(before, "f", "replace", text=text, old=old).data == after


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40), st.text(max_size=6), st.text(max_size=6), st.integers(-2, 8))
def test_nothing_that_is_asked_raises(data: bytes, old: str, text: str, line: int) -> None:
    for made in (
        edited(data, "f", "replace", text=text, old=old),
        edited(data, "f", "insert", text=text, line=line),
    ):
        assert made.said
        assert made.data is not None or made.said.startswith("Error")
    assert numbered(data, "f", line, None, 1000)


@given(st.text(alphabet="ab\n\r", max_size=20), st.text(alphabet="xy", min_size=1, max_size=4), st.integers(0, 20))
def test_an_insert_keeps_all_that_was_there(content: str, text: str, line: int) -> None:
    made = edited(content.encode(), "f", "insert", text=text, line=line).data
    if made is not None:
        assert (
            made.replace(text.encode(), b"").replace(b"\r", b"").replace(b"\n", b"")
            == content.replace("\r", "").replace("\n", "").encode()
        )
        assert text.encode() in made
