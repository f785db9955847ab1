"""Messages to ids and back: which way of writing a tokenizer gets.

Three ways, one protocol (`sao_gym.protocols.Chat`): `OwnChat` (our template), `RendererChat` (a model family that
the `renderers` library knows) and `TemplateChat` (a checkpoint's own template with a computed bridge). Each keeps
the two promises: sampled ids are kept and only new messages are rendered; no text inside a message becomes a control
id (trap 20).

Example:
    >>> chat = make_chat(tokenizer)  # doctest: +SKIP
    >>> ids = chat.prompt([Message.user("2+2?")])  # doctest: +SKIP
    >>> chat.parse(sampled_ids).content  # doctest: +SKIP
    '4'
"""

from typing import Any, Literal

from sao_gym.errors import ConfigError
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Chat

ChatKind = Literal["auto", "own"]


def make_chat(tokenizer: Any, kind: ChatKind = "auto", *, describe_tools: bool = True) -> Chat:
    """The way of writing that fits `tokenizer`; `describe_tools` is the own template's.

    Raises ConfigError for an unknown kind and ModelError where the kind does not fit the tokenizer.
    """
    if kind in ("auto", "own"):
        return OwnChat(tokenizer, describe_tools=describe_tools)
    raise ConfigError(f"chat kind must be auto or own, got {kind!r}")
