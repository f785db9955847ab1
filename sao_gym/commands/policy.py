"""A fixed policy and an environment, as the commands that need both put them together."""

from typing import Any

import torch

from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock
from sao_gym.collect import Success, collect, numbered
from sao_gym.commands.environments import Environments
from sao_gym.engines.local import EngineDeadlines, LocalEngine
from sao_gym.errors import ConfigError
from sao_gym.protocols import Chat, Clock, Engine, Sampling, WeightSource
from sao_gym.registry import make
from sao_gym.rollout import EnvPool, require_training_sampling
from sao_gym.stream import Trajectory
from sao_gym.trainer.config import EngineConfig, EnvConfig, RolloutConfig


def env_options(config: EnvConfig) -> dict[str, Any]:
    """Arguments for `registry.make`."""
    judge = {"judge_model": config.judge_model, "judge_base": config.judge_base}
    named = {"tasks": config.tasks} | judge
    return dict(config.options) | {name: value for name, value in named.items() if value}


def heldout_options(config: EnvConfig) -> dict[str, Any]:
    """Arguments that make the environment on held-out tasks. Raises ConfigError if it has none."""
    options = judged_at_once(env_options(config)) | {"split": "heldout"}
    try:
        make(config.name, **options).close()
    except ConfigError as error:
        raise ConfigError(
            f"environment {config.name!r} knows no held-out split ({error}); leave evaluation out (--eval-every, "
            "--trial.greedy, --evaluation.*)"
        ) from error
    return options


def judged_at_once(options: dict[str, Any]) -> dict[str, Any]:
    """The options of an evaluation: that feedback comes late or never is a matter of training alone."""
    return {name: value for name, value in options.items() if not name.startswith("feedback_")}


def make_budgets(config: RolloutConfig) -> Budgets:
    """The budgets of an episode."""
    return Budgets(
        max_tokens_per_turn=config.max_tokens_per_turn,
        max_tokens_per_episode=config.max_tokens_per_episode,
        max_turns=config.max_turns,
        wall_clock_s=config.wall_clock_s,
    )


def training_sampling(config: RolloutConfig, engine: Engine) -> Sampling:
    """How training samples. Raises EngineError for anything but the whole distribution."""
    sampling = Sampling(max_tokens=engine.context_length, temperature=config.temperature, top_p=config.top_p)
    require_training_sampling(sampling)
    return sampling


def make_engine(
    config: EngineConfig,
    rollout: RolloutConfig,
    model: Any,
    *,
    version: int = 0,
    clock: Clock | None = None,
    device: torch.device | None = None,
    deadline_s: float | None = None,
) -> LocalEngine:
    """An engine that owns `model`; its context is what was asked for, else the episode budget or the model's own limit."""
    if config.kv == "abort":
        raise ConfigError("engine.kv = abort is for SGLang servers; take in_place or recompute")
    limit = getattr(model.config, "max_position_embeddings", None)
    wanted = [length for length in (rollout.max_tokens_per_episode, limit) if length is not None]
    deadlines = EngineDeadlines(generate_s=deadline_s, publish_s=deadline_s) if deadline_s else EngineDeadlines()
    return LocalEngine(
        model.eval(),
        context_length=config.context_length or min(wanted, default=None),
        max_slots=config.slots,
        kv=config.kv,
        deterministic=config.deterministic,
        version=version,
        device=device,
        threads=config.threads,
        clock=clock,
        deadlines=deadlines,
    )


class Trial:
    """An engine and environments that try one policy after another. It owns `model`, which is served."""

    def __init__(
        self,
        env: EnvConfig,
        options: dict[str, Any],
        rollout: RolloutConfig,
        engine: EngineConfig,
        model: Any,
        chat: Chat,
        seed: int,
    ) -> None:
        if engine.kind != "local":
            raise ConfigError(f"engine.kind = {engine.kind} is for sao_gym.train alone; leave it out here")
        self.env, self.rollout, self.seed, self.clock = env, rollout, seed, SystemClock()
        self.in_flight = min(rollout.max_in_flight, engine.slots)
        self.environments = Environments(env.name, options, size=self.in_flight)
        self.tasks = self.environments.tasks
        self.engine = make_engine(engine, rollout, model)
        self.pool = EnvPool(
            self.environments.make, chat, make_budgets(rollout), context_length=self.engine.context_length
        )

    async def episodes(self, count: int, *, name: str, temperature: float | None = None) -> list[Trajectory]:
        """`count` episodes of the policy as it is, over the tasks in turn."""
        sampling = Sampling(
            max_tokens=self.engine.context_length,
            temperature=self.rollout.temperature if temperature is None else temperature,
        )
        return await collect(
            self.pool,
            self.engine,
            numbered(self.tasks, count, env_id=self.env.name, seed=self.seed, name=name),
            sampling=sampling,
            clock=self.clock,
            max_in_flight=self.in_flight,
        )

    async def run(
        self, source: WeightSource, version: int, episodes: int, *, temperature: float | None = None
    ) -> Success:
        """Success of these weights."""
        await self.engine.publish(source, version)
        return Success.of(await self.episodes(episodes, name=f"trial-{version}", temperature=temperature))

    async def close(self) -> None:
        """End engine and environments."""
        await self.pool.close()
        await self.environments.close()
        await self.engine.close()
