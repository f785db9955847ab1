"""What an SGLang server answers, put together token by token, whichever way the server cuts it into chunks.

Invariants: a token is taken once, with its log-prob; every token that `tokens` returns has a version that is known. A
chunk says how many tokens there are by now (`completion_tokens`), so ids and log-probs may each come whole or as what
is new, a repeated chunk adds nothing, and what fits neither is refused.

A chunk is stamped with the version that the server's front held when it passed on. Weights change in the server before
the stamp does, and no token is sampled in between (generation is paused), so a chunk that carries the stamp of the
request's beginning holds tokens of that version alone; of later chunks this is not known before the answer's end,
which lists versions as spans over the tokens.
"""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from sao_gym.errors import EngineError

T = TypeVar("T")


class FinishReason(msgspec.Struct):
    """Why a request ended. `type` is stop, length or abort."""

    type: str
    message: str | None = None
    status_code: int | None = None


class Span(msgspec.Struct):
    """Tokens [start, end) were sampled by `version`."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct):
    """What a chunk says about its request."""

    finish_reason: FinishReason | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    weight_version: str | None = None
    weight_versions: list[Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    input_token_logprobs: list[tuple[float | None, int, Any]] = []
    routed_experts: str | None = None


class Failure(msgspec.Struct):
    """An error inside of a stream."""

    message: str = ""
    code: int | None = None


class Chunk(msgspec.Struct):
    """One answer of `/generate`, or one event of its stream."""

    output_ids: list[int] = []
    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)
    error: Failure | str | None = None


UNPUBLISHED = "default"
"""What a server calls the weights that it was started with."""
_chunk = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk:
    """Raises EngineError for what is no answer of a server."""
    try:
        return _chunk.decode(data)
    except msgspec.MsgspecError as error:
        raise EngineError(f"the server's answer cannot be read ({error}): {data[:200]!r}") from error


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens with what is known of each; the three agree in length."""

    ids: list[int]
    logprobs: list[float]
    versions: list[int]


class Answer:
    """The answer to one request as it comes. `label` is the server's version when the request was sent."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.routed_experts: str | None = None
        self.seen_label = ""
        self._spans: list[Span] | None = None
        self._sure = 0

    def add(self, chunk: Chunk) -> None:
        """Take what is new in a chunk. Raises EngineError if that cannot be told."""
        meta = chunk.meta_info
        total = meta.completion_tokens
        if total is None:
            raise EngineError("a chunk of the stream does not say how many tokens there are (completion_tokens)")
        is_abort = meta.finish_reason is not None and meta.finish_reason.type == "abort"
        if new := total - len(self.ids):
            try:
                self._take(chunk, total, new)
            except EngineError:
                if not is_abort:  # an abort's last chunk may repeat a token; what came before stands
                    raise
        if meta.weight_version == self.label and self._sure == len(self.ids) - new:
            self._sure = len(self.ids)
        self.finish = meta.finish_reason
        self.seen_label = meta.weight_version or self.seen_label
        self._spans = meta.weight_versions
        self.cached_tokens = max(self.cached_tokens, meta.cached_tokens)
        self.routed_experts = meta.routed_experts or self.routed_experts

    def _take(self, chunk: Chunk, total: int, new: int) -> None:
        ids = _tail(chunk.output_ids, total, new, "ids")
        scored = _tail(chunk.meta_info.output_token_logprobs, total, new, "log-probs")
        if ids != [token_id for _, token_id, _ in scored]:
            raise EngineError("the server's log-probs are those of other tokens than it sent")
        logprobs = [logprob for logprob, _, _ in scored]
        if any(logprob is None or not math.isfinite(logprob) for logprob in logprobs):
            raise EngineError(f"the server's log-probs are not finite under version {self.label}")
        self.ids += ids
        self.logprobs += [float(logprob) for logprob in logprobs if logprob is not None]

    @property
    def is_of_new_server(self) -> bool:
        """Whether a server answered that was started anew, and holds nobody's weights but its checkpoint's."""
        spans = self._spans or ()
        return self.seen_label == UNPUBLISHED or any(span.version == UNPUBLISHED for span in spans)

    def tokens(self, versions: Mapping[str, int]) -> Tokens:
        """The tokens whose version is known: all at the end of an answer, else those of the request's own version.

        Raises EngineError for a version that is not in `versions`: somebody else has published.
        """
        labels = self._labels()
        if unknown := set(labels) - versions.keys():
            raise EngineError(
                f"the server sampled with weights {sorted(unknown)[0]!r} that this engine did not publish: give each "
                "run servers of its own"
            )
        n = len(labels)
        return Tokens(self.ids[:n], self.logprobs[:n], [versions[label] for label in labels])

    def _labels(self) -> list[str]:
        if self._spans is None:
            return [self.label] * self._sure
        labels: list[str] = []
        for span in self._spans:
            if span.start != len(labels):
                break
            labels += [span.version] * (span.end - span.start)
        if len(labels) < len(self.ids):
            raise EngineError(f"the server says the version of {len(labels)} tokens and sent {len(self.ids)}")
        return labels[: len(self.ids)]


def _tail(items: list[T], total: int, new: int, what: str) -> list[T]:
    """The last `new` of `total`, from all of them or from the new ones alone."""
    if new > 0 and len(items) in (total, new):
        return items[-new:]
    raise EngineError(
        f"a chunk holds {len(items)} {what} where there are {total} tokens, {new} of them new: it can be neither all of "
        "them nor the new ones"
    )


def scored_tokens(chunk: Chunk, ids: list[int], *, vocab_size: int) -> npt.NDArray[np.float32]:
    """Log-prob of each prompt token [n], the first 0. Raises EngineError where the server scored something else.

    A server of version 0.5.23 names a prompt's token of the last id 0, though it scores the right one.
    """
    scored = chunk.meta_info.input_token_logprobs
    named = [token_id for _, token_id, _ in scored]
    if named != ids and named != [0 if token_id == vocab_size - 1 else token_id for token_id in ids]:
        raise EngineError(f"the server scored {len(scored)} tokens that are not the {len(ids)} it was given")
    values = np.array([0.0, *(np.nan if value is None else value for value, _, _ in scored[1:])], dtype=np.float32)
    if not np.isfinite(values).all():
        raise EngineError("the server's log-probs are not finite")
    return values


def routed_rows(encoded: str, *, layers: int, top_k: int, n: int) -> npt.NDArray[np.int32]:
    """The experts [n, layers, top_k] of the `n` positions that the sampled tokens were drawn at."""
    flat = np.frombuffer(base64.b64decode(encoded), dtype="<i4")
    if flat.size % (layers * top_k) or flat.size < n * layers * top_k:
        raise EngineError(f"{flat.size} routed experts are no whole number of {layers} layers x {top_k}")
    return flat.reshape(-1, layers, top_k)[-n:].astype(np.int32) if n else np.zeros((0, layers, top_k), np.int32)
