"""What is wrong with a chat template, seen from a stream that only grows (trap 6).

Three assistant turns are rendered with and without tool calls and reasoning; each later prompt must begin with the
earlier one and end with the computed bridge. A template that fails still gives exact prefixes in `TemplateChat`,
because earlier turns are never rendered again: the verdict says how far the stream is from what the checkpoint saw.

Example:
    >>> template_verdict(tokenizer).problems  # doctest: +SKIP
    (<TemplateProblem.DROPS_REASONING: 'drops_reasoning'>,)
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Any

import numpy as np

from sao_gym.errors import ModelError
from sao_gym.messages import Message, ToolCall, ToolSpec
from sao_gym.template_chat import TemplateChat

_CALL = ToolCall(id="call_0", name="probe_tool", arguments={"probe_argument": "probe value"})
_TOOL = ToolSpec(
    name="probe_tool",
    description="Probe.",
    parameters={"type": "object", "properties": {"probe_argument": {"type": "string"}}},
)


class TemplateProblem(StrEnum):
    """How a template breaks a growing stream, or what it cannot say."""

    DROPS_REASONING = "drops_reasoning"
    """Reasoning of earlier turns disappears once a later turn is rendered."""
    IGNORES_REASONING = "ignores_reasoning"
    """Reasoning is never printed; sampled reasoning stays in the stream, where the template would leave it out."""
    REFUSES_SYSTEM = "refuses_system"
    """The template fails on a system message."""
    MOVES_SEPARATOR = "moves_separator"
    """White space at a turn's end depends on what follows."""
    REWRITES_TURNS = "rewrites_turns"
    """Earlier turns are rendered otherwise once later ones follow."""
    MERGES_TOOL_RESULTS = "merges_tool_results"
    """Neighbouring tool results share one turn: they must come in one bridge."""
    IGNORES_TOOLS = "ignores_tools"
    """Offered tools are not shown to the model."""
    NO_TOOL_CALLS = "no_tool_calls"
    """A tool call or its result is not printed, or the template fails on it."""
    FOREIGN_CALL_FORMAT = "foreign_call_format"
    """Calls are printed in a form that our parser does not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateVerdict:
    """The findings on one template. `supports_tools`: tools are shown, calls are printed and read back."""

    is_append_only: bool
    supports_tools: bool
    problems: tuple[TemplateProblem, ...] = ()


def template_verdict(tokenizer: Any) -> TemplateVerdict:
    """Judge `tokenizer.chat_template`. Raises ModelError if there is none or it fails on plain text."""
    chat = TemplateChat(tokenizer)
    found = {problem for problem in (_system_problem(chat), _tool_problem(chat)) if problem}
    if not _shows_reasoning(chat):
        found.add(TemplateProblem.IGNORES_REASONING)
    has_calls = found.isdisjoint({TemplateProblem.NO_TOOL_CALLS, TemplateProblem.IGNORES_TOOLS})
    glue: set[TemplateProblem] = set()
    for has_tool, has_reasoning in product((False, True) if has_calls else (False,), (False, True)):
        glue |= _glue_problems(chat, has_tool, has_reasoning, found)
    if has_calls and _merges_tool_results(chat):
        found.add(TemplateProblem.MERGES_TOOL_RESULTS)
    return TemplateVerdict(
        is_append_only=not glue,
        supports_tools=has_calls and TemplateProblem.FOREIGN_CALL_FORMAT not in found,
        problems=tuple(problem for problem in TemplateProblem if problem in found | glue),
    )


def _glue_problems(
    chat: TemplateChat, has_tool: bool, has_reasoning: bool, known: set[TemplateProblem]
) -> set[TemplateProblem]:
    """What goes wrong between the prompts before three successive assistant turns."""
    tools = (_TOOL,) if has_tool else ()
    first = [] if TemplateProblem.REFUSES_SYSTEM in known else [Message.system("probe system")]
    messages = [*first, Message.user("probe user")]
    before = chat.prompt_text(messages, tools)
    problems = set()
    for turn in range(3):
        calls = (_CALL,) if has_tool and turn < 2 else ()
        reasoning = f"probe reasoning {turn}" if has_reasoning else None
        said = Message(role="assistant", content=f"probe {turn}", reasoning=reasoning, tool_calls=calls)
        new = Message.tool(f"result {turn}", call=_CALL) if calls else Message.user(f"more {turn}")
        messages = [*messages, said, new]
        after = chat.prompt_text(messages, tools)
        problem = _problem_between(before, after, chat.bridge_text([new]))
        if has_reasoning and TemplateProblem.IGNORES_REASONING not in known:
            is_dropped = after.count("probe reasoning") <= turn
            problem = TemplateProblem.DROPS_REASONING if is_dropped else problem
        problems |= {problem} if problem else set()
        before = after
    return problems


def _shows_reasoning(chat: TemplateChat) -> bool:
    said = Message(role="assistant", content="probe", reasoning="probe reasoning")
    return "probe reasoning" in chat.text([Message.user("probe user"), said])


def _system_problem(chat: TemplateChat) -> TemplateProblem | None:
    try:
        chat.prompt_text([Message.system("probe system"), Message.user("probe user")])
    except ModelError:
        return TemplateProblem.REFUSES_SYSTEM
    return None


def _problem_between(before: str, after: str, bridge: str) -> TemplateProblem | None:
    if not after.startswith(before):
        is_space = after.startswith(before.rstrip())
        return TemplateProblem.MOVES_SEPARATOR if is_space else TemplateProblem.REWRITES_TURNS
    if not after.endswith(bridge):
        is_space = after.rstrip().endswith(bridge.strip())
        return TemplateProblem.MOVES_SEPARATOR if is_space else TemplateProblem.REWRITES_TURNS
    return None


def _tool_problem(chat: TemplateChat) -> TemplateProblem | None:
    user = Message.user("probe user")
    turn = Message.assistant("", tool_calls=(_CALL,))
    result = Message.tool("probe result", call=_CALL)
    try:
        if _TOOL.name not in chat.prompt_text([user], (_TOOL,)):
            return TemplateProblem.IGNORES_TOOLS
        opening = chat.prompt_text([user], (_TOOL,))
        printed = chat.prompt_text([user, turn, result], (_TOOL,))
    except ModelError:
        return TemplateProblem.NO_TOOL_CALLS
    said = printed[len(opening) :] if printed.startswith(opening) else printed
    if "probe value" not in said or "probe result" not in said:
        return TemplateProblem.NO_TOOL_CALLS
    read = chat.parse(np.asarray(chat.codec.encode(said.partition("probe result")[0]), dtype=np.int32))
    names = [(call.name, dict(call.arguments)) for call in read.tool_calls if call.problem is None]
    return None if names == [(_CALL.name, dict(_CALL.arguments))] else TemplateProblem.FOREIGN_CALL_FORMAT


def _merges_tool_results(chat: TemplateChat) -> bool:
    one, two, user = Message.tool("1", call=_CALL), Message.tool("2", call=_CALL), Message.user("u")
    try:
        alone = len(chat.bridge_text([user, one])) - len(chat.bridge_text([user]))
    except ModelError:
        return False
    return len(chat.bridge_text([one, two])) - len(chat.bridge_text([one])) < alone
