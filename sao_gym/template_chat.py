"""A checkpoint's own Jinja chat template, with a bridge computed from it.

The bridge is what the template prints between a sentinel assistant turn and the assistant's next words. Only new
messages are rendered, so that the ids so far stay a prefix even under a template that would rewrite them (drops old
reasoning, moves a separator); `template_verdict` in `sao_gym.chat` says which does. Contents are guarded before the
template sees them. Tool calls are read in the Hermes form (`sao_gym.tool_calls`).

Example:
    >>> chat = TemplateChat(tokenizer)  # doctest: +SKIP
    >>> chat.bridge([Message.user("and 3+3?")], last_id=chat.stop_token_ids[0])  # doctest: +SKIP
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sao_gym.errors import ModelError
from sao_gym.markers import MarkerReader
from sao_gym.messages import Message, ToolCall, ToolSpec
from sao_gym.openai_format import tool_to_openai
from sao_gym.records import QUESTION, check_written, guarded_record, written_turn
from sao_gym.stream import Ids
from sao_gym.text_codec import TextCodec

_SENTINEL = "\U0010fffcturn\U0010fffc"


class TemplateChat:
    """The protocol `Chat` over `tokenizer.chat_template`."""

    def __init__(self, tokenizer: Any) -> None:
        self.codec = TextCodec.of(tokenizer)
        if not getattr(self.codec.tokenizer, "chat_template", None):
            raise ModelError("the tokenizer has no chat template; use kind 'own' or another checkpoint")
        self._close = self._after_sentinel(self._render(_sentinel_turn(()), (), opens=False))
        self._stops = self._find_stops()
        opening = self._render([QUESTION], (), opens=True)
        self._reader = MarkerReader(self.codec, is_thinking=opening.rstrip().endswith("<think>"))

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The ids that the template puts after an assistant turn, then the tokenizer's end of text."""
        return self._stops

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Ids:
        """The conversation as ids, up to where the assistant begins to write. Raises ModelError."""
        return np.asarray(self.codec.encode(self._render(messages, tools, opens=True)), dtype=np.int32)

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """What the template prints for `prompt`, contents still guarded."""
        return self._render(messages, tools, opens=True)

    def text(self, messages: Sequence[Message]) -> str:
        """What the template prints for a conversation that ends here, contents still guarded."""
        return self._render(messages, (), opens=False)

    def bridge_text(self, messages: Sequence[Message]) -> str:
        """What the template prints between an assistant's last word and its next, contents still guarded."""
        try:
            printed = self._render([*_sentinel_turn(()), *messages], (), opens=True)
        except ModelError:
            return self._bridge_after_calls(messages)
        return self._after_sentinel(printed)

    def bridge(self, messages: Sequence[Message], *, last_id: int) -> Ids:
        """Ids between a sampled turn that ended with `last_id` and the assistant's next words. Raises ModelError."""
        ids = self.codec.encode(self.bridge_text(messages))
        is_close = last_id in self._stops and last_id in ids
        if is_close and not self.codec.decode(ids[: ids.index(last_id)]).strip():
            ids = ids[ids.index(last_id) + 1 :]
        return np.asarray(ids, dtype=np.int32)

    def write(self, message: Message) -> Ids:
        """Ids that the policy would have sampled to say `message`, stop token included. Raises ModelError."""
        ids = written_turn(
            message,
            self.prompt([QUESTION]).tolist(),
            lambda messages: self.codec.encode(self.text(messages)),
            self._stops,
        )
        check_written(message, ids.tolist(), self.codec)
        return ids

    def parse(self, token_ids: Ids, *, tools: Sequence[ToolSpec] = (), is_truncated: bool = False) -> Message:
        """The message that sampled ids say; calls in the Hermes form only."""
        ids = [int(index) for index in token_ids]
        if ids and ids[-1] in self._stops:
            ids.pop()
        return self._reader.read(ids, is_truncated=is_truncated)

    def decode_action(self, token_ids: Ids) -> str:
        """Text of sampled ids with every control token spelled out: for people, never to be encoded again."""
        return self.codec.decode(token_ids)

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, opens: bool) -> str:
        records = [guarded_record(message, self.codec) for message in messages]
        offered = [self.codec.guard_all(tool_to_openai(tool)) for tool in tools] or None
        try:
            printed = self.codec.tokenizer.apply_chat_template(
                records, tools=offered, tokenize=False, add_generation_prompt=opens
            )
        except Exception as error:  # a template is a program of its own and may raise anything
            roles = ", ".join(message.role for message in messages)
            raise ModelError(f"the chat template failed on messages of roles {roles}: {error}") from error
        return str(printed)

    def _bridge_after_calls(self, messages: Sequence[Message]) -> str:
        """The same for a template that takes tool results only after the calls they answer."""
        calls = tuple(
            ToolCall(id=message.tool_call_id or "call_0", name=message.name or "tool")
            for message in messages
            if message.role == "tool"
        )
        turn = _sentinel_turn(calls)
        alone = self._after_sentinel(self._render(turn, (), opens=False))
        whole = self._after_sentinel(self._render([*turn, *messages], (), opens=True))
        if not whole.startswith(alone):
            raise ModelError("the chat template rewrites an assistant turn once its tool results follow")
        return self._close + whole[len(alone) :]

    def _after_sentinel(self, printed: str) -> str:
        _, found, after = printed.partition(_SENTINEL)  # a tool result may imitate it
        if not found:
            raise ModelError("the chat template does not print an assistant's content")
        return after

    def _find_stops(self) -> tuple[int, ...]:
        # A template without a closing token (GLM's) ends a turn by opening the next one.
        call = ToolCall(id="call_0", name="tool")
        nexts: list[Message] = [] if self._close.strip() else [QUESTION, Message.tool(".", call=call)]
        texts = [self._close, *(self.bridge_text([message]) for message in nexts)]
        firsts = [next((i for i in self.codec.encode(text) if i in self.codec.control_ids), None) for text in texts]
        stops = dict.fromkeys(int(i) for i in [*firsts, self.codec.tokenizer.eos_token_id] if i is not None)
        if not stops:
            raise ModelError("neither the chat template nor the tokenizer has a token that ends a turn")
        return tuple(stops)


def _sentinel_turn(calls: tuple[ToolCall, ...]) -> list[Message]:
    return [QUESTION, Message.assistant(_SENTINEL, tool_calls=calls)]
