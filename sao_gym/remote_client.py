"""OpenAIClient: one request to `POST {api_base}/chat/completions`, with retries and their budget.

Invariants: the key stands in one request header and nowhere else; what an API says about a failure is shown without
it. A request ends in an `Answer`, or in one typed failure: ApiError where no request of the run will pass,
ContextOverflowError where the conversation does not fit, else EngineError with a kind to count.

Example:
    client = OpenAIClient(RemotePolicy(api_base="http://localhost:8000/v1", model="qwen"), clock=SystemClock())
    body = {"model": "qwen", "messages": [{"role": "user", "content": "2+2?"}]}
    answer = await client.complete(body, turn=0, meter=Meter(Prices()))
"""

import asyncio
import json
import logging
import random
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

from sao_gym.errors import ApiError, EngineError
from sao_gym.protocols import Clock
from sao_gym.remote_answer import Answer, BadAnswerError, Finish, read_answer
from sao_gym.remote_failures import (
    BAD_ANSWER,
    CONNECTION,
    CONTENT_FILTER,
    OVERFLOW,
    SERVER_ERROR,
    TIMEOUT,
    Failure,
    Meaning,
    failure_in,
    read_failure,
)
from sao_gym.remote_policy import DEFAULT_KEY_ENV, RemotePolicy
from sao_gym.retries import RetryBudget
from sao_gym.usage import Meter, TokenCount

MAX_BODY_BYTES = 64 * 2**20
CONNECT_S = 30.0
_log = logging.getLogger(__name__)


class ContextOverflowError(EngineError):
    """The conversation, or it and the tokens asked for, does not fit the model's context."""

    kind = OVERFLOW


class OpenAIClient:
    """Sends requests; one client serves all episodes of a run. `rng` draws the jitter of waits.

    `is_metered`: an answer said its tokens. `models` and `fingerprints` count the answers by what they say made them.
    """

    def __init__(self, policy: RemotePolicy, *, clock: Clock, rng: random.Random | None = None) -> None:
        self.policy = policy
        self.has_answered = self.is_metered = False
        self.models, self.fingerprints = Counter[str](), Counter[str]()
        self._clock, self._rng = clock, rng or random.Random()
        self._budget = RetryBudget(policy.retries.budget)
        self._key = policy.key()
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # A request's time is bounded as a whole in `_send`; how many run at a time is the caller's to say.
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(None, connect=min(CONNECT_S, policy.timeout_s)),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            verify=policy.url.startswith("https"),  # without TLS there are no certificates to load
        )

    async def complete(self, body: Mapping[str, Any], *, turn: int, meter: Meter) -> Answer:
        """The answer to one request body. Raises ApiError, ContextOverflowError, EngineError."""
        content = json.dumps(dict(body)).encode()  # pure ASCII: half characters of earlier turns are no UTF-8
        retry = 0
        while True:
            meter.sent(is_retry=retry > 0)
            found = await self._ask(content, turn, meter)
            if isinstance(found, Answer):
                self._note(found)
                return found
            if found.meaning is not Meaning.RETRY:
                meter.failing = None
                raise self._final(found)
            if retry >= self.policy.retries.max_retries or not self._budget.take():
                raise self._given_up(found, retry + 1)
            wait = self.policy.retries.wait_s(retry, found.asked_s, draw=self._rng.random())
            _log.info("%s; sent again in %.1f s", self._shown(found), wait)
            meter.failed(found.kind, wait)
            await self._clock.sleep(wait)
            retry += 1

    async def close(self) -> None:
        """Close all connections; idempotent."""
        await self._http.aclose()

    def _note(self, answer: Answer) -> None:
        self.has_answered = True
        self.is_metered = self.is_metered or answer.tokens is not None
        self.models.update([answer.model] if answer.model else [])
        self.fingerprints.update([answer.fingerprint] if answer.fingerprint else [])

    async def _ask(self, content: bytes, turn: int, meter: Meter) -> Answer | Failure:
        """One request, without retries."""
        try:
            async with asyncio.timeout(self.policy.timeout_s):
                status, headers, body = await self._send(content)
        except TimeoutError:
            text = f"no whole answer within {self.policy.timeout_s:g} s"
            return Failure(meaning=Meaning.RETRY, kind=TIMEOUT, text=text)
        except httpx.RequestError as error:
            kind = CONNECTION if isinstance(error, httpx.TransportError) else BAD_ANSWER
            return Failure(meaning=Meaning.RETRY, kind=kind, text=f"{type(error).__name__}: {error}".rstrip(": "))
        if not 200 <= status < 300:
            return read_failure(status, headers, body)
        return _read(body, turn, meter)

    async def _send(self, content: bytes) -> tuple[int, Mapping[str, str], bytes]:
        parts, size = [], 0
        async with self._http.stream("POST", self.policy.url, content=content) as response:
            async for part in response.aiter_bytes():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise httpx.DecodingError(f"the answer holds more than {MAX_BODY_BYTES >> 20} MB")
        return response.status_code, dict(response.headers), b"".join(parts)

    # What a failure is told as

    def _final(self, failure: Failure) -> Exception:
        said = self._shown(failure)
        if failure.meaning is Meaning.OVERFLOW:
            return ContextOverflowError(said)
        if failure.meaning is Meaning.FILTERED:
            return EngineError(said, kind=CONTENT_FILTER)
        if failure.meaning is Meaning.UNCLEAR and self.has_answered:
            return EngineError(said, kind=failure.kind)
        return ApiError(f"{said}; {self._remedy(failure)}")

    def _given_up(self, failure: Failure, sent: int) -> Exception:
        why = f"tried {sent} times" if sent > 1 else "tried once"
        if self._budget.left <= 0 and sent <= self.policy.retries.max_retries:
            why += f", the run's {self.policy.retries.budget} retries are spent"
        if failure.kind == CONNECTION and not self.has_answered:
            return ApiError(f"{self._shown(failure)} ({why}); check the address and that the server runs")
        return EngineError(f"{self._shown(failure)} ({why})", kind=failure.kind)

    def _shown(self, failure: Failure) -> str:
        status = f" ({failure.status})" if failure.status else ""
        return f"{self.policy.url} does not answer for model {self.policy.model!r}{status}: {self._clean(failure.text)}"

    def _remedy(self, failure: Failure) -> str:
        name = self.policy.key_env or DEFAULT_KEY_ENV
        if failure.status in (401, 403):
            what = "the key in" if self._key else "set an API key in"
            return f"{'check ' if self._key else ''}{what} the environment variable {name}"
        if failure.status in (402, 429):
            return "the account has no credit left"
        if failure.status == 404:
            return "check the address and the name of the model"
        return (
            "if it refuses a parameter, leave that one out (omit) or name it otherwise (max_tokens_field, extra_body)"
        )

    def _clean(self, text: str) -> str:
        """The text without the key, and without what looks like a part of it."""
        if not self._key:
            return text
        text = text.replace(self._key, "[key]")
        return re.sub(re.escape(self._key[:6]) + r"\S*", "[key]", text) if len(self._key) >= 12 else text


def _read(body: bytes, turn: int, meter: Meter) -> Answer | Failure:
    """What a body with a good status says; its tokens count even where the rest is of no use."""
    try:
        record = json.loads(body)
    except (ValueError, RecursionError):
        meter.answered(None)
        return Failure(meaning=Meaning.RETRY, kind=BAD_ANSWER, text=f"no JSON but {body[:80]!r}")
    if (failure := failure_in(record)) is not None:
        return failure
    meter.answered(TokenCount.read(record.get("usage")) if isinstance(record, Mapping) else None)
    try:
        answer = read_answer(record, turn=turn)
    except BadAnswerError as error:
        return Failure(meaning=Meaning.RETRY, kind=BAD_ANSWER, text=str(error))
    if answer.finish is Finish.FILTER:
        return Failure(meaning=Meaning.FILTERED, kind=CONTENT_FILTER, text="the answer was cut by a content filter")
    if answer.finish is Finish.FAILED:
        return Failure(meaning=Meaning.RETRY, kind=SERVER_ERROR, text="the answer ended in an error of the server")
    return answer
