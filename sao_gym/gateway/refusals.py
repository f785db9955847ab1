"""Refusals in the protocols' own words, so that clients do what they were made to do with each.

What will not pass however often it is sent is a 4xx that clients neither retry nor wait for: 400 for a request that
cannot be read or does not fit the context, 401 for a wrong secret and for one that admits no further call, because the
episode is over, out of budget or failed. (litellm knows no 403: it becomes an error of no kind, which mini-swe-agent
sends again for minutes. As a 5xx a failure of ours would repeat what the agent did.) What passes later is 429 with
Retry-After.

Example:
    >>> Refusal.context(prompt=4000, asked=200, limit=4096).openai_body()["error"]["code"]
    'context_length_exceeded'
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sao_gym.errors import SaoGymError


class Code(StrEnum):
    """What a refusal is counted as, and what stands in its `code`."""

    MALFORMED = "invalid_request"
    UNSUPPORTED = "unsupported_parameter"
    TOO_LARGE = "request_too_large"
    CONTEXT = "context_length_exceeded"
    SECRET = "invalid_api_key"
    NOT_FOUND = "not_found"
    METHOD = "method_not_allowed"
    BUDGET = "budget_exhausted"
    OVER = "episode_over"
    FAILED = "episode_failed"
    BUSY = "overloaded"
    CONFLICT = "feedback_conflict"
    GONE = "episode_deleted"


_TYPES: Mapping[int, tuple[str, str]] = {  # (OpenAI's, Anthropic's)
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    409: ("conflict_error", "invalid_request_error"),
    410: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
}


@dataclass(eq=False)
class Refusal(SaoGymError):
    """A request that is answered with an error. `retry_after_s` is set where it may pass later.

    `anthropic` is the sentence in that protocol where it differs; `param` names the field that is wrong.
    """

    status: int
    code: Code
    message: str
    param: str | None = None
    retry_after_s: float | None = None
    anthropic: str = ""

    def __str__(self) -> str:
        return self.message

    @classmethod
    def malformed(cls, message: str, param: str | None = None) -> "Refusal":
        """A body that is no request."""
        return cls(400, Code.MALFORMED, message, param)

    @classmethod
    def unsupported(cls, message: str, param: str) -> "Refusal":
        """A request for something that is not served."""
        return cls(400, Code.UNSUPPORTED, message, param)

    @classmethod
    def too_large(cls, limit: int) -> "Refusal":
        """A body of more than `limit` bytes."""
        return cls(413, Code.TOO_LARGE, f"the body is larger than {limit} bytes")

    @classmethod
    def context(cls, *, prompt: int, asked: int, limit: int) -> "Refusal":
        """A prompt of `prompt` tokens with an answer of `asked` does not fit into `limit` (case GW-04)."""
        message = (
            f"this model's maximum context length is {limit} tokens, the request needs {prompt + asked}: {prompt} in "
            f"the prompt and {asked} for the answer; shorten the messages or ask for a shorter answer"
        )
        anthropic = f"prompt is too long: {prompt + asked} tokens > {limit} maximum"
        return cls(400, Code.CONTEXT, message, "messages", anthropic=anthropic)

    @classmethod
    def secret(cls) -> "Refusal":
        """No episode has the secret that was given."""
        return cls(401, Code.SECRET, "no episode is open under this address or API key")

    @classmethod
    def budget(cls, what: str) -> "Refusal":
        """A budget of the episode is spent."""
        return cls(401, Code.BUDGET, f"the episode's budget is spent: {what}; no further call will be answered")

    @classmethod
    def over(cls, why: str) -> "Refusal":
        """The episode has ended."""
        return cls(401, Code.OVER, f"the episode is over: {why}; no further call will be answered")

    @classmethod
    def failed(cls, kind: str) -> "Refusal":
        """The episode ended with an error of our own; `kind` is what is counted."""
        return cls(401, Code.FAILED, f"the episode has failed ({kind}); no further call will be answered")

    @classmethod
    def busy(cls, retry_after_s: float) -> "Refusal":
        """Nothing is answered just now."""
        return cls(429, Code.BUSY, "no call can be answered just now; send it again", retry_after_s=retry_after_s)

    @property
    def headers(self) -> dict[str, str]:
        """Header fields of the answer."""
        return {} if self.retry_after_s is None else {"retry-after": f"{max(self.retry_after_s, 1):.0f}"}

    def openai_body(self) -> dict[str, Any]:
        """The error as OpenAI's API words it."""
        kind = _TYPES.get(self.status, _TYPES[400])[0]
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": str(self.code)}}

    def anthropic_body(self) -> dict[str, Any]:
        """The error as Anthropic's API words it."""
        kind = _TYPES.get(self.status, _TYPES[400])[1]
        return {"type": "error", "error": {"type": kind, "message": self.anthropic or self.message}}
