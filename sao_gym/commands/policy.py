"""A fixed policy and an environment, as the commands that need both put them together."""

from typing import Any

import gymnasium

from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock
from sao_gym.collect import Success, collect, numbered
from sao_gym.engines.local import LocalEngine
from sao_gym.errors import ConfigError
from sao_gym.protocols import Chat, Sampling, TaskSet, WeightSource
from sao_gym.registry import make
from sao_gym.rollout import EnvPool
from sao_gym.stream import Trajectory
from sao_gym.trainer.config import EngineConfig, EnvConfig, RolloutConfig


def env_options(config: EnvConfig) -> dict[str, Any]:
    """Arguments for `registry.make`."""
    return dict(config.options) | ({"tasks": config.tasks} if config.tasks else {})


def heldout_options(config: EnvConfig) -> dict[str, Any]:
    """Arguments that make the environment on held-out tasks. Raises ConfigError if it has none."""
    options = env_options(config) | {"split": "heldout"}
    try:
        make(config.name, **options).close()
    except ConfigError as error:
        raise ConfigError(
            f"environment {config.name!r} knows no held-out split ({error}); leave --eval-every out"
        ) from error
    return options


def env_tasks(env: gymnasium.Env[Any, Any], config: EnvConfig) -> TaskSet:
    """The tasks of an environment that was made. Raises ConfigError if it holds none."""
    tasks: TaskSet | None = getattr(env.unwrapped, "tasks", None)
    if not tasks:
        raise ConfigError(f"environment {config.name!r} holds no tasks; give --tasks FILE")
    return tasks


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
        probe = make(env.name, **options)
        self.tasks = env_tasks(probe, env)
        probe.close()
        self.env, self.rollout, self.seed, self.clock = env, rollout, seed, SystemClock()
        self.in_flight = min(rollout.max_in_flight, engine.slots)
        self.engine = LocalEngine(
            model,
            context_length=engine.context_length,
            max_slots=engine.slots,
            kv=engine.kv,
            deterministic=engine.deterministic,
            threads=engine.threads,
        )
        budgets = Budgets(
            max_tokens_per_turn=rollout.max_tokens_per_turn,
            max_tokens_per_episode=rollout.max_tokens_per_episode,
            max_turns=rollout.max_turns,
            wall_clock_s=rollout.wall_clock_s,
        )
        self.pool = EnvPool(lambda: make(env.name, **options), chat, budgets, context_length=self.engine.context_length)

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
        await self.engine.close()
