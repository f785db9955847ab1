"""The writing study as people run it: a preference learnt from single answers, and one that changes while training goes on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sao_gym.jsonl import read_jsonl, write_jsonl
from sao_gym.parquet import read_trajectories
from sao_gym.stream import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).resolve().parents[2]
PHASES = (
    '{phases = [{target = "cute", candidates = ["academic", "cute"], lasts = 16}, '
    '{target = "classical", candidates = ["cute", "classical"]}]}'
)


def run(*words: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sao_gym.train", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def batches(folder: Path) -> list[list[Trajectory]]:
    return [read_trajectories(path) for path in sorted((folder / "trajectories").glob("*.parquet"))]


def test_the_policy_learns_the_reader_s_taste(tmp_path: Path) -> None:
    out = tmp_path / "run"
    run("--env", "writing_style", "--preset", "writing_quickstart", "--out", str(out))
    records = [record for _, record in read_jsonl(out / "metrics.jsonl")]
    styles = [record["heldout_methods"] for record in records if "heldout_success" in record]
    assert len(styles) == 4
    assert styles[0]["cute"] < 0.55
    assert styles[-1]["cute"] > styles[0]["cute"] + 0.25
    sampled = [record["heldout_success"] for record in records if "heldout_success" in record]
    assert sampled[-1] > sampled[0] + 0.1
    figures = [record["signals"] for record in records if "signals" in record]
    assert figures[-1].keys() >= {
        "phase",
        "quality",
        "on_target",
        "style_cute",
        "repetition",
        "length_ratio",
    }
    assert (tmp_path / "run-start" / "manifest.json").is_file()


def test_a_preference_that_changes_by_trained_rows(tmp_path: Path) -> None:
    out, said = tmp_path / "run", tmp_path / "said.jsonl"
    write_jsonl(said, ["Yay, a fluffy little text for you, hugs and kisses, yummy! <3"])
    words = ("--env", "writing_style", "--preset", "writing_quickstart", "--env.options", PHASES)
    told = ("--engine", "scripted", "--engine.completions", str(said))
    small = ("--batch-size", "8", "--evaluation.every", "null", "--no-evaluation.at-ends", "--checkpoint.every", "2")
    lock_step = ("--staleness.max-staleness", "0", "--critic.only-steps", "0")
    run(*words, *told, *small, *lock_step, "--steps", "3", "--out", str(out))
    told_at_the_end = run("--resume", str(out), "--steps", "5", "--allow-change")
    assert "recovery: phase 2: 90% of its plateau" in told_at_the_end
    found = [{row.info["target"] for row in rows} for rows in batches(out)]
    assert found == [{"cute"}, {"cute"}, {"classical"}, {"classical"}, {"classical"}]
    last = batches(out)[-1][0].info
    assert (last["phase"], last["candidates"]) == (1, ["cute", "classical"])
    signals = [record["signals"] for _, record in read_jsonl(out / "metrics.jsonl")]
    assert [figures["phase"] for figures in signals] == [0, 0, 1, 1, 1]
    assert [figures["on_target"] for figures in signals] == [1, 1, 0, 0, 0]


def test_feedback_that_comes_late_or_never(tmp_path: Path) -> None:
    out, said = tmp_path / "run", tmp_path / "said.jsonl"
    write_jsonl(said, ["Yay, a fluffy little text for you, hugs and kisses, yummy! <3"])
    late = "feedback_late_share = 0.3, feedback_never_share = 0.2, feedback_delay_s = 0.2, feedback_deadline_s = 1.0}"
    late = f'{{phases = [{{target = "cute", candidates = ["academic", "cute"]}}], {late}'
    words = ("--env", "writing_style", "--preset", "writing_quickstart", "--env.options", late)
    told = ("--engine", "scripted", "--engine.completions", str(said))
    small = ("--batch-size", "8", "--evaluation.every", "null", "--no-evaluation.at-ends", "--critic.only-steps", "0")
    run(*words, *told, *small, "--steps", "6", "--out", str(out))
    trained = [row for rows in batches(out) for row in rows]
    assert len(trained) == 48
    assert any("feedback_s" in row.info for row in trained)
    assert all(row.score is not None and not row.outcome.is_error for row in trained)
    records = [record for _, record in read_jsonl(out / "metrics.jsonl") if "dropped_rows" in record]
    assert {reason for record in records for reason in record["dropped_rows"]} == {"no_feedback"}
