"""What the rooms promise each other. Torch-free: a tensor is whatever the engine and the learner agree on."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy.typing as npt

from sao_gym.errors import ConfigError
from sao_gym.messages import Message, ToolSpec
from sao_gym.stream import Floats, Ids, Outcome, Score, StopReason, Trajectory

if TYPE_CHECKING:
    from sao_gym.budgets import Budgets


class Clock(Protocol):
    """The only source of time and of sleep in the runtime."""

    def now(self) -> float:
        """Seconds since an arbitrary start; never falls."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Give way for `seconds`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one request is sampled. A checkpoint's own generation config is never inherited.

    `temperature` 0 is greedy (evaluation only). `stop_token_ids` are all ids that end the turn.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine sampled. token_ids, logprobs and versions [n] agree in length; the stop token is included."""

    token_ids: Ids
    logprobs: Floats
    versions: Ids
    stop: StopReason
    temperature: float
    extras: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


def request_seed(run_seed: int, task_id: str, attempt: int, stream: int, call: int) -> int:
    """Seed of one request, 63 bits: the same episode draws the same numbers on any machine, in any company."""
    text = f"{run_seed}\x1f{task_id}\x1f{attempt}\x1f{stream}\x1f{call}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


class WeightSource(Protocol):
    """A policy's weights, ready to travel."""

    @property
    def names(self) -> Sequence[str]:
        """Parameter names, each shared tensor once, in the learner's order."""
        ...

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """(name, tensor) pairs in the order of `names`; the tensors do not change while they travel."""
        ...

    @property
    def weight_hash(self) -> str:
        """Hash over names, shapes and bytes; equal to the engine's own after a publication that happened."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """A glance at an engine."""

    version: int
    running: int
    waiting: int
    weight_hash: str = ""


class Engine(Protocol):
    """Samples tokens, remembers how likely they were and which policy version drew them."""

    @property
    def version(self) -> int:
        """Policy version that the next token will be sampled with. It never falls."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and completion together, that one request may hold."""
        ...

    async def generate(self, token_ids: Ids, sampling: Sampling, session: str | None = None) -> Generation:
        """Continue `token_ids`. Cancelling the awaiting task frees the request.

        Calls with one `session` name share their common prefix. Raises EngineError.
        """
        ...

    async def score(self, token_ids: Ids, temperature: float = 1.0) -> Floats:
        """Log-prob of each token given those before it [n]; the first is 0."""
        ...

    async def publish(self, source: WeightSource, version: int) -> None:
        """Serve `source` as `version` from the next token on; requests in flight go on.

        Raises EngineError if the weights did not arrive whole; the old version then goes on serving.
        """
        ...

    async def end_session(self, session: str) -> None:
        """Forget what was kept for `session`."""
        ...

    async def health(self) -> EngineHealth:
        """Raises EngineError if the engine does not answer."""
        ...

    async def close(self) -> None:
        """Free everything; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """What a command left. `truncated` is the number of output bytes left out."""

    stdout: str
    stderr: str
    exit_code: int
    timed_out: bool = False
    truncated: int = 0


class Sandbox(Protocol):
    """A place where a policy's code runs: bounded in time, memory, processes and output, without network."""

    async def exec(self, command: str | Sequence[str], *, timeout_s: float = 30.0) -> ExecResult:
        """Run argv, or a string as `bash -c`. Raises SandboxError if the sandbox itself failed."""
        ...

    async def read(self, path: str) -> bytes:
        """Bytes of a file inside."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file inside."""
        ...

    async def close(self) -> None:
        """End every process inside and remove every trace; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt and what grading it needs. `id` is stable over runs; `answer` is the gold answer."""

    id: str
    prompt: str
    answer: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("id", "prompt", "answer"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ConfigError(f"the {name} of a Task must be text, got {type(value).__name__} {value!r}")


class TaskSet(Protocol):
    """A finite, ordered set of tasks with stable ids and a content hash."""

    @property
    def name(self) -> str:
        """Name of the set and its split."""
        ...

    @property
    def content_hash(self) -> str:
        """Hash of all that the tasks say."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Task: ...


class Grader(Protocol):
    """Judges a finished episode. Pure where it can be: gold -> 1, empty -> 0, garbage -> 0."""

    def grade(self, task: Task, trajectory: Trajectory) -> Score:
        """Raises GradingError if no verdict can be had; that is no 0."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge says of a text: whether it is good, which of the labels fits it best, and what is wrong with it.

    `label` is one of those that were asked about, or another word of the judge's where none fits. `judge` is the version
    of who judged.
    """

    quality: bool
    label: str
    judge: str
    problems: tuple[str, ...] = ()
    detail: str = ""


class Judge(Protocol):
    """Reads a text that answers a request, and gives a verdict. It is never told which label is hoped for."""

    @property
    def version(self) -> str:
        """What decides its verdicts: kind, model, prompt. Verdicts of two versions are not comparable."""
        ...

    async def judge(self, request: str, text: str, labels: Sequence[str]) -> Verdict:
        """Raises GradingError where no verdict can be had, which is no bad verdict; UserError for what ends a run."""
        ...

    async def close(self) -> None:
        """Free everything; idempotent."""
        ...


AGENT_FAILED = "agent"
"""Outcome kind of an agent program that ended badly by itself. It yields to a budget that made it do so."""


class Scaffold(Protocol):
    """An agent program: it knows the address of a model, and works in a sandbox. It never sees who answers there."""

    async def run(self, task: Task, sandbox: Any, base_url: str, budgets: "Budgets") -> Outcome:
        """Let the agent work on `task` until it ends by itself; `base_url` is one for OpenAI's clients.

        `sandbox` is a Sandbox with a shell (`sao_gym.envs.sandboxes.spec.ShellSandbox`). An agent that failed by itself
        is an outcome `error` of kind `AGENT_FAILED`. Cancelling ends it with all that it started. Raises EpisodeError
        for failures of the infrastructure, ConfigError where the program cannot be had.
        """
        ...

    async def close(self) -> None:
        """Give back what the program holds between episodes; idempotent."""
        ...


@runtime_checkable
class CountsWork(Protocol):
    """An engine that counts what happened to its requests; a run's metrics hold the figures."""

    def counters(self) -> Mapping[str, float]:
        """Totals so far, by name."""
        ...


@runtime_checkable
class SelfDriven(Protocol):
    """An environment whose episodes are driven by an agent program, and not stepped by us."""

    @property
    def drives_itself(self) -> bool:
        """Whether `play` drives the episodes; else they are stepped as any other's."""
        ...

    async def play(self, base_url: str, budgets: "Budgets") -> Outcome:
        """Between `reset` and `finish`: let the agent work. See `Scaffold.run`."""
        ...


@runtime_checkable
class Chat(Protocol):
    """One model family's way of writing messages as ids, and back."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an assistant turn."""
        ...

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Ids:
        """The conversation so far as ids, up to where the assistant begins to write."""
        ...

    def bridge(self, messages: Sequence[Message], *, last_id: int) -> Ids:
        """Ids to append after a sampled assistant turn that ended with `last_id`, so that the assistant writes next.

        Holds what the template puts after the turn (less the stop token if that was sampled), the new messages and
        the assistant's opening. Nothing before is rendered again.
        """
        ...

    def write(self, message: Message) -> Ids:
        """Ids that a policy would have sampled to say an assistant message, the stop token included.

        Raises ModelError where the family cannot write such a message.
        """
        ...

    def parse(self, token_ids: Ids, *, tools: Sequence[ToolSpec] = (), is_truncated: bool = False) -> Message:
        """The assistant message that sampled ids say. Never raises on what a policy may write.

        `tools` are those that were offered: their schemas say what an argument is in families that write none in quotes.
        """
        ...
