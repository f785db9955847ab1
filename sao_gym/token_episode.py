"""TokenEpisode: one episode's token stream as it grows, with its budgets, rewards and end.

Invariants: sampled ids are kept as they are and only new messages are rendered; there is one reward entry per action
that holds tokens; nothing is cut without a reason, and an observation that does not fit is left out and counted.

Example:
    episode = TokenEpisode(chat, Budgets(max_turns=4), context_length=None)
    episode.begin(messages, tools)
    message, cut = episode.act(generation)
    observation, outcome = episode.answer(new_messages, Outcome.terminated())
"""

from collections.abc import Sequence
from dataclasses import replace

from gymnasium.error import ResetNeeded

from sao_gym.agent_env import with_shares
from sao_gym.budgets import Budgets, Limit
from sao_gym.errors import EngineError
from sao_gym.messages import Message, ToolSpec
from sao_gym.protocols import Chat, Generation
from sao_gym.stream import Ids, Outcome, Score, Segment, StopReason, TokenStream, TruncationReason


class TokenEpisode:
    """What a `TokenEnv` knows of its episode. `rewards` has one entry per action; `dropped` counts tokens left out."""

    def __init__(self, chat: Chat, budgets: Budgets, context_length: int | None) -> None:
        self.chat, self.budgets, self.context_length = chat, budgets, context_length
        self.stream = TokenStream()
        self.tools: tuple[ToolSpec, ...] = ()
        self.rewards: list[float] = []
        self.outcome: Outcome | None = None
        self.score: Score | None = None
        self.dropped = 0

    @property
    def has_begun(self) -> bool:
        """Whether there is a prompt."""
        return bool(self.stream.segments)

    def limit(self) -> Limit:
        """What bounds the next action."""
        return self.budgets.limit(used=len(self.stream), context_length=self.context_length)

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> TruncationReason | None:
        """Append the prompt, in which `tools` are offered. Returns the limit that leaves no room for an answer, None if there is room."""
        self.tools = tuple(tools)
        self.stream = TokenStream(segments=(Segment.observation(self.chat.prompt(messages, tools)),))
        return self.budgets.exhausted(used=len(self.stream), context_length=self.context_length)

    def act(self, action: Generation) -> tuple[Message, TruncationReason | None]:
        """Append an action. Returns what it says, and the limit that cut it. Raises EngineError, ResetNeeded."""
        if self.outcome is not None or not self.has_begun:
            raise ResetNeeded("the episode is over (or has not begun); call reset() before step()")
        limit = self.limit()
        if len(action.token_ids) > limit.max_tokens:
            raise EngineError(
                f"the engine sampled {len(action.token_ids)} tokens where at most {limit.max_tokens} were allowed"
            )
        cut = _cut_by(action, limit)
        segment = Segment.action(
            action.token_ids,
            logprobs=action.logprobs,
            versions=action.versions,
            temperature=action.temperature,
            stop=action.stop,
            extras=action.extras,
        )
        self.stream = self.stream.append(segment)
        if len(segment) or not self.rewards:  # an empty action earns nothing of its own
            self.rewards.append(0.0)
        return self.chat.parse(segment.token_ids, tools=self.tools, is_truncated=cut is not None), cut

    def answer(self, messages: Sequence[Message], outcome: Outcome | None) -> tuple[Ids, Outcome | None]:
        """Append what the environment said. Returns the ids appended, and `outcome` or the budget's that now applies."""
        if not messages and outcome is not None:
            return Segment.observation([]).token_ids, outcome
        last_id = int(self.stream.token_ids[-1])
        segment = Segment.observation(self.chat.bridge(messages, last_id=last_id))
        used = len(self.stream) + len(segment)
        over = self.budgets.exhausted(used=used, context_length=self.context_length)
        bounds = [n for n in (self.budgets.max_tokens_per_episode, self.context_length) if n is not None]
        if bounds and used > min(bounds):
            self.dropped += len(segment)
            segment = Segment.observation([])
        elif len(segment):
            self.stream = self.stream.append(segment)
        if outcome is None and over is not None:
            outcome = Outcome.truncated(over)
        if outcome is None and self.budgets.max_turns and len(self.rewards) >= self.budgets.max_turns:
            outcome = Outcome.truncated(TruncationReason.TURNS)
        return segment.token_ids, outcome

    def end(self, outcome: Outcome, score: Score | None, *, is_late: bool) -> None:
        """Record how the episode ended; see `final_score`."""
        self.outcome, self.score = outcome, final_score(self.rewards, score, is_late=is_late)


def final_score(rewards: Sequence[float], score: Score | None, *, is_late: bool) -> Score | None:
    """An episode's score from its `rewards` per action and a verdict. Without one the rewards are it, unless it `is_late`."""
    value = sum(rewards)
    if score is None and not is_late:
        score = Score(value=value, passed=value > 0, detail="sum of rewards")
    if score is None:
        return None
    is_changed = abs(value - score.value) > 1e-6  # by a wrapper of rewards: what it left is the score
    if is_changed or len(score.per_action) not in (0, len(rewards)):
        score = replace(score, value=value if is_changed else score.value, per_action=())
    return with_shares(score, rewards)


def _cut_by(action: Generation, limit: Limit) -> TruncationReason | None:
    """The limit that cut an action. One cut short of what it might hold had a smaller cap per turn asked for."""
    if action.stop is StopReason.ABORT:
        return TruncationReason.WALL_CLOCK
    if action.stop is not StopReason.LENGTH:
        return None
    return limit.reason if len(action.token_ids) >= limit.max_tokens else TruncationReason.TURN_TOKENS
