"""Small batches of random episodes, small policies of several architectures and a learner, for the tests of the trainer."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from sao_gym.clock import SystemClock
from sao_gym.models import tiny_llama, tiny_qwen3, tiny_qwen3_moe
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.trainer.actor import Actor, Inputs
from sao_gym.trainer.batch import Packed, pack
from sao_gym.trainer.config import (
    ActorConfig,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    StalenessConfig,
    TrainConfig,
)
from sao_gym.trainer.critic import critic_from_model
from sao_gym.trainer.learner import Learner, StepPlan
from sao_gym.trainer.plan import make_plan

VOCABULARY = 48


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def llama() -> Any:
    """SmolLM2's architecture: a tied Llama with grouped heads."""
    return tiny_llama(VOCABULARY, seed=3)


def sliding() -> Any:
    """One full layer and one that looks back over 4 tokens."""
    kinds = ["full_attention", "sliding_attention"]
    return tiny_qwen3(VOCABULARY, 2, 32, use_sliding_window=True, sliding_window=4, layer_types=kinds)


ARCHITECTURES: Mapping[str, Callable[..., Any]] = {
    "qwen3": lambda **options: tiny_qwen3(VOCABULARY, 2, 32, **{"seed": 1, **options}),
    "qwen3_moe": lambda **options: tiny_qwen3_moe(VOCABULARY, 2, 32, experts=4, intermediate=16, **options),
    "llama": llama,
    "sliding": sliding,
}


@pytest.fixture
def make_policy() -> Callable[..., Any]:
    """A random policy by the name of its architecture, whose next-token distributions are far from even."""

    def make(kind: str = "qwen3", **options: Any) -> Any:
        model = ARCHITECTURES[kind](**options)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8.0)
        return model

    return make


def _stream(rng: np.random.Generator, turns: int, version: int, ends_in_observation: bool) -> TokenStream:
    segments = [Segment.observation(rng.integers(0, VOCABULARY, rng.integers(3, 7)))]
    for turn in range(turns):
        n = int(rng.integers(1, 5))
        segments.append(
            Segment.action(
                rng.integers(0, VOCABULARY, n),
                logprobs=-np.log(VOCABULARY) + rng.normal(0, 0.05, n),
                versions=[version] * n,
                temperature=1.0,
                stop=StopReason.STOP,
            )
        )
        if ends_in_observation or turn < turns - 1:
            segments.append(Segment.observation(rng.integers(0, VOCABULARY, rng.integers(1, 4))))
    return TokenStream(segments=tuple(segments))


@pytest.fixture
def make_batch() -> Callable[..., list[Trajectory]]:
    """Episodes of random ids, recorded at about the log-probs of an untrained model."""

    def make(
        rows: int = 6,
        seed: int = 0,
        *,
        reward: float | None = None,
        turns: int = 2,
        streams: int = 1,
        version: int = 0,
        ends_in_observation: bool = True,
        outcome: Outcome | None = None,
    ) -> list[Trajectory]:
        rng = np.random.default_rng(seed)
        made = []
        for row in range(rows):
            parts = tuple(_stream(rng, turns, version, ends_in_observation) for _ in range(streams))
            value = float(rng.integers(0, 2)) if reward is None else reward
            episode = Trajectory(
                uid=f"r{row}",
                task_id=f"t{row}",
                env_id="test",
                attempt=0,
                streams=parts,
                outcome=outcome or Outcome.terminated(),
            )
            made.append(episode.scored(Score(value=value, passed=value > 0)))
        return made

    return make


@pytest.fixture
def make_config() -> Callable[..., TrainConfig]:
    """A configuration with toy learning rates; each argument holds changes of one section."""

    def make(
        *,
        actor: Mapping[str, Any] | None = None,
        critic: Mapping[str, Any] | None = None,
        loss: Mapping[str, Any] | None = None,
        learner: Mapping[str, Any] | None = None,
        staleness: Mapping[str, Any] | None = None,
    ) -> TrainConfig:
        toy = {"lr": 1e-2, "lr_warmup_steps": 0, "only_steps": 0}
        return TrainConfig(
            actor=ActorConfig(**{"lr": 1e-3, **(actor or {})}),
            critic=CriticConfig(**{**toy, **(critic or {})}),
            loss=LossConfig(**(loss or {})),
            learner=LearnerConfig(**(learner or {})),
            staleness=StalenessConfig(**(staleness or {})),
        )

    return make


@pytest.fixture
def make_learner(make_config: Callable[..., TrainConfig]) -> Callable[..., Learner]:
    """A learner on the CPU, with a critic that starts from its policy's backbone."""

    def make(config: TrainConfig | None = None, model: Any = None, critic: Any = None) -> Learner:
        policy = ARCHITECTURES["qwen3"]() if model is None else model
        config = config or make_config()
        value = critic_from_model(policy) if critic is None and config.loss.has_critic else critic
        return Learner(config, policy, value, Accelerator(cpu=True), SystemClock())

    return make


@pytest.fixture
def plan_of() -> Callable[..., StepPlan]:
    """The plan of one batch, made as the training loop makes it."""

    def make(trajectories: Sequence[Trajectory], config: TrainConfig, **changes: Any) -> StepPlan:
        settings = {"batch": 0, "actor_batches": 0, "version": 0, "trains_actor": True}
        return make_plan(trajectories, config, **{**settings, **changes})

    return make


@pytest.fixture
def logprobs_of() -> Callable[..., tuple[torch.Tensor, Packed]]:
    """Log-probs that an actor gives the action tokens of trajectories [A], and the packed batch."""

    def read(actor: Actor, trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, Packed]:
        packed = pack(trajectories)
        with torch.no_grad():
            logprobs, _ = actor(Inputs.of(packed, torch.device("cpu")))
        return logprobs, packed

    return read


@pytest.fixture
def recorded_at() -> Callable[..., list[Trajectory]]:
    """Trajectories with other behaviour log-probs [A] (and, if given, versions [A]), in packed order."""

    def record(trajectories: Sequence[Trajectory], logprobs: Any, versions: Any = None) -> list[Trajectory]:
        given = [float(x) for x in logprobs]
        ages = [0] * len(given) if versions is None else [int(v) for v in versions]
        made = []
        for trajectory in trajectories:
            streams = []
            for stream in trajectory.streams:
                segments = []
                for segment in stream.segments:
                    n = len(segment)
                    if segment.is_action:
                        segment = Segment.action(
                            segment.token_ids,
                            logprobs=given[:n],
                            versions=ages[:n],
                            temperature=1.0,
                            stop=StopReason.STOP,
                        )
                        given, ages = given[n:], ages[n:]
                    segments.append(segment)
                streams.append(TokenStream(segments=tuple(segments)))
            made.append(replace(trajectory, streams=tuple(streams)))
        return made

    return record


@pytest.fixture
def weights_of() -> Callable[[torch.nn.Module], dict[str, torch.Tensor]]:
    """Copies of all parameters by name."""
    return lambda module: {name: value.detach().clone() for name, value in module.named_parameters()}


@pytest.fixture(scope="session")
def crash() -> ModuleType:
    """benchmarks/crash.py as a module: it has a tiny run that trains on an environment of its own."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "crash.py"
    spec = importlib.util.spec_from_file_location("crash_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_model(crash: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy of that run, on disk."""
    folder = tmp_path_factory.mktemp("crash") / "model"
    crash.make_model(folder)
    return folder
