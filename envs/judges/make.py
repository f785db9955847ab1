"""Judges by name: `rule`, `openai`, `ensemble`.

Example:
    judge = make_judge("openai", JudgeOptions(model="glm-4.7", base="http://localhost:8000/v1"))
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from sao_gym.errors import ConfigError
from sao_gym.protocols import Judge
from sao_gym.tools import nearest
from sao_gym.usage import Prices

KINDS = ("rule", "openai", "ensemble")


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """How a judge behind an API is asked.

    `prompt` names one of our prompt files; `orders` is how often a text is judged, each time with the styles listed in
    another order (the majority counts); `tries` how often an answer that says no verdict is asked for again. At most
    `concurrency` requests run at a time; `max_requests` and `max_cost` (in the currency of `prices`) end the run.
    `cache` is a file of verdicts, by judge and prompt version. `text_chars`: of a longer text the judge reads the two ends.
    """

    model: str | None = None
    base: str | None = None
    key_env: str | None = None
    prompt: str = "style-1"
    members: tuple[str, ...] = ("rule", "openai")
    cache: str | None = None
    concurrency: int = 16
    orders: int = 1
    tries: int = 3
    timeout_s: float = 120.0
    retries: int = 6
    first_wait_s: float = 1.0
    max_tokens: int = 4096
    temperature: float | None = 0.0
    text_chars: int = 12_000
    max_requests: int | None = None
    max_cost: float | None = None
    price_in: float = 0.0
    price_out: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("concurrency", "orders", "tries", "max_tokens", "text_chars"):
            if getattr(self, name) < 1:
                raise ConfigError(f"judge_options: {name} must be at least 1, got {getattr(self, name)}")
        if self.orders % 2 == 0:
            raise ConfigError(f"judge_options: orders must be odd, so that there is a majority; got {self.orders}")
        if self.max_cost is not None and not (self.price_in or self.price_out):
            raise ConfigError("judge_options: max_cost needs price_in and price_out, per million tokens")

    @classmethod
    def of(cls, **given: Any) -> "JudgeOptions":
        """Options of a configuration. Raises ConfigError for a name that is none."""
        known = [each.name for each in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(f"judge_options take no {unknown[0]!r}; {nearest(unknown[0], known, what='option')}")
        if isinstance(given.get("members"), list):
            given["members"] = tuple(given["members"])
        return cls(**given)

    @property
    def prices(self) -> Prices:
        """Prices per million tokens."""
        return Prices(tokens_in=self.price_in, tokens_out=self.price_out)


def make_judge(kind: str, options: JudgeOptions) -> Judge:
    """A judge. Raises ConfigError for an unknown kind, or options that are missing."""
    if kind == "rule":
        from sao_gym.envs.judges.rule import RuleJudge

        return RuleJudge()
    if kind == "openai":
        from sao_gym.envs.judges.openai import OpenAIJudge

        return OpenAIJudge(options)
    if kind == "ensemble":
        from sao_gym.envs.judges.ensemble import EnsembleJudge

        return EnsembleJudge(_members(options))
    raise ConfigError(f"there is no judge {kind!r}; {nearest(kind, KINDS, what='judge')}")


def _members(options: JudgeOptions) -> Sequence[Judge]:
    if "ensemble" in options.members or not options.members:
        raise ConfigError("the members of an ensemble are rule and openai, at least one of them")
    return [make_judge(kind, options) for kind in options.members]
