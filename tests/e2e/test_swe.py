"""`--env swe_verified` as people run it, on a tiny repository: real sandboxes, real tests, real learner; a tiny model.

The set has two issues that are one and the same; one of them has the name of an issue of SWE-Bench Verified where the test
is about contamination.
"""

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sao_gym.envs.swe import SweEnv
from sao_gym.jsonl import write_jsonl
from sao_gym.models import tiny_qwen3
from sao_gym.parquet import read_trajectories
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.stream import Outcome
from sao_gym.tasks._swe_overlap import stored_issues
from sao_gym.tasks.swe import swe_tasks

ROOT = Path(__file__).resolve().parents[2]
LOCAL = ("--env.options", '{backend = "local"}')
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # several commands each, on a busy machine


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root folder of the tiny repository."""
    if not Path("/var/lib/dpkg").is_dir():
        pytest.skip("no Debian to make a root folder of")
    docker_image = pytest.importorskip("docker_image")
    sys.path.append(str(ROOT / "tests/envs"))
    import swe_instances

    folder = tmp_path_factory.mktemp("root")
    folder.chmod(0o755)
    with tarfile.open(folder / "packed.tar", "w") as archive:
        docker_image.pack(archive, docker_image.closure(docker_image.PACKAGES) - docker_image.UNUSED)
    with tarfile.open(folder / "packed.tar") as archive:
        archive.extractall(folder / "root", filter="fully_trusted")
    (folder / "packed.tar").unlink()
    (folder / "root/testbed").mkdir()
    made: Path = swe_instances.tiny_root(folder / "root", tmp_path_factory.mktemp("tiny"))
    return made


def tiny_set(tiny: Path | str, path: Path, *names: str) -> str:
    """A file of the tiny issue under these ids."""
    import swe_instances

    write_jsonl(path, [swe_instances.tiny_row(image=str(tiny)) | {"instance_id": name} for name in names])
    return str(path)


def command(name: str, *words: str, code: int = 0) -> str:
    """What a command says, seen to end with this exit code."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", f"sao_gym.{name}", *words]
    done = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def metrics(run: Path) -> Sequence[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_scripted_run_needs_no_model_and_learns_what_it_is_shown(tiny: Path, tmp_path: Path) -> None:
    tasks, run = tiny_set(tiny, tmp_path / "tiny.jsonl", "tiny__adder-1", "tiny__adder-2"), tmp_path / "r"
    short = ("--steps", "2", "--batch-size", "2", "--rollout.max-in-flight", "2", "--critic.only-steps", "1")
    command(
        "train", "--env", "swe_verified", "--tasks", tasks, *LOCAL, "--engine", "scripted", *short, "--out", str(run)
    )
    steps = metrics(run)
    assert [(step["reward_mean"], step["policy_version"], step["contaminated"]) for step in steps] == [
        (1.0, 0, False),
        (1.0, 1, False),
    ]
    rows = read_trajectories(run / "trajectories" / "step_000002.parquet")
    assert all(row.outcome == Outcome.terminated() and row.score is not None and row.score.passed for row in rows)
    assert all("return a + b" in row.info["swe"]["patch"] for row in rows)
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["contaminated"], manifest["tasks"]["count"], manifest["tasks"]["source"]) == ("", 2, tasks)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, tokenizer = tmp_path_factory.mktemp("model"), byte_tokenizer()
    tiny_qwen3(len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=8192).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_run_on_the_benchmark_says_so_everywhere(tiny: Path, tmp_path: Path, model: str) -> None:
    known = stored_issues()[0].id
    tasks, run = tiny_set(tiny, tmp_path / "tiny.jsonl", "tiny__adder-1", known), tmp_path / "r"
    short = ("--steps", "2", "--batch-size", "2", "--max-tokens", "16", "--max-turns", "2", "--critic.only-steps", "1")
    out = command(
        "train", "--env", "swe_verified", "--tasks", tasks, *LOCAL, "--model", model, *short, "--out", str(run)
    )
    sentence = f"1 of 2 training tasks are of SWE-Bench Verified: {known} (its id)"
    assert f"CONTAMINATED: {sentence}; what this run learns says nothing about that benchmark" in out
    assert json.loads((run / "manifest.json").read_text())["contaminated"] == sentence
    steps = metrics(run)
    assert [(step["step"], step["rows"], step["contaminated"]) for step in steps] == [(1, 2, True), (2, 2, True)]
    assert all(step["reward_mean"] == 0.0 for step in steps), "a model that knows nothing mends nothing"
    more = command("train", "--resume", str(run), "--steps", "3", "--allow-change")
    assert f"CONTAMINATED: {sentence}" in more
    assert [step["contaminated"] for step in metrics(run)] == [True] * 3


def test_an_evaluation_on_the_same_set_gives_the_report(tiny: Path, tmp_path: Path) -> None:
    tasks, out = tiny_set(tiny, tmp_path / "tiny.jsonl", "tiny__adder-1", "tiny__adder-2"), tmp_path / "result"
    call, done = SweEnv.demonstrate(swe_tasks(tasks)[0])
    said = json.dumps({"name": "bash", "arguments": dict(call.tool_calls[0].arguments)})
    turns = [f"<tool_call>{said}</tool_call>", done.content]
    write_jsonl(tmp_path / "said.jsonl", [{"task_id": "tiny__adder-1", "turns": turns}, "I do nothing."])
    words = ("--env", "swe_verified", "--tasks", tasks, *LOCAL, "--engine", "scripted", "--max-tokens", "4096")
    table = command("eval", *words, "--completions", str(tmp_path / "said.jsonl"), "--n", "2", "--out", str(out))
    assert "tiny" in table
    summary = json.loads((out / "results.json").read_text())["benchmarks"]["tiny"]["summary"]
    assert (summary["success"], summary["n_scored"], summary["n_error"]) == (0.5, 4, 0)
    assert summary["methods"] == {"swebench": 4}
    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(sample["task_id"], sample["passed"]) for sample in samples] == [
        ("tiny__adder-1", True),
        ("tiny__adder-1", True),
        ("tiny__adder-2", False),
        ("tiny__adder-2", False),
    ]
    assert "tiny__adder-1" in (out / "report.html").read_text()


@pytest.mark.docker
def test_in_containers_and_refused_while_the_image_is_missing(tiny: Path, tmp_path: Path) -> None:
    import swe_instances

    image = swe_instances.import_root(tiny, "sao-gym-tiny:latest")
    short = ("--engine", "scripted", "--steps", "1", "--batch-size", "1", "--critic.only-steps", "0")
    tasks, run = tiny_set("owner/none:1", tmp_path / "none.jsonl", "tiny__adder-1"), tmp_path / "r"
    words = ("--env", "swe_verified", "--env.options", '{backend = "docker"}', *short, "--out", str(run))
    told = command("train", *words, "--tasks", tasks, code=2)
    missing = [line for line in told.splitlines() if "MISSING" in line]
    assert [line.split()[0] for line in missing if not line.startswith("disk")] == ["images"]
    assert f"missing owner/none:1 -> sao-gym swe pull --tasks {tasks}" in missing[0]
    assert not run.exists()
    command("train", *words, "--tasks", tiny_set(image, tmp_path / "tiny.jsonl", "tiny__adder-1"))
    assert [step["reward_mean"] for step in metrics(run)] == [1.0]
