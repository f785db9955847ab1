"""Requests of real agent programs, recorded without what other people wrote in them, to be sent again.

A trace keeps the order, keys, types, ids and outer white space of every request; of texts that neither we nor the policy
wrote (system prompts, descriptions of tools) it keeps the length alone, up to 400 characters, and of what a tool printed
not even that, for it differs between machines. A request says how many of its messages are those of the one before, so
that a file stays small.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from sao_gym.gateway import gateway as gateway_module

FOLDER = Path(__file__).with_name("traces")
HEADERS = ("x-stainless-retry-count", "idempotency-key", "x-sao-gym-auxiliary")
_KEPT = ("role", "type", "name", "id", "tool_call_id", "model", "tool_choice", "required", "enum")
_LONGEST, _RESULT = 400, 12

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """One request: the path after the episode's, the headers that say something, the body."""

    path: str
    headers: Mapping[str, str]
    body: Record


class Recorder:
    """An application that takes note of what passes through to another one."""

    def __init__(self, app: Any, taken: list[Request]) -> None:
        self.app, self.taken = app, taken

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parts: list[bytes] = []

        async def heard() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body") and scope["method"] == "POST":
                    self.taken.append(_request(scope, b"".join(parts)))
            return message

        await self.app(scope, heard, send)


def _request(scope: Any, body: bytes) -> Request:
    path = scope["path"]
    path = "/auxiliary/" * ("/auxiliary/" in path) + path.rpartition("/v1")[2].lstrip("/")
    given = {key.decode(): value.decode() for key, value in scope["headers"]}
    return Request(path, {name: given[name] for name in HEADERS if name in given}, json.loads(body))


@contextmanager
def recorded() -> Iterator[list[Request]]:
    """Take note of all requests to gateways that are made meanwhile."""
    taken: list[Request] = []
    make_app = gateway_module.make_app
    with mock.patch.object(gateway_module, "make_app", lambda door: Recorder(make_app(door), taken)):
        yield taken


def packed(requests: Sequence[Request], says: Sequence[str]) -> Record:
    """The form that is kept: masked, and each request as what differs from the one before. `says`: the policy's turns."""
    kept: list[Record] = []
    before: Record = {}
    for request in requests:
        body = {key: _masked(value, key) for key, value in request.body.items()}
        messages = body.pop("messages")
        n = 0
        while n < min(len(messages), len(before.get("messages", ()))) and messages[n] == before["messages"][n]:
            n += 1
        changed = {key: value for key, value in body.items() if before.get(key, ...) != value}
        gone = sorted(before.keys() - body.keys() - {"messages"})
        kept.append(
            {
                "path": request.path,
                "headers": dict(request.headers),
                "keep": n,
                "add": messages[n:],
                "set": changed,
                "unset": gone,
            }
        )
        before = {**body, "messages": messages}
    return {"says": list(says), "requests": kept}


def unpacked(trace: Record) -> list[Request]:
    """The requests of a trace."""
    found: list[Request] = []
    body: Record = {"messages": []}
    for item in trace["requests"]:
        body = {key: value for key, value in body.items() if key not in item["unset"]} | item["set"]
        body["messages"] = [*body["messages"][: item["keep"]], *item["add"]]
        found.append(Request(item["path"], item["headers"], dict(body)))
    return found


def load(name: str) -> Record:
    """A trace of the folder."""
    found: Record = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _masked(value: Any, key: str, role: str = "") -> Any:
    if isinstance(value, dict):
        role = value.get("role", role)
        return {name: _masked(item, name, role) for name, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, key, role) for item in value]
    if not isinstance(value, str) or role == "assistant" or key in _KEPT:
        return value
    inner = value.strip()
    start = value.index(inner) if inner else 0
    n = min(len(inner), _LONGEST) if role != "tool" else _RESULT
    return value[:start] + "." * n + value[start + len(inner) :]
