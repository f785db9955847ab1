"""What an evaluation can be told; the flags are those of training where they mean the same."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from sao_gym.chat import ChatKind
from sao_gym.config import InertRule, setting
from sao_gym.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Which environment, on which tasks."""

    name: str | None = setting(
        None, help="registered name, module:Class or file.py:Class; unset with --tasks: python_math", alias="env"
    )
    tasks: str | None = setting(
        None, help="task file (.jsonl or .parquet); unset: the environment's own", alias="tasks"
    )
    split: str | None = setting(
        None, help="split of the environment's tasks; unset: heldout if it has one", alias="split"
    )
    limit: int | None = setting(None, help="first tasks to take; unset: all", alias="limit")
    options: dict[str, Any] = setting({}, help="keyword arguments for the environment or its tasks")

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Where the policy comes from."""

    path: str | None = setting(None, help="folder of a transformers checkpoint (or of a .gguf)", alias="model")
    chat: ChatKind = setting("auto", help="how messages become ids")
    describe_tools: bool | None = setting(
        None, help="our own chat lists the tools in the system prompt; unset: as the checkpoint was made"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", help="number format of the weights")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What samples the tokens."""

    kind: Literal["local", "scripted"] = setting(
        "local", help="local: transformers in this process; scripted: says a file", alias="engine"
    )
    completions: str | None = setting(None, help="what the scripted engine says (.jsonl)", alias="completions")
    context_length: int | None = setting(None, help="most tokens of a request; unset: the model's own limit")
    deterministic: bool = setting(False, help="one request per forward pass: results do not depend on their company")
    device: str | None = setting(None, help="torch device; unset: a GPU where there is one")
    threads: int | None = setting(None, help="torch threads; unset: torch's choice")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How episodes are sampled, and their budgets."""

    n: int = setting(1, help="samples of each task", alias="n")
    seed: int = setting(0, help="decides every draw", alias="seed")
    temperature: float = setting(1.0, help="sampling temperature; 0 is greedy", alias="temperature")
    greedy: bool = setting(False, help="the same as temperature 0", alias="greedy")
    top_p: float = setting(1.0, help="nucleus mass", alias="top-p")
    top_k: int = setting(0, help="most probable tokens to choose from; 0: all", alias="top-k")
    max_tokens: int = setting(2048, help="most tokens of one turn", alias="max-tokens")
    max_turns: int | None = setting(None, help="most turns of an episode; unset: the environment's", alias="max-turns")
    max_tokens_per_episode: int | None = setting(None, help="most tokens of an episode; unset: what the model holds")
    wall_clock_s: float | None = setting(3600.0, help="most seconds of an episode")

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1:
            raise ConfigError(f"n and max_tokens must be at least 1, got {self.n} and {self.max_tokens}")
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 (greedy), or 1e-6 and more; got {self.temperature}")
        if not 0 < self.top_p <= 1 or self.top_k < 0 or self.seed < 0:
            raise ConfigError(
                f"top_p must be above 0 and at most 1, top_k and seed at least 0; got {self.top_p}, {self.top_k}, "
                f"{self.seed}"
            )
        if self.is_greedy and self.n > 1:
            raise ConfigError(
                f"n is {self.n}, and greedy decoding says the same each time; give n 1, or a temperature above 0"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.greedy or self.temperature == 0


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Sample tasks N times against a policy."""

    out: str | None = setting(None, help="new folder for results; unset: only the table", alias="out")
    concurrency: int = setting(16, help="most episodes at a time", alias="concurrency")
    level: float = setting(0.95, help="level of intervals")
    env: TasksConfig = field(default_factory=TasksConfig)
    model: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        if self.concurrency < 1 or not 0 < self.level < 1:
            raise ConfigError(
                f"concurrency must be at least 1 and level between 0 and 1, got {self.concurrency} and {self.level}"
            )
        if self.env.name is None and self.env.tasks is None:
            raise ConfigError("nothing to evaluate on: give --env NAME, --tasks FILE, or both")
        if self.engine.kind == "local" and self.model.path is None:
            raise ConfigError("no policy: give --model FOLDER, or --engine scripted --completions FILE")
        if self.engine.kind == "scripted" and self.engine.completions is None:
            raise ConfigError("the scripted engine has nothing to say: give --completions FILE")


def is_scripted(config: EvalConfig) -> bool:
    """Whether no model samples."""
    return config.engine.kind == "scripted"


RULES = (
    InertRule("engine.completions", lambda c: not is_scripted(c), "engine.kind is local"),
    *(
        InertRule(f"engine.{name}", is_scripted, "engine.kind is scripted")
        for name in ("context_length", "deterministic", "device", "threads")
    ),
    InertRule("model.dtype", is_scripted, "engine.kind is scripted"),
    InertRule(
        "model.describe_tools", lambda c: c.model.chat in ("renderer", "template"), "model.chat is not our own template"
    ),
    InertRule("env.split", lambda c: c.env.tasks is not None, "env.tasks names a file"),
)
