"""What a protocol in front of the gateway must do: read a request, write the answer, whole or in events."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from sao_gym.gateway.asked import Asked
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.session import Session
from sao_gym.gateway.tree import Node


class Dialect(Protocol):
    """One protocol. All of it is a translation: sessions know only `Asked` and `Node`."""

    def read(self, body: Mapping[str, Any], session: Session) -> Asked:
        """The request that a body says. Raises Refusal."""
        ...

    def answer(self, node: Node, asked: Asked, session: Session) -> dict[str, Any]:
        """The body of a whole answer."""
        ...

    def events(self, node: Node, asked: Asked, session: Session) -> Iterator[bytes]:
        """The same answer as server-sent events."""
        ...

    def refusal(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an error."""
        ...


_json = json.JSONEncoder(separators=(",", ":")).encode


def encoded(value: Any) -> bytes:
    """JSON as bytes; letters outside ASCII are escaped, so that halves of pairs pass too."""
    return _json(value).encode()


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encoded(value) + b"\n\n"
