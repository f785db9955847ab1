"""What an evaluation can be told; the flags are those of training where they mean the same."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sao_gym.chat import ChatKind
from sao_gym.commands.presets import EVAL_PRESETS
from sao_gym.config import Change, InertRule, Origin, Resolved, Schema, find_preset, resolve, setting, value_at
from sao_gym.config_read import read_file
from sao_gym.errors import ConfigError

EngineKind = Literal["local", "scripted", "api"]


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """On which tasks, in which environment."""

    bench: list[str] = setting(
        [], help="benchmarks, or registered environments with tasks of their own, joined by commas", alias="bench"
    )
    name: str | None = setting(
        None,
        help="registered name, module:Class or file.py:Class; unset: the benchmark's own, python_math with --tasks",
        alias="env",
    )
    tasks: str | None = setting(
        None, help="task file (.jsonl, .parquet or .csv), or hf:owner/name of a Hub data set", alias="tasks"
    )
    columns: str | None = setting(
        None, help="columns of --tasks, where they are named otherwise: prompt=question,answer=gold", alias="columns"
    )
    data: str | None = setting(
        None,
        help="folder (or file) with the benchmarks' data; unset: SAO_GYM_DATA, else the Hub",
        alias="data",
    )
    split: str | None = setting(
        None, help="split of the environment's tasks; unset: heldout if it has one", alias="split"
    )
    limit: int | None = setting(
        None, help="tasks to take of each: a fixed draw of a benchmark, else the first; unset: all", alias="limit"
    )
    tools: Literal["python", "none"] = setting(
        "python", help="none: the same problems in one turn, without the Python tool", alias="tools"
    )
    options: dict[str, Any] = setting({}, help="keyword arguments for the environment or its tasks")

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")
        if self.bench and self.tasks is not None:
            raise ConfigError("bench and tasks both say what to evaluate on: give --bench NAMES or --tasks FILE")
        if twice := next((name for name in self.bench if self.bench.count(name) > 1), None):
            raise ConfigError(f"bench names {twice!r} twice; each benchmark runs once")
        _ = self.mapping

    @property
    def mapping(self) -> dict[str, str]:
        """`columns` as field to column. Raises ConfigError."""
        pairs = [pair.partition("=") for pair in (self.columns or "").split(",") if pair]
        if wrong := next((name for name, _, column in pairs if not name.strip() or not column.strip()), None):
            raise ConfigError(f"columns are pairs such as prompt=question,answer=gold, got {wrong!r} without a column")
        return {name.strip(): column.strip() for name, _, column in pairs}


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

    kind: EngineKind | None = setting(
        None,
        help="local: transformers in this process; scripted: says a file; api: any OpenAI-compatible API; "
        "unset: api with --api-base, else local",
        alias="engine",
    )
    completions: str | None = setting(None, help="what the scripted engine says (.jsonl)", alias="completions")
    context_length: int | None = setting(None, help="most tokens of a request; unset: the model's own limit")
    deterministic: bool = setting(False, help="one request per forward pass: results do not depend on their company")
    device: str | None = setting(None, help="torch device; unset: a GPU where there is one")
    threads: int | None = setting(None, help="torch threads; unset: torch's choice")


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """An OpenAI-compatible API as the policy. Its key is read from an environment variable and kept nowhere."""

    base: str | None = setting(None, help="address up to /v1, without /chat/completions", alias="api-base")
    model: str | None = setting(None, help="name of the model there", alias="api-model")
    key_env: str | None = setting(
        None, help="environment variable that holds the key; unset: OPENAI_API_KEY if it is there", alias="api-key-env"
    )
    timeout_s: float = setting(1800.0, help="most seconds of one request")
    max_retries: int = setting(6, help="how often a request is sent again before its episode ends in an error")
    retry_budget: int = setting(1000, help="most retries of a benchmark", alias="retry-budget")
    price_in: float = setting(0.0, help="price of a million prompt tokens", alias="price-in")
    price_out: float = setting(0.0, help="price of a million completion tokens", alias="price-out")
    price_cached: float | None = setting(None, help="price of a million cached prompt tokens; unset: price_in")
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = setting(
        "max_tokens", help="what the API calls the limit of an answer"
    )
    omit: list[str] = setting([], help="parameters that are not sent: temperature, top_p, max_tokens, seed")
    extra_body: dict[str, Any] = setting({}, help="further fields of every request")
    context_length: int | None = setting(None, help="most tokens of a request; unset: the API says when it is full")
    returns_reasoning: bool = setting(True, help="send earlier reasoning back with the conversation")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How episodes are sampled, and their budgets."""

    n: int | None = setting(1, help="samples of each task; null: as the paper (16, of BeyondAIME 4)", alias="n")
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
        if (self.n is not None and self.n < 1) or self.max_tokens < 1:
            raise ConfigError(f"n and max_tokens must be at least 1, got {self.n} and {self.max_tokens}")
        if self.temperature != 0 and not 1e-6 <= self.temperature < math.inf:
            raise ConfigError(f"temperature must be 0 (greedy), or 1e-6 and more; got {self.temperature}")
        if not 0 < self.top_p <= 1 or self.top_k < 0 or self.seed < 0:
            raise ConfigError(
                f"top_p must be above 0 and at most 1, top_k and seed at least 0; got {self.top_p}, {self.top_k}, "
                f"{self.seed}"
            )
        if self.is_greedy and self.n != 1:
            raise ConfigError(
                f"n is {self.n or 'that of the paper'}, and greedy decoding says the same each time; give n 1, or a temperature above 0"
            )

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.greedy or self.temperature == 0


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Sample tasks N times against a policy."""

    out: str | None = setting(None, help="new folder for results; unset: only the table", alias="out")
    protocol: str | None = setting(None, help="name of the bundle of settings that --protocol gave")
    concurrency: int = setting(16, help="most episodes at a time; also --max-concurrency", alias="concurrency")
    level: float = setting(0.95, help="level of intervals")
    env: TasksConfig = field(default_factory=TasksConfig)
    model: PolicyConfig = field(default_factory=PolicyConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    api: ApiConfig = field(default_factory=ApiConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        if self.concurrency < 1 or not 0 < self.level < 1:
            raise ConfigError(
                f"concurrency must be at least 1 and level between 0 and 1, got {self.concurrency} and {self.level}"
            )
        if self.env.name is None and self.env.tasks is None and not self.env.bench:
            raise ConfigError("nothing to evaluate on: give --bench NAMES, --env NAME, --tasks FILE, or the latter two")
        if self.kind == "local" and self.model.path is None:
            raise ConfigError(
                "no policy: give --model FOLDER, --api-base URL --api-model NAME, or --engine scripted --completions FILE"
            )
        if self.kind == "scripted" and self.engine.completions is None:
            raise ConfigError("the scripted engine has nothing to say: give --completions FILE")
        if self.kind == "api" and (self.api.base is None or self.api.model is None):
            raise ConfigError(
                "an API needs its address and the model's name there: give --api-base URL --api-model NAME"
            )

    @property
    def kind(self) -> EngineKind:
        """What samples: as said, else an API where one is named."""
        return self.engine.kind or ("local" if self.api.base is None else "api")


def _unless(*kinds: EngineKind) -> Callable[[Any], bool]:
    return lambda config: config.kind not in kinds


RULES = (
    InertRule("engine.completions", _unless("scripted"), "nothing but the scripted engine says them"),
    *(
        InertRule(f"engine.{name}", _unless("local"), "no model runs in this process")
        for name in ("context_length", "deterministic", "device", "threads")
    ),
    InertRule("model.dtype", _unless("local"), "no model runs in this process"),
    *(
        InertRule(f"model.{name}", _unless("local", "scripted"), "the API writes its own prompts")
        for name in ("path", "chat", "describe_tools")
    ),
    InertRule("api", _unless("api"), "engine.kind is not api"),
    InertRule("sampling.top_k", _unless("local", "scripted"), "the API knows no top-k"),
    InertRule(
        "model.describe_tools", lambda c: c.model.chat in ("renderer", "template"), "model.chat is not our own template"
    ),
    InertRule("env.split", lambda c: c.env.tasks is not None, "env.tasks names a file"),
    InertRule("env.columns", lambda c: c.env.tasks is None, "no task file was given"),
)


def resolve_eval(protocol: str | None, files: Sequence[str], words: Sequence[str]) -> Resolved[EvalConfig]:
    """The configuration of a protocol's name (or .toml file), further files and flags, last wins. Raises ConfigError."""
    return resolve(
        EvalConfig,
        preset=find_preset(EVAL_PRESETS, protocol) if protocol else None,
        files=[Path(file) for file in files],
        overrides=[_renamed(word) for word in words],
        rules=RULES,
    )


def _renamed(word: str) -> str:
    """A flag by its first name: some have a second one."""
    name, sign, text = word.partition("=")
    return SECOND_NAMES.get(name, name) + sign + text if word.startswith("--") else word


SECOND_NAMES: Mapping[str, str] = MappingProxyType({"--max-concurrency": "--concurrency"})


def departures(protocol: str | None, resolved: Resolved[EvalConfig]) -> list[Change]:
    """The settings in which an evaluation is not what its protocol says."""
    if protocol is None:
        return []
    given = read_file(Schema.of(EvalConfig), find_preset(EVAL_PRESETS, protocol), Origin.PRESET)
    pairs = ((item.key, item.value, value_at(resolved.config, item.key)) for item in given)
    return [Change(key, before, after) for key, before, after in pairs if before != after]
