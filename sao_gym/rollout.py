"""One episode from reset to record. `white_box` steps a `TokenEnv` with an engine.

Invariants: every episode ends in exactly one `Trajectory`, whatever fails; infrastructure failures have outcome
`error` and no score; a wall-clock budget ends the episode as it stands, graded, with its reason.

Example:
    env = TokenEnv(make("arithmetic"), chat, Budgets(max_turns=4))
    episode = Episode(uid="e0", task=task, env_id="arithmetic", attempt=0, run_seed=0)
    trajectory = await white_box(env, engine, episode, sampling=Sampling(max_tokens=64), clock=SystemClock())
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium
import numpy as np

from sao_gym.budgets import Budgets
from sao_gym.errors import ConfigError, EngineError, EpisodeError, InvariantError, NoFeedbackError, UserError
from sao_gym.messages import Message
from sao_gym.protocols import Chat, Clock, Engine, Generation, Sampling, Task, request_seed
from sao_gym.stream import Outcome, Trajectory, TruncationReason
from sao_gym.token_env import TokenEnv

if TYPE_CHECKING:
    from sao_gym.lazy_gateway import LazyGateway

T = TypeVar("T")
GRADING_S = 300.0
POISONED = "poisoned_output"
_RESET_CALL = -1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """Which episode: `attempt` numbers the task's episodes in the run, and with the seed decides every draw."""

    uid: str
    task: Task
    env_id: str
    attempt: int
    run_seed: int
    group_id: str | None = None

    def seed(self, call: int) -> int:
        """Seed of the call-th request; of the environment for -1."""
        return request_seed(self.run_seed, self.task.id, self.attempt, 0, call)


@dataclass(slots=True)
class _Progress:
    """How far the episode came: until `is_begun`, the environment still holds the one before."""

    clock: Clock
    engine_s: float = 0.0
    env_s: float = 0.0
    is_begun: bool = False


async def white_box(
    env: TokenEnv,
    engine: Engine,
    episode: Episode,
    *,
    sampling: Sampling,
    clock: Clock,
    on_version: Callable[[int], None] | None = None,
) -> Trajectory:
    """Run one episode. `sampling.max_tokens` is a further cap per turn; its seed is replaced per request.

    `on_version` hears the engine's version when the first token is asked for, and the exact one once it is sampled.
    Raises UserError and InvariantError; anything else that fails is an outcome `error`.
    """
    if getattr(env.unwrapped, "drives_itself", False):
        raise ConfigError(f"{type(env.unwrapped).__name__} is driven by an agent program and cannot be stepped")
    progress = _Progress(clock)
    start, admitted = clock.now(), engine.version
    outcome: Outcome | None = None
    try:
        drive = _drive(env, engine, episode, sampling, progress, on_version or (lambda version: None))
        if await within(clock, env.budgets.wall_clock_s, drive) is None:
            if not progress.is_begun:
                raise EpisodeError(
                    f"the environment was not ready within the episode's {env.budgets.wall_clock_s:g} s",
                    kind="reset_timeout",
                )
            grading = env.finish_async(TruncationReason.WALL_CLOCK)
            await in_time(clock, grading_limit(env), grading, "the grade of an episode that ran out of time")
    except (UserError, InvariantError):
        raise
    except NoFeedbackError as error:
        outcome = Outcome.error(error.kind)
    except EpisodeError as error:
        _log.warning("episode %s of task %s failed (%s): %s", episode.uid, episode.task.id, error.kind, error)
        outcome = Outcome.error(error.kind)
    except Exception as error:
        _log.warning("episode %s of task %s failed", episode.uid, episode.task.id, exc_info=error)
        outcome = Outcome.error(type(error).__name__)
    finally:
        await _end_session(engine, episode.uid)
    seconds = {"episode_s": clock.now() - start, "engine_s": progress.engine_s, "env_s": progress.env_s}
    return _record(env, episode, outcome, admitted, seconds, is_begun=progress.is_begun)


async def _end_session(engine: Engine, uid: str) -> None:
    """An engine that is gone holds no session either."""
    try:
        await engine.end_session(uid)
    except EngineError as error:
        _log.warning("the engine kept the session of episode %s: %s", uid, error)


async def _drive(
    env: TokenEnv,
    engine: Engine,
    episode: Episode,
    sampling: Sampling,
    progress: _Progress,
    on_version: Callable[[int], None],
) -> bool:
    """Step until the environment or a budget ends the episode."""
    before = progress.clock.now()
    await env.reset_async(seed=episode.seed(_RESET_CALL) % 2**31, options={"task": episode.task})
    progress.env_s += progress.clock.now() - before
    progress.is_begun = True
    call = 0
    while env.outcome is None:
        if call == 0:
            on_version(engine.version)
        before = progress.clock.now()
        request = replace(
            sampling,
            max_tokens=min(sampling.max_tokens, env.next_max_tokens),
            stop_token_ids=sampling.stop_token_ids or env.chat.stop_token_ids,
            seed=episode.seed(call),
        )
        generation = await engine.generate(env.token_ids, request, episode.uid)
        require_sound(generation, request)
        if call == 0 and len(generation.versions):
            on_version(int(generation.versions[0]))
        after = progress.clock.now()
        progress.engine_s += after - before
        await env.step_async(generation)
        progress.env_s += progress.clock.now() - after
        call += 1
    return True


def require_sound(generation: Generation, request: Sampling) -> None:
    """Raise EngineError of kind `poisoned_output` for arrays that cannot be what was sampled: nothing may learn from it."""
    ids, logprobs, versions = (np.asarray(x) for x in (generation.token_ids, generation.logprobs, generation.versions))
    n = len(ids)
    wrong = None
    if not ids.shape == logprobs.shape == versions.shape == (n,):
        wrong = f"{len(ids)} ids, {len(logprobs)} log-probs and {len(versions)} versions"
    elif not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        wrong = "log-probs that are not finite, or above 0"
    elif (ids < 0).any() or (versions < 0).any() or (np.diff(versions) < 0).any():
        wrong = "ids below 0, or versions that fall"
    elif n > request.max_tokens:
        wrong = f"{n} tokens where {request.max_tokens} were asked for"
    elif generation.temperature != request.temperature:
        wrong = f"temperature {generation.temperature} where {request.temperature} was asked for"
    elif any(len(extra) != n for extra in generation.extras.values()):
        wrong = f"extras that do not have one entry for each of {n} tokens"
    if wrong:
        raise EngineError(f"the engine answered with {wrong}", kind=POISONED)


def _record(
    env: TokenEnv,
    episode: Episode,
    outcome: Outcome | None,
    admitted: int,
    timings: dict[str, float],
    *,
    is_begun: bool,
) -> Trajectory:
    if outcome is not None:
        # The environment's own state is not to be trusted after a failure; what was sampled is kept for the account.
        return Trajectory(
            uid=episode.uid,
            task_id=episode.task.id,
            env_id=episode.env_id,
            attempt=episode.attempt,
            streams=(env.stream,) if is_begun else (),
            outcome=outcome,
            group_id=episode.group_id,
            admitted_version=admitted,
            timings=timings,
            seed=episode.seed(0),
        )
    return env.trajectory(
        uid=episode.uid,
        env_id=episode.env_id,
        attempt=episode.attempt,
        seed=episode.seed(0),
        group_id=episode.group_id,
        admitted_version=admitted,
        timings=timings,
    )


async def within(clock: Clock, seconds: float | None, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if it took longer than `seconds` and was cancelled."""
    if seconds is None:
        return await work
    task = asyncio.ensure_future(work)
    alarm = asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait({task, alarm}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for pending in (task, alarm):
            pending.cancel()
        await asyncio.gather(task, alarm, return_exceptions=True)


def grading_limit(env: gymnasium.Env[Any, Any]) -> float:
    """Seconds that the grade of an episode may take which ran out of time: the environment's `grading_s`, else 300."""
    return float(getattr(env.unwrapped, "grading_s", GRADING_S))


async def in_time(clock: Clock, seconds: float, work: Coroutine[Any, Any, T], what: str) -> T | None:
    """The result of `work`. Raises EpisodeError of kind `grading_timeout`, naming `what`, if it took longer."""
    done: list[T] = []

    async def run() -> bool:
        done.append(await work)
        return True

    if await within(clock, seconds, run()) is None:
        raise EpisodeError(f"waited {seconds:g} s for {what}", kind="grading_timeout")
    return done[0]


async def _discard(env: TokenEnv) -> None:
    """Close an environment that may be broken: its episode is over, and the run goes on."""
    try:
        await env.close_async()
    except Exception as error:
        _log.warning("an environment could not be closed", exc_info=error)


class EnvPool:
    """Token environments that are used again: one episode at a time each. A failed episode's is thrown away."""

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[tuple[Message, ...], Message]],
        chat: Chat,
        budgets: Budgets,
        *,
        context_length: int | None = None,
    ) -> None:
        self._make = make
        self._chat = chat
        self._budgets = budgets
        self._context_length = context_length
        self._free: list[TokenEnv] = []
        self._gateways: dict[int, LazyGateway] = {}

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[TokenEnv]:
        """An environment for one episode."""
        env = self._free.pop() if self._free else self._new()
        try:
            yield env
        except BaseException:
            await _discard(env)
            raise
        if env.outcome is None:
            await _discard(env)
        else:
            self._free.append(env)

    async def run(
        self,
        env: TokenEnv,
        engine: Engine,
        episode: Episode,
        *,
        sampling: Sampling,
        clock: Clock,
        on_version: Callable[[int], None] | None = None,
    ) -> Trajectory:
        """One episode of a leased environment: stepped by us, or driven by its own agent through a gateway of the pool's.

        Arguments and errors as those of `white_box`; ConfigError also where a gateway is needed and cannot be had.
        """
        if not getattr(env.unwrapped, "drives_itself", False):
            return await white_box(env, engine, episode, sampling=sampling, clock=clock, on_version=on_version)
        from sao_gym.lazy_gateway import LazyGateway  # a server is needed for these alone
        from sao_gym.rollout_black_box import black_box

        lazy = self._gateways.setdefault(id(engine), LazyGateway(engine, self._chat, clock))
        return await black_box(
            env,
            await lazy.opened(),
            episode,
            budgets=self._budgets,
            sampling=sampling,
            clock=clock,
            on_version=on_version,
        )

    def _new(self) -> TokenEnv:
        return TokenEnv(self._make(), self._chat, self._budgets, context_length=self._context_length)

    async def close(self) -> None:
        """Close the environments that are free, and the gateways; idempotent."""
        while self._free:
            await self._free.pop().close_async()
        while self._gateways:
            _, lazy = self._gateways.popitem()
            await lazy.close()


def require_training_sampling(sampling: Sampling) -> None:
    """Raise EngineError for sampling whose log-probs are not those of the whole distribution (docs/paper.md row 20)."""
    if sampling.top_p != 1.0 or sampling.top_k != 0 or sampling.temperature <= 0:
        raise EngineError(
            f"training samples from the whole distribution: top_p 1, top_k 0, temperature above 0, got {sampling}"
        )
