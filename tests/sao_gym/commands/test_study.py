"""The study: its plan, its figures from made-up runs with known answers, its report, and the command itself."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sao_gym.commands.study import main
from sao_gym.commands.study_figures import arm_figures, comparisons, figures_of, read_figures, whole_seeds
from sao_gym.commands.study_plan import ARMS, BASE, Places, Study, chosen_arms, chosen_seeds
from sao_gym.commands.study_report import write_report
from sao_gym.errors import ConfigError

TWO = chosen_arms("global_loo")


def lines(*phases: Sequence[float], rows: int = 64) -> list[dict[str, object]]:
    """Metrics of a run whose batches have these successes, phase by phase."""
    found: list[dict[str, object]] = [{"event": "evaluation"}]
    for phase, successes in enumerate(phases):
        found += [{"rows": rows, "signals": {"phase": float(phase), "on_target": value}} for value in successes]
    return found


def made_up(out: Path, study: Study, level: dict[str, float]) -> Places:
    """A finished study whose arms end at `level` after the shift, a little higher with each seed."""
    places = Places(out)
    places.hold(study)
    for arm, seed in study.pairs:
        after = [0.0] * 4 + [level[arm.name] + 0.01 * seed] * 8
        run = places.run(arm, seed)
        (run / "checkpoints" / f"step_{study.steps}").mkdir(parents=True)
        (run / "checkpoints" / f"step_{study.steps}" / "state.json").write_text("{}")
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines([0.5] * 4, after)))
    return places


def test_arms_and_seeds_are_chosen() -> None:
    assert [arm.name for arm in chosen_arms("global_loo, running_mean_32")] == [BASE, "running_mean_32", "global_loo"]
    assert chosen_arms(None) == ARMS
    assert chosen_seeds("2-4") == (2, 3, 4)
    assert chosen_seeds("5,1,5") == (5, 1)
    for wrong in ("4-2", "a", "1-", ""):
        with pytest.raises(ConfigError, match="--seeds takes numbers"):
            chosen_seeds(wrong)
    with pytest.raises(ConfigError, match="no arm 'sao_warm'"):
        chosen_arms("sao_warm")


def test_a_folder_holds_one_study(tmp_path: Path) -> None:
    places, study = Places(tmp_path / "s"), Study(arms=TWO, seeds=(0, 1))
    places.hold(study)
    places.hold(study)
    assert places.read() == study
    with pytest.raises(ConfigError, match=r"other seeds \(\(0, 1\), now \(0, 1, 2\)\)"):
        places.hold(Study(arms=TWO, seeds=(0, 1, 2)))
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "x").touch()
    with pytest.raises(ConfigError, match="is not empty and holds no study"):
        Places(tmp_path / "t").hold(study)


def test_figures_of_a_run_with_a_known_answer() -> None:
    found = figures_of("a", 0, lines([0.5] * 4, [0.0] * 4 + [0.8] * 8))
    assert found.measures == pytest.approx(
        {"success": (4 * 0.5 + 8 * 0.8) / 16, "plateau_1": 0.5, "plateau_2": 0.8, "recovery_2": 7 * 64}
    )
    assert found.bounds == frozenset()
    never = figures_of("a", 0, lines([0.5] * 4, [0.0] * 12))
    assert (never.measures["recovery_2"], never.bounds) == (12 * 64, {"recovery_2"})
    with pytest.raises(ConfigError, match="has no batches"):
        figures_of("a", 0, [])


def test_arms_are_compared_over_seeds_that_all_have(tmp_path: Path) -> None:
    study = Study(arms=chosen_arms("global_loo,running_mean_32"), seeds=(0, 1, 2))
    places = made_up(tmp_path / "s", study, {BASE: 0.5, "global_loo": 0.8, "running_mean_32": 0.5})
    found = read_figures(study, places)
    assert whole_seeds(study, found) == [0, 1, 2]
    by_name = {(one.measure, one.arm): one for one in comparisons(study, found)}
    one = by_name["plateau_2", "global_loo"]
    assert one.difference.mean == pytest.approx(0.3)
    assert (one.difference.n, one.bounds) == (3, 0)
    assert by_name["plateau_2", "running_mean_32"].difference.mean == 0
    arms = {(one.measure, one.arm): one for one in arm_figures(study, found)}
    assert arms["plateau_2", "global_loo"].mean == pytest.approx(0.81)
    assert (arms["plateau_2", "global_loo"].seeds, arms["plateau_2", "global_loo"].bounds) == (3, 0)
    (places.run(study.arms[0], 2) / "checkpoints" / f"step_{study.steps}" / "state.json").unlink()
    assert whole_seeds(study, read_figures(study, places)) == [0, 1]


def test_the_report_is_the_same_each_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = Study(arms=TWO, seeds=(0, 1))
    places = made_up(tmp_path / "s", study, {BASE: 0.5, "global_loo": 0.8})
    names = ("runs.csv", "arms.csv", "comparisons.csv", "curves.png", "report.html")
    write_report(study, places)
    before = [(places.out / name).read_bytes() for name in names]
    for name in names:
        (places.out / name).unlink()
    assert main(["online", "--out", str(places.out), "--report-only"]) == 0
    assert [(places.out / name).read_bytes() for name in names] == before
    assert "report.html" in capsys.readouterr().out
    assert (places.out / "runs.csv").read_text().splitlines()[
        0
    ] == "arm,seed,success,plateau_1,plateau_2,recovery_2,bounds"
    page = (places.out / "report.html").read_text()
    assert "for orientation alone" in page
    assert "<script" not in page


def test_a_study_without_runs_is_reported_too(tmp_path: Path) -> None:
    places, study = Places(tmp_path / "s"), Study(arms=TWO, seeds=(0,))
    places.hold(study)
    assert "0 of 2 runs are done" in write_report(study, places).read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["offline"], "there is one study, online"),
        (["online", "--arms", "x"], "no arm 'x'"),
        (["online", "--steps", "0"], "--steps takes a number of at least 1"),
        (["online", "--out", "/nonexistent-study", "--report-only"], "holds no study"),
    ],
)
def test_what_cannot_be_used_is_said(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_help_and_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"{arm.name:<17}{arm.about}" in shown for arm in ARMS)
    assert main(["online", "--out", str(tmp_path / "s"), "--seeds", "0-1", "--dry-run"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * len(ARMS)
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_is_broken_off_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "study"
    words = ["online", "--out", str(out), "--arms", "running_mean_32", "--seeds", "0-1", "--steps", "4", "--jobs", "2"]
    command = [sys.executable, "-m", "sao_gym.study", *words]
    with (tmp_path / "first").open("w") as first:
        running = subprocess.Popen(command, stdout=first, stderr=first)
        while "begun" not in (tmp_path / "first").read_text():
            assert running.poll() is None, (tmp_path / "first").read_text()
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        assert running.wait(200) == 130, (tmp_path / "first").read_text()
    assert "the same command goes on" in (tmp_path / "first").read_text()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    study = Places(out).read()
    assert len(read_figures(study, Places(out))) == 4
    assert (out / "comparisons.csv").read_text().count("running_mean_32") == 2
    again = subprocess.run(command, capture_output=True, text=True)
    assert "begun" not in again.stdout, "what is done stays done"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_fails_is_named(tmp_path: Path) -> None:
    words = ["online", "--out", str(tmp_path / "s"), "--arms", BASE, "--seeds", "0", "--steps", "2", "--actor.lr", "0"]
    done = subprocess.run([sys.executable, "-m", "sao_gym.study", *words], capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{BASE} seed 0: FAILED" in done.stdout
    assert "1 runs failed" in done.stdout
