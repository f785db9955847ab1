"""How a run ends: SIGTERM, a disk that is full, an engine that is gone; each in one sentence, and it can go on."""

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sao_gym.commands.train import main
from sao_gym.engines.local import LocalEngine
from sao_gym.errors import DeadlineError, EngineError, RunFolderError
from sao_gym.ledger import Ledger
from sao_gym.trainer import loop
from sao_gym.trainer.checkpoint import find_checkpoints
from sao_gym.trainer.loop import EngineFailedError, named_failures

ROOT = Path(__file__).resolve().parents[2]


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def words(crash: ModuleType, tiny_model: Path, tmp_path: Path) -> list[str]:
    return [*crash.words(tiny_model, 0, is_lock_step=False), "--steps", "8", "--out", str(tmp_path / "run")]


def require_whole(run: Path, crash: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed to its end, the run has lost and repeated nothing."""
    assert main(["--resume", str(run)]) == 0
    monkeypatch.setattr(crash, "STEPS", 8)
    assert crash.Audit(run).close() == (0, 0)
    assert main(["--replay", str(run)]) == 0


@pytest.mark.parametrize("moment", ["learning", "waiting"])
def test_sigterm_ends_the_step_writes_a_checkpoint_and_says_how_to_go_on(
    moment: str,
    words: list[str],
    crash: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        told = told_to_stop(patch, moment)
        assert main(words) == 0
    assert told == [1]
    assert signal.getsignal(signal.SIGTERM) is before
    last = 5 if moment == "learning" else 4
    assert steps_of(run) == list(range(1, last + 1))
    whole, skipped = find_checkpoints(run / "checkpoints")
    assert (whole[-1][0].step, skipped) == (last, [])
    out = capfd.readouterr()
    assert f"stopped after {last} batches" in out.out
    assert "once more quits at once" in out.err
    require_whole(run, crash, monkeypatch)


def told_to_stop(patch: pytest.MonkeyPatch, moment: str) -> list[int]:
    """Sends this process a real SIGTERM in the fifth step; the list has an entry once it was sent."""
    sent: list[int] = []
    name = "make_plan" if moment == "learning" else "submit"
    plain = getattr(loop, name)
    count = [0]

    def with_signal(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        made = plain(*args, **kwargs)
        if count[0] == 5:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGTERM)
        return made

    patch.setattr(loop, name, with_signal)
    return sent


SECOND = """
import os, signal, sys
from sao_gym.commands.train import main
from sao_gym.trainer import loop
plain, steps = loop.make_plan, []

def twice(*args, **kwargs):
    steps.append(1)
    if len(steps) == 5:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    return plain(*args, **kwargs)

loop.make_plan = twice
main(sys.argv[1:])
"""


def test_a_second_sigterm_quits_at_once(
    words: list[str], crash: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SECOND, *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=200, capture_output=True, text=True)
    assert done.returncode == -signal.SIGTERM
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4]
    require_whole(tmp_path / "run", crash, monkeypatch)


@contextmanager
def full_disk(limit_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond the limit: the kernel refuses the write, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("what", ["save_checkpoint", "write_trajectories", "append_metrics"])
def test_a_full_disk_is_one_sentence_and_the_old_checkpoint_stands(
    what: str,
    words: list[str],
    crash: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    owner = loop.RunFolder if what == "append_metrics" else loop
    plain, calls = getattr(owner, what), []

    def full(*args: Any) -> Any:
        calls.append(1)
        if len(calls) != (2 if what == "save_checkpoint" else 5):
            return plain(*args)
        with full_disk(100):
            return plain(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, what, full)
        assert main(words) == 2
    err = capsys.readouterr().err
    assert err.count("sao-gym: error:") == 1
    assert "--resume" in err.splitlines()[-1]
    whole, skipped = find_checkpoints(run / "checkpoints")
    assert [state.step for state, _ in whole] == [3]
    assert skipped == []
    require_whole(run, crash, monkeypatch)


def test_a_full_disk_under_the_ledger_is_one_sentence(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")

    @named_failures(tmp_path)
    def fill() -> None:
        for number in range(10_000):
            ledger.enqueue(f"t{number}", 0)

    with full_disk(4096), pytest.raises(RunFolderError, match="make room, then go on with --resume"):
        fill()
    ledger.close()


def test_what_is_no_full_disk_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), named_failures(tmp_path):
        (tmp_path / "none").read_text()
    with pytest.raises(sqlite3.IntegrityError), named_failures(tmp_path):
        raise sqlite3.IntegrityError


def test_an_engine_that_dies_ends_the_run_with_its_cause(
    words: list[str],
    crash: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = LocalEngine.publish

    async def die(self: LocalEngine, source: Any, version: int) -> None:
        if version == 5:
            await self.close()
        await plain(self, source, version)

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "publish", die)
        assert main(words) == 2
    assert "sao-gym: error: " in capsys.readouterr().err
    require_whole(tmp_path / "run", crash, monkeypatch)


def test_an_engine_error_outside_of_an_episode_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match=r"the engine failed \(gone\).*--resume"), named_failures(tmp_path):
        raise EngineError("gone")


def test_a_wait_past_its_deadline_is_named(tmp_path: Path) -> None:
    stands = r"stands still \(waited 9 s for a batch\).*--resume"
    with pytest.raises(EngineFailedError, match=stands), named_failures(tmp_path):
        raise DeadlineError("waited 9 s for a batch")
