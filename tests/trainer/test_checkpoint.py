"""Checkpoints come back bit for bit, and one that is not whole is passed over by name."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from sao_gym.clock import SystemClock
from sao_gym.errors import CheckpointError
from sao_gym.models import load_policy
from sao_gym.tokenizer import train_tokenizer
from sao_gym.trainer.actor import Inputs
from sao_gym.trainer.batch import pack
from sao_gym.trainer.checkpoint import (
    OPTIMIZERS_FILE,
    STATE_FILE,
    RunState,
    find_checkpoints,
    load_optimizers,
    prune,
    read_state,
    save_checkpoint,
)
from sao_gym.trainer.critic import WEIGHTS_FILE, load_critic
from sao_gym.trainer.learner import Learner

TOKENIZER = train_tokenizer(["a b c"], vocab_size=300)


def state(step: int) -> RunState:
    return RunState(step=step, version=step, weight_hash=f"hash {step}")


def resumed(path: Path, config: Any) -> Learner:
    """A learner from a checkpoint, put together as a resumed run does it."""
    policy = load_policy(path / "actor")
    critic, _ = load_critic(path / "critic", like=policy.model)
    learner = Learner(config, policy.model, critic, Accelerator(cpu=True), SystemClock())
    load_optimizers(path, learner)
    return learner


def values(learner: Learner, batch: Any) -> torch.Tensor:
    inputs = Inputs.of(pack(batch), torch.device("cpu"))
    with torch.no_grad():
        read: torch.Tensor = learner.bare_critic(inputs, inputs.state_index)
    return read


def moments(optimizer: Any) -> list[torch.Tensor]:
    return [value for state in optimizer.state_dict()["state"].values() for value in state.values()]


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_resumed_run_goes_on_bit_for_bit(kind, tmp_path, make_policy, make_batch, make_config, make_learner, plan_of):
    """Case CK-04: critic values with the head, both optimisers' moments, and the next steps."""
    config = make_config(actor={"lr_warmup_steps": 5}, critic={"lr_warmup_steps": 8})
    learner = make_learner(config, make_policy(kind))

    def learn(one: Learner, steps: range) -> list[dict[str, Any]]:
        lines = []
        for i in steps:
            line = one.step(plan_of(make_batch(4, seed=i), config, batch=i, actor_batches=i)).metrics()
            lines.append({name: value for name, value in line.items() if not name.startswith("time_")})
        return lines

    learn(learner, range(3))
    path = save_checkpoint(tmp_path, learner, TOKENIZER, state(3))
    again = resumed(path, config)
    fixed = make_batch(5, seed=99)
    assert values(learner, fixed).std() > 0
    assert torch.equal(values(learner, fixed), values(again, fixed))
    assert torch.equal(learner.bare_critic.value_head.weight, again.bare_critic.value_head.weight)
    for one, other in (
        (learner.actor_optimizer, again.actor_optimizer),
        (learner.critic_optimizer, again.critic_optimizer),
    ):
        mine, theirs = moments(one), moments(other)
        assert len(mine) > 4
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert learner.weights().weight_hash == again.weights().weight_hash
    assert learn(learner, range(3, 6)) == learn(again, range(3, 6))
    assert learner.weights().weight_hash == again.weights().weight_hash
    assert torch.equal(values(learner, fixed), values(again, fixed))


@pytest.fixture
def save(make_learner: Callable[..., Learner]) -> Callable[[Path, int], Path]:
    """Write a checkpoint of a small learner under a step's number."""
    learner = make_learner()
    return lambda folder, step: save_checkpoint(folder, learner, TOKENIZER, state(step))


def test_what_a_checkpoint_holds(save, tmp_path):
    path = save(tmp_path, 50)
    assert path == tmp_path / "step_50"
    assert read_state(path) == state(50)
    listed = json.loads((path / STATE_FILE).read_text())["files"]
    found = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {STATE_FILE}
    assert set(listed) == found
    assert {"actor/model.safetensors", "actor/config.json", f"critic/{WEIGHTS_FILE}", OPTIMIZERS_FILE} <= found
    assert [p.name for p in tmp_path.iterdir()] == ["step_50"]
    load_policy(path / "actor")


def craft(save: Any, folder: Path) -> None:
    """The folder of case CK-01."""
    save(folder, 9)
    shutil.copytree(folder / "step_9", folder / "step_10")
    shutil.rmtree(folder / "step_10" / "critic")
    (folder / "step_100").mkdir()
    shutil.copytree(folder / "step_9", folder / "step_99.tmp")
    (folder / "step_200").write_text("a file")
    (folder / "latest").symlink_to("step_10")
    (folder / "step_300").symlink_to("step_9")


def test_what_is_not_whole_is_passed_over_by_name(save, tmp_path):
    """Case CK-01."""
    craft(save, tmp_path)
    whole, skipped = find_checkpoints(tmp_path)
    assert [(found.step, path.name) for found, path in whole] == [(9, "step_9")]
    reasons = {skip.path.name: skip.why for skip in skipped}
    assert set(reasons) == {"step_10", "step_100", "step_99.tmp", "step_200", "step_300"}
    assert "lacks critic" in reasons["step_10"]
    assert STATE_FILE in reasons["step_100"]
    assert "not a folder" in reasons["step_200"]
    assert "not a folder" in reasons["step_300"]
    assert "step_N" in reasons["step_99.tmp"]


def test_numbers_are_compared_as_numbers(save, tmp_path):
    """Case CK-01: 100 comes after 9."""
    save(tmp_path, 9)
    for step in (10, 100):
        path = tmp_path / f"step_{step}"
        shutil.copytree(tmp_path / "step_9", path)
        content = json.loads((path / STATE_FILE).read_text())
        (path / STATE_FILE).write_text(json.dumps({**content, "step": step}))
    assert [found.step for found, _ in find_checkpoints(tmp_path)[0]] == [9, 10, 100]
    prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_10", "step_100"]


def test_pruning_never_removes_the_only_whole_one(save, tmp_path):
    """Case CK-01: broken folders with higher numbers do not count as newer ones."""
    craft(save, tmp_path)
    (tmp_path / ".step_11.partial").mkdir()
    (tmp_path / ".step_9.replaced").mkdir()
    for keep in (1, 0):
        prune(tmp_path, keep)
        assert [found.step for found, _ in find_checkpoints(tmp_path)[0]] == [9]
    assert not list(tmp_path.glob(".step_*"))
    assert (tmp_path / "step_200").is_file()


@pytest.mark.parametrize("step", [10, 9])
def test_a_write_that_is_killed_leaves_the_old_one(step, save, tmp_path):
    """Case CK-01: kill -9 just before the folder gets its final name; the same number may be written again, too."""
    save(tmp_path, 9)
    child = os.fork()
    if not child:
        try:
            plain = Path.rename

            def rename(self: Path, target: Path) -> Path:
                if self.name.endswith(".partial"):
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(self, target)

            Path.rename = rename  # type: ignore[method-assign,assignment]
            save(tmp_path, step)
        finally:
            os._exit(7)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    left = {path.name for path in tmp_path.iterdir()}
    if step == 10:
        assert left == {"step_9", ".step_10.partial"}
        assert [found.step for found, _ in find_checkpoints(tmp_path)[0]] == [9]
    else:
        assert left == {".step_9.replaced", ".step_9.partial"}
        assert read_state(tmp_path / ".step_9.replaced") == state(9)
    save(tmp_path, step)
    prune(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {f"step_{step}"}


def test_a_file_of_another_size_is_named(save, tmp_path):
    path = save(tmp_path, 1)
    file = path / OPTIMIZERS_FILE
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"optimizers.pt has \d+ bytes, was written with \d+"):
        read_state(path)


@pytest.mark.parametrize("content", ["", "[]", "3", "{}", '{"files": {}}', '{"files": [], "step": 1, "version": 1}'])
def test_a_broken_state_file_is_one_sentence(content, tmp_path):
    (tmp_path / STATE_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=r"no readable state.json"):
        read_state(tmp_path)


def test_optimisers_of_another_configuration_are_refused(
    tmp_path, make_policy, make_batch, make_config, make_learner, plan_of
):
    config = make_config()
    learner = make_learner(config, make_policy())
    learner.step(plan_of(make_batch(3), config))
    path = save_checkpoint(tmp_path, learner, TOKENIZER, state(1))
    other = make_learner(make_config(critic={"train": "full"}), make_policy())
    with pytest.raises(CheckpointError, match="do not fit this run"):
        load_optimizers(path, other)
    (path / OPTIMIZERS_FILE).write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="do not fit this run"):
        load_optimizers(path, learner)
    (path / OPTIMIZERS_FILE).unlink()
    with pytest.raises(CheckpointError, match="do not fit this run"):
        load_optimizers(path, learner)
