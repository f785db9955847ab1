"""What a run that serves an application can be told (docs/feedback.md)."""

from dataclasses import dataclass
from typing import Literal

from sao_gym.config import setting
from sao_gym.errors import ConfigError

ENV = "feedback"
"""The environment whose episodes an application begins."""


@dataclass(frozen=True, kw_only=True)
class FeedbackConfig:
    """Where an application is served, how long its feedback is waited for, what is kept of it."""

    host: str = setting("127.0.0.1", help="loopback address to listen on", source="ours")
    port: int = setting(8300, help="port to listen on; 0: any free one, see feedback.address", source="ours")
    key_env: str | None = setting(
        None, help="environment variable with the application's key; unset: one is made, see feedback.key"
    )
    deadline_s: float = setting(600.0, help="seconds after an answer until its feedback is given up", source="ours")
    keep: Literal["all", "trained", "until_trained"] = setting(
        "all",
        help="all; trained: no text of what is not trained, no comments; until_trained: nor of what was trained and saved",
        source="ours",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"feedback.port = {self.port}: give a number from 0 to 65535")
        if not 0 < self.deadline_s < float("inf"):
            raise ConfigError(f"feedback.deadline_s = {self.deadline_s}: give a number of seconds above 0")
