"""Worker environments: whole or not there, made once, made anew by another lock, and refused in a sentence."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from sao_gym import workers
from sao_gym.commands.workers import main
from sao_gym.errors import ConfigError
from sao_gym.worker_python import find_python, version_of

OURS = sys.version_info[:2]
UV = """#!/bin/bash
echo "$@" >>"$(dirname "$0")/calls"
case "$1" in
  venv) for place; do :; done; mkdir -p "$place/bin"; ln -s PYTHON "$place/bin/python" ;;
  pip) [[ -e $(dirname "$0")/broken ]] && { echo "no such package" >&2; exit 1; }; sleep 0.2 ;;
  python) exit 1 ;;
esac
"""
"""Stands in for uv, which would need a package index: an environment is a link to this Python."""


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the stand-in, on PATH; `mini` there needs nothing but the standard library."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "uv").write_text(UV.replace("PYTHON", sys.executable))
    (folder / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SAO_GYM_WORKERS", str(tmp_path / "home"))
    plain = replace(workers.KINDS["mini"], probe="import json")
    monkeypatch.setattr(workers, "KINDS", MappingProxyType({**workers.KINDS, "mini": plain}))
    return folder


def names(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if path.is_dir())


def test_an_environment_is_made_once_and_found(uv: Path) -> None:
    said: list[str] = []
    assert workers.find("mini") is None
    made = workers.install("mini", say=said.append)
    assert made.python.exists()
    assert "making the mini environment" in said[0]
    calls = (uv / "calls").read_text()
    assert workers.environment("mini") == made == workers.install("mini")
    assert (uv / "calls").read_text() == calls, "nothing was done again"
    assert "--no-deps" in calls
    assert "worker_mini.lock" in calls


def test_a_build_that_fails_leaves_nothing(uv: Path) -> None:
    (uv / "broken").touch()
    with pytest.raises(ConfigError, match="packages could not be installed: no such package"):
        workers.install("mini")
    assert names(workers.workers_home()) == []
    assert workers.find("mini") is None
    (uv / "broken").unlink()
    assert workers.install("mini").python.exists()


def test_what_cannot_be_imported_is_no_environment(uv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = replace(workers.KINDS["mini"], probe="import no_such_library")
    monkeypatch.setattr(workers, "KINDS", MappingProxyType({"mini": lacking}))
    with pytest.raises(ConfigError, match="No module named 'no_such_library'"):
        workers.install("mini")
    assert names(workers.workers_home()) == []


def test_another_lock_is_another_environment(uv: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = workers.install("mini")
    monkeypatch.setattr(workers.WorkerKind, "lock_text", lambda kind: "mini-swe-agent==99\n")
    assert workers.find("mini") is None
    second = workers.install("mini")
    assert second.python != first.python
    assert not first.python.exists(), "the old one is taken away"


def test_a_base_python_that_is_gone_makes_it_anew(uv: Path) -> None:
    made = workers.install("mini")
    made.python.unlink()
    made.python.symlink_to("/nonexistent/python")
    assert workers.find("mini") is None
    assert workers.install("mini").python.resolve().exists()


def test_two_processes_build_it_once(uv: Path) -> None:
    script = (
        "from types import MappingProxyType; from dataclasses import replace; from sao_gym import workers\n"
        "workers.KINDS = MappingProxyType({'mini': replace(workers.KINDS['mini'], probe='import json')})\n"
        "print(workers.install('mini').python)"
    )
    running = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {process.communicate(timeout=120)[0] for process in running}
    assert len(said) == 1
    assert (uv / "calls").read_text().count("venv --quiet") == 1


def test_an_environment_that_is_given_is_probed_and_remembered(uv: Path, tmp_path: Path) -> None:
    given = workers.install("mini", existing=sys.executable)
    assert (given.python, given.lock_hash) == (Path(sys.executable).absolute(), "")
    assert workers.find("mini") == given
    with pytest.raises(ConfigError, match="cannot be used for sglang"):
        workers.install("sglang", existing=sys.executable)
    with pytest.raises(ConfigError, match="has no Python"):
        workers.install("mini", existing=str(tmp_path))
    assert workers.remove("mini")
    assert workers.find("mini") is None
    assert not workers.remove("mini")


def test_locks_pin_everything() -> None:
    for kind in workers.KINDS.values():
        if kind.lock:
            lines = kind.lock_text().splitlines()
            assert len(lines) > 50
            assert all("==" in line.partition(";")[0] for line in lines), kind.name
    assert "openhands-sdk==" in workers.KINDS["openhands"].lock_text()
    assert "mini-swe-agent==" in workers.KINDS["mini"].lock_text()


def test_a_shim_that_stands_for_nothing_is_no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / "python3.13"
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2; exit 127\n")
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    assert version_of(shim) is None
    assert version_of(sys.executable) == OURS
    assert find_python((3, 10))[0] == Path(sys.executable)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no Python 3\.99 or newer was found"):
        find_python((3, 99))
    with pytest.raises(ConfigError, match="is no Python that runs"):
        find_python((3, 10), given=str(shim))
    with pytest.raises(ConfigError, match=r"and 3\.99 or newer is needed"):
        find_python((3, 99), given=sys.executable)


def test_the_command_says_what_it_did(uv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert capsys.readouterr().out.count("not installed") == 3
    assert main(["install", "mini"]) == 0
    assert "/bin/python (Python" in capsys.readouterr().out
    assert main(["list"]) == 0
    assert "mini       Python" in capsys.readouterr().out
    assert main(["remove", "mini"]) == 0
    assert main(["remove", "mini"]) == 0
    assert capsys.readouterr().out.splitlines() == ["mini: removed", "mini: there was nothing to remove"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fetch"], "knows no 'fetch'"),
        (["install"], "takes one name"),
        (["list", "mini"], "takes no name"),
        (["install", "opnehands"], "there is no worker 'opnehands'; there are openhands, mini, sglang"),
        (["install", "sglang"], "--existing PYTHON"),
        (["install", "mini", "--python", "a", "--existing", "b"], "give one of them"),
    ],
)
def test_words_that_cannot_be_are_refused(
    uv: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_a_stamp_that_cannot_be_read_is_no_environment(uv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: list[Callable[[Path], object]] = [
        lambda path: path.write_text("{"),
        lambda path: path.write_text(json.dumps({"kind": "mini"})),
        lambda path: path.unlink(),
    ]
    for spoil in broken:
        made = workers.install("mini")
        spoil(made.python.parents[1] / workers.STAMP)
        assert workers.find("mini") is None
