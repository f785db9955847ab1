"""`sao-gym explain` on a hand-made run folder: what it finds, what it says, what it refuses."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator

from sao_gym.clock import SystemClock
from sao_gym.commands.explain import main
from sao_gym.commands.recorded_run import RecordedRun
from sao_gym.config import dump, resolve
from sao_gym.ledger import Ledger, RowStatus
from sao_gym.models import tiny_qwen3
from sao_gym.parquet import write_trajectories
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.runfolder import RunFolder
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.text_codec import TextCodec
from sao_gym.trainer.checkpoint import RunState, save_checkpoint
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.config_rules import TRAIN_RULES
from sao_gym.trainer.critic import critic_from_model
from sao_gym.trainer.files import CHECKPOINTS, TRAJECTORIES, step_file
from sao_gym.trainer.learner import Learner

CODEC = TextCodec(byte_tokenizer())
TOKENS = len(CODEC.tokenizer)


def row(uid: str, version: int, *, logprob: float | None = None) -> Trajectory:
    ids = CODEC.encode("é 4<|end|>")
    given = -float(np.log(TOKENS)) if logprob is None else logprob
    said = Segment.action(
        ids,
        logprobs=[given] * len(ids),
        versions=[version] * len(ids),
        temperature=1.0,
        stop=StopReason.STOP,
    )
    prompt = Segment.observation(CODEC.encode("<|user|>2 + 2?<|end|><|assistant|>"))
    made = TokenStream(segments=(prompt, said, Segment.observation(CODEC.encode("ü?"))))
    bare = Trajectory(
        uid=uid, task_id="t", env_id="arithmetic", attempt=0, streams=(made,), outcome=Outcome.terminated()
    )
    return bare.scored(Score(value=1.0, passed=True, detail="right"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 trained the critic alone, steps 2 and 3 the actor; r5 is ready, r6 was dropped, r7 runs."""
    path = tmp_path_factory.mktemp("runs") / "first"
    start = tmp_path_factory.mktemp("start")
    model = tiny_qwen3(TOKENS, layers=1, hidden=16, heads=2, kv_heads=1)
    model.save_pretrained(start)
    CODEC.tokenizer.save_pretrained(start)
    words = ["--critic.init", "cold", "--critic.only-steps", "1", "--staleness.max-staleness", "1"]
    words += ["--model", str(start)]
    resolved = resolve(TrainConfig, overrides=words, rules=TRAIN_RULES)
    with RunFolder.create(path) as folder:
        folder.write_config(dump(resolved))
        for step, version in ((1, 0), (2, 1), (3, 2)):
            folder.append_metrics({"step": step, "policy_version": version})
        folder.append_metrics({"step": 3, "event": "evaluation", "heldout_success": 0.5})
    (path / TRAJECTORIES).mkdir()
    write_trajectories(step_file(path, 1), [row("r1", 0), row("r2", 0)])
    write_trajectories(step_file(path, 2), [row("r3", 0, logprob=-30.0)])
    write_trajectories(step_file(path, 3), [row("r4", 0)])
    ledger = Ledger(path / "ledger.sqlite")
    for number in range(7):
        ledger.enqueue("t", number)
    ledger.set_ready(5, row("r5", 2))
    ledger.set_dropped(6, "stale")
    ledger.set_status(7, RowStatus.RUNNING)
    ledger.close()
    learner = Learner(resolved.config, model, critic_from_model(model), Accelerator(cpu=True), SystemClock())
    for step, version in ((2, 1), (3, 2)):
        state = RunState(step=step, version=version, weight_hash="w")
        save_checkpoint(path / CHECKPOINTS, learner, CODEC.tokenizer, state)
    return path


@pytest.fixture
def ask(run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The command's exit code, output and complaint."""

    def ask(*words: str) -> tuple[int, str, str]:
        code = main([str(run), *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return ask


def test_plain_text(ask: Callable[..., Any]) -> None:
    code, out, _ = ask("r3")
    assert code == 0
    lines = out.split("\n")
    assert lines[0] == "episode r3 · task t · terminated · score 1: right · 5 action tokens of 17"
    assert "trained at step 2 by policy version 0" in lines[1]
    assert "checkpoint step_3, policy version 2" in lines[1]
    assert "5 high" in lines[2]
    head, prompt, *tokens, observation = lines[5:-1]
    assert head.split()[:4] == ["pos", "turn", "kind", "text"]
    assert prompt.split()[:3] == ["0-8", "-1", "observation"]
    assert "'<|user|>2 + 2?<|end|><|assistant|>'" in prompt
    assert [line.split()[0] for line in tokens] == [str(position) for position in range(9, 14)]
    assert all(" high " in line for line in tokens)
    assert tokens[-1].split()[-1] == "1"
    assert "'ü?'" in observation  # bytes that are half a character alone are whole together


def test_every_token_of_an_observation(ask: Callable[..., Any]) -> None:
    _, folded, _ = ask("r3")
    code, out, _ = ask("r3", "--all")
    assert code == 0
    assert len(out.splitlines()) == len(folded.splitlines()) - 2 + 9 + 3


def test_json_holds_everything(ask: Callable[..., Any]) -> None:
    code, out, _ = ask("r4", "--json")
    record = json.loads(out)
    assert (code, record["uid"], record["step"], record["policy_version"]) == (0, "r4", 3, 1)
    assert len(record["tokens"]) == 17
    actions = [token for token in record["tokens"] if token["kind"] == "action"]
    assert {token["fate"] for token in actions} == {"kept"}
    for token in actions:
        assert token["ratio"] == pytest.approx(np.exp(token["current_logprob"] - token["behavior_logprob"]), rel=1e-4)
    assert record["reward_sum"] == record["score"] == 1.0
    assert "ratio" not in record["tokens"][0]


def test_options_may_stand_anywhere(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", str(run), "--step", "2", "r4"]) == 0
    assert json.loads(capsys.readouterr().out)["weights"] == "checkpoint step_2, policy version 1"


def test_version_of_the_learner_at_the_step(run: Path) -> None:
    """Metrics hold the version after a step; a critic-only batch raises none."""
    recorded = RecordedRun.open(run)
    found = [recorded.find(uid) for uid in ("r1", "r2", "r3", "r4", "r5")]
    assert [(f.step, f.version, f.trains_actor) for f in found] == [
        (1, 0, False),
        (1, 0, False),
        (2, 0, True),
        (3, 1, True),
        (None, 2, True),
    ]


def test_a_ready_row_and_the_runs_start(ask: Callable[..., Any]) -> None:
    code, out, _ = ask("r5", "--step", "0")
    assert code == 0
    assert "ready, not trained yet by policy version 2" in out
    assert "the weights that the run started from, critic cold" in out


def test_a_table_on_a_terminal(ask: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = ask("r1")
    assert code == 0
    assert "such a batch trains the critic alone" in out
    assert "logp then" in out


def kept_files(run: Path) -> dict[str, int]:
    """Name and time of change of every file but SQLite's own, which come and go with a connection."""
    files = (path for path in run.rglob("*") if path.is_file() and not path.name.endswith(("-shm", "-wal")))
    return {str(path): path.stat().st_mtime_ns for path in files}


def test_what_cannot_be_explained_is_one_sentence(ask: Callable[..., Any], run: Path) -> None:
    before = kept_files(run)
    for words, said in (
        (["r33"], "holds no trajectory 'r33'; did you mean r3"),
        (["zzz"], "holds no trajectory 'zzz'; it holds 5, first r1, r2, r3, r4, r5"),
        (["r6"], "r6 of"),
        (["r6"], "is dropped (stale)"),
        (["r7"], "is running"),
        (["r3", "--step", "9"], "no whole checkpoint of step 9; whole ones: 2, 3, and 0 is the start"),
        (["r3", "--step", "x"], "--step takes the number of a checkpoint, got 'x'"),
        (["r3", "--verbose"], "no option --verbose"),
        ([], "got 1 words"),
    ):
        code, out, err = ask(*words)
        assert (code, out) == (2, ""), words
        assert said in err
        assert err.count("\n") == 1
    assert kept_files(run) == before


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "r1"]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_a_damaged_run_is_one_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "metrics.jsonl").write_text('{"step": 1\n{"step": 2}\n')
    assert main([str(broken), "r3"]) == 2
    assert "metrics.jsonl holds a line that is no JSON" in capsys.readouterr().err
    step_file(broken, 1).write_bytes(b"PAR1 no")
    assert main([str(broken), "r3"]) == 2
    assert "step_000001.parquet is not a trajectory file" in capsys.readouterr().err
    (broken / "config.toml").write_text("stepz = 3\n")
    assert main([str(broken), "r3"]) == 2
    assert "stepz" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_passed_over(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / CHECKPOINTS / "step_3" / "critic" / "critic.safetensors").unlink()
    assert main([str(broken), "r4"]) == 0
    assert "figures of checkpoint step_2" in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "RUN UID" in capsys.readouterr().out
