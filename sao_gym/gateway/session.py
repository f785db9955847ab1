"""One episode behind the gateway: its calls are answered, and become token streams when it is closed.

Invariants: ids are kept as they were sampled and only new messages are rendered; a generation belongs to the session
and not to the connection that asked for it, so that a client which gave up can still get it; nothing is answered after
the end; a length-truncated action ends the episode (trap 19); every wait has a deadline.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sao_gym.budgets import Budgets, Limit
from sao_gym.errors import DeadlineError, EngineError, EpisodeError
from sao_gym.gateway.allowance import Allowance
from sao_gym.gateway.asked import Asked
from sao_gym.gateway.counts import Counts
from sao_gym.gateway.gate import Gate
from sao_gym.gateway.prompts import Prompt, Prompts
from sao_gym.gateway.record import EpisodeRecord, final_outcome, make_record
from sao_gym.gateway.refusals import Refusal
from sao_gym.gateway.retry import Retries, Retry
from sao_gym.gateway.sampled import TextChat, cut_at
from sao_gym.gateway.settings import GatewaySettings
from sao_gym.gateway.shown import show, show_text
from sao_gym.gateway.tree import Node, Tree
from sao_gym.messages import ToolCall
from sao_gym.protocols import Clock, Engine, Generation, Sampling, request_seed
from sao_gym.remote_failures import Meaning, read_failure
from sao_gym.rollout import Episode, require_sound, within
from sao_gym.stream import Ids, Outcome, StopReason, TruncationReason

_log = logging.getLogger(__name__)


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
        self._sampling = sampling
        self._allowance = Allowance(budgets, turn_cap=sampling.max_tokens, max_auxiliary=settings.max_auxiliary_calls)
        self._on_version = on_version
        self._admitted_version = engine.version
        self._retries = Retries()
        self._tasks: set[asyncio.Task[Node]] = set()
        self._minted: dict[str, ToolCall] = {}
        self._prompts = Prompts(chat, self.tree, self._minted)
        self.threads: dict[str, tuple[Mapping[str, Any], ...]] = {}
        self._asked: list[Mapping[str, Any]] = []
        self._index = 0
        self._engine_s = 0.0
        self._failure: str | None = None
        self._record: EpisodeRecord | None = None
        self._is_closed = False

    @property
    def truncation(self) -> TruncationReason | None:
        """The budget that the agent ran into, None if it got what it last asked for."""
        return self._allowance.truncation

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
        self._allowance.require(is_auxiliary=asked.is_auxiliary)

    # One call

    async def _sample(self, asked: Asked) -> Node:
        is_auxiliary, allowance = asked.is_auxiliary, self._allowance
        prompt = self._prompts.of(asked, is_first=not is_auxiliary and not allowance.turns)
        token_ids = prompt.all_ids
        limit = allowance.limit(
            prompt=len(token_ids),
            new=len(prompt.new_ids),
            asked=asked.max_tokens,
            context=self._engine.context_length,
            is_auxiliary=is_auxiliary,
        )
        request = self._request(is_auxiliary, limit)
        index, self._index = self._index, self._index + 1
        is_first = not is_auxiliary and not allowance.turns
        allowance.begin(len(prompt.new_ids), is_auxiliary=is_auxiliary)
        if is_first:
            self._on_version(self._engine.version)
        try:
            generation = await self._generate(token_ids, request, is_auxiliary)
        except Refusal:
            allowance.give_back(len(prompt.new_ids), is_auxiliary=is_auxiliary)
            raise
        if is_first and len(generation.versions):
            self._on_version(int(generation.versions[0]))
        generation, stop_string = cut_at(self.chat, generation, asked.stop)
        node = self._node(asked, prompt, index, generation, stop_string)
        self._keep(node, asked)
        if not is_auxiliary:
            allowance.answered(len(generation.token_ids), generation.stop, limit)
        return node

    def _request(self, is_auxiliary: bool, limit: Limit) -> Sampling:
        number = self._allowance.auxiliary if is_auxiliary else self._allowance.turns
        episode = self.episode
        return replace(
            self._sampling,
            max_tokens=limit.max_tokens,
            stop_token_ids=self._sampling.stop_token_ids or self.chat.stop_token_ids,
            seed=request_seed(episode.run_seed, episode.task.id, episode.attempt, int(is_auxiliary), number),
        )

    async def _generate(self, token_ids: Ids, request: Sampling, is_auxiliary: bool) -> Generation:
        start = self._clock.now()
        try:
            work = self._engine.generate(token_ids, request, self.engine_session(is_auxiliary))
            generation = await within(self._clock, self.settings.call_s, work)
        except EngineError as error:
            if read_failure(400, {}, str(error).encode()).meaning is not Meaning.OVERFLOW:
                raise
            raise self._allowance.overflow(
                prompt=len(token_ids),
                asked=request.max_tokens,
                context=self._engine.context_length,
                is_auxiliary=is_auxiliary,
            ) from error
        finally:
            self._engine_s += self._clock.now() - start
        if generation is None:
            raise EngineError(f"no answer within {self.settings.call_s:g} s", kind="engine_timeout")
        require_sound(generation, request)
        return generation

    def _node(self, asked: Asked, prompt: Prompt, index: int, generation: Generation, stop_string: str | None) -> Node:
        is_cut = generation.stop in (StopReason.LENGTH, StopReason.ABORT)
        if asked.prompt is None:
            message = self.chat.parse(generation.token_ids, tools=asked.offered, is_truncated=is_cut)
            shown = show(message, index=index, cut=is_cut, stop_string=stop_string, as_text=asked.calls_as_text)
        else:
            ended = generation.stop is StopReason.STOP
            said = self.chat.codec.decode(generation.token_ids[: len(generation.token_ids) - ended])
            shown = show_text(said, cut=is_cut, stop_string=stop_string)
        return Node(
            index=index,
            parent=prompt.parent,
            heard=prompt.heard,
            tools=prompt.tools,
            prompt_ids=prompt.new_ids,
            generation=generation,
            shown=shown,
            reason=prompt.reason,
            echo=prompt.echo,
            is_auxiliary=asked.is_auxiliary,
            asked=asked.sampling,
            text=None if prompt.text is None else prompt.text + shown.content,
            is_raw=asked.prompt is not None,
            is_cut=is_cut,
        )

    def _keep(self, node: Node, asked: Asked) -> None:
        self.tree.add(node)
        self._minted.update((call.id, call.sampled) for call in node.shown.calls)
        self._count(node)
        if asked.sampling not in self._asked and len(self._asked) < 32:
            self._asked.append(asked.sampling)

    def _count(self, node: Node) -> None:
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
        for is_auxiliary in (False, True) if self._allowance.auxiliary else (False,):
            try:
                await self._engine.end_session(self.engine_session(is_auxiliary))
            except (EngineError, DeadlineError) as error:
                _log.warning("the engine kept the session of episode %s: %s", self.episode.uid, error)
        if self._record is None:
            self._record = make_record(
                self.tree,
                self.counts,
                outcome=final_outcome(outcome, failure=self._failure, truncation=self.truncation),
                asked=self._asked,
                engine_s=self._engine_s,
                admitted_version=self._admitted_version,
            )
            self._retries.clear()
        return self._record
