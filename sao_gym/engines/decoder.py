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

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from sao_gym.engines.forward import CachedModel
from sao_gym.engines.loading import load_weights
from sao_gym.engines.request import Request
from sao_gym.engines.sampling import Draws, sample, scaled_logprobs
from sao_gym.engines.sessions import IdleSession, IdleSessions
from sao_gym.engines.slots import SlotStore
from sao_gym.errors import EngineError
from sao_gym.protocols import Sampling, WeightSource
from sao_gym.stream import Floats, StopReason

KvPolicy = Literal["in_place", "recompute"]


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
        self._idle = IdleSessions(max_slots * model.context_length if max_idle_tokens is None else max_idle_tokens)
        self._max_slots, self._kv, self._deterministic = max_slots, kv, deterministic
        self._prefill_chunk, self._prefill_tokens = prefill_chunk, prefill_tokens
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
            idle = self._idle.take(request.session)
            if idle is None:
                continue
            # the last token is fed again, for its logits
            request.filled = min(idle.common(request.ids), len(request.ids) - 1)
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
            ids = request.ids[: request.filled]
            self._idle.keep(request.session, IdleSession(ids, self._store.take(row, len(ids))))
        last = len(self.active) - 1
        if row != last:  # active rows stay 0..n-1
            self._store.move(last, row, self.active[last].filled)
            self.active[row] = self.active[last]
        self.active.pop()

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
        self._idle.take(session)
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
        return self._idle.names
