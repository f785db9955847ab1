"""`sao_gym.sft`: fine-tune a policy, or start a tiny one from nothing, by imitation of given episodes.

Learns from the environment's own demonstrations, a trajectory parquet or a JSON lines file of chats, on action tokens
only. Writes an ordinary transformers folder with tokenizer, `config.toml`, `metrics.jsonl` and `manifest.json`.

Example:
    python -m sao_gym.sft --env arithmetic --new qwen3_tiny --preset quickstart --out start
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from sao_gym import __version__
from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.collect import Success
from sao_gym.commands.base import run_command, take_options
from sao_gym.commands.environments import Environments
from sao_gym.commands.policy import Trial, env_options, heldout_options
from sao_gym.commands.presets import SFT_PRESETS
from sao_gym.config import Resolved, dump, find_preset, help_text, preset_names, resolve, setting
from sao_gym.conversation import require_token_records
from sao_gym.demonstrations import (
    content_hash,
    conversations,
    demonstrator,
    read_conversations,
    tokenized,
)
from sao_gym.errors import ConfigError
from sao_gym.messages import Message, ToolSpec
from sao_gym.models import copy_model, load_policy, quiet, tiny_qwen3, tiny_qwen3_moe
from sao_gym.own_chat import OwnChat
from sao_gym.parquet import read_trajectories
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.protocols import Chat, Task
from sao_gym.runfolder import RunFolder, new_folder
from sao_gym.stream import Trajectory
from sao_gym.tokenizer import train_tokenizer
from sao_gym.trainer.config import EngineConfig, EnvConfig, ModelConfig, RolloutConfig
from sao_gym.trainer.imitation import Imitation, ImitationConfig, row_order
from sao_gym.weights import ModuleWeights, module_tensors, weight_hash

NewModel = Literal["qwen3_tiny", "qwen3_moe_tiny"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is imitated."""

    file: str | None = setting(
        None,
        help="trajectories (.parquet) or chats (.jsonl with a list under messages); unset: the environment's "
        "demonstrations",
        alias="data",
    )
    demonstrations: int = setting(4096, help="demonstrations made", alias="demos")
    wrong_share: float = setting(
        0.0, help="share of demonstrations that are wrong on purpose, from 0 to 1", alias="demo-wrong-share"
    )

    def __post_init__(self) -> None:
        if self.demonstrations < 1 or not 0.0 <= self.wrong_share <= 1.0:
            raise ConfigError("data: demonstrations must be at least 1, wrong_share from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class NewModelConfig:
    """A policy from nothing: its shape, and the tokenizer learnt on the demonstrations' own text."""

    kind: NewModel | None = setting(None, help="qwen3_tiny or qwen3_moe_tiny, in place of --model", alias="new")
    layers: int = setting(2, help="layers")
    hidden: int = setting(128, help="width")
    heads: int = setting(4, help="attention heads, and half as many for keys and values")
    init_std: float = setting(0.07, help="standard deviation of new weights; with 0.02 copying is learnt far later")
    vocab_size: int = setting(1024, help="most entries of the vocabulary")


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """Success on held-out tasks while learning, sampled at temperature 1."""

    every: int | None = setting(None, help="steps between trials; null: none", alias="eval-every")
    after: int = setting(0, help="steps before the first trial")
    episodes: int = setting(128, help="episodes of a trial", alias="eval-episodes")
    stop_at_success: float | None = setting(
        None, help="stop at the first trial with at least this share of successes", alias="stop-at-success"
    )
    greedy: bool = setting(False, help="try the finished policy once more, greedily")

    def __post_init__(self) -> None:
        if self.episodes < 1 or (self.every is not None and self.every < 1):
            raise ConfigError("trial: every and episodes must be at least 1")
        if self.stop_at_success is not None and self.every is None:
            raise ConfigError("trial: stop_at_success needs --eval-every, or nothing is measured")


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Imitation of demonstrations, action tokens only."""

    out: str = setting(help="new folder for the policy", alias="out")
    steps: int = setting(200, help="optimiser steps, or fewer with --stop-at-success", alias="steps")
    batch_size: int = setting(32, help="episodes per step", alias="batch-size")
    seed: int = setting(0, help="seed of new weights, demonstrations, order and sampling", alias="seed")
    threads: int = setting(1, help="torch threads")
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    new: NewModelConfig = field(default_factory=NewModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sft: ImitationConfig = field(default_factory=ImitationConfig)
    trial: TrialConfig = field(default_factory=TrialConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_size < 1 or self.threads < 1:
            raise ConfigError("steps, batch_size and threads must be at least 1")
        if self.seed < 0:
            raise ConfigError(f"seed must be at least 0, got {self.seed}")
        if (self.model.path is None) == (self.new.kind is None):
            raise ConfigError("give either --model FOLDER or --new qwen3_tiny (or qwen3_moe_tiny)")
        if self.new.kind is not None and self.data.file is not None and self.data.file.endswith(".parquet"):
            raise ConfigError(
                "a new model needs text to learn its tokenizer from, and .parquet holds ids: give --model"
            )


@dataclass(frozen=True, eq=False, slots=True)
class _Start:
    """What imitation begins with."""

    model: Any
    tokenizer: Any
    chat: Chat
    trajectories: list[Trajectory]


@run_command
def main(argv: list[str]) -> None:
    """Entry point of `python -m sao_gym.sft`."""
    options = take_options(argv, values=("preset",), switches=("help",))
    if options.has("help"):
        taken = (("--preset NAME", "a preset, or the path of a .toml file"),)
        print(help_text(SftConfig, "python -m sao_gym.sft", preset_names(SFT_PRESETS), taken))
        return
    preset = options.value("preset")
    resolved = resolve(SftConfig, preset=find_preset(SFT_PRESETS, preset) if preset else None, overrides=options.rest)
    torch.set_num_threads(resolved.config.threads)
    with new_folder(Path(resolved.config.out)) as folder:
        asyncio.run(_run(resolved, folder))


async def _run(resolved: Resolved[SftConfig], folder: RunFolder) -> None:
    config, clock = resolved.config, SystemClock()
    started = clock.now()
    start = _start(config)
    print(_described(start))
    folder.write_config(dump(resolved))
    trial: Trial | None = None
    if config.trial.every is not None or config.trial.greedy:
        options = heldout_options(config.env)
        engine_model = copy_model(start.model)
        trial = Trial(config.env, options, config.rollout, config.engine, engine_model, start.chat, config.seed)
    try:
        facts = await _learn(config, start, trial, folder)
    finally:
        if trial is not None:
            await trial.close()
    with quiet():
        start.model.save_pretrained(folder.path)
    start.tokenizer.save_pretrained(folder.path)
    facts |= {
        "seconds": round(clock.now() - started, 3),
        "seed": config.seed,
        "data_hash": content_hash(start.trajectories),
        "trajectories": len(start.trajectories),
        "weight_hash": weight_hash(module_tensors(start.model)),
        "versions": {"sao_gym": __version__, "torch": torch.__version__},
    }
    folder.write_manifest(facts)
    print(
        f"wrote {folder.path} after {facts['steps']} steps and {facts['seconds']:.1f} s: weights {facts['weight_hash']}"
    )


async def _learn(config: SftConfig, start: _Start, trial: Trial | None, folder: RunFolder) -> dict[str, Any]:
    imitation = Imitation(start.model, config.sft, steps=config.steps)
    order = row_order(len(start.trajectories), batch_size=config.batch_size, steps=config.steps, seed=config.seed)
    facts: dict[str, Any] = {}
    for step, rows in enumerate(order, start=1):
        await asyncio.sleep(0)  # a Ctrl-C is heard between two steps; the loop turns it into a cancellation
        taken = imitation.step([start.trajectories[row] for row in rows])
        record: dict[str, Any] = {"step": step, "loss": taken.loss, "tokens": taken.tokens}
        record |= {"gradient_norm": taken.gradient_norm, "lr": taken.lr}
        if trial is not None and _is_due(step, config):
            success = await trial.run(ModuleWeights(start.model), step, config.trial.episodes)
            record["success"] = success.rate
            facts |= {"success": success.rate, "tokens_per_episode": success.tokens}
            print(_line(step, taken.loss, success))
        folder.append_metrics(record)
        facts |= {"steps": step, "final_loss": taken.loss}
        if (goal := config.trial.stop_at_success) is not None and record.get("success", 0.0) >= goal:
            break
    if trial is not None and config.trial.greedy:
        greedy = await trial.run(ModuleWeights(start.model), facts["steps"] + 1, config.trial.episodes, temperature=0.0)
        facts["greedy_success"] = greedy.rate
        print(f"greedy: success {greedy.rate:.3f} over {greedy.episodes} episodes")
    return facts


def _is_due(step: int, config: SftConfig) -> bool:
    every = config.trial.every
    if every is None:
        return False
    return step == config.steps or (step > config.trial.after and step % every == 0)


def _line(step: int, loss: float, success: Success) -> str:
    errors = f", {success.errors} failed" if success.errors else ""
    return (
        f"step {step:>5}: loss {loss:.3f}, success {success.rate:.3f} over {success.episodes} episodes{errors}, "
        f"{success.tokens:.0f} tokens and {success.turns:.1f} turns an episode"
    )


def _described(start: _Start) -> str:
    tokens = sum(trajectory.n_tokens for trajectory in start.trajectories)
    actions = sum(trajectory.n_action for trajectory in start.trajectories)
    parameters = sum(parameter.numel() for parameter in start.model.parameters())
    return (
        f"{parameters:,} parameters, {len(start.tokenizer)} tokens in the vocabulary; {len(start.trajectories)} episodes "
        f"of {tokens / len(start.trajectories):.0f} tokens, of which {actions / tokens:.0%} are learnt from"
    )


# -- where model and data come from


def _start(config: SftConfig) -> _Start:
    if config.new.kind is None:
        policy = load_policy(config.model.path or "")
        chat = make_chat(policy.tokenizer, config.model.chat, describe_tools=config.model.describe_tools)
        return _Start(policy.model, policy.tokenizer, chat, _trajectories(config, chat, policy.model))
    demonstrations = None if config.data.file else _demonstrations(config)
    # Bytes alone can say everything: what they say is the text from which the vocabulary is then learnt.
    bytes_chat = OwnChat(byte_tokenizer(), describe_tools=config.model.describe_tools)
    texts = [
        bytes_chat.decode_action(stream.token_ids)
        for trajectory in _written(config, bytes_chat, demonstrations)
        for stream in trajectory.streams
    ]
    tokenizer = train_tokenizer(texts, vocab_size=config.new.vocab_size)
    chat = OwnChat(tokenizer, describe_tools=config.model.describe_tools)
    model = _new_model(config.new, len(tokenizer), config.seed)
    return _Start(model, tokenizer, chat, _written(config, chat, demonstrations))


def _new_model(config: NewModelConfig, vocab_size: int, seed: int) -> Any:
    make_model = tiny_qwen3_moe if config.kind == "qwen3_moe_tiny" else tiny_qwen3
    return make_model(
        vocab_size,
        config.layers,
        config.hidden,
        heads=config.heads,
        kv_heads=max(config.heads // 2, 1),
        initializer_range=config.init_std,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class _Demonstrations:
    tools: tuple[ToolSpec, ...]
    conversations: list[tuple[Task, list[Message]]]


def _demonstrations(config: SftConfig) -> _Demonstrations:
    environments = Environments(config.env.name, env_options(config.env), size=1)
    made = conversations(
        demonstrator(config.env.name),
        environments.tasks,
        count=config.data.demonstrations,
        wrong_share=config.data.wrong_share,
        seed=config.seed,
    )
    return _Demonstrations(environments.tools, made)


def _written(config: SftConfig, chat: Chat, demonstrations: _Demonstrations | None) -> list[Trajectory]:
    if demonstrations is None:
        return read_conversations(Path(config.data.file or ""), chat)
    return [
        tokenized(
            messages,
            chat,
            demonstrations.tools,
            uid=f"demonstration-{index}",
            task_id=task.id,
            env_id=config.env.name,
        )
        for index, (task, messages) in enumerate(demonstrations.conversations)
    ]


def _trajectories(config: SftConfig, chat: Chat, model: Any) -> list[Trajectory]:
    path = config.data.file
    if path is None or not path.endswith(".parquet"):
        return _written(config, chat, None if path else _demonstrations(config))
    recorded = read_trajectories(Path(path))
    require_token_records(recorded, path)
    found = [t for t in recorded if t.n_action and not t.outcome.is_error]
    if not found:
        raise ConfigError(f"{path} holds no trajectory with action tokens; give one that a run wrote")
    largest = max(int(stream.token_ids.max()) for t in found for stream in t.streams)
    if largest >= model.config.vocab_size:
        raise ConfigError(
            f"{path} holds the id {largest}, {config.model.path} knows {model.config.vocab_size}: another tokenizer"
        )
    return found
