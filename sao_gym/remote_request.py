"""What is sent to an API: the conversation as it stands there, and the body of one request.

Invariant: a turn of the policy is sent back as it came. Only where a server refuses to read it again (arguments of a
call that are no JSON) are such arguments wrapped in some, for the rest of the episode.

Example:
    >>> talk = Conversation()
    >>> talk.hear([{"role": "user", "content": "2+2?"}])
    >>> policy = RemotePolicy(api_base="http://localhost/v1", model="m", omit=("seed", "top_p"))
    >>> request_body(policy, Sampling(max_tokens=9), (), talk, 9)
    {'model': 'm', 'messages': [{'role': 'user', 'content': '2+2?'}], 'temperature': 1.0, 'max_tokens': 9}
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sao_gym.messages import ToolSpec
from sao_gym.openai_format import tool_to_openai
from sao_gym.protocols import Sampling
from sao_gym.remote_answer import has_unreadable_arguments, with_readable_arguments, without_reasoning
from sao_gym.remote_policy import RemotePolicy

SEED_BITS = 31  # some servers hold a seed in a signed 32-bit number


class Conversation:
    """The messages of one episode in the API's own form."""

    def __init__(self) -> None:
        self._messages: list[Mapping[str, Any]] = []

    def hear(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """Append what the environment said."""
        self._messages.extend(messages)

    def say(self, echo: Mapping[str, Any]) -> None:
        """Append the policy's turn as it came."""
        self._messages.append(echo)

    def make_readable(self) -> bool:
        """Wrap arguments that are no JSON. Returns whether there were any."""
        before = [m for m in self._messages if has_unreadable_arguments(m)]
        self._messages = [with_readable_arguments(m) for m in self._messages]
        return bool(before)

    def messages(self, *, with_reasoning: bool) -> list[Mapping[str, Any]]:
        """All of it, for one request."""
        return list(self._messages) if with_reasoning else [without_reasoning(m) for m in self._messages]


def request_body(
    policy: RemotePolicy,
    sampling: Sampling,
    tools: Sequence[ToolSpec],
    conversation: Conversation,
    max_tokens: int | None,
) -> dict[str, Any]:
    """One request. `sampling.seed` decides its draw, `max_tokens` None leaves the length to the API."""
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": max_tokens,
        "seed": sampling.seed % (1 << SEED_BITS),
    }
    sent = {name: value for name, value in options.items() if name not in policy.omit and value is not None}
    if "max_tokens" in sent:
        sent[policy.max_tokens_field] = sent.pop("max_tokens")
    if sampling.top_k:
        sent["top_k"] = sampling.top_k
    if tools:
        sent["tools"] = [tool_to_openai(tool) for tool in tools]
    messages = conversation.messages(with_reasoning=policy.returns_reasoning)
    return {"model": policy.model, "messages": messages, **sent, **policy.extra_body}
