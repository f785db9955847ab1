"""A generation cut at a client's stop string, by whole tokens.

The engine samples to the policy's own end of turn and knows no strings. What came after the token that completes the
stop string was never said: it goes, with its log-probs. The stop string stays in the ids, the text ends before it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from sao_gym.protocols import Chat, Generation
from sao_gym.stream import Ids, StopReason


class TextChat(Chat, Protocol):
    """A `Chat` that also spells out what was sampled, as all of `sao_gym.chat` do."""

    def decode_action(self, token_ids: Ids) -> str:
        """Text of sampled ids, control tokens spelled out."""
        ...


def cut_at(chat: TextChat, generation: Generation, stops: Sequence[str]) -> tuple[Generation, str | None]:
    """`generation` up to the token that completes the first of `stops`, and which one; as it is where none stands in it."""
    ids = generation.token_ids
    if not stops or not any(stop in chat.decode_action(ids) for stop in stops):
        return generation, None
    low, high = 1, len(ids)
    while low < high:  # the text of a longer run holds whatever that of a shorter one holds
        middle = (low + high) // 2
        text = chat.decode_action(ids[:middle])
        low, high = (low, middle) if any(stop in text for stop in stops) else (middle + 1, high)
    text = chat.decode_action(ids[:low])
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
