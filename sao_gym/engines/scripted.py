"""An engine that says what it was told to: for tests, and for people who debug an environment without a model.

It keeps every promise of an engine (ids, log-probs, versions, stop reasons, cancellation) except that nothing is
computed. A completion that runs out before a stop id or the limit counts as cut by the limit.

Example:
    engine = ScriptedEngine.from_texts(["<tool_call>...", "The answer is 4."], tokenizer)
    engine = ScriptedEngine(lambda prompt: [int(prompt[-1]) + 1, stop_id])
"""

import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sao_gym.clock import SystemClock
from sao_gym.errors import EngineError
from sao_gym.protocols import Clock, EngineHealth, Generation, Sampling, WeightSource
from sao_gym.stream import Floats, Ids, StopReason


@dataclass(frozen=True, slots=True)
class Completion:
    """Ids to be said, with their log-probs; None for `constant_logprobs`."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None


Said: TypeAlias = Completion | Sequence[int]
Policy: TypeAlias = Callable[[Ids], Said]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request as the engine saw it, in order of arrival; `generation` is None until it ended well."""

    prompt: Ids
    sampling: Sampling
    session: str | None
    generation: Generation | None = None


def constant_logprobs(n: int) -> Floats:
    """Log-probs [n] of n scripted tokens: -0.10, -0.11, ... -0.16 and again, so that a shift by one shows."""
    return (-0.1 - 0.01 * (np.arange(n) % 7)).astype(np.float32)


class ScriptedEngine:
    """An `Engine` around a policy: a function from the prompt's ids to the completion's.

    `latency_s` is the time on `clock` that a completion of n tokens takes, its tokens evenly spread over it; each
    carries the version that was in force when it was due. `failures` maps the number of a call, counted from 0, to
    the error that it raises.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        context_length: int = 1 << 20,
        version: int = 0,
        latency_s: float | Callable[[int], float] = 0.0,
        failures: Mapping[int, Exception] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._script: Callable[[Ids, str | None], Said] = lambda prompt, session: policy(prompt)
        self._context_length = context_length
        self._latency_s = latency_s
        self._failures = dict(failures or {})
        self._clock = clock or SystemClock()
        self._history = [(-float("inf"), version)]
        self._weight_hash = ""
        self._running = 0
        self._closed = False
        self.calls: list[Call] = []
        self.ended_sessions: list[str] = []

    @classmethod
    def from_lists(cls, completions: Iterable[Said], **options: Any) -> "ScriptedEngine":
        """Each session hears `completions` in order, from the first one on; calls without a session share one turn.

        A call past the last completion raises EngineError. `options` as for the class.
        """
        script = list(completions)
        return cls._by_session(lambda session: script, **options)

    @classmethod
    def from_sessions(cls, completions: Mapping[str, Sequence[Said]], **options: Any) -> "ScriptedEngine":
        """Each session hears its own completions in order; an unknown session raises EngineError."""
        return cls._by_session(lambda session: completions.get(session or "", ()), **options)

    @classmethod
    def from_prompts(cls, completions: Mapping[tuple[int, ...], Said], **options: Any) -> "ScriptedEngine":
        """The completion of each prompt, by its ids; an unknown prompt raises EngineError."""

        def policy(prompt: Ids) -> Said:
            key = tuple(int(token_id) for token_id in prompt)
            if key not in completions:
                raise EngineError(f"no completion is scripted for a prompt of {len(key)} ids")
            return completions[key]

        return cls(policy, **options)

    @classmethod
    def from_texts(
        cls, texts: Iterable[str], tokenizer: Any, stop_id: int | None = None, **options: Any
    ) -> "ScriptedEngine":
        """As `from_lists`, from texts; each ends with `stop_id`, by default the tokenizer's end of sequence."""
        end = tokenizer.eos_token_id if stop_id is None else stop_id
        if end is None:
            raise EngineError("the tokenizer declares no end of sequence; give stop_id")
        return cls.from_lists(
            [[*tokenizer.encode(text, add_special_tokens=False), int(end)] for text in texts], **options
        )

    @classmethod
    def _by_session(cls, script: Callable[[str | None], Sequence[Said]], **options: Any) -> "ScriptedEngine":
        heard: defaultdict[str | None, int] = defaultdict(int)

        def say(prompt: Ids, session: str | None) -> Said:
            completions, index = script(session), heard[session]
            heard[session] += 1
            if index >= len(completions):
                raise EngineError(
                    f"call {index + 1} of session {session}, but {len(completions)} completions are scripted"
                )
            return completions[index]

        engine = cls(lambda prompt: (), **options)
        engine._script = say
        return engine

    @property
    def version(self) -> int:
        """Policy version in force."""
        return self._history[-1][1]

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and completion together, that one request may hold."""
        return self._context_length

    async def generate(self, token_ids: Ids, sampling: Sampling, session: str | None = None) -> Generation:
        """The scripted completion, cut at its first stop id or at the limit. Raises EngineError or a scripted failure."""
        number = len(self.calls)
        prompt = np.array(token_ids, dtype=np.int32)
        self.calls.append(Call(prompt=prompt, sampling=sampling, session=session))
        self._check(prompt, sampling)
        if number in self._failures:
            raise self._failures[number]
        ids, logprobs, stop = self._cut(self._script(prompt, session), sampling, len(prompt))
        start = self._clock.now()
        seconds = self._latency_s(len(ids)) if callable(self._latency_s) else self._latency_s
        self._running += 1
        try:
            if seconds > 0:
                await self._clock.sleep(seconds)
        finally:
            self._running -= 1
        due = [start + seconds * (i + 1) / len(ids) for i in range(len(ids))]
        generation = Generation(
            token_ids=ids,
            logprobs=logprobs,
            versions=np.array([self._version_at(time) for time in due], dtype=np.int32),
            stop=stop,
            temperature=sampling.temperature,
        )
        self.calls[number] = Call(prompt=prompt, sampling=sampling, session=session, generation=generation)
        return generation

    def _check(self, prompt: Ids, sampling: Sampling) -> None:
        if self._closed:
            raise EngineError("the engine was closed")
        if not 0 < len(prompt) < self._context_length or sampling.max_tokens < 1:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens and max_tokens {sampling.max_tokens} do not fit a context of "
                f"{self._context_length}"
            )

    def _cut(self, said: Said, sampling: Sampling, prompt_length: int) -> tuple[Ids, Floats, StopReason]:
        completion = said if isinstance(said, Completion) else Completion(said)
        limit = min(sampling.max_tokens, self._context_length - prompt_length)
        ids = np.array(completion.token_ids, dtype=np.int32)[:limit]
        stops = np.flatnonzero(np.isin(ids, sampling.stop_token_ids))
        if len(stops):
            ids = ids[: stops[0] + 1]
        given = completion.logprobs
        logprobs = constant_logprobs(len(ids)) if given is None else np.array(given, dtype=np.float32)[: len(ids)]
        if not len(ids) or len(logprobs) != len(ids):
            raise EngineError(f"a scripted completion has {len(ids)} ids and {len(logprobs)} log-probs")
        return ids, logprobs, StopReason.STOP if len(stops) else StopReason.LENGTH

    def _version_at(self, time: float) -> int:
        return self._history[bisect.bisect_right(self._history, time, key=lambda entry: entry[0]) - 1][1]

    async def score(self, token_ids: Ids, temperature: float = 1.0) -> Floats:
        """`constant_logprobs` after the first token, whose score is 0 [n]."""
        return np.concatenate([np.zeros(1, np.float32), constant_logprobs(len(token_ids) - 1)])

    async def publish(self, source: WeightSource, version: int) -> None:
        """Take note of a version; tokens due from now on carry it. Raises EngineError if it does not rise."""
        if version <= self.version:
            raise EngineError(f"version {version} was published, the engine already serves {self.version}")
        self._weight_hash = source.weight_hash
        self._history.append((self._clock.now(), version))

    async def end_session(self, session: str) -> None:
        """Noted in `ended_sessions`; the session's place in its script stays."""
        self.ended_sessions.append(session)

    async def health(self) -> EngineHealth:
        """Raises EngineError once closed."""
        if self._closed:
            raise EngineError("the engine was closed")
        return EngineHealth(version=self.version, running=self._running, waiting=0, weight_hash=self._weight_hash)

    async def close(self) -> None:
        """Refuse further calls; idempotent."""
        self._closed = True
