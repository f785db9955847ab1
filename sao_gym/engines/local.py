"""The embedded engine: an unmodified transformers model in a thread of its own.

Requests come from any event loop, decode together and see new weights between two steps. Sampled ids, log-probs and
versions are what DESIGN's engine promises: of the distribution that was sampled, per token. A checkpoint's own
generation config is never read.

Example:
    engine = LocalEngine(model, max_slots=32, context_length=1024)
    generation = await engine.generate(prompt_ids, Sampling(max_tokens=64, stop_token_ids=(2,), seed=5), "episode-1")
    await engine.publish(ModuleWeights(learner), version=1)
    await engine.close()
"""

import asyncio
import math
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sao_gym.clock import SystemClock
from sao_gym.engines.decoder import Decoder, DecoderCounts, KvPolicy
from sao_gym.engines.forward import CachedModel
from sao_gym.engines.waiting import result_within
from sao_gym.engines.worker import EngineThread
from sao_gym.errors import ConfigError, DeadlineError, EngineError, ModelError
from sao_gym.protocols import Clock, EngineHealth, Generation, Sampling, WeightSource
from sao_gym.stream import Floats, Ids
from sao_gym.weights import module_tensors, weight_hash

CLOSE_S = 60.0
MIN_TEMPERATURE = 1e-6
"""Logits divided by less leave float32; 0 is greedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A publication that happened: how long requests stood still for it, and when it was over, on the engine's clock."""

    version: int
    weight_hash: str
    seconds: float
    finished_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDeadlines:
    """The longest that each kind of call may take, in seconds."""

    generate_s: float = 3600.0
    score_s: float = 600.0
    publish_s: float = 600.0
    health_s: float = 120.0


class LocalEngine:
    """An `Engine` around a causal language model, which it owns from now on (`models.copy_model` makes a twin).

    `kv`: at a publication keep keys and values ("in_place") or feed every history again ("recompute").
    `deterministic`: one request per forward pass. `threads`: torch threads of the engine's thread (torch
    gives that number to threads that start later, too), None for torch's choice. Raises ModelError for a model that cannot be served, ConfigError for settings out of range.
    """

    def __init__(
        self,
        model: Any,
        *,
        context_length: int | None = None,
        max_slots: int = 32,
        kv: KvPolicy = "in_place",
        deterministic: bool = False,
        version: int = 0,
        device: torch.device | str | None = None,
        threads: int | None = None,
        clock: Clock | None = None,
        deadlines: EngineDeadlines | None = None,
        prefill_chunk: int = 512,
        max_idle_tokens: int | None = None,
    ) -> None:
        if kv not in ("in_place", "recompute"):
            raise ConfigError(f"kv is {kv!r}; expected 'in_place' or 'recompute'")
        if max_slots < 1 or prefill_chunk < 1 or (threads is not None and threads < 1):
            raise ConfigError("max_slots, prefill_chunk and threads must be at least 1")
        self._clock = clock or SystemClock()
        self._deadlines = deadlines or EngineDeadlines()
        self._publications: list[Publication] = []
        self._weight_hash = ""
        self._decoder = Decoder(
            CachedModel(model if device is None else model.to(device), _context_length(model, context_length)),
            max_slots=max_slots,
            kv=kv,
            deterministic=deterministic,
            version=version,
            prefill_chunk=prefill_chunk,
            max_idle_tokens=max_idle_tokens,
        )
        self._thread = EngineThread(self._decoder, threads)
        self._finalizer = weakref.finalize(self, self._thread.stop)

    @property
    def version(self) -> int:
        """Policy version that the next token will be sampled with."""
        return self._decoder.version

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and completion together, that one request may hold."""
        return self._decoder.model.context_length

    @property
    def publications(self) -> tuple[Publication, ...]:
        """Every publication so far."""
        return tuple(self._publications)

    @property
    def counts(self) -> DecoderCounts:
        """Tokens fed, reused and sampled so far."""
        return self._decoder.counts

    async def generate(self, token_ids: Ids, sampling: Sampling, session: str | None = None) -> Generation:
        """Continue `token_ids`, at most to the context length. Cancelling the awaiting task frees the request.

        Calls with one `session` name share their common prefix. Raises EngineError, DeadlineError.
        """
        ids = self._checked(token_ids)
        if len(ids) >= self.context_length:
            raise EngineError(f"a prompt of {len(ids)} tokens leaves no room in a context of {self.context_length}")
        if sampling.max_tokens < 1 or sampling.top_k < 0 or not 0.0 < sampling.top_p <= 1.0:
            raise EngineError(f"cannot sample with {sampling}: max_tokens >= 1, top_k >= 0, 0 < top_p <= 1")
        if sampling.temperature != 0.0 and not _is_temperature(sampling.temperature):
            raise EngineError(
                f"cannot sample at temperature {sampling.temperature}: 0, or {MIN_TEMPERATURE:g} and more"
            )
        future = self._thread.generate(ids, sampling, session)
        what = f"a generation of {sampling.max_tokens} tokens after {len(ids)}, session {session}"
        return await result_within(future, self._deadlines.generate_s, self._clock, what)

    async def score(self, token_ids: Ids, temperature: float = 1.0) -> Floats:
        """Log-prob of each token given those before it [n] under the current weights; the first is 0."""
        ids = self._checked(token_ids)
        if len(ids) > self.context_length or not _is_temperature(temperature):
            raise EngineError(
                f"cannot score {len(ids)} tokens at temperature {temperature}: at most {self.context_length}, "
                f"{MIN_TEMPERATURE:g} and more"
            )
        future = self._thread.call(lambda decoder: decoder.score(ids, temperature))
        return await result_within(future, self._deadlines.score_s, self._clock, f"scoring {len(ids)} tokens")

    async def publish(self, source: WeightSource, version: int) -> None:
        """Serve `source` as `version` from the next token on; requests in flight go on.

        Raises EngineError if the weights did not arrive whole; the old version then goes on serving.
        """
        future = self._thread.call(partial(self._publish, source, version))
        what = f"the publication of version {version}"
        await result_within(future, self._deadlines.publish_s, self._clock, what)

    def _publish(self, source: WeightSource, version: int, decoder: Decoder) -> None:
        start = self._clock.now()
        self._weight_hash = decoder.publish(source, version)
        end = self._clock.now()
        self._publications.append(
            Publication(version=version, weight_hash=self._weight_hash, seconds=end - start, finished_at=end)
        )

    async def abort(self, session: str) -> None:
        """End a session's requests: they return what was sampled so far, with stop reason `abort`."""
        future = self._thread.call(lambda decoder: self._thread.settle(decoder.abort(session)))
        await result_within(future, self._deadlines.health_s, self._clock, f"the abort of session {session}")

    async def end_session(self, session: str) -> None:
        """Forget what was kept for `session`."""
        future = self._thread.call(lambda decoder: decoder.end_session(session))
        await result_within(future, self._deadlines.health_s, self._clock, f"the end of session {session}")

    async def health(self) -> EngineHealth:
        """The engine thread's own answer. Raises EngineError if it has died, DeadlineError if it is stuck."""
        future = self._thread.call(self._health)
        return await result_within(future, self._deadlines.health_s, self._clock, "the engine's health")

    def _health(self, decoder: Decoder) -> EngineHealth:
        if not self._weight_hash:
            self._weight_hash = weight_hash(module_tensors(decoder.model.model))
        return EngineHealth(
            version=decoder.version,
            running=len(decoder.active),
            waiting=len(decoder.waiting),
            weight_hash=self._weight_hash,
        )

    async def close(self) -> None:
        """End the thread; requests in flight fail with EngineError. Idempotent."""
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, CLOSE_S):
            raise DeadlineError(f"waited {CLOSE_S:g} s for the engine thread to end")

    def _checked(self, token_ids: Ids) -> list[int]:
        array = np.asarray(token_ids)
        if array.ndim != 1 or not len(array) or not np.issubdtype(array.dtype, np.integer):
            raise EngineError(f"token ids must be a non-empty row of integers, got shape {array.shape}")
        if array.min() < 0 or array.max() >= self._decoder.model.vocab_size:
            raise EngineError(
                f"token ids go from {array.min()} to {array.max()}, the model knows 0 to "
                f"{self._decoder.model.vocab_size - 1}; prompt and model have different tokenizers"
            )
        return [int(token_id) for token_id in array]


def _is_temperature(value: float) -> bool:
    return MIN_TEMPERATURE <= value < math.inf


def _context_length(model: Any, asked: int | None) -> int:
    limit = getattr(model.config, "max_position_embeddings", None)
    length = limit if asked is None else asked
    if length is None:
        raise ModelError(f"{type(model).__name__} declares no context length; set context_length")
    if length < 2 or (limit is not None and length > limit):
        raise ModelError(f"context_length {length} was asked for; this model takes 2 to {limit}")
    return int(length)
