"""TokenEnv: the same episode at token level. Text is derived from ids, never the reverse.

`reset` returns the prompt's ids, `step` takes what an engine sampled and returns the ids to append. Invariants:
- sampled ids are kept as they are; only new messages are ever rendered.
- a generation cut by a limit ends the episode, with the limit that cut it as the reason; so does an observation that
  leaves no room for another action.
- wrappers between this one and the environment are never bypassed.

Example:
    env = TokenEnv(make("arithmetic"), chat, Budgets(max_tokens_per_turn=64, max_turns=4))
    ids, info = env.reset(seed=0)
    while not (terminated or truncated):
        generation = await engine.generate(env.token_ids, Sampling(max_tokens=env.next_max_tokens))
        ids, reward, terminated, truncated, info = await env.step_async(generation)
    trajectory = env.trajectory(uid="e0", env_id="arithmetic", attempt=0, seed=0)
"""

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker

from sao_gym.agent_env import AgentEnv, as_messages
from sao_gym.budgets import Budgets
from sao_gym.errors import EpisodeError
from sao_gym.loops import Caller, drive, inline, offload
from sao_gym.messages import Message
from sao_gym.protocols import Chat, Generation
from sao_gym.spaces import Generations, TokenIds
from sao_gym.stream import Ids, Outcome, Score, TokenStream, Trajectory, TruncationReason
from sao_gym.token_episode import TokenEpisode

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
        return self._episode.stream

    @property
    def token_ids(self) -> Ids:
        """All ids so far [T]: the next request's prompt."""
        return self._episode.stream.token_ids

    @property
    def outcome(self) -> Outcome | None:
        """How the episode ended, None while it goes on."""
        return self._episode.outcome

    @property
    def score(self) -> Score | None:
        """The episode's score, None while it goes on or where the verdict comes later."""
        return self._episode.score

    @property
    def next_max_tokens(self) -> int:
        """Most tokens that the next action may sample; 0 after the end."""
        return 0 if self.outcome else self._episode.limit().max_tokens

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
            messages, info = await offload(self._below.reset, seed=seed, options=options)
        return self._begin(messages, info)

    def step(self, action: Generation) -> TokenStep:
        """Append what was sampled, let the environment answer, append the answer. Raises EngineError, ResetNeeded."""
        message, cut = self._episode.act(action)
        return drive(self._settle(inline, self._below.step(message), cut))

    async def step_async(self, action: Generation) -> TokenStep:
        """`step` for a caller that has other episodes to go on with."""
        message, cut = self._episode.act(action)
        if agent := self._awaited:
            result: MessageStep = await agent.step_async(message)
        else:
            result = await offload(self._below.step, message)
        return await self._settle(offload, result, cut)

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
            await offload(self._below.close)

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
        outcome = outcome or self.outcome
        if outcome is None:
            raise ResetNeeded("the episode is not over; step or finish it, or say its outcome")
        problems = getattr(self._below.unwrapped, "call_problems", {})
        own: dict[str, Any] = {"call_problems": dict(problems), **getattr(self._below.unwrapped, "episode_info", {})}
        if self._episode.dropped:
            own["dropped_observation_tokens"] = self._episode.dropped
        record = Trajectory(
            uid=uid,
            task_id=self._task_id(),
            env_id=env_id,
            attempt=attempt,
            streams=(self.stream,),
            outcome=outcome,
            group_id=group_id,
            admitted_version=admitted_version,
            timings=dict(timings or {}),
            seed=seed,
            info={**own, **(info or {})},
        )
        return record if outcome.is_error or self.score is None else record.scored(self.score)

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
        self._episode = TokenEpisode(self.chat, self.budgets, self.context_length)
        self._reset_info: dict[str, Any] = {}

    def _begin(self, messages: Sequence[Message], info: dict[str, Any]) -> tuple[Ids, dict[str, Any]]:
        tools = getattr(self._below.unwrapped, "tools", ())
        self._reset_info = dict(info)
        messages = as_messages(messages, f"what {type(self._below.unwrapped).__name__}.reset returns")
        over = self._episode.begin(messages, tools)
        if over is not None:
            raise EpisodeError(
                f"the prompt of task {self._task_id()!r} holds {len(self.stream)} tokens and leaves no room for an "
                f"answer ({over}); raise that budget or leave the task out",
                kind="prompt_too_long",
            )
        return self.token_ids, info

    async def _settle(self, call: Caller, result: MessageStep, cut: TruncationReason | None) -> TokenStep:
        """Append the answer and decide how things stand."""
        messages, reward, terminated, truncated, info = result
        self._episode.rewards[-1] += float(reward)
        outcome: Outcome | None = None
        if cut is not None:
            outcome = Outcome.truncated(cut)
        elif terminated:
            outcome = Outcome.terminated()
        elif truncated:
            outcome = Outcome.truncated(info.get("truncation_reason", TruncationReason.TURNS))
        said = as_messages(messages, f"what {type(self._below.unwrapped).__name__}.step returns")
        ids, outcome = self._episode.answer(said, outcome)
        if outcome is None:
            return ids, float(reward), False, False, dict(info)
        info, extra = await self._end(call, outcome, info)
        return ids, float(reward) + extra, not outcome.is_truncated, outcome.is_truncated, info

    async def _end(self, call: Caller, outcome: Outcome, info: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
        """Record outcome and score. Returns the last info, and what the last action earns beyond its step's reward."""
        episode, agent, extra = self._episode, self._agent, 0.0
        given = info.get("score")
        score = given if isinstance(given, Score) else None  # what others call a score is none of ours
        if "score" not in info and agent is not None:
            paid = agent.episode_return
            score = await call(agent.finish_async if call is offload else agent.finish, outcome.reason or "")
            extra = agent.episode_return - paid
            episode.rewards[-1] += extra
        episode.end(outcome, score, is_late=agent is not None)
        last: dict[str, Any] = {**info, "score": episode.score}
        if outcome.is_truncated:
            last["truncation_reason"] = outcome.reason
        if episode.dropped:
            last["dropped_observation_tokens"] = episode.dropped
        return last, extra

    async def _finish(self, call: Caller, reason: str) -> Score | None:
        if not self._episode.has_begun:
            raise ResetNeeded("there is no episode to finish; call reset() first")
        if self.outcome is None:
            if not self._episode.rewards:
                self._episode.rewards.append(0.0)
            await self._end(call, Outcome.truncated(reason), {})
        return self.score
