"""What a run can be told. Each field says whether its default is the paper's or ours (docs/paper.md).

Sections are dataclasses; `--actor.lr 1e-4` sets `actor.lr`, and the fields people need most have a short flag.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from sao_gym.config import setting
from sao_gym.errors import ConfigError
from sao_gym.stream import Credit
from sao_gym.trainer.feedback_config import ENV as FEEDBACK_ENV
from sao_gym.trainer.feedback_config import FeedbackConfig

AdvantageKind = Literal[
    "critic", "group", "leave_one_out", "global_leave_one_out", "running_mean_prompt", "running_mean_global"
]
WINDOWS = {"running_mean_prompt": 8, "running_mean_global": 128}
"""Rewards in a running mean where `loss.window` is unset: the paper's."""


def _at_least(section: str, minimum: float, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value < minimum:
            raise ConfigError(f"{section}{name} = {value}: give at least {minimum:g}")


def _above_0(section: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ConfigError(f"{section}{name} = {value}: give a number above 0")


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Which environment, on which tasks."""

    name: str = setting("arithmetic", help="registered name, module:Class or file.py:Class", source="ours", alias="env")
    tasks: str | None = setting(
        None,
        help="task file (.jsonl, .parquet or .csv); unset: the environment's own tasks",
        source="ours",
        alias="tasks",
    )
    options: dict[str, Any] = setting({}, help="keyword arguments for the environment", source="ours")
    judge_model: str | None = setting(
        None, help="model that judges, where the environment has a judge behind an API", alias="judge-model"
    )
    judge_base: str | None = setting(None, help="URL of the API that judges (OpenAI-compatible)", alias="judge-base")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where the policy comes from."""

    path: str | None = setting(
        None, help="folder of a transformers checkpoint (or of a .gguf)", source="ours", alias="model"
    )
    hub: str | None = setting(
        None, help="checkpoint that a preset is for, by its name on the Hub; said by --dry-run, fetched by nothing"
    )
    chat: Literal["auto", "own", "renderer", "template"] = setting(
        "auto", help="how messages become ids: auto, own, renderer or template", source="ours"
    )
    start: str | None = setting(
        None, help="imitation preset (sao_gym.sft) that makes a tiny policy first where no model is given"
    )
    describe_tools: bool | None = setting(
        None, help="our own chat lists the tools in the system prompt; unset: as the checkpoint was made"
    )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How episodes are sampled, and their budgets."""

    temperature: float = setting(1.0, help="sampling temperature", source="paper")
    top_p: float = setting(
        1.0, help="must be 1 in training: log-probs are those of the whole distribution", source="paper"
    )
    max_turns: int | None = setting(50, help="most turns of an episode", source="paper", alias="max-turns")
    max_tokens_per_turn: int | None = setting(None, help="most tokens of one turn", source="ours", alias="max-tokens")
    max_tokens_per_episode: int | None = setting(
        131072, help="most tokens of an episode, prompt and observations included", source="paper"
    )
    wall_clock_s: float | None = setting(3600.0, help="most seconds of an episode", source="ours")
    max_in_flight: int = setting(64, help="most episodes at a time", source="ours")
    failure_retries: int = setting(3, help="tries of an episode whose infrastructure failed", source="ours")
    failures_in_a_row: int | None = setting(
        None, help="lost episodes in a row that end the run; unset: two batches of them, at least 8", source="ours"
    )
    failure_share: float = setting(
        0.75, help="share of lost ones among the last 8 batches of episodes that ends the run; 1: never", source="ours"
    )

    def __post_init__(self) -> None:
        _at_least(
            "rollout.",
            1,
            max_in_flight=self.max_in_flight,
            max_turns=self.max_turns,
            max_tokens_per_turn=self.max_tokens_per_turn,
            max_tokens_per_episode=self.max_tokens_per_episode,
        )
        _at_least("rollout.", 0, failure_retries=self.failure_retries)
        _at_least("rollout.", 1, failures_in_a_row=self.failures_in_a_row)
        if not 0 <= self.failure_share <= 1:
            raise ConfigError(f"rollout.failure_share = {self.failure_share}: give a share from 0 to 1")
        _above_0("rollout.", wall_clock_s=self.wall_clock_s)
        if self.temperature <= 0:
            raise ConfigError(f"rollout.temperature = {self.temperature}: training samples, so give a number above 0")
        if self.top_p != 1.0:
            raise ConfigError(
                f"rollout.top_p = {self.top_p}: training needs 1, for the ratio divides by log-probs of the whole distribution"
            )


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    """SGLang servers: those at `urls`, else as many as asked for, started with the run and ended with it."""

    urls: list[str] = setting(
        [],
        help="running servers to attach to, or a router in front of them; empty: the run starts its own",
        source="ours",
    )
    servers: int = setting(1, help="servers that the run starts", source="ours")
    python: str | None = setting(
        None, help="python of an SGLang environment; unset: the one that sao-gym workers install sglang made"
    )
    gpus: list[int] = setting([], help="GPUs of the servers, shared out evenly; empty: what each server finds")
    args: list[str] = setting([], help="further arguments for sglang.launch_server, one word an item", source="ours")
    transport: Literal["disk", "tensor", "distributed"] = setting(
        "disk",
        help="how weights travel: over a folder that all see, over this machine's memory, or over a process group",
    )
    folder: str | None = setting(None, help="folder of the weights for transport = disk; unset: in the run's own")
    host: str = setting("127.0.0.1", help="this machine's address as servers see it, for transport = distributed")
    backend: Literal["gloo", "nccl"] = setting("gloo", help="backend of the process group")
    bucket_mb: int = setting(512, help="megabytes of weights that travel at a time", source="ours")
    start_s: float = setting(600.0, help="longest wait for a server to be ready", source="ours")

    def __post_init__(self) -> None:
        _at_least("engine.sglang.", 1, servers=self.servers, bucket_mb=self.bucket_mb)
        _above_0("engine.sglang.", start_s=self.start_s)
        if len(self.gpus) % self.servers:
            raise ConfigError(
                f"engine.sglang.gpus = {self.gpus} cannot be shared out evenly over engine.sglang.servers = {self.servers}"
            )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What samples the tokens."""

    kind: Literal["local", "scripted", "sglang"] = setting(
        "local",
        help="local: transformers inside this process; scripted: the same, but it says what it is told; sglang: servers",
        source="ours",
        alias="engine",
    )
    completions: str | None = setting(
        None, help="what a scripted engine says, turn by turn; unset: what the environment demonstrates", source="ours"
    )
    slots: int = setting(32, help="requests decoded side by side", source="ours")
    context_length: int | None = setting(
        None,
        help="most tokens of a request; unset: the model's own limit or the episode budget",
        source="ours",
    )
    kv: Literal["in_place", "recompute", "abort"] = setting(
        "in_place",
        help="what becomes of the KV cache at a publication; abort (sglang alone): requests come back and are sent again",
        source="ours",
    )
    deterministic: bool = setting(
        False, help="one request per forward pass: results do not depend on their company", source="ours"
    )
    threads: int = setting(1, help="torch threads of the engine", source="ours")

    probe_tolerance: float = setting(
        1e-3, help="largest difference of a log-prob between engine and learner after a publication", source="ours"
    )
    canary_tokens: int = setting(
        512, help="length of the row that engine and learner both score after each publication; 0: none", source="ours"
    )
    parity_warning: float = setting(
        0.02, help="mean difference of a log-prob on the canary from which on the run says what to do", source="ours"
    )
    sglang: SGLangConfig = field(default_factory=SGLangConfig)

    def __post_init__(self) -> None:
        _at_least("engine.", 1, slots=self.slots, context_length=self.context_length, threads=self.threads)
        _at_least("engine.", 0, canary_tokens=self.canary_tokens)
        _above_0("engine.", probe_tolerance=self.probe_tolerance, parity_warning=self.parity_warning)
        if self.kv == "abort" and self.kind != "sglang":
            raise ConfigError(f"engine.kv = abort is for engine.kind = sglang, not for {self.kind}")


@dataclass(frozen=True, kw_only=True)
class StalenessConfig:
    """How old a trained row may be."""

    max_staleness: int = setting(4, help="policy versions between a row's first token and its training", source="ours")
    on_stale: Literal["wait", "mask", "drop"] = setting(
        "mask", help="what happens to rows that hold the gate shut", source="ours"
    )
    stale_grace_s: float = setting(60.0, help="seconds that the gate may be shut before on_stale acts", source="ours")

    def __post_init__(self) -> None:
        _at_least("staleness.", 0, max_staleness=self.max_staleness, stale_grace_s=self.stale_grace_s)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with float32 master weights."""

    lr: float = setting(1e-6, help="learning rate", source="paper")
    lr_warmup_steps: int = setting(0, help="batches over which the learning rate rises to lr", source="ours")
    beta1: float = setting(0.9, help="AdamW beta 1", source="ours")
    beta2: float = setting(0.95, help="AdamW beta 2", source="ours")
    eps: float = setting(1e-8, help="AdamW epsilon", source="ours")
    weight_decay: float = setting(0.0, help="AdamW weight decay", source="ours")
    grad_clip: float | None = setting(1.0, help="largest gradient norm; null: no clipping", source="ours")

    def __post_init__(self) -> None:
        _at_least(
            "",
            0,
            lr=self.lr,
            lr_warmup_steps=self.lr_warmup_steps,
            weight_decay=self.weight_decay,
            eps=self.eps,
        )
        for name in ("lr", "weight_decay", "eps"):
            if math.isinf(getattr(self, name)):
                raise ConfigError(f"{name} = inf: give a finite number")
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise ConfigError(f"beta1 = {self.beta1}, beta2 = {self.beta2}: give numbers from 0 to below 1")
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ConfigError(f"grad_clip = {self.grad_clip}: give a number above 0, or null for no clipping")


@dataclass(frozen=True, kw_only=True)
class ActorConfig(OptimizerConfig):
    """The policy's optimiser."""

    updates_per_batch: int = setting(
        1,
        help="optimiser steps per batch, each on its share of the rows; the policy version rises by one",
        source="ours",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("actor.", 1, updates_per_batch=self.updates_per_batch)


@dataclass(frozen=True, kw_only=True)
class CriticConfig(OptimizerConfig):
    """The value network and its schedule."""

    lr: float = setting(5e-6, help="learning rate", source="paper")
    lr_warmup_steps: int = setting(10, help="batches over which the learning rate rises to lr", source="ours")
    updates: int = setting(2, help="K: critic updates per batch", source="paper")
    only_steps: int = setting(
        10, help="first batches that train the critic alone; they raise no policy version", source="ours"
    )
    advantage_values: Literal["pre", "post"] = setting(
        "pre", help="advantages from the values read before, or after, the critic's passes"
    )
    train: str | list[str] = setting(
        "mlp_only", help="mlp_only, all_but_attention, full, or regular expressions on names", source="paper"
    )
    init: str | None = setting(
        None,
        help="folder of sao_gym.pretrain_critic, or the word cold for a new head",
        source="ours",
        alias="critic-init",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least("critic.", 1, updates=self.updates)
        _at_least("critic.", 0, only_steps=self.only_steps)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """The objective: DIS on skip-observation GAE."""

    advantage: AdvantageKind = setting(
        "critic", help="critic: GAE on learnt values; the others compare rewards and have no critic", source="paper"
    )
    group_std: Literal["population", "sample", "none"] = setting(
        "population", help="deviation that advantage = group divides by", source="ours"
    )
    window: int | None = setting(
        None, help="rewards in a running mean; unset: 8 of a prompt, 128 of all prompts", source="ours"
    )
    policy: Literal["dis", "ppo", "cispo", "icepop", "trm"] = setting("dis", help="policy loss", source="paper")
    eps_low: float = setting(0.3, help="keeps ratios above 1 - eps_low", source="paper")
    eps_high: float = setting(5.0, help="keeps ratios below 1 + eps_high", source="paper")
    ratio_reference: Literal["rollout", "proximal", "synced"] = setting(
        "rollout",
        help="denominator of the ratio: what the engine recorded, or log-probs of the weights that the batch found "
        "(proximal), or that were published last (synced: the same ones)",
        source="ours",
    )
    detach_ratio: bool = setting(True, help="no gradient through the ratio", source="ours")
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = setting(
        "token_mean", help="how token losses are averaged over the global batch", source="ours"
    )
    gamma: float = setting(1.0, help="discount per action token", source="ours")
    alpha: float = setting(1.5, help="lambda = 1 - 1/(alpha l)", source="paper")
    fixed_lambda: float | None = setting(None, help="one lambda for all rows; unset: by length", source="ours")
    lambda_length: Literal["actions", "all_tokens", "turns"] = setting("actions", help="what l counts", source="ours")
    truncation: Literal["terminal", "bootstrap", "drop"] = setting(
        "terminal", help="how a budget's end is valued", source="ours"
    )
    credit: Credit = setting("chain", help="how several streams of one episode share its score", source="ours")
    whiten: bool = setting(False, help="whiten advantages over the batch", source="ours")

    def __post_init__(self) -> None:
        _at_least("loss.", 0, eps_low=self.eps_low, eps_high=self.eps_high, gamma=self.gamma)
        _at_least("loss.", 1, window=self.window)
        _above_0("loss.", alpha=self.alpha)
        if self.fixed_lambda is not None and not 0 <= self.fixed_lambda <= 1:
            raise ConfigError(f"loss.fixed_lambda = {self.fixed_lambda}: give a number from 0 to 1")
        if self.policy == "dis" and self.ratio_reference != "rollout":
            raise ConfigError(
                f"loss.ratio_reference = {self.ratio_reference}: DIS divides by what the engine recorded; leave it at "
                "rollout, or take another loss.policy"
            )
        if self.truncation == "bootstrap" and not self.has_critic:
            raise ConfigError(
                f"loss.truncation = bootstrap reads the critic's values, and with loss.advantage = {self.advantage} "
                "there is no critic; take terminal or drop"
            )

    @property
    def has_critic(self) -> bool:
        """Whether advantages come from a value network; the arms that compare rewards make none."""
        return self.advantage == "critic"


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """How the networks are run."""

    micro_batch_tokens: int = setting(16384, help="packed tokens of one forward pass; changes no result", source="ours")
    precision: Literal["no", "bf16"] = setting("no", help="compute type; master weights stay float32", source="ours")
    gradient_checkpointing: bool = setting(False, help="recompute activations in the backward pass", source="ours")
    threads: int = setting(1, help="torch threads of the learner", source="ours")

    def __post_init__(self) -> None:
        _at_least("learner.", 1, micro_batch_tokens=self.micro_batch_tokens, threads=self.threads)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run can be taken up again."""

    every: int = setting(50, help="batches between checkpoints; the last batch always gets one", source="ours")
    keep: int = setting(2, help="newest checkpoints kept", source="ours")

    def __post_init__(self) -> None:
        _at_least("checkpoint.", 1, every=self.every, keep=self.keep)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation on held-out tasks before, during and after training."""

    every: int | None = setting(None, help="batches between evaluations; null: none", source="ours")
    episodes: int = setting(512, help="episodes of an evaluation", source="ours")
    at_ends: bool = setting(
        False, help="evaluate before the first and after the last batch, sampled and greedy", source="ours"
    )
    weights: Literal["copy", "live"] = setting(
        "copy",
        help="copy: a second engine holds the weights of the step (as much memory again); live: the engine of the "
        "rollouts, whose versions change meanwhile",
        source="ours",
    )
    bench: str | None = setting(
        None, help="benchmark or environment to evaluate on; unset: held-out tasks of env.name", source="ours"
    )
    tasks: str | None = setting(None, help="task file to evaluate on; unset: the environment's own", source="ours")
    data: str | None = setting(
        None, help="folder or file of the benchmark; unset: SAO_GYM_DATA, else the Hub", source="ours"
    )
    options: dict[str, Any] = setting(
        {}, help="keyword arguments for the environment of evaluation.bench", source="ours"
    )
    allow_overlap: bool = setting(
        False, help="evaluate also on tasks that overlap the training tasks; every result is then marked", source="ours"
    )

    def __post_init__(self) -> None:
        _at_least("evaluation.", 1, every=self.every, episodes=self.episodes)

    @property
    def is_asked_for(self) -> bool:
        """Whether anything is evaluated at all."""
        return self.at_ends or self.every is not None

    @property
    def has_own_tasks(self) -> bool:
        """Whether other tasks than the held-out split of the training environment were named."""
        return self.bench is not None or self.tasks is not None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    steps: int = setting(1000, help="batches to train on", source="paper", alias="steps")
    batch_size: int = setting(128, help="rows per batch", source="paper", alias="batch-size")
    group_size: int = setting(
        1, help="rollouts of a prompt that are admitted and trained together", source="paper", alias="group-size"
    )
    seed: int = setting(0, help="seed of prompt order, sampling and new weights", source="ours", alias="seed")
    check: bool = setting(True, help="check the run's own promises at every step", source="ours", alias="check")
    trackers: Literal["auto", "none", "tensorboard", "trackio", "wandb"] = setting(
        "auto", help="where scalars go beside metrics.jsonl; auto: tensorboard if installed", alias="trackers"
    )
    deadline_s: float = setting(
        1800.0, help="longest wait for a batch or a publication before the run gives up", source="ours"
    )
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    feedback: FeedbackConfig = field(default_factory=FeedbackConfig)

    def __post_init__(self) -> None:
        _at_least("", 1, batch_size=self.batch_size, group_size=self.group_size)
        if self.batch_size % self.group_size:
            raise ConfigError(
                f"batch_size = {self.batch_size} rows are no whole number of groups of group_size = {self.group_size}; "
                "give a multiple"
            )
        if self.batch_size % self.actor.updates_per_batch:
            raise ConfigError(
                f"batch_size = {self.batch_size} rows cannot be cut into actor.updates_per_batch = "
                f"{self.actor.updates_per_batch} equal parts; give a multiple"
            )
        if self.loss.advantage in ("group", "leave_one_out") and self.group_size < 2:
            raise ConfigError(
                f"loss.advantage = {self.loss.advantage} compares rows of one prompt: give a group_size of 2 or more"
            )
        if self.rollout.max_in_flight < self.group_size:
            raise ConfigError(
                f"rollout.max_in_flight = {self.rollout.max_in_flight} is below group_size = {self.group_size}: the rows "
                "of a group start together, so give at least as many"
            )
        _at_least("", 0, steps=self.steps, seed=self.seed)
        _above_0("", deadline_s=self.deadline_s)
        if self.serves_applications:
            self._require_servable()

    def _require_servable(self) -> None:
        """Raises ConfigError for what cannot be had where an application begins the episodes."""
        if self.group_size > 1:
            raise ConfigError(
                f"group_size = {self.group_size}: an application asks once, so there are no groups; leave it at 1"
            )
        if self.engine.kind == "scripted":
            raise ConfigError(
                "a scripted engine does not know what an application will ask; take --engine local or sglang"
            )
        if self.evaluation.is_asked_for and self.evaluation.bench is None:
            raise ConfigError(
                "the environment feedback has no tasks of its own to evaluate on: name some by evaluation.bench"
            )

    @property
    def serves_applications(self) -> bool:
        """Whether an application begins the episodes."""
        return self.env.name == FEEDBACK_ENV

    @property
    def critic_only_steps(self) -> int:
        """First batches that train the critic alone; none where there is no critic."""
        return self.critic.only_steps if self.loss.has_critic else 0
