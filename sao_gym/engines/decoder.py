"""Batched decoding, one step at a time, without threads: what `LocalEngine` runs in its own.

A row of the slot store belongs to one request. Each `step` feeds what some rows still lack (a prompt, the part of a
prompt that its session has not seen, a history to be recomputed) or, when all are up to date, the last token of every
row, and samples one token wherever a row's history is complete.

Invariants:
- a token's version is that of the weights whose logits it was drawn from.
- keys and values are only reused inside the session that made them, and at least one prompt token is always fed.
- `deterministic`: one row per forward pass, prompts always from their first token, so that a result depends on the
  request and the weights alone, bit for bit.

Example:
    decoder = Decoder(CachedModel(model, 256), max_slots=4)
    request = decoder.add([1, 2, 3], Sampling(max_tokens=8))
    while not request.is_finished:
        decoder.step()
    generation = request.generation()
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from sao_gym.engines.forward import CachedModel
from sao_gym.engines.loading import load_weights
from sao_gym.engines.sampling import Draws, sample, scaled_logprobs
from sao_gym.engines.slots import Prefix, SlotStore
from sao_gym.errors import EngineError
from sao_gym.protocols import Generation, Sampling, WeightSource
from sao_gym.stream import Floats, Ids, StopReason

KvPolicy = Literal["in_place", "recompute"]


@dataclass(eq=False, slots=True)
class Request:
    """One request on its way. `ids` are prompt and completion; the row holds keys and values of `filled` of them."""

    ids: list[int]
    sampling: Sampling
    session: str | None
    limit: int
    draws: Draws
    prompt_length: int
    filled: int = 0
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: StopReason | None = None
    error: str | None = None

    @property
    def lacks(self) -> int:
        """Tokens that must be fed before the next one can be sampled."""
        return len(self.ids) - self.filled

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended, well or not."""
        return self.stop is not None or self.error is not None

    def accept(self, token_id: int, logprob: float, version: int) -> None:
        """Append a sampled token; a stop token wins over the limit."""
        if not np.isfinite(logprob):
            self.error = f"the model's logits are not finite under version {version}"
            return
        self.ids.append(token_id)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token_id in self.sampling.stop_token_ids:
            self.stop = StopReason.STOP
        elif len(self.logprobs) >= self.limit:
            self.stop = StopReason.LENGTH

    def generation(self) -> Generation:
        """What was sampled. Raises EngineError if the request failed."""
        if self.error is not None or self.stop is None:
            raise EngineError(self.error or "the request has not ended")
        return Generation(
            token_ids=np.array(self.ids[self.prompt_length :], dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32),
            stop=self.stop,
            temperature=self.sampling.temperature,
        )


@dataclass(frozen=True, slots=True)
class IdleSession:
    """What is kept of a session between two requests."""

    ids: list[int]
    prefix: Prefix


@dataclass(slots=True)
class DecoderCounts:
    """Tokens fed as prompts, reused from sessions, and sampled, since the start."""

    fed: int = 0
    reused: int = 0
    sampled: int = 0
    forward_passes: int = 0


class Decoder:
    """The requests of one model. Not thread-safe; see `LocalEngine`.

    `max_slots` requests decode together, the rest wait in order of arrival. Idle sessions keep at most
    `max_idle_tokens` tokens of keys and values; the least recently used go first.
    """

    def __init__(
        self,
        model: CachedModel,
        *,
        max_slots: int = 32,
        kv: KvPolicy = "in_place",
        deterministic: bool = False,
        version: int = 0,
        prefill_chunk: int = 512,
        prefill_tokens: int = 4096,
        max_idle_tokens: int | None = None,
    ) -> None:
        self.model = model
        self.version = version
        self.counts = DecoderCounts()
        self.active: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._idle: OrderedDict[str, IdleSession] = OrderedDict()
        self._idle_tokens = 0
        self._max_slots, self._kv, self._deterministic = max_slots, kv, deterministic
        self._prefill_chunk, self._prefill_tokens = prefill_chunk, prefill_tokens
        self._max_idle_tokens = max_slots * model.context_length if max_idle_tokens is None else max_idle_tokens
        self._store = SlotStore(max_slots, model.context_length)

    def add(self, ids: Sequence[int], sampling: Sampling, session: str | None = None) -> Request:
        """Queue a request whose ids and limits have been checked."""
        request = Request(
            ids=list(ids),
            sampling=sampling,
            session=session,
            limit=min(sampling.max_tokens, self.model.context_length - len(ids)),
            draws=Draws(sampling.seed),
            prompt_length=len(ids),
        )
        self.waiting.append(request)
        return request

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self.active or self.waiting)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Feed and sample once; returns the requests that ended, in order of their rows."""
        self._admit()
        for rows in self._plan():
            self._advance(rows)
        ended = [request for request in self.active if request.is_finished]
        for row in reversed(range(len(self.active))):
            if self.active[row].is_finished:
                self._release(row, keep=self.active[row].error is None)
        return ended

    def _admit(self) -> None:
        while self.waiting and len(self.active) < self._max_slots:
            request = self.waiting.popleft()
            self.active.append(request)
            idle = self._forget(request.session)
            if idle is None or self._deterministic:
                continue
            # the last token is fed again, for its logits
            request.filled = min(_common_prefix(idle.ids, request.ids), len(request.ids) - 1)
            self._store.reserve(len(self.active), len(request.ids))
            self._store.put(len(self.active) - 1, idle.prefix, request.filled)
            self.counts.reused += request.filled

    def _plan(self) -> list[list[int]]:
        """Groups of rows to feed, each in one forward pass."""
        behind = [row for row, request in enumerate(self.active) if request.lacks > 1]
        if self._deterministic:
            return [[row] for row in behind or range(len(self.active))]
        if not behind:
            return [list(range(len(self.active)))] if self.active else []
        behind.sort(key=lambda row: -self.active[row].lacks)
        width = min(self.active[behind[0]].lacks, self._prefill_chunk)
        # rows much shorter than the longest wait for a pass of their own kind: padding costs as much as tokens
        group = [row for row in behind if 2 * self.active[row].lacks >= width]
        return [sorted(group[: max(1, self._prefill_tokens // width)])]

    def _advance(self, rows: list[int]) -> None:
        requests = [self.active[row] for row in rows]
        offsets = [request.filled for request in requests]
        chunks = [request.ids[request.filled : request.filled + self._prefill_chunk] for request in requests]
        logits = self.model.feed(self._store, rows, chunks, offsets)
        self.counts.forward_passes += 1
        for request, chunk in zip(requests, chunks, strict=True):
            request.filled += len(chunk)
            self.counts.fed += len(chunk)
        ready = [index for index, request in enumerate(requests) if request.lacks == 0]
        if ready:
            self._sample(logits if len(ready) == len(rows) else logits[ready], [requests[i] for i in ready])

    def _sample(self, logits: torch.Tensor, requests: list[Request]) -> None:
        uniforms = [request.draws[len(request.logprobs)] for request in requests]
        ids, logprobs = sample(logits, [request.sampling for request in requests], uniforms)
        for request, token_id, logprob in zip(requests, ids.tolist(), logprobs.tolist(), strict=True):
            request.accept(token_id, logprob, self.version)
        self.counts.sampled += len(requests)

    def _release(self, row: int, *, keep: bool) -> None:
        request = self.active[row]
        if keep and request.session is not None and not self._deterministic:
            self._remember(request.session, request.ids[: request.filled], row)
        last = len(self.active) - 1
        if row != last:  # active rows stay 0..n-1
            self._store.move(last, row, self.active[last].filled)
            self.active[row] = self.active[last]
        self.active.pop()

    def _remember(self, session: str, ids: list[int], row: int) -> None:
        self._forget(session)
        self._idle[session] = IdleSession(ids, self._store.take(row, len(ids)))
        self._idle_tokens += len(ids)
        while self._idle_tokens > self._max_idle_tokens:
            self._forget(next(iter(self._idle)))

    def _forget(self, session: str | None) -> IdleSession | None:
        idle = self._idle.pop(session, None) if session is not None else None
        if idle is not None:
            self._idle_tokens -= len(idle.ids)
        return idle

    @torch.inference_mode()
    def drop(self, request: Request) -> None:
        """Free a request that nobody waits for any more; nothing is kept of it."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.active:
            self._release(self.active.index(request), keep=False)

    def abort(self, session: str) -> list[Request]:
        """End a session's requests with what was sampled so far, and return them."""
        aborted = [r for r in (*self.waiting, *self.active) if r.session == session and not r.is_finished]
        for request in aborted:
            request.stop = StopReason.ABORT
            self.drop(request)
        return aborted

    def end_session(self, session: str) -> None:
        """Forget what was kept for a session; a request of it that still runs goes on and leaves nothing."""
        self._forget(session)
        for request in (*self.waiting, *self.active):
            if request.session == session:
                request.session = None

    def publish(self, source: WeightSource, version: int) -> str:
        """Serve `source` as `version` from the next step on; returns the weight hash.

        Raises EngineError, with the old weights in force, if they did not arrive whole.
        """
        if version <= self.version:
            raise EngineError(f"version {version} was published, the engine already serves {self.version}")
        arrived = load_weights(self.model.model, source)
        self.version = version
        if self._kv == "recompute":
            self._idle.clear()
            self._idle_tokens = 0
            for request in self.active:
                request.filled = 0
        return arrived

    @torch.inference_mode()
    def score(self, ids: Sequence[int], temperature: float) -> Floats:
        """Log-prob of each token given those before it [n]; the first is 0."""
        store = SlotStore(1, self.model.context_length)
        scores = np.zeros(len(ids), dtype=np.float32)
        for start in range(0, len(ids) - 1, self._prefill_chunk):
            chunk = ids[start : min(start + self._prefill_chunk, len(ids) - 1)]
            logits = self.model.feed(store, [0], [chunk], [start], all_logits=True)[0]
            logprobs = scaled_logprobs(logits, [temperature] * len(chunk))
            targets = torch.tensor(ids[start + 1 : start + 1 + len(chunk)], device=logits.device)
            scores[start + 1 : start + 1 + len(chunk)] = logprobs.gather(1, targets[:, None])[:, 0].cpu().numpy()
        return scores

    @property
    def sessions(self) -> tuple[str, ...]:
        """Sessions with kept keys and values, least recently used first."""
        return tuple(self._idle)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = min(len(a), len(b))
    differs: Ids = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n])).astype(np.int32)
    return int(differs[0]) if len(differs) else n
