r"""Our own way of writing messages: turns between control tokens, tool calls as JSON between `<tool_call>` markers.

A tokenizer with our specials gets `<|user|>text<|end|>`; a foreign one with ChatML's control tokens gets
`<|im_start|>user\ntext<|im_end|>\n`. Where the tokenizer has `<tool_call>` or `<think>` as control tokens only
their ids are markers and the same text spelled by ordinary ids is text; where it has not, the text is the marker.
Nothing is ever dropped or moved, so that a bridge continues any prompt exactly.

Example:
    >>> chat = OwnChat(train_tokenizer([]))  # doctest: +SKIP
    >>> chat.codec.decode(chat.prompt([Message.user("2+2?")]))  # doctest: +SKIP
    '<|user|>2+2?<|end|><|assistant|>'
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sao_gym.errors import ModelError
from sao_gym.markers import MarkerReader
from sao_gym.messages import Message, Role, ToolCall, ToolSpec
from sao_gym.stream import Ids
from sao_gym.text_codec import TextCodec
from sao_gym.tokenizer import END

_ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
Part = str | int


@dataclass(frozen=True, slots=True)
class _Turns:
    """How a turn of each role opens, which id ends it, and what stands after that."""

    opening: dict[Role, tuple[Part, ...]]
    end: int
    after: str


DESCRIBE_TOOLS = "sao_gym_describe_tools"


def remember(tokenizer: Any, *, describe_tools: bool) -> None:
    """Let the tokenizer's folder say how its model was taught to be written to."""
    tokenizer.init_kwargs[DESCRIBE_TOOLS] = describe_tools


class OwnChat:
    """The protocol `Chat` in our own template, for any tokenizer that has our control tokens or ChatML's.

    `describe_tools` lists the tools in the system prompt; None is what `remember` wrote into the tokenizer, else true.
    """

    def __init__(self, tokenizer: Any, *, describe_tools: bool | None = None) -> None:
        self.codec = TextCodec.of(tokenizer)
        remembered = getattr(self.codec.tokenizer, "init_kwargs", {}).get(DESCRIBE_TOOLS, True)
        self.describe_tools = bool(remembered) if describe_tools is None else describe_tools
        self._turns = _find_turns(self.codec)
        eos = self.codec.tokenizer.eos_token_id
        is_other = eos in self.codec.control_ids and eos != self._turns.end
        self._stops = (self._turns.end, int(eos)) if is_other else (self._turns.end,)
        self._reader = MarkerReader(self.codec)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The id that ends a turn, then the tokenizer's own end of text where that is another control token."""
        return self._stops

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Ids:
        """The conversation as ids, up to where the assistant begins to write."""
        parts: list[Part] = []
        rest = list(messages)
        if tools and self.describe_tools:
            first = rest.pop(0) if rest and rest[0].role == "system" else None
            parts += self._turn("system", self._system_body(first, tools))
        for message in rest:
            parts += self._message(message)
        return self.codec.join([*parts, *self._turns.opening["assistant"]])

    def bridge(self, messages: Sequence[Message], *, last_id: int) -> Ids:
        """Ids between a sampled turn that ended with `last_id` and the assistant's next words."""
        parts: list[Part] = [] if last_id == self._turns.end else [self._turns.end]
        parts.append(self._turns.after)
        for message in messages:
            parts += self._message(message)
        return self.codec.join([*parts, *self._turns.opening["assistant"]])

    def write(self, message: Message) -> Ids:
        """Ids that the policy would have sampled to say `message`, the stop token included: a demonstration."""
        return self.codec.join([*self._body(message), self._turns.end])

    def parse(self, token_ids: Ids, *, tools: Sequence[ToolSpec] = (), is_truncated: bool = False) -> Message:
        """The message that sampled ids say; see `sao_gym.tool_calls` for what counts as a call."""
        ids = [int(index) for index in token_ids]
        if ids and ids[-1] in self._stops:
            ids.pop()
        return self._reader.read(ids, is_truncated=is_truncated)

    def decode_action(self, token_ids: Ids) -> str:
        """Text of sampled ids with every control token spelled out: for people, never to be encoded again."""
        return self.codec.decode(token_ids)

    def _message(self, message: Message) -> list[Part]:
        return self._turn(message.role, self._body(message))

    def _turn(self, role: Role, body: Sequence[Part]) -> list[Part]:
        return [*self._turns.opening[role], *body, self._turns.end, self._turns.after]

    def _body(self, message: Message) -> list[Part]:
        parts: list[Part] = []
        if message.reasoning is not None:
            parts += [self._marker("<think>"), message.reasoning, self._marker("</think>")]
        parts.append(message.content)
        for call in message.tool_calls:
            parts += [self._marker("<tool_call>"), call_text(call), self._marker("</tool_call>")]
        return parts

    def _marker(self, text: str) -> Part:
        index = self.codec.control_id(text)
        return text if index is None else index

    def _system_body(self, message: Message | None, tools: Sequence[ToolSpec]) -> list[Part]:
        lines = [tool_text(tool) for tool in tools]
        before = f"{message.content}\n\n" if message and message.content else ""
        return [
            before + "You have these tools, one to a line:\n" + "\n".join(lines) + "\n\nTo use one, write ",
            self._marker("<tool_call>"),
            '{"name": "its name", "arguments": {"parameter": "value"}}',
            self._marker("</tool_call>"),
            " and end your turn; the result comes in the next message.",
        ]


def call_text(call: ToolCall) -> str:
    """A call as JSON, keys in the order given; a call that could not be read as it was written."""
    if call.problem is not None and call.raw:
        return call.raw
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


def tool_text(tool: ToolSpec) -> str:
    """A tool as one line of compact JSON."""
    record = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def _find_turns(codec: TextCodec) -> _Turns:
    own = {role: codec.control_id(f"<|{role}|>") for role in _ROLES}
    end = codec.control_id(END)
    if end is not None and None not in own.values():
        return _Turns({role: (index,) for role, index in own.items() if index is not None}, end, "")
    start, end = codec.control_id("<|im_start|>"), codec.control_id("<|im_end|>")
    if start is None or end is None:
        raise ModelError(
            "the tokenizer has neither our turn tokens (<|user|> ... <|end|>) nor ChatML's (<|im_start|>, "
            "<|im_end|>); use its own chat template instead"
        )
    return _Turns({role: (start, f"{role}\n") for role in _ROLES}, end, "\n")
