"""Which family of `renderers` a tokenizer belongs to: the one that prints what the checkpoint's own template prints.

The library itself goes by the checkpoint's hub name, which a local folder or a fine-tune does not have, and a name
says nothing about a template that was changed. So each family that fits the vocabulary renders a few conversations,
and must give the ids of the template; reasoning is left out, where renderers depart from templates on purpose.

Example:
    >>> find_family(tokenizer)  # doctest: +SKIP
    'qwen3'
"""

from typing import Any

import numpy as np
from renderers.base import MODEL_RENDERER_MAP

from sao_gym.errors import ModelError
from sao_gym.messages import Message, ToolCall, ToolSpec
from sao_gym.renderer_chat import RendererChat, families
from sao_gym.template_chat import TemplateChat
from sao_gym.text_codec import TextCodec

_CALL = ToolCall(id="call_0", name="probe", arguments={"text": "é", "flags": [True, None], "nested": {"b": 1}})
_TOOL = ToolSpec(
    name="probe",
    description="Probe.",
    parameters={"type": "object", "properties": {"text": {"type": "string"}, "flags": {"type": "array"}}},
)
_USER, _SYSTEM = Message.user("one"), Message.system("zero")
_PROBES: tuple[tuple[tuple[Message, ...], tuple[ToolSpec, ...]], ...] = (
    ((_USER,), ()),
    ((_SYSTEM, _USER, Message.assistant("two"), Message.user("three")), ()),
    ((_SYSTEM, _USER), (_TOOL,)),
    ((_USER, Message.assistant("two", tool_calls=(_CALL,)), Message.tool("three", call=_CALL)), (_TOOL,)),
)


def find_family(tokenizer: Any) -> str | None:
    """Name of the first family that agrees with the tokenizer's own template, None where none does."""
    try:
        template = TemplateChat(tokenizer)
        wanted = [template.prompt(messages, tools) for messages, tools in _PROBES]
    except ModelError:
        return None
    named = MODEL_RENDERER_MAP.get(getattr(template.codec.tokenizer, "name_or_path", ""))
    fitting = (family for family in families() if _may_fit(template.codec, family))
    candidates = sorted(fitting, key=lambda family: family != named)
    return next((family for family in candidates if _agrees(template.codec, family, wanted)), None)


def _may_fit(codec: TextCodec, family: str) -> bool:
    # Making this one loads a vocabulary of its own from the network: only where it can be meant.
    return family != "gpt-oss" or codec.control_id("<|channel|>") is not None


def _agrees(codec: TextCodec, family: str, wanted: list[Any]) -> bool:
    try:
        chat = RendererChat(codec, family)
        given = [chat.prompt(messages, tools) for messages, tools in _PROBES]
    except Exception:  # a family that cannot even render a probe is not this tokenizer's
        return False
    return all(np.array_equal(a, b) for a, b in zip(wanted, given, strict=True))
