"""One episode behind the gateway: its calls are answered, and become token streams when it is closed.

Invariants: ids are kept as they were sampled and only new messages are rendered; a generation belongs to the session
and not to the connection that asked for it, so that a client which gave up can still get it; nothing is answered after
the end; a length-truncated action ends the episode (trap 19); every wait has a deadline.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sao_gym.budgets import Budgets, Limit
from sao_gym.errors import ConfigError, EngineError, EpisodeError, InvariantError, ModelError
from sao_gym.gateway.asked import Asked
from sao_gym.gateway.counts import Counts
from sao_gym.gateway.diagnosis import reason_of
from sao_gym.gateway.echo import Heard, hear, tools_key
from sao_gym.gateway.gate import Gate
from sao_gym.gateway.history import all_in_call_order, in_call_order, read_messages, with_one_system
from sao_gym.gateway.reasons import Reason
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.retry import Retries, Retry
from sao_gym.gateway.sampled import TextChat, cut_at
from sao_gym.gateway.settings import GatewaySettings
from sao_gym.gateway.shown import show
from sao_gym.gateway.streams import auxiliary_streams_of, streams_of
from sao_gym.gateway.tree import Match, Node, Tree
from sao_gym.messages import ToolCall
from sao_gym.openai_format import tool_from_openai
from sao_gym.protocols import Clock, Engine, Generation, Sampling, request_seed
from sao_gym.remote_failures import Meaning, read_failure
from sao_gym.rollout import Episode, require_sound, within
from sao_gym.stream import Ids, Outcome, StopReason, TokenStream, TruncationReason

AGENT_FAILED = "agent"
"""Outcome kind of an agent program that ended badly by itself. It yields to a budget that made it do so."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """What an episode left: `streams` to train on, `auxiliary` ones not, and JSON values for `Trajectory.info`."""

    streams: tuple[TokenStream, ...]
    auxiliary: tuple[TokenStream, ...]
    outcome: Outcome
    info: Mapping[str, Any]
    engine_s: float
    admitted_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """Where a call goes: its parent, the ids that are new, how it hangs there."""

    parent: Node | None
    heard: tuple[Heard, ...]
    tools: bytes
    new_ids: Ids
    all_ids: Ids
    reason: Reason
    match: Match


class Session:
    """The calls of one episode. Made by `Gateway.open`."""

    def __init__(
        self,
        episode: Episode,
        *,
        engine: Engine,
        chat: TextChat,
        clock: Clock,
        gate: Gate,
        budgets: Budgets,
        sampling: Sampling,
        settings: GatewaySettings,
        on_version: Callable[[int], None],
    ) -> None:
        self.episode = episode
        self.tree = Tree(by_position=settings.match_by_position)
        self.counts = Counts(episodes=1)
        self.settings = settings
        self.chat = chat
        self._engine, self._clock, self._gate = engine, clock, gate
        self._budgets, self._sampling = budgets, sampling
        self._on_version = on_version
        self._admitted_version = engine.version
        self._retries = Retries()
        self._tasks: set[asyncio.Task[Node]] = set()
        self._minted: dict[str, ToolCall] = {}
        self._asked: list[Mapping[str, Any]] = []
        self._calls = {True: 0, False: 0}
        self._turns = 0
        self._used = 0
        self._engine_s = 0.0
        self._truncation: TruncationReason | None = None
        self._is_cut = False
        self._failure: str | None = None
        self._record: EpisodeRecord | None = None
        self._is_closed = False

    @property
    def truncation(self) -> TruncationReason | None:
        """The budget that the agent ran into, None if it got what it last asked for."""
        return self._truncation

    @property
    def failure(self) -> str | None:
        """Kind of the failure of ours that ended the episode."""
        return self._failure

    def marked(self, asked: Asked, *, is_auxiliary: bool) -> Asked:
        """`asked` as an auxiliary call where it is one, or where a marker stands in its first or last message."""
        markers = self.settings.auxiliary_markers
        if not is_auxiliary and markers:
            texts = [str(record.get("content")) for record in (*asked.records[:1], *asked.records[-1:])]
            is_auxiliary = any(marker in text for marker in markers for text in texts)
        return replace(asked, is_auxiliary=True) if is_auxiliary else asked

    async def ask(self, asked: Asked, retry: Retry) -> Node:
        """Answer one call. Raises Refusal.

        A retry that says so gets the answer that was made, or is being made, for the same request (case GW-02).
        """
        try:
            task = self._retries.earlier(retry)
            if task is None:
                self._require_open(asked)
                task = asyncio.ensure_future(self._answer(asked))
                self._tasks.add(task)
                task.add_done_callback(self._forget)
                self._retries.note(retry, task)
            else:
                self.counts.replays += 1
            return await self._wait(task)
        except Refusal as refusal:
            self.counts.refusals[refusal.code] += 1
            raise

    def _forget(self, task: asyncio.Task[Node]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever asked may be gone

    async def _wait(self, task: asyncio.Task[Node]) -> Node:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._is_closed:
                raise self._over() from None
            raise

    async def _answer(self, asked: Asked) -> Node:
        async with self._gate.entered():
            self._require_open(asked)
            try:
                return await self._sample(asked)
            except (Refusal, asyncio.CancelledError):
                raise
            except EpisodeError as error:
                self._fail(error.kind, error)
            except Exception as error:
                self._fail(type(error).__name__, error)
            raise Refusal.failed(self._failure or "unknown")

    def _fail(self, kind: str, error: Exception) -> None:
        self._failure = self._failure or kind
        uid, task_id = self.episode.uid, self.episode.task.id
        trace = None if isinstance(error, EpisodeError) else error
        _log.warning("episode %s of task %s failed (%s): %s", uid, task_id, kind, error, exc_info=trace)

    # What may be asked

    def _over(self) -> Refusal:
        return Refusal.over("it was closed")

    def _require_open(self, asked: Asked) -> None:
        if self._is_closed:
            raise self._over()
        if self._failure is not None:
            raise Refusal.failed(self._failure)
        if asked.is_auxiliary:
            if self._calls[True] >= self.settings.max_auxiliary_calls:
                raise Refusal.budget(f"{self.settings.max_auxiliary_calls} auxiliary calls")
            return
        if self._is_cut:
            raise Refusal.over(f"an answer was cut ({self._truncation})")
        if self._budgets.max_turns is not None and self._turns >= self._budgets.max_turns:
            self._truncation = TruncationReason.TURNS
            raise Refusal.budget(f"{self._budgets.max_turns} turns")

    def _limit(self, asked: Asked, prompt: _Prompt) -> Limit:
        """What bounds the answer. Raises Refusal where nothing is left."""
        n = len(prompt.all_ids)
        per_turn = min(self._sampling.max_tokens, self._budgets.max_tokens_per_turn or self._sampling.max_tokens)
        wanted = min(per_turn, asked.max_tokens or per_turn)
        context = self._engine.context_length
        if n + (wanted if asked.max_tokens else 1) > context:
            raise self._overflow(asked, n, wanted)
        bounds = [Limit(wanted, TruncationReason.TURN_TOKENS), Limit(context - n, TruncationReason.CONTEXT)]
        most = self._budgets.max_tokens_per_episode
        if most is not None and not asked.is_auxiliary:
            left = most - self._used - len(prompt.new_ids)
            if left < 1:
                self._truncation = TruncationReason.EPISODE_TOKENS
                raise Refusal.budget(f"{most} tokens")
            bounds.append(Limit(left, TruncationReason.EPISODE_TOKENS))
        return min(reversed(bounds), key=lambda limit: limit.max_tokens)

    def _overflow(self, asked: Asked, prompt: int, wanted: int) -> Refusal:
        if not asked.is_auxiliary:
            self._truncation = TruncationReason.CONTEXT
        return Refusal.context(prompt=prompt, asked=wanted, limit=self._engine.context_length)

    # One call

    async def _sample(self, asked: Asked) -> Node:
        prompt = self._prompt(asked)
        limit = self._limit(asked, prompt)
        index = sum(self._calls.values())
        request = self._request(asked, limit)
        self._calls[asked.is_auxiliary] += 1
        if not asked.is_auxiliary:
            self._turns += 1
            self._used += len(prompt.new_ids)
            if self._turns == 1:
                self._on_version(self._engine.version)
        try:
            generation = await self._generate(asked, prompt, request)
        except Refusal:
            self._turns -= not asked.is_auxiliary
            self._used -= 0 if asked.is_auxiliary else len(prompt.new_ids)
            raise
        return self._keep(asked, prompt, limit, index, generation)

    def _request(self, asked: Asked, limit: Limit) -> Sampling:
        number, episode = self._calls[asked.is_auxiliary], self.episode
        stream = int(asked.is_auxiliary)
        return replace(
            self._sampling,
            max_tokens=limit.max_tokens,
            stop_token_ids=self._sampling.stop_token_ids or self.chat.stop_token_ids,
            seed=request_seed(episode.run_seed, episode.task.id, episode.attempt, stream, number),
        )

    async def _generate(self, asked: Asked, prompt: _Prompt, request: Sampling) -> Generation:
        name = self.engine_session(asked.is_auxiliary)
        start = self._clock.now()
        try:
            work = self._engine.generate(prompt.all_ids, request, name)
            generation = await within(self._clock, self.settings.call_s, work)
        except EngineError as error:
            if read_failure(400, {}, str(error).encode()).meaning is Meaning.OVERFLOW:
                raise self._overflow(asked, len(prompt.all_ids), request.max_tokens) from error
            raise
        finally:
            self._engine_s += self._clock.now() - start
        if generation is None:
            raise EngineError(f"no answer within {self.settings.call_s:g} s", kind="engine_timeout")
        require_sound(generation, request)
        return generation

    def _keep(self, asked: Asked, prompt: _Prompt, limit: Limit, index: int, generation: Generation) -> Node:
        generation, stop_string = cut_at(self.chat, generation, asked.stop)
        is_cut = generation.stop in (StopReason.LENGTH, StopReason.ABORT)
        message = self.chat.parse(generation.token_ids, is_truncated=is_cut)
        shown = show(message, index=index, cut=is_cut, stop_string=stop_string, as_text=asked.calls_as_text)
        node = Node(
            index=index,
            parent=prompt.parent,
            heard=prompt.heard,
            tools=prompt.tools,
            prompt_ids=prompt.new_ids,
            generation=generation,
            shown=shown,
            reason=prompt.reason,
            echo=prompt.match.echo if prompt.parent is not None else None,
            is_auxiliary=asked.is_auxiliary,
            asked=asked.sampling,
            is_cut=is_cut,
        )
        self.tree.add(node)
        self._minted.update((call.id, call.sampled) for call in shown.calls)
        self._count(node, asked)
        if not asked.is_auxiliary:
            self._account(node, limit)
        return node

    def _account(self, node: Node, limit: Limit) -> None:
        """What an answer means for the episode."""
        sampled = node.generation
        if self._turns == 1 and len(sampled.versions):
            self._on_version(int(sampled.versions[0]))
        self._used += len(sampled.token_ids)
        if not node.is_cut:
            self._truncation = self._truncation if self._is_cut else None
            return
        self._is_cut = True
        if sampled.stop is StopReason.ABORT:
            self._truncation = TruncationReason.WALL_CLOCK
        else:
            is_full = len(sampled.token_ids) >= limit.max_tokens
            self._truncation = limit.reason if is_full else TruncationReason.TURN_TOKENS

    def _count(self, node: Node, asked: Asked) -> None:
        counts = self.counts
        if node.is_auxiliary:
            counts.auxiliary_calls += 1
        else:
            counts.calls += 1
            counts.reasons[node.reason] += 1
        if node.echo is not None:
            counts.echoes[node.echo] += 1
        counts.sampled_tokens += len(node.generation.token_ids)
        counts.prompt_tokens += node.n_prompt
        counts.malformed_calls.update(call.sampled.problem for call in node.shown.calls if call.sampled.problem)
        if asked.sampling not in self._asked and len(self._asked) < 32:
            self._asked.append(asked.sampling)

    # Prompts

    def _prompt(self, asked: Asked) -> _Prompt:
        if asked.prompt is not None:
            return self._raw_prompt(asked)
        try:
            heard, tools = tuple(hear(record) for record in asked.records), tools_key(asked.tools)
            match = self.tree.match(heard, tools)
            is_first = not asked.is_auxiliary and not self._turns
            reason = reason_of(self.tree, heard, tools, match, is_first=is_first)
            if match.node is not None:
                new_ids = self._bridge(asked, match)
                if new_ids is not None:
                    return _Prompt(
                        parent=match.node,
                        heard=heard[match.start :],
                        tools=tools,
                        new_ids=new_ids,
                        all_ids=np.concatenate([match.node.token_ids(), new_ids]),
                        reason=reason,
                        match=match,
                    )
                reason = Reason.UNBRIDGEABLE
            ids = self._whole(asked)
        except (ConfigError, ModelError) as error:
            raise Refusal.malformed(str(error), "messages") from error
        return _Prompt(parent=None, heard=heard, tools=tools, new_ids=ids, all_ids=ids, reason=reason, match=Match())

    def _bridge(self, asked: Asked, match: Match) -> Ids | None:
        """Ids of the new messages after the matched node, None where the chat family cannot write them there."""
        node = match.node
        if node is None or not len(node.generation.token_ids):
            return None
        said = asked.records[match.start - 1].get("tool_calls") or ()
        records = in_call_order(asked.records[match.start :], [str(call.get("id")) for call in said])
        messages = read_messages(records, self._minted)
        last_id = int(node.generation.token_ids[-1])
        for form in (messages, with_one_system(messages)):
            try:
                return self.chat.bridge(form, last_id=last_id)
            except ModelError as error:
                _log.debug("episode %s: %s", self.episode.uid, error)
        return None

    def _whole(self, asked: Asked) -> Ids:
        """Ids of a whole conversation. Raises ConfigError, ModelError."""
        messages = read_messages(all_in_call_order(asked.records), self._minted)
        tools = [tool_from_openai(tool) for tool in asked.tools]
        try:
            return self.chat.prompt(messages, tools)
        except ModelError:
            plain = with_one_system(messages)
            if plain == messages:
                raise
            return self.chat.prompt(plain, tools)

    def _raw_prompt(self, asked: Asked) -> _Prompt:
        raise Refusal.unsupported("raw completions are not served", "prompt")

    def engine_session(self, is_auxiliary: bool) -> str:
        """Name of the engine's session: auxiliary calls must not push the agent's prefix out."""
        return f"{self.episode.uid}/auxiliary" if is_auxiliary else self.episode.uid

    # The end

    async def close(self, outcome: Outcome | None = None) -> EpisodeRecord:
        """End the episode: calls in flight are cancelled and refused, the tree becomes streams. Idempotent."""
        if self._record is not None:
            return self._record
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for is_auxiliary in (False, True):
            if is_auxiliary and not self._calls[True]:
                continue
            try:
                await self._engine.end_session(self.engine_session(is_auxiliary))
            except EngineError as error:
                _log.warning("the engine kept the session of episode %s: %s", self.episode.uid, error)
        if self._record is None:
            self._record = self._make_record(outcome)
            self._retries.clear()
        return self._record

    def _make_record(self, outcome: Outcome | None) -> EpisodeRecord:
        streams = streams_of(self.tree.nodes)
        trained = [node for node in self.tree.nodes if not node.is_auxiliary]
        sampled = sum(len(node.generation.token_ids) for node in trained)
        if sum(stream.n_action for stream in streams) != sampled:
            raise InvariantError(f"the streams of episode {self.episode.uid} do not hold each of {sampled} tokens once")
        self.counts.streams += len(streams)
        self.counts.stream_tokens += sum(len(stream) for stream in streams)
        self.counts.delivered += sum(node.is_delivered for node in self.tree.nodes)
        return EpisodeRecord(
            streams=streams,
            auxiliary=auxiliary_streams_of(self.tree.nodes),
            outcome=self._outcome(outcome),
            info={**self.counts.as_info(), "asked_sampling": [dict(asked) for asked in self._asked]},
            engine_s=self._engine_s,
            admitted_version=self._admitted_version,
        )

    def _outcome(self, given: Outcome | None) -> Outcome:
        """A failure of ours or the driver's first, then a budget that was run into, then what the driver said."""
        if self._failure is not None:
            return Outcome.error(self._failure)
        if given is not None and given.is_error and given.reason != AGENT_FAILED:
            return given
        if self._truncation is not None:
            return Outcome.truncated(self._truncation)
        return given or Outcome.terminated()
