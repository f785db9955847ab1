"""What a failed request to an API means: worth sending again, no room in the context, filtered, refused, or unclear.

Invariant: every answer that is no success has exactly one meaning, and bodies of any shape can be read.

Example:
    >>> body = b'{"error": {"code": "context_length_exceeded", "message": "maximum context length is 8192 tokens"}}'
    >>> read_failure(400, {}, body).meaning.value, read_failure(503, {}, b"<html>busy</html>").kind
    ('overflow', 'server_error')
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sao_gym.retries import asked_wait_s

RATE_LIMITED, SERVER_ERROR, BAD_REQUEST = "rate_limited", "server_error", "bad_request"
CONNECTION, TIMEOUT, BAD_ANSWER = "connection", "api_timeout", "bad_answer"
CONTENT_FILTER, OVERFLOW = "content_filter", "context_overflow"
_AGAIN = (408, 409, 425)
_REFUSED = (401, 402, 403, 404, 405)
_SHOWN = 300
_OVERFLOW = re.compile(
    r"context[ _]length|context[ _]window|maximum context|max_model_len|too many (input |prompt )?tokens"
    r"|(prompt|input|conversation)( \w+){0,3} (is|are) too long|reduce the length of|input token count"
    r"|exceeds? the (model'?s )?(maximum|max|available) (context|input|prompt|sequence|number of tokens)"
    r"|string_above_max_length|model_max_prompt_tokens_exceeded",
    re.IGNORECASE,
)
_FILTER = re.compile(
    r"content_filter|content[ _]policy|content management policy|moderation|flagged|data_inspection_failed",
    re.IGNORECASE,
)
_NO_MONEY = re.compile(r"insufficient_quota|insufficient[ _](balance|credit|fund)|billing_hard_limit", re.IGNORECASE)


class Meaning(StrEnum):
    """What to do after a failure."""

    RETRY = "retry"
    """It may pass: send the same request again, later."""
    OVERFLOW = "overflow"
    """The conversation, or it and the tokens asked for, does not fit the model's context."""
    FILTERED = "filtered"
    """The API will not answer this conversation: the episode fails, the others go on."""
    REFUSED = "refused"
    """No request of this run will pass: key, money, model or address are wrong."""
    UNCLEAR = "unclear"
    """This request will not pass. Where none ever did, none will."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request that did not get an answer. `kind` is what is counted, `text` what was said, `asked_s` for how long to wait."""

    meaning: Meaning
    kind: str
    text: str
    status: int | None = None
    asked_s: float | None = None


def read_failure(status: int, headers: Mapping[str, str], body: bytes) -> Failure:
    """The meaning of an answer whose status is no success; `headers` have small names."""
    text, code = _said(body)
    known = f"{code} {text}"
    meaning, kind = _meaning(status, known)
    if 300 <= status < 400 and headers.get("location"):
        text = f"moved to {headers['location'][:_SHOWN]}"
    return Failure(meaning=meaning, kind=kind, text=text, status=status, asked_s=asked_wait_s(headers))


def failure_in(record: Any) -> Failure | None:
    """The failure that a body with status 200 reports in the place of an answer, None if it reports none."""
    error = record.get("error") if isinstance(record, Mapping) else None
    if not error or record.get("choices"):
        return None
    code = error.get("code") if isinstance(error, Mapping) else None
    number = int(str(code)) if str(code).isdecimal() else 500
    status = number if 300 <= number < 600 else 500
    return read_failure(status, {}, json.dumps(record).encode())


def _meaning(status: int, known: str) -> tuple[Meaning, str]:
    if status == 429:
        return (Meaning.REFUSED if _NO_MONEY.search(known) else Meaning.RETRY), RATE_LIMITED
    if status not in _REFUSED and _OVERFLOW.search(known):
        return Meaning.OVERFLOW, OVERFLOW
    if status not in (401, 402, 404) and _FILTER.search(known):
        return Meaning.FILTERED, CONTENT_FILTER
    if status >= 500 or status in _AGAIN:
        return Meaning.RETRY, SERVER_ERROR
    if status in _REFUSED or status < 400:
        return Meaning.REFUSED, BAD_REQUEST
    return Meaning.UNCLEAR, BAD_REQUEST


def _said(body: bytes) -> tuple[str, str]:
    """The message for people and the codes for programs in a body of any shape."""
    plain = body.decode("utf-8", "replace")
    try:
        record = json.loads(plain)
    except (ValueError, RecursionError):
        return _short(re.sub(r"<[^>]*>", " ", plain[:10_000])), ""
    if isinstance(record, list) and record:
        record = record[0]
    error = record.get("error", record) if isinstance(record, dict) else record
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or json.dumps(error)
        return _short(str(message)), " ".join(str(error.get(name)) for name in ("code", "type") if error.get(name))
    return _short(str(error)), ""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
