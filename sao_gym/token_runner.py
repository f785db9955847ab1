"""An engine as the policy of an evaluation: episodes at token level, one after the other through a pool of environments.

Torch-free: the engine may be any. The engine stays the caller's; `close` gives back the environments alone.

Example:
    runner = TokenRunner(
        engine=engine, chat=chat, make_env=lambda: make("arithmetic"), budgets=Budgets(), clock=SystemClock(),
        sampling=Sampling(max_tokens=64))
    run = await runner.run(Episode(uid="e0", task=task, env_id="arithmetic", attempt=0, run_seed=0))
"""

from collections.abc import Callable
from dataclasses import replace

import gymnasium

from sao_gym.budgets import Budgets
from sao_gym.conversation import conversation_of
from sao_gym.evaluation_results import EpisodeRun
from sao_gym.messages import Message
from sao_gym.protocols import Chat, Clock, Engine, Sampling
from sao_gym.rollout import EnvPool, Episode
from sao_gym.stream import Trajectory

MakeEnv = Callable[[], gymnasium.Env[tuple[Message, ...], Message]]
RESPONSE = "response"
_GENERATE_REASONS = ("engine", "poisoned_output", "DeadlineError")


class TokenRunner:
    """Runs episodes with `white_box`; implements `sao_gym.evaluation.EpisodeRunner`."""

    def __init__(
        self,
        *,
        engine: Engine,
        chat: Chat,
        make_env: MakeEnv,
        budgets: Budgets,
        sampling: Sampling,
        clock: Clock,
    ) -> None:
        self._engine, self._chat, self._sampling, self._clock = engine, chat, sampling, clock
        self._pool = EnvPool(make_env, chat, budgets, context_length=engine.context_length)

    @property
    def version(self) -> int:
        """The engine's policy version now."""
        return self._engine.version

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn, so that every sample of a task says the same."""
        return self._sampling.temperature == 0

    async def run(self, episode: Episode) -> EpisodeRun:
        """One episode. Raises UserError; whatever else fails is an outcome `error` with its stage."""
        asked: list[int] = []
        async with self._pool.lease() as env:
            trajectory = await self._pool.run(
                env, self._engine, episode, sampling=self._sampling, clock=self._clock, on_version=asked.append
            )
        said = last_message(trajectory, self._chat)
        if said is not None:  # what graders of answers saw: with it an episode can be graded again without a tokenizer
            trajectory = replace(trajectory, info={**trajectory.info, RESPONSE: said.content})
        return EpisodeRun(trajectory=trajectory, stage=_stage(trajectory, is_asked=bool(asked)), text=last_words(said))

    async def close(self) -> None:
        """Close the environments; idempotent."""
        await self._pool.close()


def _stage(trajectory: Trajectory, *, is_asked: bool) -> str | None:
    """Where an episode failed, None where it did not."""
    if not trajectory.outcome.is_error:
        return None
    reason = trajectory.outcome.reason or ""
    if reason.startswith("grading"):
        return "grade"
    if not is_asked:
        return "reset"
    return "generate" if reason in _GENERATE_REASONS else "step"


def last_message(trajectory: Trajectory, chat: Chat) -> Message | None:
    """The policy's last message, None where it said nothing."""
    last = next((stream.actions[-1] for stream in reversed(trajectory.streams) if stream.actions), None)
    return None if last is None else chat.parse(last.token_ids, is_truncated=trajectory.outcome.is_truncated)


def last_words(message: Message | None) -> str:
    """What graders of final answers see; where the last turn holds calls alone, the calls as they were written."""
    if message is None:
        return ""
    return message.content or "\n".join(call.raw for call in message.tool_calls)


def response_of(trajectory: Trajectory) -> str | None:
    """The text of the policy's last message as an evaluation recorded it, None where there is no such record."""
    said = conversation_of(trajectory)
    if said is not None:
        return next((message.content for message in reversed(said) if message.role == "assistant"), None)
    found = trajectory.info.get(RESPONSE)
    return None if found is None else str(found)
