"""A run's learner, fed again from what the run recorded: the weights must be the same to the last bit at every step.

Nothing is sampled. The learner starts as the run's did; each batch is read from `trajectories/`, and the policy version
that learnt from it, and whether the actor was trained, from `metrics.jsonl`. What then differs is the learner.

Example:
    for step in replayed(learner, config, RecordedRun.read(Path("runs/first"))):
        print(step.number, step.is_same)
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao_gym.errors import RunFolderError
from sao_gym.parquet import read_trajectories
from sao_gym.runfolder import MANIFEST, METRICS
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.files import step_file
from sao_gym.trainer.learner import Learner
from sao_gym.trainer.plan import make_plan


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step as the run wrote it. `before`: the policy version that learnt."""

    number: int
    before: int
    trains_actor: bool
    weight_hash: str
    path: Path


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step done again."""

    number: int
    recorded: str
    found: str

    @property
    def is_same(self) -> bool:
        """Whether the weights are the run's, bit by bit."""
        return self.recorded == self.found


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a replay needs of a run folder."""

    start_hash: str
    ranks: int
    steps: tuple[RecordedStep, ...]

    @classmethod
    def read(cls, run: Path) -> "RecordedRun":
        """Raises RunFolderError if the folder holds no recorded training, or a part of it is missing."""
        try:
            manifest = json.loads((run / MANIFEST).read_text(encoding="utf-8"))
            lines = (run / METRICS).read_bytes().split(b"\n")[:-1]
            start, ranks = str(manifest["start_weight_hash"]), int(manifest["ranks"])
            records = [record for line in lines if "event" not in (record := json.loads(line))]
            steps = tuple(_steps(run, records))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RunFolderError(
                f"{run} holds no recorded training to replay ({type(error).__name__}: {error})"
            ) from error
        if missing := [step.path for step in steps if not step.path.is_file()]:
            raise RunFolderError(f"the run cannot be replayed: {missing[0]} is missing")
        if not steps:
            raise RunFolderError(f"{run} holds no step to replay: give the folder of a run that trained")
        return cls(start, ranks, steps)


def _steps(run: Path, records: list[dict[str, Any]]) -> Iterator[RecordedStep]:
    before = 0
    for record in records:
        number, after = int(record["step"]), int(record["policy_version"])
        yield RecordedStep(number, before, after > before, str(record["weight_hash"]), step_file(run, number))
        before = after


def replayed(learner: Learner, config: TrainConfig, run: RecordedRun) -> Iterator[ReplayedStep]:
    """Do each step again with `learner`, which stands where the run began, and say whether the weights agree."""
    for index, step in enumerate(run.steps):
        plan = make_plan(
            read_trajectories(step.path),
            config,
            batch=index,
            actor_batches=step.before,
            version=step.before,
            trains_actor=step.trains_actor,
            ranks=learner.world,
        )
        learner.step(plan)
        yield ReplayedStep(step.number, step.weight_hash, learner.weights().weight_hash)
