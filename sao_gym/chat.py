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

import warnings
from typing import Any, Literal, get_args

from sao_gym.errors import ConfigError, ModelError
from sao_gym.family import find_family
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Chat
from sao_gym.renderer_chat import RendererChat
from sao_gym.template_chat import TemplateChat
from sao_gym.template_verdict import TemplateProblem, TemplateVerdict, template_verdict
from sao_gym.text_codec import TextCodec
from sao_gym.tokenizer import END

__all__ = ["ChatKind", "TemplateProblem", "TemplateVerdict", "make_chat", "template_verdict"]

ChatKind = Literal["auto", "own", "renderer", "template"]


def make_chat(
    tokenizer: Any, kind: ChatKind = "auto", *, family: str | None = None, describe_tools: bool | None = None
) -> Chat:
    """The way of writing that fits `tokenizer`.

    `auto` takes our template where the tokenizer has our control tokens; then the family of `renderers` whose output
    equals the checkpoint's own template; then that template if it shows tools and prints calls that we read; then our
    template over ChatML; then the checkpoint's template for conversations without tools. `family` names a family of
    `renderers` and implies that kind; `describe_tools` is the own template's, None is what the tokenizer was made for.

    Raises ConfigError for an unknown kind or family and ModelError where the tokenizer does not fit.
    """
    if kind not in get_args(ChatKind):
        raise ConfigError(f"chat kind must be one of {', '.join(get_args(ChatKind))}, got {kind!r}")
    codec = TextCodec.of(tokenizer)
    if kind == "own":
        return OwnChat(codec, describe_tools=describe_tools)
    if kind == "template":
        return TemplateChat(codec)
    if kind == "auto" and family is None and codec.control_id(END) is not None:
        return OwnChat(codec, describe_tools=describe_tools)
    family = family or find_family(codec)
    if family is not None:
        return RendererChat(codec, family)
    if kind == "renderer":
        raise ModelError("no family of the renderers library fits this tokenizer; name one or use kind 'template'")
    return _fallback(codec, describe_tools)


def _fallback(codec: TextCodec, describe_tools: bool | None) -> Chat:
    has_template = bool(getattr(codec.tokenizer, "chat_template", None))
    if has_template and template_verdict(codec).supports_tools:
        return TemplateChat(codec)
    try:
        return OwnChat(codec, describe_tools=describe_tools)
    except ModelError:
        if not has_template:
            raise
        warnings.warn(
            "this checkpoint's chat template prints no tool calls that can be read: its answers will hold none; "
            "name a family of the renderers library to get them",
            stacklevel=3,
        )
        return TemplateChat(codec)
