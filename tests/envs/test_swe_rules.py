"""What a patch is applied without, how a script's output is cut, and what the witness's notes are worth: no sandbox."""

import hashlib
import hmac
import json
import re
from pathlib import Path

import pytest
import swe_instances as swe
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.envs.swe_report import SweReport
from sao_gym.envs.swe_rules import changes_the_tests, left_out, modules_of, named_by
from sao_gym.envs.swe_script import CANARY, EvalScript, meddled
from sao_gym.envs.swe_witness import Seen, Witness

MARK = "f00d"
SCRIPT = EvalScript.of(swe.tiny_row("x")["eval_script"], MARK)


def test_no_gold_patch_of_verified_loses_a_file(data_dir: Path) -> None:
    import pyarrow.parquet as pq

    rows = pq.read_table(data_dir / "swe_verified.parquet").to_pylist()
    for row in rows:
        named = named_by(row["eval_script"], row["test_patch"])
        paths = set(re.findall(r"^diff --git a/(\S+) b/", row["patch"], re.M))
        assert {path: left_out(path, named, modules_of(paths)) for path in paths} == dict.fromkeys(paths, "")
        assert set(re.findall(r"^\+\+\+ b/(\S+)", row["test_patch"], re.M)) <= named
        EvalScript.of(row["eval_script"], MARK)
    assert len(rows) == 500


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("src/a.py", ""),
        ("a/json.py", ""),
        ("django/test/client.py", ""),
        ("lib/mpl/testing/decorators.py", ""),
        ("docs/conf.py", ""),
        ("json.py", "stands in"),
        ("src/pytest/__init__.py", "stands in"),
        ("a/b/conftest.py", "decides"),
        ("a/b.egg-info/entry_points.txt", "decides"),
        (".git/config", "decides"),
        ("sympy/testing/runtests.py", "decides"),
        ("a/tests", "is a test"),
        ("a/tests/helper.py", "is a test"),
        ("a/test_b.py", "is a test"),
        ("bin/test", "belongs"),
        ("bin", "belongs"),
    ],
)
def test_rule(path: str, why: str) -> None:
    assert left_out(path, {"bin/test"}, {"src/_pytest"}).startswith(why)
    assert bool(left_out(path, {"bin/test"}, {"src/_pytest"})) == bool(why)


def test_a_repository_that_is_the_runner_may_be_mended() -> None:
    assert left_out("src/_pytest/python.py", (), {"src/_pytest"}) == ""


def test_settings_are_put_back_for_their_part_about_tests_alone() -> None:
    before = "[metadata]\nname = a\n[tool:pytest]\naddopts = -q\n[flake8]\nx = 1\n"
    assert not changes_the_tests(before, before.replace("name = a", "name = b").replace("x = 1", "x = 2"))
    assert changes_the_tests(before, before.replace("-q", "-p evil"))
    assert changes_the_tests(before, before + "[options.entry_points]\npytest11 = a\n")
    assert changes_the_tests("", "[tool.pytest.ini_options]\naddopts = '-p evil'\n")


def output(section: str = "ok\n", listed: str = CANARY + "\n", code: str = "0") -> str:
    parts = [f"{MARK}-began\nhead\n{MARK}-settled\n{listed}{MARK}-listed\nbetween\n\n{MARK}-start\n", section]
    return "".join([*parts, f"\n{MARK}-end {code}\nrest\n"])


def test_output_is_cut_at_the_marks() -> None:
    cut = SCRIPT.cut(output("a\nPASSED x\n"))
    assert (cut.began, cut.is_whole, cut.exit_code, cut.section) == (True, True, 0, "a\nPASSED x\n\n")
    assert cut.changed == (CANARY,)
    assert SCRIPT.cut(output(listed="")).changed is None
    assert not SCRIPT.cut("nothing\n").began


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200))
def test_what_tests_print_stays_in_its_section(text: str) -> None:
    """Code under test does not know the mark, and without it nothing that it prints is taken for one."""
    if MARK not in text:
        cut = SCRIPT.cut(output(text))
        assert cut.section == text + "\n"
        assert cut.exit_code == 0


def test_the_script_runs_as_the_row_has_it() -> None:
    lines = [line for line in swe.tiny_row("x")["eval_script"].splitlines() if ">>>>>" not in line]
    at = -1
    wrapped = SCRIPT.text.splitlines()
    for line in lines:
        at = wrapped.index(line, at + 1)


@pytest.mark.parametrize(
    ("path", "is_bad"),
    [
        ("/opt/miniconda3/envs/testbed/lib/python3.9/site-packages/_pytest/runner.py", True),
        ("/opt/miniconda3/envs/testbed/lib/python3.9/site-packages/adder.egg-link", False),
        ("/opt/miniconda3/envs/testbed/lib/python3.9/site-packages/easy-install.pth", False),
        ("/opt/miniconda3/envs/testbed/lib/python3.9/json/__init__.py", True),
        ("/opt/miniconda3/envs/testbed/bin/django-admin", False),
        ("/opt/miniconda3/envs/testbed/bin/python3.9", True),
        ("/usr/bin/git", True),
        ("/etc/locale.gen", False),
        ("/etc/ld.so.preload", True),
        ("/root/.gitconfig", False),
        ("/root/.bashrc", True),
        ("/testbed/adder.egg-info/PKG-INFO", False),
        ("/testbed/build/lib/a/conftest.py", False),
        ("/testbed/a/conftest.py", True),
        ("/testbed/.git/hooks/post-checkout", True),
        ("/testbed/.git/index", False),
        ("pytest11 in /testbed/x/entry_points.txt", True),
    ],
)
def test_what_no_installation_changes(path: str, is_bad: bool) -> None:
    assert bool(meddled((CANARY, path), "/testbed")) is is_bad


# ---- the witness

WITNESS = Witness.of("pytest -rA tests/test_m.py\n", "/tmp/x")


def notes(*records: dict[str, object], key: bytes | None = None) -> bytes:
    assert WITNESS is not None
    last, lines = b"", []
    for record in records:
        text = json.dumps(record).encode()
        last = hmac.new(key or WITNESS.key, last + text, hashlib.sha256).hexdigest().encode()
        lines.append(last + b" " + text + b"\n")
    return b"".join(lines)


BEGIN, END = {"at": "begin", "spread": False}, {"at": "end", "exit": 0, "changed": []}
CALL = {"at": "call", "kind": "ok", "test": "t.py::a"}


def seen(data: bytes) -> Seen:
    assert WITNESS is not None
    return WITNESS.seen(data)


def test_what_was_seen_to_pass_is_believed_and_nothing_else() -> None:
    found = seen(notes(BEGIN, CALL, END))
    assert found.statuses == (("t.py::a", "PASSED"),)
    assert found.log == "PASSED t.py::a\n"
    report = SweReport(seen={"t.py::a": "PASSED", "t.py::c[x-1]": "PASSED"})
    assert found.against(("t.py::a", "t.py::c[x", "[100%]"), report) == ()
    assert "t.py::b passed in the log" in found.against(("t.py::a", "t.py::b"), report)[0]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        pytest.param(b"", "was not seen to run", id="nothing"),
        pytest.param(notes(BEGIN, CALL), "not seen to end", id="cut short"),
        pytest.param(notes(BEGIN, CALL, END, key=b"other"), "were changed", id="another key"),
        pytest.param(notes(BEGIN, CALL) + b"PASSED t.py::a\n", "were changed", id="lines"),
        pytest.param(notes(BEGIN) + notes(END), "were changed", id="not chained"),
        pytest.param(notes(BEGIN, {**END, "changed": ["x"]}), "was changed while it ran: x", id="runner"),
    ],
)
def test_notes_that_are_not_whole_are_a_doubt(data: bytes, why: str) -> None:
    assert why in seen(data).problem


def test_other_runners_have_no_witness() -> None:
    assert Witness.of("./tests/runtests.py --verbosity 2 a\n", "/tmp/x") is None
    assert Witness.of("PYTHONWARNINGS='ignore' bin/test -C a.py\n", "/tmp/x") is None
    through_tox = Witness.of("tox --current-env -epy39 -v -- tests/test_a.py\n", "/tmp/x")
    assert through_tox is not None
    assert through_tox.seen(b"").is_silent, "tox may keep its settings from pytest"
