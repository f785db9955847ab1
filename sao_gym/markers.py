"""Ids cut at the markers of reasoning and tool calls, for `sao_gym.tool_calls` to read.

Where the tokenizer has a marker as a control token only that id is the marker, and the same text spelled by ordinary
ids is text; where it has not, the text is the marker.

Example:
    >>> MarkerReader(codec).read(ids).tool_calls[0].name  # doctest: +SKIP
    'python'
"""

import re
from collections.abc import Iterator, Sequence

from sao_gym.messages import Message
from sao_gym.text_codec import TextCodec
from sao_gym.tool_calls import Mark, Piece, read_message

_MARKERS = {
    "<think>": Mark.THINK_OPEN,
    "</think>": Mark.THINK_CLOSE,
    "<tool_call>": Mark.CALL_OPEN,
    "</tool_call>": Mark.CALL_CLOSE,
}


class MarkerReader:
    """Reads assistant messages; `is_thinking` says that the prompt has already opened the reasoning."""

    def __init__(self, codec: TextCodec, *, is_thinking: bool = False) -> None:
        self._codec = codec
        self._is_thinking = is_thinking
        ids = {text: codec.control_id(text) for text in _MARKERS}
        self._marks = {index: _MARKERS[text] for text, index in ids.items() if index is not None}
        spelled = [re.escape(text) for text, index in ids.items() if index is None]
        self._spelled = re.compile(f"({'|'.join(spelled) or '(?!)'})")

    def read(self, ids: Sequence[int], *, is_truncated: bool = False) -> Message:
        """The message that ids say, the stop token already taken off."""
        opened = [Piece("", Mark.THINK_OPEN)] if self._is_thinking else []
        return read_message([*opened, *self._pieces(ids)], is_truncated=is_truncated)

    def _pieces(self, ids: Sequence[int]) -> Iterator[Piece]:
        start = 0
        for position, index in enumerate(ids):
            if index in self._marks:
                yield from self._split(self._codec.decode(ids[start:position]))
                yield Piece(self._codec.decode([index]), self._marks[index])
                start = position + 1
        yield from self._split(self._codec.decode(ids[start:]))

    def _split(self, text: str) -> Iterator[Piece]:
        for part in self._spelled.split(text):
            is_marker = self._spelled.fullmatch(part) is not None
            yield Piece(part, _MARKERS[part] if is_marker else None)


class ReasoningCutter:
    """Takes reasoning out of sampled ids, for a parser that would look for calls inside it (case TC-03)."""

    def __init__(self, codec: TextCodec, *, is_open: bool) -> None:
        self._codec = codec
        self._is_open = is_open
        self._open_id = codec.control_id("<think>")
        self._close_id = codec.control_id("</think>")

    def cut(self, ids: Sequence[int]) -> tuple[str | None, list[int]]:
        """(reasoning or None, ids outside it).

        Reasoning that never closes takes all that follows; a close without an opening takes all that came before; after reasoning
        it closes nothing and is left out.
        """
        thought: list[int] = []
        shown: list[int] = []
        is_open, has_reasoning = self._is_open, self._is_open
        for index in ids:
            if index == self._close_id:
                if not is_open and not has_reasoning:
                    thought, shown = [*thought, *shown], []
                is_open, has_reasoning = False, True
            elif index == self._open_id and not is_open:
                is_open = has_reasoning = True
            else:
                (thought if is_open else shown).append(index)
        return (self._codec.decode(thought).strip() if has_reasoning else None), shown
