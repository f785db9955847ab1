"""Resume, first form: traps 13, 29 and 36, and the rules by which a folder goes back to a checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sao_gym.commands import composition
from sao_gym.commands.train import main
from sao_gym.config import resolve
from sao_gym.ledger import Ledger, RowStatus
from sao_gym.models import tiny_qwen3
from sao_gym.parquet import read_trajectories, write_trajectories
from sao_gym.runfolder import RunFolder
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.tokenizer import train_tokenizer
from sao_gym.trainer.checkpoint import OPTIMIZERS_FILE, RunState, find_checkpoints
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.files import row_uid, step_file
from sao_gym.trainer.resume import recovered
from sao_gym.trainer.runtime import Runtime
from sao_gym.trainer.survival import Survival

ROOT = Path(__file__).resolve().parents[2]
ENV = '''
from sao_gym.core import AgentEnv, Reply
from sao_gym.protocols import Task
from sao_gym.stream import Score


class Parity(AgentEnv):
    """Pays for an answer of even length: a random policy earns something now and then."""

    def __init__(self) -> None:
        super().__init__([Task(id=f"t{i}", prompt=f"{i}?") for i in range(11)])

    def respond(self, message):
        return Reply(is_final=True)

    def grade(self):
        passed = len(self.last_action.content) % 2 == 0
        return Score(value=float(passed), passed=passed)
'''


def words(folder: Path, *more: str) -> list[str]:
    """A small run: it trains the actor from the second batch on and keeps a checkpoint every second batch."""
    given = ["--env", f"{folder / 'parity.py'}:Parity", "--model", str(folder / "tiny"), "--critic-init", "cold"]
    given += ["--batch-size", "4", "--max-tokens", "6", "--engine.context-length", "128", "--critic.only-steps", "1"]
    given += ["--actor.lr", "1e-2", "--critic.lr", "1e-2", "--checkpoint.every", "2", "--checkpoint.keep", "9"]
    return [*given, "--rollout.max-in-flight", "8", *more]


LOCK_STEP = ("--staleness.max-staleness", "0", "--engine.deterministic", "--rollout.wall-clock-s", "null")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and an environment of its own, on disk."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "parity.py").write_text(ENV)
    tokenizer = train_tokenizer(["a?"] * 4, vocab_size=268)
    model = tiny_qwen3(vocab_size=len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=128)
    model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return folder


class Crash(BaseException):
    """The process ends here: nothing of the run may catch it."""


def crashed(monkeypatch: pytest.MonkeyPatch, step: int, command: list[str]) -> None:
    """Run the command; the process's end comes where the line of metrics of `step` would be written."""
    write = RunFolder.append_metrics

    def broken(self: RunFolder, record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise Crash
        write(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_metrics", broken)
        with pytest.raises(Crash):
            main(command)


def metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def history(path: Path) -> dict[int, list[Trajectory]]:
    """Rows by the step that trained them."""
    return {int(file.stem[5:]): read_trajectories(file) for file in sorted((path / "trajectories").iterdir())}


def require_one_history(path: Path, steps: int) -> None:
    """What must hold for a run that was cut and taken up again: no step and no row twice, none missing, none newer."""
    records, rows = metrics(path), history(path)
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert list(rows) == list(range(1, steps + 1))
    uids = [row.uid for step in rows.values() for row in step]
    assert len(uids) == len(set(uids)) == 4 * steps, "rows trained twice along the surviving history: 0"
    before = 0
    for record in records:
        for row in rows[record["step"]]:
            assert row.last_version is not None
            assert row.last_version <= before, "no token is of a version that was still to come (trap 29)"
        before = record["policy_version"]
    survived = Survival()
    for row in (row for batch in rows.values() for row in batch):
        survived.add(row, is_trained=True)
    counted = records[-1]["survival"]
    assert counted == survived.table(), "who survived is counted once, over all of the run's lives"
    ledger = Ledger(path / "ledger.sqlite")
    trained = {row.number: row for row in ledger.rows(RowStatus.TRAINED)}
    ledger.close()
    assert {row_uid(number) for number in trained} == set(uids)
    for step, batch in rows.items():
        for row in batch:
            kept = trained[int(row.uid[1:])]
            assert (kept.task_id, kept.attempt, kept.trained_at_step) == (row.task_id, row.attempt, step)


def test_a_run_that_was_cut_is_the_unbroken_one(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traps 13 and 36, bit by bit: in lock step and deterministic mode nothing at all may differ."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(words(made, *LOCK_STEP, "--steps", "7", "--out", str(whole))) == 0
    crashed(monkeypatch, 6, words(made, *LOCK_STEP, "--steps", "7", "--out", str(cut)))
    assert [record["step"] for record in metrics(cut)] == [1, 2, 3, 4, 5]
    lost = {row.uid for row in history(cut)[5]}
    assert main(["--resume", str(cut)]) == 0
    require_one_history(cut, 7)
    assert {row.uid for row in history(cut)[5]} == lost, "the rows of a lost step are trained again"
    for step in range(1, 8):
        assert [(r.uid, r.task_id, r.attempt, r.seed) for r in history(cut)[step]] == [
            (r.uid, r.task_id, r.attempt, r.seed) for r in history(whole)[step]
        ]
    for key in ("weight_hash", "reward_mean", "value_loss", "policy_loss", "actor_grad_norm", "critic_grad_norm"):
        assert [r[key] for r in metrics(cut)] == [r[key] for r in metrics(whole)], key
    assert len({r["weight_hash"] for r in metrics(whole)}) == 7, "the run does learn"


def test_an_asynchronous_run_that_was_cut(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    crashed(monkeypatch, 6, words(made, "--steps", "9", "--out", str(path)))
    before = Ledger(path / "ledger.sqlite")
    prompts = {row.number: (row.task_id, row.attempt) for row in before.rows()}
    assert before.rows(RowStatus.RUNNING), "episodes were in flight"
    before.close()
    assert main(["--resume", str(path)]) == 0
    require_one_history(path, 9)
    after = Ledger(path / "ledger.sqlite")
    assert {number: (after.row(number).task_id, after.row(number).attempt) for number in prompts} == prompts
    after.close()
    assert all(record["staleness_max"] <= 4 for record in metrics(path))


@pytest.mark.parametrize("preset", ["grpo", "running_mean_global"])
def test_an_arm_that_was_cut_is_the_unbroken_one(
    preset: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups stay whole, members of a group differ, and running means go on from the checkpoint's."""
    given = ["--preset", preset, "--env", f"{made / 'parity.py'}:Parity", "--model", str(made / "tiny")]
    given += ["--batch-size", "4", "--max-tokens", "6", "--engine.context-length", "128", "--actor.lr", "1e-2"]
    given += ["--checkpoint.every", "2", "--rollout.max-in-flight", "8", *LOCK_STEP, "--steps", "5"]
    size = 2 if preset == "grpo" else 1
    given += ["--group-size", str(size)] if size > 1 else []
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main([*given, "--out", str(whole)]) == 0
    crashed(monkeypatch, 4, [*given, "--out", str(cut)])
    assert main(["--resume", str(cut)]) == 0
    require_one_history(cut, 5)
    for key in ("weight_hash", "reward_mean", "advantage_mean", "policy_loss", "prompts", "actor_updates"):
        assert [r[key] for r in metrics(cut)] == [r[key] for r in metrics(whole)], key
    for record in metrics(whole):
        assert (record["prompts"], record["rows"]) == (4 // size, 4)
        assert record["value_loss"] is None
        assert record["actor_updates"] + record["actor_steps_skipped"] == (4 if preset == "grpo" else 1)
        assert (record["time_group_wait_s"] is None) == (size == 1)
    for batch in history(whole).values():
        if size > 1:
            groups = [row.group_id for row in batch]
            assert groups == [f"g{batch[i // size * size].uid[1:]}" for i in range(4)]
        assert len({(row.task_id, row.attempt) for row in batch}) == 4
    assert main(["--resume", str(whole), "--group-size", "4", "--allow-change"]) == 2, "the ledger's groups are fixed"


def test_both_optimisers_come_back(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    assert main(words(made, "--steps", "4", "--out", str(path))) == 0
    whole, _ = find_checkpoints(path / "checkpoints")
    state, checkpoint = whole[-1]
    saved = torch.load(checkpoint / OPTIMIZERS_FILE, weights_only=True)
    config = resolve(TrainConfig, preset=path / "config.toml").config
    with RunFolder.open_for_resume(path) as folder, composition.opened(config, folder, resume=True) as run:
        assert run.state == state
        assert (state.step, state.version) == (4, 3)
        assert run.parts.engine.version == 3
        learner = run.parts.learner
        for name, optimizer in (("actor", learner.actor_optimizer), ("critic", learner.critic_optimizer)):
            there = optimizer.state_dict()["state"]
            assert there.keys() == saved[name]["state"].keys()
            assert any(moments["exp_avg_sq"].any() for moments in there.values())
            for index, moments in saved[name]["state"].items():
                for key, value in moments.items():
                    assert torch.equal(there[index][key], value)


# -- the rules, on a ledger made by hand


def row_of(number: int, versions: list[int]) -> Trajectory:
    action = Segment.action(
        [1] * len(versions), logprobs=[-1.0] * len(versions), versions=versions, temperature=1.0, stop=StopReason.STOP
    )
    made = Trajectory(
        uid=row_uid(number),
        task_id=f"t{number}",
        env_id="e",
        attempt=0,
        streams=(TokenStream(segments=(Segment.observation([1]), action)),),
        outcome=Outcome.terminated(),
    )
    return made.scored(Score(value=1.0, passed=True))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "r") as made:
        (made.path / "trajectories").mkdir()
        yield made


def filled(rows: dict[int, tuple[RowStatus, list[int], int | None]], folder: RunFolder) -> Ledger:
    """A ledger with rows 1..n: state, versions, step that trained it. Their step files lie in the folder."""
    ledger = Ledger(":memory:")
    for number, (status, versions, step) in sorted(rows.items()):
        assert ledger.enqueue(f"t{number}", 0).number == number
        if versions:
            ledger.set_ready(number, row_of(number, versions))
        if step is not None:
            ledger.set_trained([number], step)
        if status in (RowStatus.RUNNING, RowStatus.SCORING):
            ledger.set_status(number, status)
    for step in {step for _, _, step in rows.values() if step is not None}:
        batch = [row_of(number, versions) for number, (_, versions, at) in rows.items() if at == step]
        write_trajectories(step_file(folder.path, step), batch)
        folder.append_metrics({"step": step})
    return ledger


def test_each_state_goes_where_the_rules_say(folder: RunFolder) -> None:
    """Traps 13 and 29."""
    trained, ready, running, scoring = RowStatus.TRAINED, RowStatus.READY, RowStatus.RUNNING, RowStatus.SCORING
    rows = {
        1: (trained, [0, 0], 1),
        2: (trained, [0, 1], 2),
        3: (trained, [1, 1], 3),  # after the checkpoint, with versions that it knows: ready again
        4: (trained, [1, 2], 3),  # after the checkpoint, with a version of the lost timeline: run again
        5: (ready, [1, 1], None),
        6: (ready, [1, 3], None),
        7: (running, [], None),
        8: (scoring, [], None),
    }
    ledger = filled(rows, folder)
    ledger.add_checkpoint(2, 1, "step_2")
    ledger.add_checkpoint(3, 2, "step_3")
    recovered(ledger, folder, RunState(step=2, version=1, weight_hash=""), batch_rows=2, max_staleness=1)
    states = {row.number: str(row.status) for row in ledger.rows()}
    assert states == {
        1: "trained",
        2: "trained",
        3: "ready",
        4: "queued",
        5: "ready",
        6: "queued",
        7: "queued",
        8: "queued",
    }
    assert ledger.trajectory(3).uid == "r3"
    assert ledger.row(3).trained_at_step is None
    assert [ledger.row(n).failures for n in (4, 6, 7, 8)] == [0] * 4, "a crash is no failure of an episode"
    assert sorted(path.name for path in (folder.path / "trajectories").iterdir()) == [
        "step_000001.parquet",
        "step_000002.parquet",
    ]
    assert [record["step"] for record in folder.read_metrics()] == [1, 2]


def test_rows_let_past_the_gate_are_run_again_and_take_no_other_with_them(folder: RunFolder) -> None:
    ledger = filled({1: (RowStatus.READY, [0], None), 2: (RowStatus.READY, [4], None)}, folder)
    recovered(ledger, folder, RunState(step=5, version=5, weight_hash=""), batch_rows=2, max_staleness=1)
    assert [row.status for row in ledger.rows()] == [RowStatus.QUEUED, RowStatus.READY]


def test_lost_critic_only_batches_leave_no_more_ready_rows_than_the_rule_allows(folder: RunFolder) -> None:
    """They took rows without raising V: given back together, the rows would be too many of one version."""
    rows: dict[int, Any] = {number: (RowStatus.TRAINED, [0], 1 + (number - 1) // 2) for number in range(1, 9)}
    ledger = filled(rows, folder)
    recovered(ledger, folder, RunState(step=0, version=0, weight_hash=""), batch_rows=2, max_staleness=1)
    assert [row.number for row in ledger.rows(RowStatus.READY)] == [1, 2, 3, 4], "the newest are run again"
    assert [row.number for row in ledger.rows(RowStatus.QUEUED)] == [5, 6, 7, 8]


def test_groups_are_taken_up_whole(folder: RunFolder) -> None:
    """The v0 of a group is that of its oldest row; a half-ready group counts with all its rows."""
    ledger = Ledger(":memory:")
    for n, firsts in enumerate([(3, 5), (4, None), (5, 5), (5, 5)]):
        group = ledger.enqueue_group(f"t{n}", (0, 1))
        for row, first in zip(group, firsts, strict=True):
            if first is None:
                ledger.set_status(row.number, RowStatus.RUNNING)
            else:
                ledger.set_ready(row.number, row_of(row.number, [first]))
    recovered(ledger, folder, RunState(step=5, version=5, weight_hash=""), batch_rows=2, max_staleness=1)
    states = [row.status for row in ledger.rows()]
    queued, ready = RowStatus.QUEUED, RowStatus.READY
    assert states[:2] == [queued, queued], "its oldest row is beyond the bound"
    assert states[2:4] == [ready, queued], "the missing row is run in its group"
    assert states[4:] == [ready, ready, queued, queued], "two rows at 4, two at 5: the newest group is too much"


# -- kill -9


KILLER = """
import os, signal, sys
from sao_gym.commands.train import main
from sao_gym.ledger import Ledger
from sao_gym.runfolder import RunFolder
from sao_gym.trainer import checkpoint, loop
owner = {"Ledger": Ledger, "RunFolder": RunFolder, "checkpoint": checkpoint, "loop": loop}[sys.argv[1]]
name, left, when = sys.argv[2], int(sys.argv[3]), sys.argv[4]
plain = getattr(owner, name)

def deadly(*args, **kwargs):
    global left
    left -= 1
    if left == 0 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = plain(*args, **kwargs)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, deadly)
main(sys.argv[5:])
"""


def killed(script: list[str]) -> int:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", *script], cwd=ROOT, env=environment, timeout=200).returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "call", "when"),
    [
        ("Ledger", "set_trained", 5, "before"),
        ("Ledger", "set_trained", 5, "after"),
        ("RunFolder", "append_metrics", 5, "after"),
        ("loop", "write_trajectories", 5, "after"),
        ("checkpoint", "_sync", 2, "before"),
        ("checkpoint", "save_critic", 2, "after"),
        ("Ledger", "add_checkpoint", 2, "before"),
        ("loop", "prune", 2, "before"),
        ("Ledger", "set_ready", 22, "before"),
        ("Ledger", "set_status", 21, "after"),
    ],
)
def test_kill_9_at_every_kind_of_moment(
    owner: str, name: str, call: int, when: str, made: Path, tmp_path: Path
) -> None:
    path = tmp_path / "r"
    start = words(made, "--steps", "8", "--out", str(path))
    assert killed([KILLER, owner, name, str(call), when, *start]) == -signal.SIGKILL
    assert not (path / "curves.png").exists()
    assert main(["--resume", str(path)]) == 0
    require_one_history(path, 8)


@pytest.mark.slow
def test_kill_9_while_it_takes_itself_up_again(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    start = words(made, "--steps", "8", "--out", str(path))
    assert killed([KILLER, "Ledger", "set_trained", "6", "after", *start]) == -signal.SIGKILL
    for owner, name in (("Ledger", "recover"), ("RunFolder", "rewind_metrics")):
        assert killed([KILLER, owner, name, "1", "after", "--resume", str(path)]) == -signal.SIGKILL
    assert main(["--resume", str(path)]) == 0
    require_one_history(path, 8)


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 6])
def test_kill_9_from_outside(step: int, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "r"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "sao_gym.train", *words(made, "--steps", "40", "--out", str(path))]
    with subprocess.Popen(start, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as running:
        limit = time.monotonic() + 120
        while not (path / "metrics.jsonl").exists() or len(metrics(path)) < step:
            assert time.monotonic() < limit
            assert running.poll() is None
            time.sleep(0.01)
        running.kill()
    assert main(["--resume", str(path)]) == 0
    require_one_history(path, 40)


def test_a_runtime_is_told_of_every_row_that_is_ready(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given back at a resume counts in the rule from the first moment on."""
    path = tmp_path / "r"
    crashed(monkeypatch, 4, words(made, "--steps", "6", "--out", str(path)))
    config = resolve(TrainConfig, preset=path / "config.toml").config
    with RunFolder.open_for_resume(path) as folder, composition.opened(config, folder, resume=True) as run:
        runtime: Runtime = run.parts.runtime
        ready = run.parts.ledger.rows(RowStatus.READY)
        assert len(ready) >= 4, "at least the lost step's rows"
        assert {row.number: row.first_version for row in ready} == {
            row.number: row.first_version for row in runtime.rule.rows()
        }
        assert runtime.rule.version == run.state.version == 1
