"""RemotePolicy: which API answers in a policy's place, and how it is asked. The key is named here, never held.

Example:
    >>> policy = RemotePolicy(api_base="http://localhost:8000/v1", model="qwen", omit=("seed",))
    >>> policy.url
    'http://localhost:8000/v1/chat/completions'
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit

from sao_gym.errors import ConfigError
from sao_gym.retries import RetryRule
from sao_gym.usage import Prices

DEFAULT_KEY_ENV = "OPENAI_API_KEY"
OMITTABLE = ("temperature", "top_p", "max_tokens", "seed")
_OWN_FIELDS = ("model", "messages", "tools", "stream", "n", "max_completion_tokens", "function_call", *OMITTABLE)
_PATH = "/chat/completions"
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_SECRET_FIELDS = ("api_key", "apikey", "key", "authorization", "password", "secret")
_SECRET_WORDS = ("key", "token", "secret", "password", "sig")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePolicy:
    """An API that speaks OpenAI's chat completions, and a model there.

    `key_env` names the environment variable that holds the key; None: OPENAI_API_KEY where it is set. `omit` names
    parameters that are not sent, `extra_body` holds further ones. `context_length` is the model's, None: the API says
    when it is full. `returns_reasoning`: earlier reasoning is sent back with the conversation.
    """

    api_base: str
    model: str
    key_env: str | None = None
    timeout_s: float = 1800.0
    retries: RetryRule = field(default_factory=RetryRule)
    prices: Prices = field(default_factory=Prices)
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    omit: tuple[str, ...] = ()
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    context_length: int | None = None
    returns_reasoning: bool = True

    def __post_init__(self) -> None:
        _check_base(self.api_base)
        if not self.model:
            raise ConfigError("an API needs the name of a model; give the one that it lists")
        if self.key_env is not None and not _VARIABLE.fullmatch(self.key_env):
            raise ConfigError("key_env must be the name of an environment variable in capitals, never the key itself")
        if not self.timeout_s > 0 or (self.context_length is not None and self.context_length < 1):
            raise ConfigError(
                f"timeout_s and context_length must be above 0, got {self.timeout_s} and {self.context_length}"
            )
        unknown = [name for name in self.omit if name not in OMITTABLE]
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is no parameter that can be left out; choose from {', '.join(OMITTABLE)}"
            )
        taken = [name for name in self.extra_body if name in _OWN_FIELDS]
        if taken:
            raise ConfigError(
                f"extra_body cannot say {taken[0]!r}: it has a setting of its own, or is not to be changed"
            )
        if any(name.lower().replace("-", "_") in _SECRET_FIELDS for name in self.extra_body):
            raise ConfigError("extra_body is written into records; put a key into an environment variable (key_env)")
        try:
            json.dumps(dict(self.extra_body), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"extra_body must be what JSON can say ({error})") from error

    @property
    def url(self) -> str:
        """Where requests go."""
        parts = urlsplit(self.api_base)
        path = parts.path.rstrip("/").removesuffix(_PATH) + _PATH
        return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))

    def key(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The key, None where none is needed. Raises ConfigError if the variable that was named holds none."""
        name = self.key_env or DEFAULT_KEY_ENV
        key = environ.get(name, "").strip()
        if not key and self.key_env is not None:
            raise ConfigError(f"the environment variable {name} holds no API key; set it, or name another one")
        if not key.isascii() or any(sign.isspace() for sign in key):
            raise ConfigError(f"what the environment variable {name} holds cannot be an API key; copy the key again")
        return key or None


def _check_base(api_base: str) -> None:
    try:
        parts = urlsplit(api_base)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"api_base must be a URL such as https://api.openai.com/v1, got {api_base!r}")
    has_secret = any(word in parts.query.lower() for word in _SECRET_WORDS)
    if parts.username is not None or has_secret:
        raise ConfigError("api_base seems to hold a key or a password; put it into an environment variable (key_env)")
