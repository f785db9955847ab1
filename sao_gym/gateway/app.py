"""The gateway's HTTP face: finds the episode through a door, reads the body, answers in the protocol's words.

Invariants: no path, secret or body is logged; whatever comes, the answer is the protocol's own.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from sao_gym.errors import ConfigError
from sao_gym.gateway.anthropic_messages import AnthropicMessages
from sao_gym.gateway.asked import Asked
from sao_gym.gateway.chat_completions import ChatCompletions
from sao_gym.gateway.completions import Completions
from sao_gym.gateway.dialect import Dialect, encoded
from sao_gym.gateway.refusals import Code, Refusal
from sao_gym.gateway.responses import Responses
from sao_gym.gateway.retry import Retry
from sao_gym.gateway.session import Session
from sao_gym.gateway.settings import GatewaySettings
from sao_gym.gateway.tree import Node

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_log = logging.getLogger(__name__)
_EVENT_STREAM = "text/event-stream"


class Door(Protocol):
    """Where the app finds the session that a request is for."""

    settings: GatewaySettings

    @property
    def context_length(self) -> int:
        """Of the engine."""
        ...

    def require_key(self, request: "Request") -> None:
        """Raises Refusal for a caller who may not ask."""
        ...

    def find(self, request: "Request", retry: Retry) -> Session:
        """The session of a caller who may ask; `retry` tells whether the same was asked before. Raises Refusal."""
        ...

    def refused(self, session: Session) -> None:
        """Hears that a call was refused, or failed."""
        ...

    def answered(self, session: Session) -> Mapping[str, str]:
        """Hears that a call was answered. Returns header fields for the answer."""
        ...


Found = Callable[["Request"], Awaitable["Response"]]
PREFIXES = ("/v1", "/s/{secret}/v1", "/s/{secret}/auxiliary/v1")


def make_app(
    door: Door, *, prefixes: Sequence[str] = PREFIXES, further: Mapping[str, Found] = MappingProxyType({})
) -> "Starlette":
    """The application: every dialect under every prefix, and what is `further` posted, by path.

    Raises ConfigError where starlette is missing.
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError("the gateway needs starlette and uvicorn: pip install 'sao-gym[gateway]'") from error
    dialects: dict[str, Dialect] = {
        "/chat/completions": ChatCompletions(),
        "/completions": Completions(),
        "/responses": Responses(),
        "/messages": AnthropicMessages(),
    }
    routes = [Route(path, handler, methods=["POST"]) for path, handler in further.items()]
    for prefix in prefixes:
        is_auxiliary = "auxiliary" in prefix
        for path, dialect in dialects.items():
            handler = _handler(door, dialect, is_auxiliary=is_auxiliary)
            routes.append(Route(prefix + path, handler, methods=["POST"]))
        routes.append(Route(prefix + "/models", _models(door), methods=["GET"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: _unknown})


async def _unknown(request: "Request", error: Exception) -> "Response":
    """A path or method that is not served, in OpenAI's words."""
    status = getattr(error, "status_code", 404)
    if status == 405:
        return refused(Refusal(405, Code.METHOD, f"{request.method} is not served here"), Refusal.openai_body)
    return refused(Refusal(404, Code.NOT_FOUND, "nothing is served under this path"), Refusal.openai_body)


def _models(door: Door) -> Found:
    async def models(request: "Request") -> "Response":
        try:
            door.require_key(request)
        except Refusal as refusal:
            return refused(refusal, Refusal.openai_body)
        name, length = door.settings.model, door.context_length
        model = {"id": name, "object": "model", "created": 0, "owned_by": "sao-gym", "max_model_len": length}
        return answered({"object": "list", "data": [model]})

    return models


def _handler(door: Door, dialect: Dialect, *, is_auxiliary: bool) -> Found:
    async def handle(request: "Request") -> "Response":
        try:
            door.require_key(request)
            body = await read_body(request, door.settings.max_body_bytes)
            retry = Retry.read(request.url.path, body, request.headers)
            session = door.find(request, retry)
            with _told_if_not(door, session):
                asked = _read(dialect, body, session, request.headers, is_auxiliary=is_auxiliary)
                node = await session.ask(asked, retry)
        except Refusal as refusal:
            return refused(refusal, dialect.refusal)
        node.is_delivered = node.is_delivered or not await request.is_disconnected()
        return _said(dialect, node, asked, session, door.answered(session))

    return handle


@contextmanager
def _told_if_not(door: Door, session: Session) -> Iterator[None]:
    try:
        yield
    except BaseException:
        door.refused(session)
        raise


def _said(dialect: Dialect, node: Node, asked: Asked, session: Session, told: Mapping[str, str]) -> "Response":
    if not asked.is_streamed:
        return answered(dialect.answer(node, asked, session), told)
    from starlette.responses import Response

    return Response(b"".join(dialect.events(node, asked, session)), media_type=_EVENT_STREAM, headers=dict(told))


def _read(dialect: Dialect, body: bytes, session: Session, headers: Mapping[str, str], *, is_auxiliary: bool) -> Asked:
    try:
        asked = dialect.read(parse_object(body), session)
    except ConfigError as error:
        raise Refusal.malformed(str(error)) from error
    return session.marked(
        asked,
        is_auxiliary=is_auxiliary or headers.get(session.settings.auxiliary_header, "0") not in ("", "0", "false"),
    )


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Raises Refusal."""
    try:
        record = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal.malformed(f"the body must be one JSON object: {str(error)[:200]}") from error
    if not isinstance(record, dict):
        raise Refusal.malformed(f"the body must be one JSON object, got {type(record).__name__}")
    return record


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


async def read_body(request: "Request", limit: int) -> bytes:
    """A request's body. Raises Refusal for one of more than `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refusal.too_large(limit)
        parts.append(part)
    return b"".join(parts)


def key_of(request: "Request") -> str:
    """The API key, in the header of either protocol."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


def answered(body: Mapping[str, Any], told: Mapping[str, str] = MappingProxyType({})) -> "Response":
    """A JSON answer with these header fields."""
    from starlette.responses import Response

    return Response(encoded(body), media_type="application/json", headers=dict(told))


def refused(refusal: Refusal, words: Callable[[Refusal], Mapping[str, Any]]) -> "Response":
    """A refusal in a protocol's words."""
    from starlette.responses import Response

    return Response(encoded(words(refusal)), refusal.status, headers=refusal.headers, media_type="application/json")
