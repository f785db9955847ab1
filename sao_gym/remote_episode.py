"""RemoteEpisode: one episode with a policy behind an API, turn by turn, held to its budgets.

Invariants: tokens are those that the API counts; what fails is raised with its kind, and `stage` says where. What an
API cannot tell before it has answered is an observation's size: `max_tokens_per_episode` may be passed by the last
observation, and the next action then ends the episode.

Example:
    going = RemoteEpisode(episode, MessageEpisode(env), client, budgets=budgets, sampling=sampling, clock=clock)
    await going.run()
    record = going.trajectory(failed=None, seconds=12.0)
"""

from dataclasses import replace

from sao_gym.budgets import Budgets, Limit
from sao_gym.conversation import MESSAGES, message_to_record
from sao_gym.errors import ConfigError, EngineError, EpisodeError, InvariantError
from sao_gym.message_episode import MessageEpisode
from sao_gym.openai_format import message_to_openai
from sao_gym.protocols import Clock, Sampling
from sao_gym.remote_answer import Answer, Finish
from sao_gym.remote_client import ContextOverflowError, OpenAIClient
from sao_gym.remote_failures import BAD_REQUEST, SERVER_ERROR
from sao_gym.remote_request import Conversation, request_body
from sao_gym.rollout import Episode, grading_limit, in_time, within
from sao_gym.stream import Outcome, Trajectory, TruncationReason
from sao_gym.usage import Meter

_RESET_CALL = -1
_COUNT_SLACK = 4  # some servers leave control tokens out of their count


class RemoteEpisode:
    """`stage` is where it stands (reset, generate, step), `meter` its account so far."""

    def __init__(
        self,
        episode: Episode,
        driver: MessageEpisode,
        client: OpenAIClient,
        *,
        budgets: Budgets,
        sampling: Sampling,
        clock: Clock,
    ) -> None:
        self.episode, self.driver, self.meter = episode, driver, Meter(client.policy.prices)
        self.stage = "reset"
        self._client, self._policy = client, client.policy
        self._budgets, self._sampling, self._clock = budgets, sampling, clock
        self._conversation = Conversation()
        self._used = 0
        self._engine_s = self._env_s = 0.0
        self._models: set[str] = set()

    async def run(self) -> None:
        """Take the episode to its end. Raises EpisodeError, UserError, and what the environment raises."""
        seconds = self._budgets.wall_clock_s
        if await within(self._clock, seconds, self._drive()) is not None:
            return
        if not self.driver.has_begun:
            raise EpisodeError(
                f"the environment was not ready within the episode's {seconds:g} s", kind="reset_timeout"
            )
        if self.meter.failing is not None:
            raise EngineError(
                f"the episode's {seconds:g} s ran out while the API did not answer", kind=self.meter.failing
            )
        grading = self.driver.finish(TruncationReason.WALL_CLOCK)
        await in_time(
            self._clock, grading_limit(self.driver.env), grading, "the grade of an episode that ran out of time"
        )

    def trajectory(self, *, failed: Outcome | None, seconds: float) -> Trajectory:
        """The record: messages, and no streams. `failed` is the outcome `error` where one befell it."""
        episode, driver = self.episode, self.driver
        outcome = failed or driver.outcome
        if outcome is None:
            raise InvariantError(f"episode {episode.uid} ended without an outcome")
        # Shares belong to actions of a stream, and there is none: they stand in `info`.
        score = None if failed or driver.score is None else replace(driver.score, per_action=())
        return Trajectory(
            uid=episode.uid,
            task_id=episode.task.id,
            env_id=episode.env_id,
            attempt=episode.attempt,
            streams=(),
            outcome=outcome,
            group_id=episode.group_id,
            score=score,
            timings={
                "episode_s": seconds,
                "engine_s": self._engine_s,
                "env_s": self._env_s,
                "retry_wait_s": self.meter.waited_s,
            },
            seed=episode.seed(0),
            info={
                MESSAGES: [message_to_record(message) for message in driver.messages],
                "rewards": list(driver.rewards),
                "call_problems": driver.call_problems if driver.has_begun else {},
                **(driver.episode_info if driver.has_begun else {}),
                "models": sorted(self._models),
            },
        )

    # Turns

    async def _drive(self) -> bool:
        before = self._clock.now()
        await self.driver.reset(self.episode.task, seed=self.episode.seed(_RESET_CALL) % 2**31)
        self._env_s += self._clock.now() - before
        self._conversation.hear(map(message_to_openai, self.driver.messages))
        call = 0
        while self.driver.outcome is None:
            await self._turn(call)
            call += 1
        return True

    async def _turn(self, call: int) -> None:
        """One action and the environment's reply, or the end of the episode where there is no room for an action."""
        limit = self._budgets.limit(used=self._used, context_length=self._policy.context_length)
        if limit.max_tokens < 1:
            await self._finish(limit.reason)
            return
        self.stage = "generate"
        before = self._clock.now()
        try:
            answer, cut = await self._answer(call, limit)
        except ContextOverflowError as error:
            if call == 0:
                raise EpisodeError(str(error), kind="prompt_too_long") from error
            await self._finish(TruncationReason.CONTEXT)
            return
        finally:
            self._engine_s += self._clock.now() - before
        self._account(answer)
        self.stage, before = "step", self._clock.now()
        self._conversation.say(answer.echo)
        replies = await self.driver.step(answer.message, cut=cut, max_turns=self._budgets.max_turns)
        self._env_s += self._clock.now() - before
        self._conversation.hear(map(message_to_openai, replies))

    async def _finish(self, reason: TruncationReason) -> None:
        self.stage = "step"
        await self.driver.finish(reason)

    def _account(self, answer: Answer) -> None:
        if answer.model:
            self._models.add(answer.model)
        if answer.tokens is not None:
            self._used = answer.tokens.total
        elif self._budgets.max_tokens_per_episode is not None and not self._client.is_metered:
            raise ConfigError(
                "the API does not say how many tokens it used, so max_tokens_per_episode "
                f"{self._budgets.max_tokens_per_episode} cannot be kept; leave it unset, or use an API that says `usage`"
            )

    # One action

    async def _answer(self, call: int, limit: Limit) -> tuple[Answer, TruncationReason | None]:
        """The next action, and the limit that cut it."""
        asked: int | None = min(self._sampling.max_tokens, limit.max_tokens)
        if "max_tokens" in self._policy.omit:
            asked = None
        try:
            answer = await self._ask(call, asked)
        except ContextOverflowError:
            if asked is None:
                raise
            # What is left of the context is less than was asked for: without the number the API gives what is left.
            asked = None
            answer = await self._ask(call, asked)
        return answer, _cut(answer, asked, limit)

    async def _ask(self, call: int, max_tokens: int | None) -> Answer:
        try:
            return await self._send(call, max_tokens)
        except EngineError as error:
            is_refused = error.kind in (BAD_REQUEST, SERVER_ERROR)
            if not (is_refused and self._conversation.make_readable()):
                raise
        return await self._send(call, max_tokens)

    async def _send(self, call: int, max_tokens: int | None) -> Answer:
        sampling = replace(self._sampling, seed=self.episode.seed(call))
        body = request_body(self._policy, sampling, self.driver.tools, self._conversation, max_tokens)
        return await self._client.complete(body, turn=call, meter=self.meter)


def _cut(answer: Answer, asked: int | None, limit: Limit) -> TruncationReason | None:
    """The limit that cut an answer: the one asked for, or the API's own where it came first."""
    if answer.finish is not Finish.LENGTH:
        return None
    sampled = answer.tokens.completion if answer.tokens else None
    if asked is None or (sampled is not None and sampled + _COUNT_SLACK < asked):
        return TruncationReason.CONTEXT
    return limit.reason if asked >= limit.max_tokens else TruncationReason.TURN_TOKENS
