"""The gateway's HTTP face: finds the episode by its secret, reads the body, answers in the protocol's words.

Invariants: no path, secret or body is logged; whatever comes, the answer is the protocol's own.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
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


class Sessions(Protocol):
    """Where the app finds the session of a secret."""

    settings: GatewaySettings

    def session_of(self, secret: str) -> Session:
        """Raises Refusal where there is none."""
        ...

    @property
    def context_length(self) -> int:
        """Of the engine."""
        ...


def make_app(sessions: Sessions) -> "Starlette":
    """The application. Raises ConfigError where starlette is missing."""
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
    routes = []
    for prefix in ("/v1", "/s/{secret}/v1", "/s/{secret}/auxiliary/v1"):
        is_auxiliary = "auxiliary" in prefix
        for path, dialect in dialects.items():
            handler = _handler(sessions, dialect, is_auxiliary=is_auxiliary)
            routes.append(Route(prefix + path, handler, methods=["POST"]))
        routes.append(Route(prefix + "/models", _models(sessions), methods=["GET"]))
    return Starlette(routes=routes, exception_handlers={HTTPException: _unknown})


async def _unknown(request: "Request", error: Exception) -> "Response":
    """A path or method that is not served, in OpenAI's words."""
    status = getattr(error, "status_code", 404)
    if status == 405:
        return _refused(Refusal(405, Code.METHOD, f"{request.method} is not served here"), Refusal.openai_body)
    return _refused(Refusal(404, Code.NOT_FOUND, "nothing is served under this path"), Refusal.openai_body)


def _models(sessions: Sessions) -> Callable[["Request"], Awaitable["Response"]]:
    async def models(request: "Request") -> "Response":
        try:
            sessions.session_of(_secret(request))
        except Refusal as refusal:
            return _refused(refusal, Refusal.openai_body)
        name, length = sessions.settings.model, sessions.context_length
        model = {"id": name, "object": "model", "created": 0, "owned_by": "sao-gym", "max_model_len": length}
        return _answered({"object": "list", "data": [model]})

    return models


def _handler(
    sessions: Sessions, dialect: Dialect, *, is_auxiliary: bool
) -> Callable[["Request"], Awaitable["Response"]]:
    async def handle(request: "Request") -> "Response":
        try:
            session = sessions.session_of(_secret(request))
            body = await _body(request, sessions.settings.max_body_bytes)
            asked = _read(dialect, body, session, request.headers, is_auxiliary=is_auxiliary)
            node = await session.ask(asked, Retry.read(request.url.path, body, request.headers))
        except Refusal as refusal:
            return _refused(refusal, dialect.refusal)
        node.is_delivered = node.is_delivered or not await request.is_disconnected()
        return _said(dialect, node, asked, session)

    return handle


def _said(dialect: Dialect, node: Node, asked: Asked, session: Session) -> "Response":
    if not asked.is_streamed:
        return _answered(dialect.answer(node, asked, session))
    from starlette.responses import Response

    return Response(b"".join(dialect.events(node, asked, session)), media_type=_EVENT_STREAM)


def _read(dialect: Dialect, body: bytes, session: Session, headers: Mapping[str, str], *, is_auxiliary: bool) -> Asked:
    try:
        record = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal.malformed(f"the body must be one JSON object: {str(error)[:200]}") from error
    if not isinstance(record, dict):
        raise Refusal.malformed(f"the body must be one JSON object, got {type(record).__name__}")
    try:
        asked = dialect.read(record, session)
    except ConfigError as error:
        raise Refusal.malformed(str(error)) from error
    return session.marked(
        asked,
        is_auxiliary=is_auxiliary or headers.get(session.settings.auxiliary_header, "0") not in ("", "0", "false"),
    )


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


async def _body(request: "Request", limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise Refusal.too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _secret(request: "Request") -> str:
    """From the path, else the API key in the header of either protocol."""
    found = request.path_params.get("secret")
    if found:
        return str(found)
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


def _answered(body: Mapping[str, Any]) -> "Response":
    from starlette.responses import Response

    return Response(encoded(body), media_type="application/json")


def _refused(refusal: Refusal, words: Callable[[Refusal], Mapping[str, Any]]) -> "Response":
    from starlette.responses import Response

    return Response(encoded(words(refusal)), refusal.status, headers=refusal.headers, media_type="application/json")
