"""A generation cut at a client's stop string, by whole tokens.

The engine samples to the policy's own end of turn and knows no strings. What came after the token that completes the
stop string was never said: it goes, with its log-probs. The stop string stays in the ids, the text ends before it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from sao_gym.protocols import Chat, Generation
from sao_gym.stream import StopReason
from sao_gym.text_codec import TextCodec


class TextChat(Chat, Protocol):
    """A `Chat` whose tokenizer can be asked for text, as that of all of `sao_gym.chat`."""

    codec: TextCodec


def cut_at(chat: TextChat, generation: Generation, stops: Sequence[str]) -> tuple[Generation, str | None]:
    """`generation` up to the token that completes the first of `stops`, and which one; as it is where none stands in it."""
    ids = generation.token_ids
    if not stops or not any(stop in chat.codec.decode(ids) for stop in stops):
        return generation, None
    low, high = 1, len(ids)
    while low < high:  # the text of a longer run holds whatever that of a shorter one holds
        middle = (low + high) // 2
        text = chat.codec.decode(ids[:middle])
        low, high = (low, middle) if any(stop in text for stop in stops) else (middle + 1, high)
    text = chat.codec.decode(ids[:low])
    found = min((stop for stop in stops if stop in text), key=text.index)
    if low == len(ids) and generation.stop is StopReason.STOP:
        return generation, found
    cut = replace(
        generation,
        token_ids=ids[:low],
        logprobs=generation.logprobs[:low],
        versions=generation.versions[:low],
        stop=StopReason.STOP_STRING,
        extras={name: values[:low] for name, values in generation.extras.items()},
    )
    return cut, found
