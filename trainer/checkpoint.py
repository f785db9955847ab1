"""Checkpoints: a folder that is whole or does not count.

    checkpoints/step_50/  actor/ (an ordinary transformers folder)  critic/  optimizers.pt  state.json

The folder is written under another name, synced, and renamed; `state.json`, which lists every file with its size, is
written last. Old ones are removed only once a newer one is whole.
"""

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from sao_gym.errors import CheckpointError
from sao_gym.models import quiet
from sao_gym.trainer.critic import save_critic
from sao_gym.trainer.learner import Learner
from sao_gym.trainer.survival import SurvivalState

_NAME = re.compile(r"step_(\d+)$")
STATE_FILE = "state.json"
OPTIMIZERS_FILE = "optimizers.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands: batches done, policy version, hash of the policy's weights, and which rows survived so far."""

    step: int
    version: int
    weight_hash: str
    survival: SurvivalState = field(default_factory=SurvivalState)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A folder that looks like a checkpoint and is not whole."""

    path: Path
    why: str


def save_checkpoint(folder: Path, learner: Learner, tokenizer: Any, state: RunState) -> Path:
    """Write `folder/step_N`. Returns its path. Raises CheckpointError if it cannot be written; older ones stand."""
    try:
        return _save(folder, learner, tokenizer, state)
    except (OSError, RuntimeError, SafetensorError) as error:  # the writers of the three kinds of files
        shutil.rmtree(folder / f".step_{state.step}.partial", ignore_errors=True)
        raise CheckpointError(
            f"checkpoint step_{state.step} cannot be written in {folder} ({' '.join(str(error).split())}); the ones "
            "before it stand: make room, and go on with --resume"
        ) from error


def _save(folder: Path, learner: Learner, tokenizer: Any, state: RunState) -> Path:
    final = folder / f"step_{state.step}"
    partial = folder / f".step_{state.step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model: Any = learner.model
    with quiet():
        model.save_pretrained(partial / "actor")
    tokenizer.save_pretrained(partial / "actor")
    if learner.bare_critic:
        where = {"step": state.step, "version": state.version, "weight_hash": state.weight_hash}
        save_critic(learner.bare_critic, partial / "critic", {"kind": "checkpoint", **where})
    optimizers = {
        "actor": learner.actor_optimizer.state_dict(),
        "critic": learner.critic_optimizer.state_dict() if learner.bare_critic else None,
        "running_means": learner.row_advantages.state(),
        "torch_rng": torch.get_rng_state(),
    }
    torch.save(optimizers, partial / OPTIMIZERS_FILE)
    files = {
        str(path.relative_to(partial)): path.stat().st_size for path in sorted(partial.rglob("*")) if path.is_file()
    }
    (partial / STATE_FILE).write_text(json.dumps({**asdict(state), "files": files}, indent=1) + "\n", encoding="utf-8")
    _sync(partial)
    replaced = folder / f".step_{state.step}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if final.is_symlink() or final.is_file():
        final.unlink()
    elif final.exists():
        final.rename(replaced)
    partial.rename(final)
    _sync_folder(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        else:
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(folder: Path) -> RunState:
    """The state of a whole checkpoint. Raises CheckpointError saying what is missing."""
    try:
        data = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        files = data.pop("files")
        survival = SurvivalState(**data.pop("survival", {}))
        state = RunState(**data, survival=survival)
        sizes = {str(name): int(size) for name, size in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder} has no readable {STATE_FILE} ({type(error).__name__})") from error
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{folder} lacks {name}")
        if path.stat().st_size != size:
            raise CheckpointError(f"{folder / name} has {path.stat().st_size} bytes, was written with {size}")
    return state


def find_checkpoints(folder: Path) -> tuple[list[tuple[RunState, Path]], list[Skipped]]:
    """Whole checkpoints, oldest first (step numbers compared as numbers), and what was passed over and why."""
    whole, skipped = [], []
    paths = sorted(folder.glob("step_*"))
    named = [(int(match[1]), path) for path in paths if (match := _NAME.match(path.name))]
    skipped += [Skipped(path, "its name is not step_N") for path in paths if not _NAME.match(path.name)]
    for _, path in sorted(named):
        if not path.is_dir() or path.is_symlink():
            skipped.append(Skipped(path, "not a folder of its own"))
            continue
        try:
            whole.append((read_state(path), path))
        except CheckpointError as error:
            skipped.append(Skipped(path, str(error)))
    return whole, skipped


def prune(folder: Path, keep: int) -> None:
    """Remove all whole checkpoints but the newest `keep`, and leftovers of interrupted writes."""
    whole, _ = find_checkpoints(folder)
    for _, path in whole[: -max(keep, 1)]:
        shutil.rmtree(path)
    for pattern in (".step_*.partial", ".step_*.replaced"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


def load_optimizers(path: Path, learner: Learner) -> None:
    """Put both optimisers and torch's random state back. Raises CheckpointError if they do not fit."""
    try:
        saved = torch.load(path / OPTIMIZERS_FILE, weights_only=True)
        learner.actor_optimizer.load_state_dict(saved["actor"])
        if learner.bare_critic:
            learner.critic_optimizer.load_state_dict(saved["critic"])
        learner.row_advantages.load_state(saved.get("running_means", {}))
        torch.set_rng_state(saved["torch_rng"])
    except (OSError, EOFError, KeyError, ValueError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(
            f"the optimisers in {path} do not fit this run ({error}); resume with its own configuration"
        ) from error
