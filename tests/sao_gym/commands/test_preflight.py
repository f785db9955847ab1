"""What is looked at before a run starts: each thing alone, all of them together, and how soon they are said."""

import json
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from sao_gym.commands import preflight
from sao_gym.commands.preflight import (
    disk_check,
    memory_check,
    model_check,
    tasks_check,
    training_bytes,
    training_checks,
)
from sao_gym.commands.presets import TRAIN_PRESETS
from sao_gym.commands.train import main
from sao_gym.config import preset_names, resolve
from sao_gym.envs.swe_preflight import agent_check
from sao_gym.preflight import Check, CheckState
from sao_gym.registry import register
from sao_gym.tasks._swe_overlap import stored_issues
from sao_gym.trainer.config import TrainConfig

ROOT = Path(__file__).resolve().parents[3]
HUB_MODEL = "Qwen/Qwen3-30B-A3B-Thinking-2507"


def config(*words: str) -> TrainConfig:
    return resolve(TrainConfig, overrides=words).config


@pytest.fixture
def rows(tmp_path: Path) -> Callable[..., str]:
    """A file of tasks of repositories with these ids, in a folder as image."""

    def write(*ids: str, image: str = str(tmp_path)) -> str:
        row = {
            "repo": "a/b",
            "base_commit": "0" * 40,
            "problem_statement": "It fails.",
            "FAIL_TO_PASS": ["t.py::t"],
            "test_patch": "",
            "patch": "x",
            "image": image,
        }
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps({**row, "instance_id": one}) + "\n" for one in ids))
        return str(tmp_path / "rows.jsonl")

    return write


# -- the model


def test_a_model_is_there_or_is_said_to_be_missing(tmp_path: Path) -> None:
    found = model_check(config())
    assert (found.state, found.remedy) == (CheckState.MISSING, "--model DIR")
    found = model_check(config("--model.hub", HUB_MODEL))
    assert found.remedy == (
        f"hf download {HUB_MODEL} --local-dir models/Qwen3-30B-A3B-Thinking-2507 and "
        "--model models/Qwen3-30B-A3B-Thinking-2507"
    )
    assert model_check(config("--model", str(tmp_path / "none"))).found == f"there is no folder {tmp_path}/none"
    assert model_check(config("--model", str(tmp_path))).found == f"{tmp_path} holds no config.json"
    asked = model_check(config("--model", str(tmp_path / "x"), "--model.hub", HUB_MODEL))
    assert asked.remedy == f"hf download {HUB_MODEL} --local-dir {tmp_path}/x"
    (tmp_path / "config.json").write_text("{}")
    assert model_check(config("--model", str(tmp_path))).state is CheckState.OK
    assert model_check(config("--engine", "scripted")).state is CheckState.OK


# -- memory and disk


def per_parameter(*words: str) -> tuple[float, float]:
    found = training_bytes(100, config(*words))
    return found.least / 100, found.most / 100


def test_memory_is_that_of_all_copies() -> None:
    assert per_parameter() == (16 + 4 + 4, 16 + 16 + 4), "policy, critic (frozen or not), and the engine's copy"
    assert per_parameter("--loss.advantage", "global_leave_one_out") == (16 + 4, 16 + 4)
    assert per_parameter("--evaluation.every", "5") == (16 + 4 + 8, 16 + 16 + 8)
    assert per_parameter("--evaluation.every", "5", "--evaluation.weights", "live") == per_parameter()


def test_the_largest_gpu_has_to_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "gpu_bytes", lambda: [24 << 30, 80 << 30])
    fits, too_much = memory_check(config(), 10**9), memory_check(config(), 30 * 10**9)
    assert (fits.state, too_much.state) == (CheckState.OK, CheckState.MISSING)
    assert (
        "22 GiB to 34 GiB needed for 1 billion parameters, activations aside; 2 GPUs, the largest with 80 GiB"
        in fits.found
    )
    assert "671 GiB to 1,006 GiB needed" in too_much.found
    assert memory_check(config(), 3 * 10**9).state is CheckState.OK, "it may fit: nobody is kept from trying"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert memory_check(config(), 30 * 10**9).state is CheckState.UNKNOWN
    assert memory_check(config(), None).state is CheckState.UNKNOWN
    monkeypatch.setattr(preflight, "gpu_bytes", list)
    assert "no GPU" in memory_check(config(), 1000).found


def test_the_driver_is_asked_and_may_be_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for says, found in (
        ("echo 81559; echo 24576", [81559 << 20, 24576 << 20]),
        ("echo No devices", []),
        ("exit 9", []),
    ):
        tool.write_text(f"#!/bin/sh\n{says}\n")
        tool.chmod(0o755)
        assert preflight.gpu_bytes() == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert preflight.gpu_bytes() == []


def test_checkpoints_need_room() -> None:
    assert disk_check(config(), 1000).state is CheckState.OK
    assert disk_check(config(), 10**15).state is CheckState.MISSING
    assert disk_check(config(), None).state is CheckState.UNKNOWN


# -- tasks


def test_tasks_are_counted_and_contamination_is_said(rows: Callable[..., str]) -> None:
    _, found = tasks_check(config())
    assert found.state is CheckState.OK
    assert "of arithmetic-train" in found.found
    known = stored_issues()[3].id
    tasks, found = tasks_check(config("--env", "swe_verified", "--tasks", rows("a__b-1", known)))
    assert tasks is not None
    assert found.found.startswith("2 of rows; CONTAMINATED: 1 of 2 training tasks are of SWE-Bench Verified: ")
    _, cleaned = tasks_check(
        config("--env", "swe_verified", "--tasks", rows("a__b-1", known), "--env.options", "{decontaminate = true}")
    )
    assert cleaned.found == "1 of rows; 1 left out, of SWE-Bench Verified"
    _, none = tasks_check(config("--env", "swe_verified", "--tasks", "none.jsonl"))
    assert (none.state, none.remedy) == (CheckState.MISSING, "--tasks FILE")
    _, none = tasks_check(config("--env", "nowhere"))
    assert "unknown environment 'nowhere'" in none.found


def test_an_environment_without_checks_of_its_own_is_made(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def seen(*words: str) -> list[tuple[str, str]]:
        return [(one.name, str(one.state)) for one in training_checks(config(*words))[5:]]

    assert seen("--env", "arithmetic") == [("environment", "ok")]
    assert seen("--env", "writing_style", "--env.options", '{judge = "openai"}') == [("environment", "MISSING")]
    assert seen("--env", "python_math", "--tasks", str(tmp_path / "none.jsonl")) == [], "said of the tasks already"
    words = ["--preset", "writing_quickstart", "--env.options", '{judge = "openai"}', "--out", str(tmp_path / "r")]
    assert main(["--env", "writing_style", *words]) == 2
    told = capsys.readouterr()
    assert "--judge-model NAME --judge-base URL" in told.err
    assert "imitation" not in told.out, "heard before minutes of imitation"
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_environment_is_heard_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--env", "nosuch"]) == 2
    assert "unknown environment 'nosuch'" in capsys.readouterr().err


def test_sglang_needs_a_python_to_start_it_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAO_GYM_WORKERS", str(tmp_path))

    def seen(*words: str) -> Check:
        return preflight.engine_check(config("--engine", "sglang", *words))

    assert seen().remedy.startswith("sao-gym workers install sglang")
    assert seen("--engine.sglang.python", str(tmp_path / "none")).state is CheckState.MISSING
    assert seen("--engine.sglang.python", sys.executable).state is CheckState.OK
    assert seen("--engine.sglang.urls", '["http://a:1"]').state is CheckState.UNKNOWN


def test_images_of_held_out_tasks_are_wanted_where_they_are_evaluated_on(
    rows: Callable[..., str], data_dir: Path
) -> None:
    options = f'{{backend = "local", data = "{data_dir}"}}'
    words = ("--env", "swe_verified", "--tasks", rows("a__b-1"), "--env.options", options, "--engine", "scripted")
    assert training_checks(config(*words))[-1].found == "1 of 1, unpacked folders"
    checks = training_checks(config(*words, "--evaluation.every", "5", "--evaluation.episodes", "3"))
    assert {one.name: one.found for one in checks}["held-out tasks"] == "3 of swe_verified"
    assert checks[-1].found.startswith("1 of 4 are folders with an unpacked root; missing swebench/sweb.eval")


@pytest.mark.parametrize(
    ("scaffold", "state", "words"),
    [
        ("shell", CheckState.OK, "bash and edit"),
        ("mini", CheckState.UNKNOWN, "mini has no environment yet; the run makes it first"),
        ("my.module:Agent", CheckState.UNKNOWN, "my.module:Agent"),
    ],
)
def test_who_works_is_said(
    scaffold: str, state: CheckState, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette")
    monkeypatch.setenv("SAO_GYM_WORKERS", str(tmp_path))
    found = agent_check(scaffold)
    assert found.state is state
    assert words in found.found
    assert found.remedy == ("sao-gym workers install mini" if scaffold == "mini" else "")


# -- together


@pytest.mark.parametrize("name", preset_names(TRAIN_PRESETS))
def test_every_preset_can_be_looked_at(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    if main(["--preset", name, "--dry-run"]) == 2:
        assert "there is no setting" in capsys.readouterr().err, "a preset of another command"
        return
    _, _, told = capsys.readouterr().out.partition("# what must be there\n")
    assert [line.split()[1] for line in told.splitlines()][:5] == ["model", "memory", "engine", "disk", "tasks"]
    assert [*tmp_path.iterdir()] == []


def test_an_environment_brings_its_own_checks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked: list[Any] = []

    def own(tasks: Any, options: Any) -> Sequence[Check]:
        asked.append((len(tasks), options))
        return [Check.missing("kitchen", "no kettle", "buy one")]

    register(
        "kitchen_test",
        entry_point="sao_gym.envs.arithmetic:ArithmeticEnv",
        tasks="sao_gym.tasks.arithmetic:arithmetic_tasks",
        preflight=own,
    )
    words = ["--env", "kitchen_test", "--env.options", "{pool = 64}", "--critic-init", "cold", "--engine", "scripted"]
    assert main([*words, "--dry-run"]) == 0
    assert "# kitchen  MISSING  no kettle -> buy one" in capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert "kitchen  MISSING  no kettle -> buy one" in said.out
    assert said.err == "sao-gym: error: 1 thing is missing (kitchen: buy one)\n"
    assert not (tmp_path / "run").exists()
    assert asked == [(64, {"pool": 64})] * 2


def test_a_scripted_engine_shows_our_own_tools(
    rows: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--env", "swe_verified", "--tasks", rows("a__b-1"), "--engine", "scripted", "--out", str(tmp_path / "run")]
    assert main(words) == 2
    assert "own tools do, and scaffold is 'openhands': give --env.options '{scaffold = " in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def run(folder: Path, *words: str) -> tuple["subprocess.CompletedProcess[str]", float]:
    """A training command in a process of its own, with no Hub and no engine; and its seconds."""
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": "http://127.0.0.1:1",
        "DOCKER_HOST": f"unix://{folder}/none.sock",
        "OMP_NUM_THREADS": "1",
    }
    began = time.monotonic()
    command = [sys.executable, "-m", "sao_gym.train", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=100, check=False
    )
    return done, time.monotonic() - began


def test_with_nothing_there_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "--env", "swe_verified")
    assert done.returncode == 2
    found = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    for name, words in (
        ("model", f"hf download {HUB_MODEL} --local-dir models/"),
        ("memory", "needed for 30.5 billion parameters"),
        ("tasks", "SWE-Gym/SWE-Gym"),
        ("containers", f"no Docker engine answers at unix://{tmp_path}/none.sock"),
    ):
        assert "MISSING" in found[name]
        assert words in found[name]
        assert f"{name}: " in done.stderr
    assert "sao-gym swe pull --tasks swe_gym" in found["images"]
    assert [*tmp_path.iterdir()] == []


def test_a_dry_run_says_the_same_and_the_papers_settings(tmp_path: Path) -> None:
    done, _ = run(tmp_path, "--env", "swe_verified", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    said = resolve(TrainConfig, preset=_written(tmp_path / "said.toml", done.stdout)).config
    assert (said.loss.policy, said.loss.eps_low, said.loss.eps_high) == ("dis", 0.8, 3.0)
    assert (said.rollout.max_turns, said.rollout.max_tokens_per_episode) == (300, 128 * 1024)
    assert (said.batch_size, said.group_size, said.env.tasks, said.model.hub) == (128, 1, "swe_gym", HUB_MODEL)
    assert "\n# containers" in done.stdout
    assert "\n# images" in done.stdout


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_benchmark_is_listed_in_time(tmp_path: Path, data_dir: Path) -> None:
    data = f'{{backend = "docker", data = "{data_dir}"}}'
    done, _ = run(tmp_path, "--env", "swe_verified", "--tasks", "swe_verified", "--env.options", data, "--dry-run")
    assert done.returncode == 0
    assert "500 of swe_verified; CONTAMINATED: 500 of 500 training tasks are of SWE-Bench Verified" in done.stdout
    assert "500 are needed; there is no engine to ask -> sao-gym swe pull --bench swe_verified" in done.stdout


@pytest.mark.alone
def test_it_is_all_said_within_ten_seconds(tmp_path: Path, data_dir: Path) -> None:
    data = f'{{backend = "docker", data = "{data_dir}"}}'
    for words in ((), ("--dry-run",), ("--tasks", "swe_verified", "--env.options", data)):
        _, seconds = run(tmp_path, "--env", "swe_verified", *words)
        assert seconds < 10, words


def test_what_fits_is_let_through(rows: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text("{}")
    header = json.dumps({"w": {"shape": [1000, 1000]}}).encode()
    (tmp_path / "m/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    words = ("--env", "swe_verified", "--tasks", rows("a__b-1"), "--env.options", '{backend = "local"}')
    checks = training_checks(config(*words, "--model", str(tmp_path / "m")))
    assert [one.name for one in checks] == [
        *("model", "memory", "engine", "disk", "tasks", "grader", "agent", "containers", "images"),
    ]
    assert [one for one in checks if one.is_missing and one.name not in ("grader", "containers")] == []
    folders = training_checks(config(*words[:3], rows("a__b-1", image=str(tmp_path / "none")), *words[4:]))
    assert folders[-1].found == f"0 of 1 are folders with an unpacked root; missing {tmp_path}/none"
