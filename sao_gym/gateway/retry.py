"""Retries that say so: the same request, with the client's own signal that it was sent before (case GW-02).

The same body alone is a new call: an agent that begins again from the same notes may well repeat itself, and would get
its old answer for ever.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from sao_gym.gateway.tree import Node

Made = asyncio.Task[Node]


@dataclass(frozen=True, slots=True)
class Retry:
    """What identifies a request: a hash of its address and bytes, whether it is a retry, its idempotency key."""

    body: bytes = b""
    is_retry: bool = False
    key: str | None = None

    @classmethod
    def read(cls, path: str, body: bytes, headers: Mapping[str, str]) -> "Retry":
        """From a request; `headers` are looked up in small letters."""
        count = headers.get("x-stainless-retry-count", "0")
        digest = hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).digest()
        is_retry = count.isascii() and count.isdigit() and int(count[:9]) > 0
        return cls(digest, is_retry, headers.get("idempotency-key") or None)


class Retries:
    """The answers made for each request of a session, also those in the making. Failed ones are not given again."""

    def __init__(self) -> None:
        self._latest: dict[bytes, Made] = {}
        self._by_key: dict[tuple[str, bytes], Made] = {}

    def earlier(self, retry: Retry) -> Made | None:
        """The answer that a retry asks for, None for a new call."""
        found = self._by_key.get((retry.key, retry.body)) if retry.key is not None else None
        if found is None and retry.is_retry:
            found = self._latest.get(retry.body)
        if found is None or not found.done():
            return found
        return None if found.cancelled() or found.exception() is not None else found

    def note(self, retry: Retry, made: Made) -> None:
        """Take note of the answer to a new call."""
        self._latest[retry.body] = made
        if retry.key is not None:
            self._by_key[retry.key, retry.body] = made

    def clear(self) -> None:
        """Forget all."""
        self._latest.clear()
        self._by_key.clear()
