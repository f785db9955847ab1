"""`sao_gym.pretrain_critic`: fit a critic to a fixed policy's returns, before any RL.

Rolls the policy out, fits a critic that starts from it with nothing frozen, and writes a folder for
`train --critic-init` that says which policy, tasks and episodes it came from.

Example:
    python -m sao_gym.pretrain_critic --env arithmetic --model start --episodes 512 --out critic
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sao_gym import __version__
from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.collect import Success
from sao_gym.commands.base import run_command, take_options
from sao_gym.commands.policy import Trial, env_options
from sao_gym.commands.presets import CRITIC_PRESETS
from sao_gym.config import Resolved, dump, find_preset, help_text, preset_names, resolve, setting
from sao_gym.demonstrations import content_hash
from sao_gym.errors import ConfigError
from sao_gym.models import LoadedPolicy, copy_model, load_policy
from sao_gym.parquet import write_trajectories
from sao_gym.runfolder import RunFolder, new_folder
from sao_gym.stream import Trajectory
from sao_gym.trainer.config import EngineConfig, EnvConfig, ModelConfig, RolloutConfig
from sao_gym.trainer.critic import critic_from_model, save_critic
from sao_gym.trainer.value_pretraining import Fitted, ValuePretrainingConfig, pretrain_values
from sao_gym.weights import module_tensors, weight_hash

EPISODES_FILE = "episodes.parquet"


@dataclass(frozen=True, kw_only=True)
class PretrainCriticConfig:
    """Value pretraining on episodes of a fixed policy."""

    out: str = setting(help="new folder for the critic", alias="out")
    episodes: int = setting(512, help="episodes of the fixed policy", alias="episodes")
    seed: int = setting(0, help="seed of sampling, of the split and of the order", alias="seed")
    threads: int = setting(1, help="torch threads")
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    value: ValuePretrainingConfig = field(default_factory=ValuePretrainingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.episodes < 2 or self.threads < 1:
            raise ConfigError("episodes must be at least 2 and threads at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed}")
        if self.model.path is None:
            raise ConfigError("give the policy whose values are learnt: --model FOLDER")


@run_command
def main(argv: list[str]) -> None:
    """Entry point of `python -m sao_gym.pretrain_critic`."""
    options = take_options(argv, values=("preset",), switches=("help",))
    if options.has("help"):
        taken = (("--preset NAME", "a preset, or the path of a .toml file"),)
        print(help_text(PretrainCriticConfig, "python -m sao_gym.pretrain_critic", preset_names(CRITIC_PRESETS), taken))
        return
    preset = options.value("preset")
    resolved = resolve(
        PretrainCriticConfig, preset=find_preset(CRITIC_PRESETS, preset) if preset else None, overrides=options.rest
    )
    torch.set_num_threads(resolved.config.threads)
    policy = load_policy(resolved.config.model.path or "")
    with new_folder(Path(resolved.config.out)) as folder:
        _run(resolved, policy, folder)


def _run(resolved: Resolved[PretrainCriticConfig], policy: LoadedPolicy, folder: RunFolder) -> None:
    config, clock = resolved.config, SystemClock()
    started = clock.now()
    folder.write_config(dump(resolved))
    episodes, tasks_hash = asyncio.run(_episodes(config, policy))
    usable = [t for t in episodes if t.n_action and not t.outcome.is_error and t.score is not None]
    success = Success.of(episodes)
    print(f"{len(usable)} of {len(episodes)} episodes, {success.tokens:.0f} tokens each, success {success.rate:.3f}")
    write_trajectories(folder.file(EPISODES_FILE), usable)
    rolled_out = clock.now()
    critic = critic_from_model(policy.model)
    fitted = pretrain_values(critic, usable, config.value, seed=config.seed)
    for epoch, value in enumerate(fitted.explained_variance):
        folder.append_metrics({"step": epoch, "explained_variance": value})
        print(f"epoch {epoch:>3}: explained variance on held-out episodes {_shown(value)}")
    provenance = _provenance(config, policy, fitted, usable) | {
        "tasks_hash": tasks_hash,
        "success": success.rate,
        "rollout_s": round(rolled_out - started, 3),
        "fit_s": round(clock.now() - rolled_out, 3),
    }
    save_critic(critic, folder.path, provenance)
    folder.write_manifest(provenance)
    print(
        f"wrote {folder.path}: explained variance {_shown(provenance['explained_variance'])} after epoch {fitted.best}"
    )


def _shown(value: float | None) -> str:
    return "undefined (all episodes earned the same)" if value is None else f"{value:.3f}"


async def _episodes(config: PretrainCriticConfig, policy: LoadedPolicy) -> tuple[list[Trajectory], str]:
    chat = make_chat(policy.tokenizer, config.model.chat, describe_tools=config.model.describe_tools)
    trial = Trial(
        config.env,
        env_options(config.env),
        config.rollout,
        config.engine,
        copy_model(policy.model),
        chat,
        config.seed,
    )
    try:
        return await trial.episodes(config.episodes, name="pretrain"), trial.tasks.content_hash
    finally:
        await trial.close()


def _provenance(
    config: PretrainCriticConfig, policy: LoadedPolicy, fitted: Fitted, episodes: list[Trajectory]
) -> dict[str, Any]:
    return {
        "policy_weight_hash": weight_hash(module_tensors(policy.model)),
        "policy_version": 0,
        "env": config.env.name,
        "env_options": dict(config.env.options),
        "episodes": len(episodes),
        "episodes_hash": content_hash(episodes),
        "episodes_fitted": fitted.trained,
        "episodes_held_out": fitted.heldout,
        "seed": config.seed,
        "explained_variance": fitted.explained_variance[fitted.best],
        "explained_variance_curve": list(fitted.explained_variance),
        "best_epoch": fitted.best,
        "sao_gym": __version__,
    }
