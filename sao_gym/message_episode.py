"""MessageEpisode: one environment, stepped with messages, for policies that show no tokens.

Invariants: the conversation holds every message in order; there is one reward per action and the score agrees with
their sum as at token level; wrappers around the environment are never bypassed.

Example:
    episode = MessageEpisode(make("arithmetic"))
    await episode.reset(task, seed=0)
    while episode.outcome is None:
        await episode.step(policy(episode.messages))
    print(episode.outcome, episode.score)
"""

from collections.abc import Mapping
from typing import Any, SupportsFloat

import gymnasium
from gymnasium.error import ResetNeeded

from sao_gym.agent_env import AgentEnv, as_messages
from sao_gym.loops import offload
from sao_gym.messages import Message, ToolSpec
from sao_gym.protocols import Task
from sao_gym.stream import Outcome, Score, TruncationReason
from sao_gym.token_env import PASSIVE_WRAPPERS
from sao_gym.token_episode import final_score

MessageEnv = gymnasium.Env[tuple[Message, ...], Message]


class MessageEpisode:
    """An environment and the episode it is in. `rewards` has one entry per action; `score` None: none, or later."""

    def __init__(self, env: MessageEnv) -> None:
        self.env = env
        self._clear()

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the policy is told of."""
        return tuple(getattr(self.env.unwrapped, "tools", ()))

    @property
    def call_problems(self) -> dict[str, int]:
        """How often calls could not be run, by problem."""
        return dict(getattr(self.env.unwrapped, "call_problems", {}))

    @property
    def episode_info(self) -> dict[str, Any]:
        """What the environment itself keeps with an episode."""
        return dict(getattr(self.env.unwrapped, "episode_info", {}))

    @property
    def last_action(self) -> Message | None:
        """The policy's latest message, None before the first."""
        return next((message for message in reversed(self.messages) if message.role == "assistant"), None)

    async def reset(self, task: Task, *, seed: int) -> None:
        """Begin an episode."""
        self._clear()
        options = {"task": task}
        if agent := self._awaited:
            messages, _ = await agent.reset_async(seed=seed, options=options)
        else:
            messages, _ = await offload(self.env.reset, seed=seed, options=options)
        self.messages.extend(as_messages(messages, f"what {self._name}.reset returns"))
        self.has_begun = True

    async def step(
        self, action: Message, *, cut: TruncationReason | None = None, max_turns: int | None = None
    ) -> tuple[Message, ...]:
        """One action; returns what is new. `cut`: the limit that cut it, with which the episode ends."""
        if not self.has_begun or self.outcome is not None:
            raise ResetNeeded("the episode is over (or has not begun); call reset() before step()")
        self.messages.append(action)
        self.rewards.append(0.0)
        if agent := self._awaited:
            result: tuple[Any, SupportsFloat, bool, bool, dict[str, Any]] = await agent.step_async(action)
        else:
            result = await offload(self.env.step, action)
        said, reward, terminated, truncated, info = result
        self.rewards[-1] += float(reward)
        replies = as_messages(said, f"what {self._name}.step returns")
        self.messages.extend(replies)
        outcome = None
        if cut is not None:
            outcome = Outcome.truncated(cut)
        elif terminated:
            outcome = Outcome.terminated()
        elif truncated:
            outcome = Outcome.truncated(info.get("truncation_reason", TruncationReason.TURNS))
        elif max_turns is not None and len(self.rewards) >= max_turns:
            outcome = Outcome.truncated(TruncationReason.TURNS)
        if outcome is not None:
            await self._end(outcome, info)
        return replies

    async def finish(self, reason: TruncationReason) -> None:
        """End the episode because a budget ended it, graded as it stands; idempotent. Raises ResetNeeded."""
        if not self.has_begun:
            raise ResetNeeded("there is no episode to finish; call reset() first")
        if self.outcome is None:
            await self._end(Outcome.truncated(reason), {})

    async def close(self) -> None:
        """Close the environment; idempotent."""
        if agent := self._awaited:
            await agent.close_async()
        else:
            await offload(self.env.close)

    @property
    def _name(self) -> str:
        return type(self.env.unwrapped).__name__

    @property
    def _awaited(self) -> AgentEnv | None:
        """The environment, if nothing stands between that would have to see each step."""
        env: Any = self.env
        while isinstance(env, PASSIVE_WRAPPERS):
            env = env.env
        return env if isinstance(env, AgentEnv) else None

    def _clear(self) -> None:
        self.messages: list[Message] = []
        self.rewards: list[float] = []
        self.outcome: Outcome | None = None
        self.score: Score | None = None
        self.has_begun = False

    async def _end(self, outcome: Outcome, info: Mapping[str, Any]) -> None:
        inner = self.env.unwrapped
        given = info.get("score")
        score = given if isinstance(given, Score) else None  # what others call a score is none of ours
        rewards = self.rewards or [0.0]
        if "score" not in info and isinstance(inner, AgentEnv):
            paid = inner.episode_return
            score = await inner.finish_async(outcome.reason or "")
            rewards[-1] += inner.episode_return - paid
        self.score = final_score(rewards, score, is_late=isinstance(inner, AgentEnv))
        self.outcome = outcome
