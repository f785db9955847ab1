"""TokenEnv: the same episode at token level. Text is derived from ids, never the reverse.

`reset` returns the prompt's ids, `step` takes what an engine sampled and returns the ids to append. Invariants:
- sampled ids are kept as they are; only new messages are ever rendered.
- a generation cut by a limit ends the episode, with the limit that cut it as the reason.
- an observation that leaves no room for another action ends it too; one that does not fit is left out and counted.
- wrappers between this one and the environment are never bypassed.

Example:
    env = TokenEnv(make("arithmetic"), chat, Budgets(max_tokens_per_turn=64, max_turns=4))
    ids, info = env.reset(seed=0)
    while not (terminated or truncated):
        generation = await engine.generate(env.token_ids, Sampling(max_tokens=env.next_max_tokens))
        ids, reward, terminated, truncated, info = await env.step_async(generation)
    trajectory = env.trajectory(uid="e0", env_id="arithmetic", attempt=0, seed=0)
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, SupportsFloat

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from sao_gym.agent_env import AgentEnv, with_shares
from sao_gym.budgets import Budgets, Limit
from sao_gym.errors import EngineError, EpisodeError
from sao_gym.loops import Caller, drive, inline, offload
from sao_gym.messages import Message
from sao_gym.protocols import Chat, Generation
from sao_gym.spaces import Generations, TokenIds
from sao_gym.stream import Ids, Outcome, Score, Segment, StopReason, TokenStream, Trajectory, TruncationReason

TokenStep = tuple[Ids, float, bool, bool, dict[str, Any]]
MessageStep = tuple[tuple[Message, ...], SupportsFloat, bool, bool, dict[str, Any]]
PASSIVE_WRAPPERS = (OrderEnforcing, PassiveEnvChecker)


class TokenEnv(gymnasium.Wrapper[Ids, Generation, tuple[Message, ...], Message]):
    """An agent environment for policies that sample tokens. `context_length` is the engine's, None for no limit."""

    def __init__(
        self,
        env: gymnasium.Env[tuple[Message, ...], Message],
        chat: Chat,
        budgets: Budgets | None = None,
        *,
        context_length: int | None = None,
    ) -> None:
        super().__init__(env)  # type: ignore[arg-type]  # a wrapper's own types are the outer ones
        self.chat = chat
        self.budgets = budgets or Budgets()
        self.context_length = context_length
        known = chat.prompt([Message.user("the answer is 42 because x = 7")])
        self.observation_space = TokenIds(known)
        self.action_space = Generations(known, chat.stop_token_ids)
        self._clear()

    # What a driver reads

    @property
    def stream(self) -> TokenStream:
        """The episode so far."""
        return self._stream

    @property
    def token_ids(self) -> Ids:
        """All ids so far [T]: the next request's prompt."""
        return self._stream.token_ids

    @property
    def outcome(self) -> Outcome | None:
        """How the episode ended, None while it goes on."""
        return self._outcome

    @property
    def score(self) -> Score | None:
        """The episode's score, None while it goes on or where the verdict comes later."""
        return self._score

    @property
    def next_max_tokens(self) -> int:
        """Most tokens that the next action may sample; 0 after the end."""
        return 0 if self._outcome else self._limit().max_tokens

    @property
    def is_async(self) -> bool:
        """Whether `step_async` awaits the environment itself; else the blocking `step` runs in a worker thread."""
        return self._awaited is not None

    # Gymnasium, blocking and asynchronous

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Ids, dict[str, Any]]:
        """Begin an episode and return the prompt's ids. Raises EpisodeError (prompt_too_long) without room to answer."""
        self._clear()
        messages, info = self._below.reset(seed=seed, options=options)
        return self._begin(messages, info)

    async def reset_async(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Ids, dict[str, Any]]:
        """`reset` for a caller that has other episodes to go on with."""
        self._clear()
        if agent := self._awaited:
            messages, info = await agent.reset_async(seed=seed, options=options)
        else:
            messages, info = await asyncio.to_thread(self._below.reset, seed=seed, options=options)
        return self._begin(messages, info)

    def step(self, action: Generation) -> TokenStep:
        """Append what was sampled, let the environment answer, append the answer. Raises EngineError, ResetNeeded."""
        message, reason = self._take(action)
        return drive(self._settle(inline, self._below.step(message), reason))

    async def step_async(self, action: Generation) -> TokenStep:
        """`step` for a caller that has other episodes to go on with."""
        message, reason = self._take(action)
        if agent := self._awaited:
            result: MessageStep = await agent.step_async(message)
        else:
            result = await asyncio.to_thread(self._below.step, message)
        return await self._settle(offload, result, reason)

    def finish(self, reason: str) -> Score | None:
        """End the episode because a budget outside ended it (`TruncationReason`), graded as it stands; idempotent."""
        return drive(self._finish(inline, reason))

    async def finish_async(self, reason: str) -> Score | None:
        """`finish` for a caller that has other episodes to go on with."""
        return await self._finish(offload, reason)

    async def close_async(self) -> None:
        """`close` for a caller that has other episodes to go on with."""
        if agent := self._awaited:
            await agent.close_async()
        else:
            await asyncio.to_thread(self._below.close)

    # The record

    def trajectory(
        self,
        *,
        uid: str,
        env_id: str,
        attempt: int,
        seed: int = 0,
        group_id: str | None = None,
        admitted_version: int = 0,
        timings: Mapping[str, float] | None = None,
        outcome: Outcome | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """The episode as a record, scored where a score is known. Raises ResetNeeded while it goes on.

        `outcome` overrides the environment's own: an `error` has no score.
        """
        outcome = outcome or self._outcome
        if outcome is None:
            raise ResetNeeded("the episode is not over; step or finish it, or say its outcome")
        problems = getattr(self._below.unwrapped, "call_problems", {})
        own: dict[str, Any] = {"call_problems": dict(problems)}
        if self._dropped:
            own["dropped_observation_tokens"] = self._dropped
        record = Trajectory(
            uid=uid,
            task_id=self._task_id(),
            env_id=env_id,
            attempt=attempt,
            streams=(self._stream,),
            outcome=outcome,
            group_id=group_id,
            admitted_version=admitted_version,
            timings=dict(timings or {}),
            seed=seed,
            info={**own, **(info or {})},
        )
        return record if outcome.is_error or self._score is None else record.scored(self._score)

    # Parts of a step

    @property
    def _below(self) -> gymnasium.Env[Any, Any]:
        return self.env

    @property
    def _agent(self) -> AgentEnv | None:
        """The environment under all wrappers, if it is one of ours."""
        inner = self._below.unwrapped
        return inner if isinstance(inner, AgentEnv) else None

    @property
    def _awaited(self) -> AgentEnv | None:
        """The environment, if nothing stands between that would have to see each step."""
        env = self._below
        while isinstance(env, PASSIVE_WRAPPERS):
            env = env.env
        return env if isinstance(env, AgentEnv) else None

    def _task_id(self) -> str:
        agent = self._agent
        return agent.task.id if agent else str(self._reset_info.get("task_id", ""))

    def _clear(self) -> None:
        """Forget the last episode first: whatever interrupts a reset, nothing of it can be taken for the next."""
        self._stream = TokenStream()
        self._rewards: list[float] = []
        self._outcome: Outcome | None = None
        self._score: Score | None = None
        self._dropped = 0
        self._reset_info: dict[str, Any] = {}

    def _begin(self, messages: Sequence[Message], info: dict[str, Any]) -> tuple[Ids, dict[str, Any]]:
        tools = getattr(self._below.unwrapped, "tools", ())
        prompt = Segment.observation(self.chat.prompt(messages, tools))
        self._stream = TokenStream(segments=(prompt,))
        self._reset_info = dict(info)
        over = self.budgets.exhausted(used=len(prompt), context_length=self.context_length)
        if over is not None:
            raise EpisodeError(
                f"the prompt of task {self._task_id()!r} holds {len(prompt)} tokens and leaves no room for an answer "
                f"({over}); raise that budget or leave the task out",
                kind="prompt_too_long",
            )
        return prompt.token_ids, info

    def _limit(self) -> Limit:
        return self.budgets.limit(used=len(self._stream), context_length=self.context_length)

    def _take(self, action: Generation) -> tuple[Message, TruncationReason | None]:
        """Append an action. Returns what it says, and the limit that cut it."""
        if self._outcome is not None or not self._stream.segments:
            raise ResetNeeded("the episode is over (or has not begun); call reset() before step()")
        limit = self._limit()
        if len(action.token_ids) > limit.max_tokens:
            raise EngineError(
                f"the engine sampled {len(action.token_ids)} tokens where at most {limit.max_tokens} were allowed"
            )
        reason = _cut_by(action, limit)
        segment = Segment.action(
            action.token_ids,
            logprobs=action.logprobs,
            versions=action.versions,
            temperature=action.temperature,
            stop=action.stop,
            extras=action.extras,
        )
        self._stream = self._stream.append(segment)
        if len(segment) or not self._rewards:  # an empty action earns nothing of its own
            self._rewards.append(0.0)
        return self.chat.parse(segment.token_ids, is_truncated=reason is not None), reason

    async def _settle(self, call: Caller, result: MessageStep, cut: TruncationReason | None) -> TokenStep:
        """Append the answer and decide how things stand."""
        messages, reward, terminated, truncated, info = result
        self._rewards[-1] += float(reward)
        if cut is not None:
            outcome: Outcome | None = Outcome.truncated(cut)
        elif terminated:
            outcome = Outcome.terminated()
        elif truncated:
            outcome = Outcome.truncated(info.get("truncation_reason", TruncationReason.TURNS))
        else:
            outcome = None
        observation = Segment.observation([])
        if messages or outcome is None:
            observation, over = self._observe(messages)
            outcome = outcome or over
        if outcome is None and self.budgets.max_turns and len(self._rewards) >= self.budgets.max_turns:
            outcome = Outcome.truncated(TruncationReason.TURNS)
        info = dict(info)
        if outcome is not None:
            extra = await self._end(call, outcome, info)
            reward = float(reward) + extra
        is_truncated = outcome is not None and outcome.is_truncated
        return (
            observation.token_ids,
            float(reward),
            outcome is not None and not is_truncated,
            is_truncated,
            info,
        )

    def _observe(self, messages: Sequence[Message]) -> tuple[Segment, Outcome | None]:
        last_id = int(self._stream.token_ids[-1])
        segment = Segment.observation(self.chat.bridge(messages, last_id=last_id))
        used = len(self._stream) + len(segment)
        over = self.budgets.exhausted(used=used, context_length=self.context_length)
        limits = [n for n in (self.budgets.max_tokens_per_episode, self.context_length) if n is not None]
        if limits and used > min(limits):
            self._dropped += len(segment)
            segment = Segment.observation([])
        if len(segment):
            self._stream = self._stream.append(segment)
        return segment, Outcome.truncated(over) if over else None

    async def _end(self, call: Caller, outcome: Outcome, info: dict[str, Any]) -> float:
        """Record the outcome and the score; returns what the last action earns beyond its step's reward."""
        self._outcome = outcome
        if outcome.is_truncated:
            info["truncation_reason"] = outcome.reason
        if self._dropped:
            info["dropped_observation_tokens"] = self._dropped
        agent, extra = self._agent, 0.0
        if "score" not in info and agent is not None:
            paid = agent.episode_return
            finish = agent.finish_async if call is offload else agent.finish
            info["score"] = await call(finish, outcome.reason or "")
            extra = agent.episode_return - paid
            self._rewards[-1] += extra
        self._score = info["score"] = self._scored(info.get("score"))
        return extra

    def _scored(self, score: Score | None) -> Score | None:
        """The score whose value the rewards sum to, as the wrappers in between left them."""
        value = sum(self._rewards)
        if score is None:
            if self._agent is not None:
                return None
            return with_shares(Score(value=value, passed=value > 0, detail="sum of rewards"), self._rewards)
        if abs(value - score.value) <= 1e-6:
            fits = not score.per_action or len(score.per_action) == len(self._rewards)
            return with_shares(score if fits else replace(score, per_action=()), self._rewards)
        return with_shares(replace(score, value=value, per_action=()), self._rewards)

    async def _finish(self, call: Caller, reason: str) -> Score | None:
        if not self._stream.segments:
            raise ResetNeeded("there is no episode to finish; call reset() first")
        if self._outcome is None:
            if not self._rewards:
                self._rewards.append(0.0)
            await self._end(call, Outcome.truncated(reason), {})
        return self._score


def _cut_by(action: Generation, limit: Limit) -> TruncationReason | None:
    """The limit that cut an action. One cut short of what it might hold had a smaller cap per turn asked for."""
    if action.stop is StopReason.ABORT:
        return TruncationReason.WALL_CLOCK
    if action.stop is not StopReason.LENGTH:
        return None
    return limit.reason if len(action.token_ids) >= limit.max_tokens else TruncationReason.TURN_TOKENS
