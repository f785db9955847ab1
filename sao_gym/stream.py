"""The vocabulary: episodes as streams of action and observation segments, and all that is derived from them.

Invariants, each held at construction:
- ids stand as they were sampled; the sampled stop token belongs to the action.
- an action carries one log-prob and one policy version per token and the temperature they were taken at; an
  observation carries none.
- segments carry no reward; `Trajectory.scored` places it, on the last token of the action that earned it.
- masks, positions, turn ids and staleness are computed properties: no code sets a mask.

Example:
    >>> prompt = Segment.observation([1, 2, 3])
    >>> reply = Segment.action([7, 8], logprobs=[-0.1, -0.2], versions=[4, 4], temperature=1.0,
    ...                        stop=StopReason.STOP)
    >>> stream = TokenStream(segments=(prompt, reply))
    >>> stream.action_mask.tolist(), stream.turns.tolist()
    ([False, False, False, True, True], [-1, -1, -1, 0, 0])
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sao_gym.errors import InvariantError

Ids = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Credit = Literal["chain", "local", "compactionrl"]


class SegmentKind(StrEnum):
    """Who wrote the tokens: the policy, or anything else."""

    ACTION = "action"
    OBSERVATION = "observation"


class StopReason(StrEnum):
    """Why a generation ended. When the last allowed token is a stop token, `STOP` wins over `LENGTH`."""

    STOP = "stop"
    """A stop token was sampled; it is the action's last id."""
    STOP_STRING = "stop_string"
    """The text reached a stop string; it stays in the ids."""
    LENGTH = "length"
    """The token limit of the turn or of the episode was reached; the episode ends."""
    ABORT = "abort"
    """The request was cancelled; what was sampled so far is kept."""


class OutcomeStatus(StrEnum):
    """How an episode ended. `TERMINATED` wins over `TRUNCATED`; `ERROR` is never trained on."""

    TERMINATED = "terminated"
    TRUNCATED = "truncated"
    ERROR = "error"


class TruncationReason(StrEnum):
    """Which budget ended an episode."""

    TURNS = "turns"
    TURN_TOKENS = "turn_tokens"
    EPISODE_TOKENS = "episode_tokens"
    CONTEXT = "context"
    WALL_CLOCK = "wall_clock"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended, and the reason where it did not end by itself."""

    status: OutcomeStatus
    reason: str | None = None

    @classmethod
    def terminated(cls) -> "Outcome":
        """The environment declared the episode over."""
        return cls(OutcomeStatus.TERMINATED)

    @classmethod
    def truncated(cls, reason: str) -> "Outcome":
        """A budget ended the episode; see `TruncationReason`."""
        return cls(OutcomeStatus.TRUNCATED, str(reason))

    @classmethod
    def error(cls, reason: str) -> "Outcome":
        """Infrastructure failed; the episode says nothing about the policy."""
        return cls(OutcomeStatus.ERROR, reason)

    @property
    def is_error(self) -> bool:
        """Whether the episode must stay out of every loss and every score."""
        return self.status is OutcomeStatus.ERROR

    @property
    def is_truncated(self) -> bool:
        """Whether a budget ended the episode."""
        return self.status is OutcomeStatus.TRUNCATED


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A grader's verdict on one episode.

    `per_action` gives each action's own share of `value`, in order; empty means that the last action earned it
    all. `detail` is one sentence for people, `method` one word for counts: how the verdict was reached, as the answer
    grader's "integer", "spelling", "table", "symbolic", "judge", "none" (no answer) and "undecided".
    """

    value: float
    passed: bool
    per_action: tuple[float, ...] = ()
    detail: str = ""
    grader_version: str = ""
    method: str = ""


def _array(values: Any, dtype: Any) -> npt.NDArray[Any]:
    array = np.array(values, dtype=dtype)  # a copy: a record never shares memory with its maker
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False, kw_only=True)
class Segment:
    """A run of tokens with one author.

    Shapes: token_ids [n] int32; behavior_logprobs [n] float32 and versions [n] int32 on actions, None on
    observations; extras are arrays [n, ...] of what an engine knows per token.
    """

    kind: SegmentKind
    token_ids: Ids
    behavior_logprobs: Floats | None = None
    versions: Ids | None = None
    temperature: float | None = None
    stop: StopReason | None = None
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @classmethod
    def observation(cls, token_ids: Iterable[int] | Ids, **extras: Any) -> "Segment":
        """Tokens that the environment, the prompt or a template wrote."""
        arrays = {name: _array(value, None) for name, value in extras.items()}
        return cls(kind=SegmentKind.OBSERVATION, token_ids=_array(token_ids, np.int32), extras=arrays)

    @classmethod
    def action(
        cls,
        token_ids: Iterable[int] | Ids,
        *,
        logprobs: Iterable[float] | Floats,
        versions: Iterable[int] | Ids,
        temperature: float,
        stop: StopReason,
        extras: Mapping[str, Any] | None = None,
    ) -> "Segment":
        """Tokens that the policy sampled, with what the engine recorded of each."""
        return cls(
            kind=SegmentKind.ACTION,
            token_ids=_array(token_ids, np.int32),
            behavior_logprobs=_array(logprobs, np.float32),
            versions=_array(versions, np.int32),
            temperature=float(temperature),
            stop=stop,
            extras={name: _array(value, None) for name, value in (extras or {}).items()},
        )

    def __post_init__(self) -> None:
        n = len(self.token_ids)
        if self.token_ids.ndim != 1:
            raise InvariantError(f"token_ids must be one-dimensional, got shape {self.token_ids.shape}")
        for name, values in self.extras.items():
            if len(values) != n:
                raise InvariantError(f"extra {name!r} has {len(values)} entries for {n} tokens")
        recorded = (self.behavior_logprobs, self.versions, self.temperature, self.stop)
        if self.kind is SegmentKind.OBSERVATION:
            if any(value is not None for value in recorded):
                raise InvariantError("an observation carries no log-probs, versions, temperature or stop reason")
            return
        if self.behavior_logprobs is None or self.versions is None or self.temperature is None or self.stop is None:
            raise InvariantError("an action needs log-probs, versions, a temperature and a stop reason")
        if not len(self.behavior_logprobs) == len(self.versions) == n:
            raise InvariantError(
                f"an action of {n} tokens came with {len(self.behavior_logprobs)} log-probs and "
                f"{len(self.versions)} versions; all three must agree"
            )
        if not np.isfinite(self.behavior_logprobs).all() or (self.behavior_logprobs > 1e-3).any():
            raise InvariantError("behaviour log-probs must be finite and not above 0")
        if n > 1 and (np.diff(self.versions) < 0).any():
            raise InvariantError("policy versions inside an action never fall")

    def __len__(self) -> int:
        return len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        return (
            (self.kind, self.temperature, self.stop) == (other.kind, other.temperature, other.stop)
            and _same(self.token_ids, other.token_ids)
            and _same(self.behavior_logprobs, other.behavior_logprobs)
            and _same(self.versions, other.versions)
            and self.extras.keys() == other.extras.keys()
            and all(_same(self.extras[name], other.extras[name]) for name in self.extras)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def is_action(self) -> bool:
        """Whether the policy sampled these tokens."""
        return self.kind is SegmentKind.ACTION


def _same(a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and np.array_equal(a, b)


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """An append-only sequence of segments. Properties are arrays over its T tokens, or over its A action tokens."""

    segments: tuple[Segment, ...] = ()

    def append(self, segment: Segment) -> "TokenStream":
        """A stream with one segment more; this one stays as it is."""
        made = TokenStream(segments=(*self.segments, segment))
        made.__dict__["_n_tokens"] = len(self) + len(segment)  # else an episode of n turns would count n * n segments
        return made

    def __len__(self) -> int:
        return self._n_tokens

    @cached_property
    def _n_tokens(self) -> int:
        return sum(len(segment) for segment in self.segments)

    def _joined(self, parts: list[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
        return _array(np.concatenate(parts) if parts else [], dtype)

    @cached_property
    def actions(self) -> tuple[Segment, ...]:
        """The action segments that hold tokens, in order. An aborted, empty action is not one."""
        return tuple(segment for segment in self.segments if segment.is_action and len(segment))

    @cached_property
    def token_ids(self) -> Ids:
        """All ids [T]."""
        return self._joined([segment.token_ids for segment in self.segments], np.int32)

    @cached_property
    def positions(self) -> Ids:
        """Position of each token in the stream [T]."""
        return _array(np.arange(len(self)), np.int32)

    @cached_property
    def action_mask(self) -> Mask:
        """True where the policy sampled the token [T]."""
        parts = [np.full(len(segment), segment.is_action) for segment in self.segments]
        return self._joined(parts, np.bool_)

    @cached_property
    def turns(self) -> Ids:
        """Index of the action a token belongs to [T]; an observation has that of the action before it, -1 at first."""
        lengths = [len(segment) for segment in self.segments]
        opens = np.cumsum([segment.is_action and len(segment) > 0 for segment in self.segments]) - 1
        return _array(np.repeat(opens, lengths), np.int32)

    @cached_property
    def behavior_logprobs(self) -> Floats:
        """Log-prob that the engine recorded when it sampled each action token [A]."""
        return self._joined([s.behavior_logprobs for s in self.actions if s.behavior_logprobs is not None], np.float32)

    @cached_property
    def versions(self) -> Ids:
        """Policy version that sampled each action token [A]."""
        return self._joined([s.versions for s in self.actions if s.versions is not None], np.int32)

    @cached_property
    def temperatures(self) -> Floats:
        """Temperature each action token was sampled at [A]."""
        return self._joined([np.full(len(s), s.temperature) for s in self.actions], np.float32)

    @cached_property
    def action_positions(self) -> Ids:
        """Position of each action token in the stream [A]. The state before it ends one position earlier."""
        return _array(np.flatnonzero(self.action_mask), np.int32)

    @property
    def n_action(self) -> int:
        """Number of sampled tokens."""
        return len(self.action_positions)


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The record of one episode. Several streams (compaction, sub-agents) share its score, in causal order."""

    uid: str
    task_id: str
    env_id: str
    attempt: int
    streams: tuple[TokenStream, ...]
    outcome: Outcome
    group_id: str | None = None
    score: Score | None = None
    admitted_version: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n_action(self) -> int:
        """Number of sampled tokens over all streams."""
        return sum(stream.n_action for stream in self.streams)

    @property
    def n_tokens(self) -> int:
        """Number of tokens over all streams, prompts and observations included."""
        return sum(len(stream) for stream in self.streams)

    @property
    def n_turns(self) -> int:
        """Number of actions over all streams."""
        return sum(len(stream.actions) for stream in self.streams)

    @property
    def first_version(self) -> int | None:
        """Policy version of the first sampled token: staleness counts from here. None without one."""
        return next((int(s.versions[0]) for s in self.streams if s.n_action), None)

    @property
    def last_version(self) -> int | None:
        """Newest policy version in the trajectory, None without sampled tokens."""
        return max((int(s.versions.max()) for s in self.streams if s.n_action), default=None)

    def scored(self, score: Score) -> "Trajectory":
        """This trajectory with a verdict. Raises InvariantError if the shares do not fit the actions or the value."""
        if score.per_action:
            if len(score.per_action) != self.n_turns:
                raise InvariantError(
                    f"score has {len(score.per_action)} shares for {self.n_turns} actions; give one per action or none"
                )
            if abs(sum(score.per_action) - score.value) > 1e-6:
                raise InvariantError(f"shares sum to {sum(score.per_action)}, the score's value is {score.value}")
        if not np.isfinite(score.value):
            raise InvariantError(f"a score must be finite, got {score.value}")
        return replace(self, score=score)

    def rewards(self, credit: Credit = "chain") -> tuple[Floats, ...]:
        """Reward per action token, one array [A_s] per stream (docs/paper.md row 5).

        Each share stands on the last token of its action. Sum over all streams == score.value, but with `local` credit
        each stream that holds an action ends with the whole value.
        """
        value = self.score.value if self.score else 0.0
        shares = list(self.score.per_action) if self.score and self.score.per_action else None
        last = max((i for i, stream in enumerate(self.streams) if stream.n_action), default=-1)
        placed = []
        for index, stream in enumerate(self.streams):
            rewards = np.zeros(stream.n_action, dtype=np.float32)
            ends = np.cumsum([len(action) for action in stream.actions]) - 1
            if credit == "local" and stream.n_action:
                rewards[-1] = value
            elif shares is not None:
                rewards[ends] = shares[: len(ends)]
                shares = shares[len(ends) :]
            elif index == last:
                rewards[-1] = value
            placed.append(rewards)
        return tuple(placed)
