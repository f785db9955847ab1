"""Model families that the `renderers` library knows, behind our protocol and our two promises.

What the library does otherwise (checked: 0.1.12), and what is done about it:
- it encodes contents with control tokens live: it is handed a tokenizer that keeps guarded text ordinary;
- it runs calls out of reasoning that never closed (GLM's also out of closed reasoning): the reasoning is cut out of
  the ids before it reads them (case TC-03);
- it marks calls "ok" that carry no object and fails on some numbers: every call is checked again, and Qwen3's form is
  read by our own parser;
- without schemas it takes unquoted arguments for JSON: `parse` is told which tools were offered.
Reasoning of earlier turns is kept (`thinking_retention="all"`): what was sampled stays in the stream.

Example:
    >>> chat = RendererChat(tokenizer, "qwen3")  # doctest: +SKIP
    >>> chat.bridge([Message.tool("3", call=call)], last_id=chat.stop_token_ids[0])  # doctest: +SKIP
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import renderers.base as library
from renderers.configs import _config_class_for

from sao_gym.errors import ConfigError, ModelError
from sao_gym.markers import MarkerReader, ReasoningCutter
from sao_gym.messages import CallProblem, Message, ToolCall, ToolSpec
from sao_gym.openai_format import tool_to_openai
from sao_gym.records import QUESTION, check_written, guarded_record, written_turn
from sao_gym.stream import Ids
from sao_gym.text_codec import TextCodec
from sao_gym.tool_calls import checked_call, cut, problem_call

_HERMES = frozenset({"qwen3", "qwen3-vl"})
_PROBLEMS = {
    "invalid_json": CallProblem.INVALID_JSON,
    "malformed_structure": CallProblem.INVALID_JSON,
    "missing_name": CallProblem.MISSING_NAME,
    "unclosed_block": CallProblem.UNCLOSED,
}


class RendererChat:
    """The protocol `Chat` for one family of `renderers`."""

    def __init__(self, tokenizer: Any, family: str) -> None:
        self.codec = TextCodec.of(tokenizer)
        self.family = family
        self._renderer = _make_renderer(_GuardedTokenizer(self.codec), family)
        self._opening = self._render([QUESTION], opens=True)
        self._stops = tuple(int(index) for index in self._renderer.get_stop_token_ids())
        opens = self.codec.decode(self._opening).rstrip().endswith("<think>")
        self._reasoning = ReasoningCutter(self.codec, is_open=opens)
        self._reader = MarkerReader(self.codec, is_thinking=opens) if family in _HERMES else None
        self._closing: list[int] = []
        if self._read(self.codec.plain("x"), ()).content != "x":  # the parser takes all text for reasoning at first
            self._closing = self.codec.encode("</think>")

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an assistant turn in this family."""
        return self._stops

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Ids:
        """The conversation as ids, up to where the assistant begins to write. Raises ModelError."""
        return np.asarray(self._render(messages, tools, opens=True), dtype=np.int32)

    def bridge(self, messages: Sequence[Message], *, last_id: int) -> Ids:
        """Ids between a sampled turn that ended with `last_id` and the assistant's next words.

        Raises ModelError where the family has no way to continue with these messages.
        """
        records = [guarded_record(message, self.codec) for message in messages]
        end = [last_id] if last_id in self._stops else []
        for words in ("</think>.", "."):  # the first closes reasoning that the prompt opened
            said = [*self.codec.encode(words), *end]
            bridged = self._renderer.bridge_to_next_turn(self._opening, said, records)
            before = [*self._opening, *said]
            if bridged is not None and bridged.token_ids[: len(before)] == before:
                return np.asarray(bridged.token_ids[len(before) :], dtype=np.int32)
        raise ModelError(f"the {self.family} renderer cannot continue with {_roles(messages)}")

    def write(self, message: Message) -> Ids:
        """Ids that the policy would have sampled to say `message`, stop token included. Raises ModelError."""
        ids = written_turn(message, self._opening, self._render, self._stops)
        check_written(message, ids.tolist(), self.codec)
        return ids

    def parse(self, token_ids: Ids, *, tools: Sequence[ToolSpec] = (), is_truncated: bool = False) -> Message:
        """The message that sampled ids say; text that the library fails on is a call that cannot be read."""
        ids = [int(index) for index in token_ids]
        if self._reader is not None:
            ids = ids[:-1] if ids and ids[-1] in self._stops else ids
            return self._reader.read(ids, is_truncated=is_truncated)
        reasoning, shown = self._reasoning.cut([i for i in ids if 0 <= i < len(self.codec.tokenizer)])
        message = replace(self._read(shown, tools), reasoning=reasoning)
        return cut(message) if is_truncated else message

    def decode_action(self, token_ids: Ids) -> str:
        """Text of sampled ids with every control token spelled out: for people, never to be encoded again."""
        return self.codec.decode(token_ids)

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, opens: bool = False) -> list[int]:
        records = [guarded_record(message, self.codec) for message in messages]
        offered = [self.codec.guard_all(tool_to_openai(tool)) for tool in tools] or None
        try:
            ids = self._renderer.render_ids(records, tools=offered, add_generation_prompt=opens)
        except Exception as error:  # the library raises whatever comes on an order of roles it does not know
            raise ModelError(f"the {self.family} renderer failed on {_roles(messages)}: {error}") from error
        return [int(index) for index in ids]

    def _read(self, shown: list[int], tools: Sequence[ToolSpec]) -> Message:
        offered, ids = [tool_to_openai(tool) for tool in tools] or None, [*self._closing, *shown]
        try:
            found = self._renderer.parse_response(ids, tools=offered, prompt_ids=self._opening)
            names = _call_ids(found.tool_calls)
            calls = tuple(self._call(call, name) for call, name in zip(found.tool_calls, names, strict=True))
            content = str(found.content or "").strip()
        except Exception:  # the library may fail in any way on what a policy writes; the episode goes on
            content, text = "", self.codec.decode(shown)
            calls = (problem_call(CallProblem.INVALID_JSON, text, "call_0"),)
        return Message(role="assistant", content=content, tool_calls=calls)

    def _call(self, found: Any, call_id: str) -> ToolCall:
        raw = str(found.raw or "")
        if found.status not in ("ok", "unknown_tool"):  # which tools there are is the environment's to say
            problem = _PROBLEMS.get(str(found.status), CallProblem.INVALID_JSON)
            return problem_call(problem, raw, call_id, str(found.name or ""))
        return checked_call(found.name, found.arguments, raw, call_id)


class _GuardedTokenizer:
    """What a renderer sees of a tokenizer: guarded text stays ordinary. It offers no character offsets."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        return self._codec.encode(text)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._codec.tokenizer, name)


def _roles(messages: Sequence[Message]) -> str:
    return f"messages of roles {', '.join(message.role for message in messages) or 'none'}"


def _call_ids(found: Sequence[Any]) -> list[str]:
    """`call_0`, `call_1`, ...; or the ids that a policy wrote itself (Kimi's), if each has its own."""
    written = [call.id for call in found if isinstance(call.id, str) and call.id]
    if found and len(set(written)) == len(found):
        return written
    return [f"call_{index}" for index in range(len(found))]


def families() -> tuple[str, ...]:
    """Names of the families that the library knows."""
    library._populate_registry()
    return tuple(sorted(set(library.RENDERER_REGISTRY) - {"default"}))


def _make_renderer(tokenizer: Any, family: str) -> Any:
    if family not in families():
        raise ConfigError(f"unknown chat family {family!r}; known are {', '.join(families())}")
    config_class = _config_class_for(family)
    try:
        return library.RENDERER_REGISTRY[family](tokenizer, config_class(thinking_retention="all"))
    except Exception as error:
        raise ModelError(f"the tokenizer does not fit the chat family {family}: {error}") from error
