"""The policy of an evaluation: an engine in this process, a script, or an API, each behind an `EpisodeRunner`."""

from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any, Protocol

from sao_gym.budgets import Budgets
from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.commands.eval_config import ApiConfig, EvalConfig, SamplingConfig
from sao_gym.commands.eval_targets import Target
from sao_gym.completions import check_script, read_script, scripted_engine
from sao_gym.evaluation import EpisodeRunner, TokenRunner, episode_uid
from sao_gym.policy_loading import OpenPolicy, byte_tokenizer, chat_fingerprint, load_tokenizer, open_policy
from sao_gym.protocols import Sampling
from sao_gym.remote import RemoteRunner
from sao_gym.remote_policy import RemotePolicy
from sao_gym.retries import RetryRule
from sao_gym.usage import Prices


class EvalPolicy(Protocol):
    """What is evaluated."""

    @property
    def tokenizer(self) -> Any:
        """Reads the ids of episodes; None where they are recorded as messages."""
        ...

    def runner(self, target: Target) -> EpisodeRunner:
        """A driver of episodes in the environments of one benchmark."""
        ...

    async def facts(self) -> dict[str, Any]:
        """What names the policy in a manifest."""
        ...

    async def close(self) -> None:
        """Free everything; idempotent."""
        ...


class EnginePolicy:
    """An engine that samples ids in this process."""

    def __init__(self, config: EvalConfig, opened: OpenPolicy) -> None:
        self._config, self._opened = config, opened
        self.tokenizer = opened.tokenizer

    def runner(self, target: Target) -> EpisodeRunner:
        """See `EvalPolicy`."""
        return TokenRunner(
            engine=self._opened.engine,
            chat=self._opened.chat,
            make_env=target.environments.make,
            budgets=budgets(self._config.sampling),
            sampling=sampling(self._config.sampling),
            clock=SystemClock(),
        )

    async def facts(self) -> dict[str, Any]:
        """See `EvalPolicy`."""
        chat, model = self._opened.chat, self._config.model
        template = getattr(self.tokenizer, "chat_template", None)
        return {
            "model": {
                "path": model.path,
                "weight_hash": (await self._opened.engine.health()).weight_hash or None,
                "tokenizer_hash": tokenizer_hash(self.tokenizer),
            },
            "chat": {
                "kind": type(chat).__name__,
                "fingerprint": chat_fingerprint(chat),
                "describe_tools": getattr(chat, "describe_tools", None),
                "template_hash": sha256(str(template).encode()).hexdigest() if template else None,
                "stop_token_ids": list(chat.stop_token_ids),
            },
            "engine": {
                **asdict(self._config.engine),
                "kind": self._config.kind,
                "dtype": model.dtype,
                "context_length": self._opened.engine.context_length,
                "policy_version": self._opened.engine.version,
            },
        }

    async def close(self) -> None:
        """See `EvalPolicy`."""
        await self._opened.engine.close()


class ApiPolicy:
    """A model behind an API."""

    tokenizer = None

    def __init__(self, config: EvalConfig) -> None:
        self._config = config
        self._policy = remote_policy(config.api)
        self._policy.key()  # a key that is missing is said before anything runs

    def runner(self, target: Target) -> EpisodeRunner:
        """See `EvalPolicy`."""
        return RemoteRunner(
            policy=self._policy,
            make_env=target.environments.make,
            budgets=budgets(self._config.sampling),
            sampling=sampling(self._config.sampling),
            clock=SystemClock(),
        )

    async def facts(self) -> dict[str, Any]:
        """See `EvalPolicy`."""
        return {"engine": {"kind": "api", "url": self._policy.url}, "model": {"name": self._policy.model}}

    async def close(self) -> None:
        """Nothing is held between benchmarks."""


def open_eval_policy(config: EvalConfig, targets: Sequence[Target]) -> EvalPolicy:
    """The policy that the configuration names. Raises UserError for what cannot be opened."""
    if config.kind == "api":
        return ApiPolicy(config)
    return EnginePolicy(config, _local(config) if config.kind == "local" else _scripted(config, targets))


def _local(config: EvalConfig) -> OpenPolicy:
    return open_policy(
        config.model.path or "",
        chat_kind=config.model.chat,
        describe_tools=config.model.describe_tools,
        dtype=config.model.dtype,
        device=config.engine.device,
        slots=config.concurrency,
        context_length=config.engine.context_length,
        deterministic=config.engine.deterministic,
        threads=config.engine.threads,
    )


def _scripted(config: EvalConfig, targets: Sequence[Target]) -> OpenPolicy:
    path = config.engine.completions or ""
    script = read_script(path)
    check_script(script, [task for target in targets for task in target.tasks], path)
    tokenizer = load_tokenizer(config.model.path) if config.model.path else byte_tokenizer()
    chat = make_chat(tokenizer, config.model.chat, describe_tools=config.model.describe_tools)
    episodes = {
        episode_uid(target.label, index, attempt): script.lines(task.id, attempt)
        for target in targets
        for index, task in enumerate(target.tasks)
        for attempt in range(target.samples)
    }
    engine = scripted_engine(episodes, tokenizer, chat.stop_token_ids[0])
    return OpenPolicy(engine=engine, chat=chat, tokenizer=tokenizer)


def remote_policy(config: ApiConfig) -> RemotePolicy:
    """The API as settings name it. Raises ConfigError."""
    return RemotePolicy(
        api_base=config.base or "",
        model=config.model or "",
        key_env=config.key_env,
        timeout_s=config.timeout_s,
        retries=RetryRule(max_retries=config.max_retries, budget=config.retry_budget),
        prices=Prices(tokens_in=config.price_in, tokens_out=config.price_out, tokens_cached=config.price_cached),
        max_tokens_field=config.max_tokens_field,
        omit=tuple(config.omit),
        extra_body=config.extra_body,
        context_length=config.context_length,
        returns_reasoning=config.returns_reasoning,
    )


def sampling(config: SamplingConfig) -> Sampling:
    """How one request is sampled."""
    temperature = 0.0 if config.is_greedy else config.temperature
    return Sampling(max_tokens=config.max_tokens, temperature=temperature, top_p=config.top_p, top_k=config.top_k)


def budgets(config: SamplingConfig) -> Budgets:
    """What may cut an episode."""
    return Budgets(
        max_tokens_per_turn=config.max_tokens,
        max_tokens_per_episode=config.max_tokens_per_episode,
        max_turns=config.max_turns,
        wall_clock_s=config.wall_clock_s,
    )


def tokenizer_hash(tokenizer: Any) -> str | None:
    """SHA-256 of all that a fast tokenizer does with text; None for one that does not tell."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return sha256(backend.to_str().encode()).hexdigest() if backend is not None else None
