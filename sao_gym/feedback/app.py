"""The desk's HTTP face: the dialects of the gateway under one key for all episodes, and the path that takes feedback.

- POST /v1/chat/completions: the answer's header x-sao-episode names the episode; sent back, it goes on with that one.
- POST /v1/feedback: {"episode": "...", "score": 0.0 to 1.0, "comment": "..."}.
"""

import hmac
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from sao_gym.feedback.desk import Desk
from sao_gym.feedback.served import Feedback
from sao_gym.gateway import Address
from sao_gym.gateway.app import Found, answered, key_of, make_app, parse_object, read_body, refused
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.retry import Retry
from sao_gym.gateway.server import served
from sao_gym.gateway.session import Session
from sao_gym.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

EPISODE_HEADER = "x-sao-episode"
MAX_FEEDBACK_BYTES = 64 << 10
_FIELDS = ("episode", "score", "comment")


class DeskDoor:
    """One key for the application; the header says which episode a request goes on with."""

    def __init__(self, desk: Desk, key: str) -> None:
        self.desk, self._key = desk, key.encode()
        self.settings: GatewaySettings = desk.gateway.settings

    @property
    def context_length(self) -> int:
        """Of the engine."""
        return self.desk.gateway.context_length

    def require_key(self, request: "Request") -> None:
        """Raises Refusal for another key; compared in constant time."""
        if not hmac.compare_digest(key_of(request).encode("utf-8", "replace"), self._key):
            raise Refusal(
                401, Refusal.secret().code, "this is not the application's key; see feedback.key in the run's folder"
            )

    def find(self, request: "Request", retry: Retry) -> Session:
        """The session that the request goes on with, or begins. Raises Refusal."""
        return self.desk.find(request.headers.get(EPISODE_HEADER, ""), retry)

    def refused(self, session: Session) -> None:
        """A call was refused."""
        self.desk.refused(session)

    def answered(self, session: Session) -> Mapping[str, str]:
        """The episode's name."""
        return {EPISODE_HEADER: self.desk.answered(session)}


@asynccontextmanager
async def serving(desk: Desk, *, key: str, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[Address]:
    """Answer applications that have `key` meanwhile. Raises ConfigError."""
    async with served(desk_app(DeskDoor(desk, key)), host=host, port=port) as address:
        yield address


def desk_app(door: DeskDoor) -> "Starlette":
    """The application. Raises ConfigError where starlette is missing."""
    return make_app(door, prefixes=("/v1",), further={"/v1/feedback": _feedback(door)})


def _feedback(door: DeskDoor) -> Found:
    async def post(request: "Request") -> "Response":
        try:
            door.require_key(request)
            record = parse_object(await read_body(request, MAX_FEEDBACK_BYTES))
            name, score, comment = read_feedback(record)
            receipt = await door.desk.post(name, Feedback(score, comment))
        except Refusal as refusal:
            return refused(refusal, Refusal.openai_body)
        said = {"episode": receipt.episode, "score": receipt.score, "for_training": receipt.is_for_training}
        return answered({**said, "why": receipt.why})

    return post


def read_feedback(record: Mapping[str, Any]) -> tuple[str, float, str | None]:
    """Episode, score and comment of a body. Raises Refusal for anything else."""
    if unknown := [name for name in record if name not in _FIELDS]:
        raise Refusal.malformed(f"unknown field {unknown[0]!r}; feedback has {', '.join(_FIELDS)}", unknown[0])
    name, score, comment = (record.get(field) for field in _FIELDS)
    if not isinstance(name, str) or not name:
        raise Refusal.malformed(
            f"episode must be what the header {EPISODE_HEADER} of an answer said, got {name!r}", "episode"
        )
    is_number = isinstance(score, int | float) and not isinstance(score, bool)
    if not is_number or not math.isfinite(score) or not 0 <= score <= 1:  # type: ignore[arg-type, operator]
        raise Refusal.malformed(f"score must be a number from 0 (bad) to 1 (good), got {score!r}", "score")
    if comment is not None and not isinstance(comment, str):
        raise Refusal.malformed(f"comment must be text, got {type(comment).__name__}", "comment")
    return name, float(score), comment  # type: ignore[arg-type]
