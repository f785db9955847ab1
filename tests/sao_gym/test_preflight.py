"""Checks as a table, hosts that are asked, and sizes of checkpoints read off their files."""

import json
import socket
import struct
import time
from pathlib import Path

import pytest

from sao_gym.model_size import folder_parameters, known_parameters
from sao_gym.preflight import GIB, Check, gib, reaches, table


def test_a_table_says_what_is_missing_and_what_brings_it() -> None:
    checks = [
        Check.ok("model", "m"),
        Check.missing("images", "1 of 2", "pull them"),
        Check.unknown("disk", "no one to ask"),
    ]
    assert table(checks).splitlines() == [
        "model   ok       m",
        "images  MISSING  1 of 2 -> pull them",
        "disk    unknown  no one to ask",
    ]
    assert [one.is_missing for one in checks] == [False, True, False]
    assert table([]) == ""


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 MiB"), (5 << 20, "5 MiB"), (GIB, "1.0 GiB"), (2000 * GIB, "2,000 GiB")]
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert gib(size) == text


def test_a_host_is_reached_or_not_in_bounded_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reaches(f"http://127.0.0.1:{port}/v1")
    assert not reaches(f"http://127.0.0.1:{port}")
    assert not reaches("no address at all")
    began = time.monotonic()
    assert not reaches("http://192.0.2.1:81", timeout_s=0.2), "an address that nobody has"
    assert time.monotonic() - began < 5


def write_header(path: Path, header: object) -> None:
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data)


def test_parameters_are_counted_over_all_files(tmp_path: Path) -> None:
    write_header(tmp_path / "a.safetensors", {"__metadata__": {}, "w": {"shape": [3, 4]}, "s": {"shape": []}})
    write_header(tmp_path / "b.safetensors", {"b": {"shape": [5]}})
    assert folder_parameters(tmp_path) == 18
    (tmp_path / "c.safetensors").write_bytes(b"torn")
    assert folder_parameters(tmp_path) is None
    assert folder_parameters(tmp_path / "none") is None


@pytest.mark.parametrize("header", [[], {"w": 1}, {"w": {"shape": "x"}}, {"w": {}}])
def test_a_header_that_is_none_has_no_count(tmp_path: Path, header: object) -> None:
    write_header(tmp_path / "a.safetensors", header)
    assert not folder_parameters(tmp_path)


def test_the_papers_model_has_the_size_in_its_name() -> None:
    assert known_parameters("Qwen/Qwen3-30B-A3B-Thinking-2507") == pytest.approx(30.5e9, rel=0.002)
    assert known_parameters("another/one") is known_parameters(None) is None
