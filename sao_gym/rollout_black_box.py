"""One episode that an agent program drives, from reset to record: the twin of `rollout.white_box`.

Invariants: the same as there. Every episode ends in exactly one `Trajectory`, whatever fails; a budget that the agent runs
into ends the episode as it stands, graded, with its reason, also where the program does not take no for an answer; an agent
that failed by itself, or never asked for anything, is an `error` and never 0.

Example:
    async with gateway.serving():
        made = await black_box(env, gateway, episode, budgets=Budgets(max_turns=50), sampling=sampling, clock=clock)
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium

from sao_gym.agent_env import AgentEnv
from sao_gym.budgets import Budgets
from sao_gym.errors import ConfigError, EpisodeError, InvariantError, NoFeedbackError, UserError
from sao_gym.gateway import EpisodeRecord, Gateway, GatewayEpisode
from sao_gym.protocols import AGENT_FAILED, Clock, Sampling, SelfDriven
from sao_gym.rollout import GRADING_S, Episode, in_time, within
from sao_gym.stream import Outcome, Score, Trajectory, TruncationReason

LOOK_S = 1.0
LINGER_S = 30.0
"""How long a program may go on after it was told that its budget is spent, or that there is no engine."""
_RESET_CALL = -1
_log = logging.getLogger(__name__)
Env = gymnasium.Env[Any, Any]


@dataclass(slots=True)
class _Progress:
    """How far the episode came, and what is to be put in its record."""

    handle: GatewayEpisode
    is_begun: bool = False
    score: Score | None = None
    record: EpisodeRecord | None = None
    timings: dict[str, float] = field(default_factory=dict)


async def black_box(
    env: Env,
    gateway: Gateway,
    episode: Episode,
    *,
    budgets: Budgets,
    sampling: Sampling,
    clock: Clock,
    on_version: Callable[[int], None] | None = None,
) -> Trajectory:
    """Run one episode of an environment that `drives_itself`, against a gateway that is serving.

    Arguments and errors as those of `white_box`.
    """
    inner, start = _agent_env(env), clock.now()
    handle = gateway.open(episode, sampling=sampling, budgets=budgets, on_version=on_version)
    progress = _Progress(handle)
    outcome: Outcome | None = None
    try:
        given = await _played(inner, episode, budgets, clock, progress)
        outcome = await _ended(inner, progress, given, clock)
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
        progress.record = await progress.handle.close(outcome)
    if outcome.is_error and progress.record.outcome.is_error:
        outcome = progress.record.outcome  # a failure of the engine comes before what it led to
    progress.timings["episode_s"] = clock.now() - start
    return _record(inner, episode, outcome, progress)


async def _played(env: Any, episode: Episode, budgets: Budgets, clock: Clock, progress: _Progress) -> Outcome:
    """Reset, and let the agent work until it ends, or time or patience does."""

    async def drive() -> Outcome:
        before = clock.now()
        await env.reset_async(seed=episode.seed(_RESET_CALL) % 2**31, options={"task": episode.task})
        progress.timings["env_s"] = clock.now() - before
        progress.is_begun = True
        return await _unless_stubborn(env, progress.handle, budgets, clock)

    given = await within(clock, budgets.wall_clock_s, drive())
    if given is not None:
        return given
    if not progress.is_begun:
        raise EpisodeError(
            f"the environment was not ready within the episode's {budgets.wall_clock_s:g} s", kind="reset_timeout"
        )
    return Outcome.truncated(TruncationReason.WALL_CLOCK)


async def _unless_stubborn(env: Any, handle: GatewayEpisode, budgets: Budgets, clock: Clock) -> Outcome:
    """What `play` says; a program that goes on although nothing is answered any more is ended."""
    play = asyncio.ensure_future(env.play(handle.base_url, budgets))
    watch = asyncio.ensure_future(_refused_for_long(handle, clock))
    try:
        await asyncio.wait({play, watch}, return_when=asyncio.FIRST_COMPLETED)
        if play.done():
            return play.result()  # type: ignore[no-any-return]
        return Outcome.error(AGENT_FAILED)
    finally:
        for task in (play, watch):
            task.cancel()
        await asyncio.gather(play, watch, return_exceptions=True)


async def _refused_for_long(handle: GatewayEpisode, clock: Clock) -> None:
    """Return once the gateway has answered nothing but no for `LINGER_S`."""
    since: float | None = None
    while since is None or clock.now() - since < LINGER_S:
        await clock.sleep(LOOK_S)
        is_over = handle.truncation is not None or handle.session.failure is not None
        since = (clock.now() if since is None else since) if is_over else None


async def _ended(env: Any, progress: _Progress, given: Outcome, clock: Clock) -> Outcome:
    """Close the gateway's side, then grade the work as it stands."""
    record = await progress.handle.close(given)
    if record.outcome.is_error:
        return record.outcome
    if not record.streams:
        kind = "prompt_too_long" if record.outcome.is_truncated else "agent_silent"
        raise EpisodeError("the agent program ended without having got a single answer", kind=kind)
    before, seconds = clock.now(), float(getattr(env, "grading_s", GRADING_S))
    grading = env.finish_async(record.outcome.reason or "")
    progress.score = await in_time(clock, seconds, grading, "the grade of an agent program's work")
    progress.timings["env_s"] += clock.now() - before
    return record.outcome


def _record(env: Any, episode: Episode, outcome: Outcome, progress: _Progress) -> Trajectory:
    record = progress.record
    if record is None:
        raise InvariantError(f"episode {episode.uid} was not closed")
    own = dict(getattr(env, "episode_info", {})) if progress.is_begun else {}
    made = record.trajectory(episode, outcome, timings={"env_s": 0.0, **progress.timings}, info=own)
    return made if outcome.is_error or progress.score is None else made.scored(progress.score)


def drives_itself(env: Env) -> bool:
    """Whether an agent program drives the episodes of an environment."""
    inner = env.unwrapped
    return isinstance(inner, SelfDriven) and inner.drives_itself


def _agent_env(env: Env) -> Any:
    inner = env.unwrapped
    if not (isinstance(inner, AgentEnv) and drives_itself(inner)):
        raise ConfigError(f"{type(inner).__name__} is stepped and does not drive itself; use white_box")
    return inner
