"""Gymnasium spaces of what agents and environments exchange: messages above, token ids below.

A space decides membership and draws random elements, so that Gymnasium's own checker and random policies work on
agent environments. Random elements are harmless: text of a few words, a call of a tool with random arguments, or ids
that the chat itself writes.

Example:
    >>> Message.assistant("4") in MessageSpace(), (Message.user("2+2?"),) in Messages()
    (True, True)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from sao_gym.messages import Message, ToolCall
from sao_gym.protocols import Generation
from sao_gym.stream import Ids, StopReason

WORDS = ("the", "answer", "is", "42", "x", "=", "7", "because", "print(1)", "\\boxed{3}", "é", "hello")


def _sentence(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, size=int(rng.integers(1, 8))).tolist())


class _PlainSpace(Space[Any]):
    """A space without shape or dtype, equal to any other of its class and fields."""

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Whether elements flatten into one Box: never."""
        return False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class MessageSpace(_PlainSpace):
    """Actions: one assistant `Message`. `sample` calls one of `tool_names` in about half of the draws."""

    def __init__(self, tool_names: Sequence[str] = (), seed: int | None = None) -> None:
        super().__init__(seed)
        self.tool_names = tuple(tool_names)

    def contains(self, x: Any) -> bool:
        """Whether `x` is an assistant message."""
        return isinstance(x, Message) and x.role == "assistant"

    def sample(self, mask: Any = None, probability: Any = None) -> Message:
        """A random assistant message; masks have no meaning here and are ignored."""
        text = _sentence(self.np_random)
        if not self.tool_names or self.np_random.random() < 0.5:
            return Message.assistant(text)
        name = str(self.np_random.choice(self.tool_names))
        call = ToolCall(id="call-0", name=name, arguments={"x": int(self.np_random.integers(100))})
        return Message.assistant(text, tool_calls=(call,))


class Messages(_PlainSpace):
    """Observations: a tuple of `Message`s, none of them the policy's own. It may be empty."""

    def contains(self, x: Any) -> bool:
        """Whether `x` is a tuple of messages that an environment may say."""
        return isinstance(x, tuple) and all(
            isinstance(message, Message) and message.role != "assistant" for message in x
        )

    def sample(self, mask: Any = None, probability: Any = None) -> tuple[Message, ...]:
        """Between one and three user messages of random words."""
        count = int(self.np_random.integers(1, 4))
        return tuple(Message.user(_sentence(self.np_random)) for _ in range(count))


class TokenIds(_PlainSpace):
    """Observations of a token-level environment: a one-dimensional int32 array of ids, possibly empty."""

    def __init__(self, known_ids: Sequence[int] | Ids = (0,), seed: int | None = None) -> None:
        super().__init__(seed)
        self.known_ids = tuple(int(i) for i in known_ids)

    def contains(self, x: Any) -> bool:
        """Whether `x` is an int32 array [n] of ids that are not negative."""
        return isinstance(x, np.ndarray) and x.dtype == np.int32 and x.ndim == 1 and bool((x >= 0).all())

    def sample(self, mask: Any = None, probability: Any = None) -> Ids:
        """Up to 16 of the known ids."""
        return self.np_random.choice(self.known_ids, size=int(self.np_random.integers(1, 17))).astype(np.int32)


class Generations(_PlainSpace):
    """Actions of a token-level environment: what an engine sampled, with log-probs and versions."""

    def __init__(self, known_ids: Sequence[int] | Ids, stop_ids: Sequence[int], seed: int | None = None) -> None:
        super().__init__(seed)
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.known_ids = tuple(int(i) for i in known_ids if int(i) not in self.stop_ids)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a Generation whose arrays agree in length."""
        return isinstance(x, Generation) and len(x.token_ids) == len(x.logprobs) == len(x.versions)

    def sample(self, mask: Any = None, probability: Any = None) -> Generation:
        """A few known ids and a stop token, as a uniform policy of version 0 would have drawn them."""
        body = self.np_random.choice(self.known_ids, size=int(self.np_random.integers(1, 9)))
        ids = np.append(body, self.np_random.choice(self.stop_ids)).astype(np.int32)
        logprob = -np.log(len(self.known_ids) + len(self.stop_ids))
        return Generation(
            token_ids=ids,
            logprobs=np.full(len(ids), logprob, dtype=np.float32),
            versions=np.zeros(len(ids), dtype=np.int32),
            stop=StopReason.STOP,
            temperature=1.0,
        )
