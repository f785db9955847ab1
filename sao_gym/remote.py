"""RemoteRunner: any API that speaks OpenAI's chat completions as the policy of an evaluation.

Invariants: an episode is held to its budgets as at token level, with tokens as the API counts them; what fails in the
API, waits for it included, is an outcome `error` and never a score. Nothing is invented: the record holds the messages
(`sao_gym.conversation`), no ids, no log-probs, no versions, so nothing can be trained on it.

What an API cannot tell before it has answered: an observation's size. `max_tokens_per_episode` may therefore be passed
by the last observation; the next action then ends the episode.

Example:
    policy = RemotePolicy(api_base="http://localhost:8000/v1", model="qwen")
    runner = RemoteRunner(
        policy=policy, make_env=lambda: make("arithmetic"), budgets=Budgets(max_turns=4),
        sampling=Sampling(max_tokens=512), clock=SystemClock())
    evaluation = await evaluate(runner=runner, tasks=tasks, samples=4, clock=SystemClock(), seed=0)
"""

import logging
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sao_gym.budgets import Budgets, Limit
from sao_gym.conversation import MESSAGES, message_to_record
from sao_gym.errors import ConfigError, EngineError, EpisodeError, InvariantError, UserError
from sao_gym.evaluation_results import EpisodeRun, Usage
from sao_gym.message_episode import MessageEnv, MessageEpisode
from sao_gym.messages import Message
from sao_gym.openai_format import message_to_openai
from sao_gym.protocols import Clock, Sampling
from sao_gym.remote_answer import Answer, Finish
from sao_gym.remote_client import ContextOverflowError, OpenAIClient
from sao_gym.remote_failures import BAD_REQUEST, SERVER_ERROR
from sao_gym.remote_policy import RemotePolicy
from sao_gym.remote_request import Conversation, request_body
from sao_gym.rollout import GRADING_S, Episode, in_time, within
from sao_gym.stream import Outcome, Trajectory, TruncationReason
from sao_gym.usage import Meter, total

_RESET_CALL = -1
_COUNT_SLACK = 4  # some servers leave control tokens out of their count
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFacts:
    """What the API said of itself, for a manifest: names of models and fingerprints, with the number of answers."""

    models: dict[str, int]
    fingerprints: dict[str, int]


@dataclass(slots=True)
class _State:
    """One episode on its way."""

    episode: Episode
    driver: MessageEpisode
    meter: Meter
    stage: str = "reset"
    conversation: Conversation = field(default_factory=Conversation)
    used: int = 0
    engine_s: float = 0.0
    env_s: float = 0.0
    models: list[str] = field(default_factory=list)


class RemoteRunner:
    """Drives episodes with an API; implements `sao_gym.evaluation.EpisodeRunner`. Raises ConfigError without its key."""

    def __init__(
        self,
        *,
        policy: RemotePolicy,
        make_env: Callable[[], MessageEnv],
        budgets: Budgets,
        sampling: Sampling,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self.policy, self.budgets, self.sampling = policy, budgets, sampling
        self._make_env, self._clock = make_env, clock
        self._client = OpenAIClient(policy, clock=clock, rng=rng)
        self._free: list[MessageEpisode] = []
        self._is_metered = False
        self._models, self._fingerprints = Counter[str](), Counter[str]()
        self._usages: list[Usage] = []

    @property
    def version(self) -> int:
        """Always 0: an API tells no policy version."""
        return 0

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn, as far as a temperature of 0 says so to an API."""
        return self.sampling.temperature == 0

    @property
    def usage(self) -> Usage:
        """What the episodes of this runner cost so far."""
        return total(self._usages)

    @property
    def facts(self) -> RemoteFacts:
        """What the API said of itself so far."""
        return RemoteFacts(models=dict(self._models), fingerprints=dict(self._fingerprints))

    async def run(self, episode: Episode) -> EpisodeRun:
        """One episode. Raises UserError (ApiError: no request of the run will pass); other failures are outcomes `error`."""
        driver = self._free.pop() if self._free else MessageEpisode(self._make_env())
        state = _State(episode, driver, Meter(self.policy.prices))
        start = self._clock.now()
        try:
            failed = await self._finished(state)
        except BaseException:
            await _discard(driver)
            raise
        finally:
            self._usages.append(state.meter.usage)
        if failed is None:
            self._free.append(driver)
        else:
            await _discard(driver)
        trajectory = self._record(state, failed, self._clock.now() - start)
        return EpisodeRun(
            trajectory=trajectory,
            stage=None if failed is None else _stage(state, failed),
            text=_words(driver.last_action),
            usage=state.meter.usage,
        )

    async def close(self) -> None:
        """Close the environments and the connections; idempotent."""
        while self._free:
            await _discard(self._free.pop())
        await self._client.close()

    # One episode

    async def _finished(self, state: _State) -> Outcome | None:
        """Take the episode to its end. Returns the outcome `error` if something failed, else None."""
        uid, task = state.episode.uid, state.episode.task.id
        try:
            if await within(self._clock, self.budgets.wall_clock_s, self._drive(state)) is None:
                await self._out_of_time(state)
        except (UserError, InvariantError):
            raise
        except EpisodeError as error:
            _log.warning("episode %s of task %s failed (%s): %s", uid, task, error.kind, error)
            return Outcome.error(error.kind)
        except Exception as error:
            _log.warning("episode %s of task %s failed", uid, task, exc_info=error)
            return Outcome.error(type(error).__name__)
        return None

    async def _out_of_time(self, state: _State) -> None:
        seconds = self.budgets.wall_clock_s
        if not state.driver.has_begun:
            raise EpisodeError(
                f"the environment was not ready within the episode's {seconds:g} s", kind="reset_timeout"
            )
        if state.meter.failing is not None:
            raise EngineError(
                f"the episode's {seconds:g} s ran out while the API did not answer", kind=state.meter.failing
            )
        grading = state.driver.finish(TruncationReason.WALL_CLOCK)
        await in_time(self._clock, GRADING_S, grading, "the grade of an episode that ran out of time")

    async def _drive(self, state: _State) -> bool:
        driver, episode = state.driver, state.episode
        before = self._clock.now()
        await driver.reset(episode.task, seed=episode.seed(_RESET_CALL) % 2**31)
        state.env_s += self._clock.now() - before
        state.conversation.hear(map(message_to_openai, driver.messages))
        call = 0
        while driver.outcome is None:
            await self._turn(state, call)
            call += 1
        return True

    async def _turn(self, state: _State, call: int) -> None:
        """One action and the environment's reply, or the end of the episode where there is no room for an action."""
        limit = self.budgets.limit(used=state.used, context_length=self.policy.context_length)
        if limit.max_tokens < 1:
            await self._finish(state, limit.reason)
            return
        state.stage = "generate"
        before = self._clock.now()
        try:
            answer, cut = await self._answer(state, call, limit)
        except ContextOverflowError as error:
            if call == 0:
                raise EpisodeError(str(error), kind="prompt_too_long") from error
            await self._finish(state, TruncationReason.CONTEXT)
            return
        finally:
            state.engine_s += self._clock.now() - before
        self._account(state, answer)
        state.stage, before = "step", self._clock.now()
        state.conversation.say(answer.echo)
        replies = await state.driver.step(answer.message, cut=cut, max_turns=self.budgets.max_turns)
        state.env_s += self._clock.now() - before
        state.conversation.hear(map(message_to_openai, replies))

    async def _finish(self, state: _State, reason: TruncationReason) -> None:
        state.stage = "step"
        before = self._clock.now()
        await state.driver.finish(reason)
        state.env_s += self._clock.now() - before

    async def _answer(self, state: _State, call: int, limit: Limit) -> tuple[Answer, TruncationReason | None]:
        """The next action, and the limit that cut it."""
        asked: int | None = min(self.sampling.max_tokens, limit.max_tokens)
        if "max_tokens" in self.policy.omit:
            asked = None
        try:
            answer = await self._ask(state, call, asked)
        except ContextOverflowError:
            if asked is None:
                raise
            # What is left of the context is less than was asked for: without the number the API gives what is left.
            asked = None
            answer = await self._ask(state, call, asked)
        return answer, _cut(answer, asked, limit)

    async def _ask(self, state: _State, call: int, max_tokens: int | None) -> Answer:
        sampling = replace(self.sampling, seed=state.episode.seed(call))
        try:
            return await self._send(state, call, sampling, max_tokens)
        except EngineError as error:
            is_refused = error.kind in (BAD_REQUEST, SERVER_ERROR)
            if not (is_refused and state.conversation.make_readable()):
                raise
        return await self._send(state, call, sampling, max_tokens)

    async def _send(self, state: _State, call: int, sampling: Sampling, max_tokens: int | None) -> Answer:
        body = request_body(self.policy, sampling, state.driver.tools, state.conversation, max_tokens)
        return await self._client.complete(body, turn=call, meter=state.meter)

    def _account(self, state: _State, answer: Answer) -> None:
        if answer.model:
            self._models[answer.model] += 1
            state.models.append(answer.model)
        if answer.fingerprint:
            self._fingerprints[answer.fingerprint] += 1
        if answer.tokens is not None:
            self._is_metered = True
            state.used = answer.tokens.total
        elif self.budgets.max_tokens_per_episode is not None and not self._is_metered:
            raise ConfigError(
                "the API does not say how many tokens it used, so max_tokens_per_episode "
                f"{self.budgets.max_tokens_per_episode} cannot be kept; leave it unset, or use an API that says `usage`"
            )

    def _record(self, state: _State, failed: Outcome | None, seconds: float) -> Trajectory:
        episode, driver = state.episode, state.driver
        score = driver.score if failed is None else None
        outcome = failed or driver.outcome
        if outcome is None:
            raise InvariantError(f"episode {episode.uid} ended without an outcome")
        return Trajectory(
            uid=episode.uid,
            task_id=episode.task.id,
            env_id=episode.env_id,
            attempt=episode.attempt,
            streams=(),
            outcome=outcome,
            group_id=episode.group_id,
            # Shares belong to actions of a stream, and there is none: they stand in `info`.
            score=None if score is None else replace(score, per_action=()),
            timings={
                "episode_s": seconds,
                "engine_s": state.engine_s,
                "env_s": state.env_s,
                "retry_wait_s": state.meter.waited_s,
            },
            seed=episode.seed(0),
            info=_info(state),
        )


def _info(state: _State) -> dict[str, Any]:
    return {
        MESSAGES: [message_to_record(message) for message in state.driver.messages],
        "rewards": list(state.driver.rewards),
        "call_problems": state.driver.call_problems if state.driver.has_begun else {},
        "models": sorted(set(state.models)),
    }


def _cut(answer: Answer, asked: int | None, limit: Limit) -> TruncationReason | None:
    """The limit that cut an answer: the one asked for, or the API's own where it came first."""
    if answer.finish is not Finish.LENGTH:
        return None
    sampled = answer.tokens.completion if answer.tokens else None
    if asked is None or (sampled is not None and sampled + _COUNT_SLACK < asked):
        return TruncationReason.CONTEXT
    return limit.reason if asked >= limit.max_tokens else TruncationReason.TURN_TOKENS


def _stage(state: _State, failed: Outcome) -> str:
    return "grade" if (failed.reason or "").startswith("grading") else state.stage


def _words(action: Message | None) -> str:
    """What graders of final answers see; where the last turn holds calls alone, the calls as they were written."""
    if action is None:
        return ""
    return action.content or "\n".join(call.raw for call in action.tool_calls)


async def _discard(driver: MessageEpisode) -> None:
    """Close an environment that may be broken: its episode is over, and the run goes on."""
    try:
        await driver.close()
    except Exception as error:
        _log.warning("an environment could not be closed", exc_info=error)
