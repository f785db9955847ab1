"""A run's folder read from outside: its configuration, its trajectories, the networks of its checkpoints.

Invariant: nothing is written and nothing is locked, so a run that is still going on can be read.

Example:
    run = RecordedRun.open(Path("runs/first"))
    found = run.find("r17")
    networks = run.networks(step=None)
"""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sao_gym.config import resolve
from sao_gym.errors import CheckpointError, ConfigError, InvariantError, RunFolderError, TaskFileError
from sao_gym.ledger import LEDGER_FILE, Ledger, RowStatus
from sao_gym.models import load_policy
from sao_gym.parquet import read_trajectories
from sao_gym.runfolder import CONFIG, METRICS
from sao_gym.stream import Trajectory
from sao_gym.trainer.actor import Actor
from sao_gym.trainer.checkpoint import find_checkpoints
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.config_rules import TRAIN_RULES
from sao_gym.trainer.critic import Critic, critic_from_model, load_critic
from sao_gym.trainer.files import CHECKPOINTS, TRAJECTORIES, row_number, row_uid

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A recorded trajectory. `step` trained it, None while it waits; `version` is the learner's at that step."""

    trajectory: Trajectory
    step: int | None
    version: int
    trains_actor: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """Policy and critic of one moment of a run; `origin` says which."""

    actor: Actor
    critic: Critic
    tokenizer: Any
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """The folder of a run and the configuration that it was started with."""

    path: Path
    config: TrainConfig

    @classmethod
    def open(cls, path: Path) -> "RecordedRun":
        """Read a run's configuration. Raises RunFolderError."""
        if not (path / CONFIG).is_file():
            raise RunFolderError(f"{path} is not the folder of a run (no {CONFIG}); give the --out of sao_gym.train")
        try:
            config = resolve(TrainConfig, preset=path / CONFIG, rules=TRAIN_RULES).config
        except ConfigError as error:
            raise RunFolderError(f"{path} holds no training run that can be read ({error})") from error
        return cls(path=path, config=config)

    # -- trajectories

    def find(self, uid: str) -> Found:
        """A trajectory by its uid, trained or ready. Raises TaskFileError with the nearest uids."""
        uids: list[str] = []
        for step, path in self._step_files():
            here = _uids_of(path)
            if uid in here:
                return self._trained(read_trajectories(path)[here.index(uid)], step)
            uids += here
        if (self.path / LEDGER_FILE).is_file():
            ledger = Ledger(self.path / LEDGER_FILE)
            try:
                ready = [row_uid(row.number) for row in ledger.rows(RowStatus.READY)]
                if uid in ready:
                    return self._ready(ledger.trajectory(row_number(uid)))
                self._refuse_without_trajectory(ledger, uid)
            finally:
                ledger.close()
            uids += ready
        raise TaskFileError(f"{self.path} holds no trajectory {uid!r}; {_offer(uid, uids)}")

    def _step_files(self) -> list[tuple[int, Path]]:
        paths = (self.path / TRAJECTORIES).glob("step_*.parquet")
        numbered = ((path.stem.removeprefix("step_"), path) for path in paths)
        return sorted((int(number), path) for number, path in numbered if number.isdecimal())

    def _trained(self, trajectory: Trajectory, step: int) -> Found:
        """A line of metrics holds the version *after* its step."""
        trains_actor = step > self.config.critic_only_steps
        after = [int(record["policy_version"]) for record in self._metrics() if record["step"] == step]
        version = after[-1] - int(trains_actor) if after else trajectory.last_version or 0
        return Found(trajectory=trajectory, step=step, version=version, trains_actor=trains_actor)

    def _ready(self, trajectory: Trajectory) -> Found:
        """Explained as if the next batch held it."""
        steps = self._metrics()
        done, version = (int(steps[-1]["step"]), int(steps[-1]["policy_version"])) if steps else (0, 0)
        trains_actor = done >= self.config.critic_only_steps
        return Found(trajectory=trajectory, step=None, version=version, trains_actor=trains_actor)

    def _refuse_without_trajectory(self, ledger: Ledger, uid: str) -> None:
        try:
            row = ledger.row(row_number(uid))
        except (ValueError, InvariantError):
            return
        why = f" ({row.reason})" if row.reason else ""
        raise TaskFileError(
            f"{uid} of {self.path} is {row.status.value}{why}, and only ready and trained rows keep a trajectory; "
            "name one of those"
        )

    def _metrics(self) -> list[dict[str, Any]]:
        """The lines of steps; a last line that is not whole is left out."""
        path = self.path / METRICS
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        try:
            records = [json.loads(line) for line in lines if line.strip()]
        except ValueError as error:
            raise TaskFileError(f"{path} holds a line that is no JSON ({error}); mend or remove it") from error
        return [record for record in records if "policy_version" in record]

    # -- networks

    def networks(self, step: int | None) -> Networks:
        """Those of checkpoint `step`, of the newest whole one for None, or those the run started from for 0.

        A run without a checkpoint has only its start. Raises CheckpointError, ModelError.
        """
        whole, _ = find_checkpoints(self.path / CHECKPOINTS)
        if step == 0 or (step is None and not whole):
            return self._start()
        chosen = [(state, path) for state, path in whole if step in (None, state.step)]
        if not chosen:
            known = ", ".join(str(state.step) for state, _ in whole) or "none"
            raise CheckpointError(
                f"{self.path} has no whole checkpoint of step {step}; whole ones: {known}, and 0 is the start"
            )
        state, path = chosen[-1]
        policy = load_policy(path / "actor")
        critic, _ = load_critic(path / "critic", like=policy.model)
        return Networks(
            actor=Actor(policy.model.eval()),
            critic=critic.eval(),
            tokenizer=policy.tokenizer,
            origin=f"checkpoint {path.name}, policy version {state.version}",
        )

    def _start(self) -> Networks:
        model, init = self.config.model.path, self.config.critic.init
        if model is None:
            raise ConfigError(f"{self.path}/{CONFIG} names no model, so the run's start cannot be loaded")
        policy = load_policy(model)
        is_cold = init in (None, "cold")
        critic = critic_from_model(policy.model) if is_cold else load_critic(Path(str(init)), like=policy.model)[0]
        return Networks(
            actor=Actor(policy.model.eval()),
            critic=critic.eval(),
            tokenizer=policy.tokenizer,
            origin="the weights that the run started from" + (", critic cold: V = 0" if is_cold else ""),
        )


def _uids_of(path: Path) -> list[str]:
    try:
        uids: list[str] = pq.read_table(path, columns=["uid"]).column("uid").to_pylist()
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise TaskFileError(
            f"{path} is not a trajectory file of sao-gym ({error}); restore it or move it away"
        ) from error
    return uids


def _offer(uid: str, uids: list[str]) -> str:
    if not uids:
        return "it holds none yet"
    close = difflib.get_close_matches(uid, uids, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return f"it holds {len(uids)}, first {', '.join(uids[:_SHOWN])}"
