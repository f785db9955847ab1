"""Checkpoints' own templates and the renderers library, over small tokenizers with each family's control tokens.

The templates are those that the TRL package carries.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sao_gym.chat import TemplateVerdict, make_chat, template_verdict
from sao_gym.demonstrations import read_conversations
from sao_gym.errors import ConfigError, ModelError, TaskFileError
from sao_gym.jsonl import write_jsonl
from sao_gym.messages import CallProblem, Message, ToolCall, ToolSpec
from sao_gym.openai_format import message_from_openai
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Chat
from sao_gym.renderer_chat import RendererChat
from sao_gym.template_chat import TemplateChat
from sao_gym.template_verdict import TemplateProblem as P
from sao_gym.tokenizer import train_tokenizer

QWEN = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
GLM = [
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|endoftext|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
]
KIMI = [
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "[EOS]",
    "[BOS]",
    "<think>",
    "</think>",
]
MINIMAX = ["]~!b[", "]~b]", "[e~[", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"]
DEEPSEEK = [
    f"<｜{name}｜>".replace(" ", "▁")
    for name in (
        "begin of sentence", "end of sentence", "User", "Assistant", "tool calls begin", "tool calls end",
        "tool call begin", "tool call end", "tool sep", "tool outputs begin", "tool outputs end",
        "tool output begin", "tool output end",
    )
] + ["<think>", "</think>"]  # fmt: skip
LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]


def small_tokenizer(controls: list[str], template: str | None = None, eos: str = "") -> PreTrainedTokenizerFast:
    """A small vocabulary; as in Qwen3, markers like `<think>` are added tokens that are not flagged special."""
    tokenizer = train_tokenizer(["user\nassistant\nsystem\n.\n\n"] * 4, vocab_size=300, specials=("<e>",))
    flagged = [AddedToken(text, special=text[1] in "|｜", normalized=False) for text in controls]
    tokenizer.add_tokens(flagged)
    if eos:
        tokenizer.eos_token = eos
    if template is not None:
        tokenizer.chat_template = template_text(template)
    return tokenizer


def template_text(name: str) -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


CONTROLS = {
    "qwen3": QWEN,
    "qwen3.5": QWEN,
    "qwen3.6": QWEN,
    "qwen3.8": QWEN,
    "nemotron-3": QWEN,
    "glm-4.5": GLM,
    "glm-5": GLM,
    "glm-5.1": GLM,
    "glm-5.3": GLM,
    "kimi-k2": KIMI,
    "minimax-m2": MINIMAX,
    "deepseek-v3": DEEPSEEK,
    "deepseek-r1": DEEPSEEK,
    "llama-3": LLAMA,
}
PYTHON = ToolSpec(
    name="python",
    description="Run Python.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "What to run."}},
        "required": ["code"],
    },
)
CALL = ToolCall(id="call_0", name="python", arguments={"code": "print(1)"})
RENDERERS = {family: RendererChat(small_tokenizer(controls), family) for family, controls in CONTROLS.items()}
TEMPLATES = {
    "template qwen3": TemplateChat(small_tokenizer(QWEN, "qwen3", "<|im_end|>")),
    "template qwen2.5": TemplateChat(small_tokenizer(QWEN, "qwen2_5", "<|im_end|>")),
    "template glm": TemplateChat(small_tokenizer(GLM, "glm4moe", "<|endoftext|>")),
    "template llama": TemplateChat(small_tokenizer(LLAMA, "llama3_2", "<|eot_id|>")),
}
AnyChat = RendererChat | TemplateChat
CHATS: dict[str, AnyChat] = {**RENDERERS, **TEMPLATES}
EVERY = pytest.mark.parametrize("name", CHATS)
for each in RENDERERS.values():
    each.prompt([Message.user("u")], [PYTHON])  # the schemas that unquoted arguments are read by

VERDICTS: dict[tuple[str, tuple[str, ...], str], tuple[bool, bool, tuple[P, ...]]] = {
    ("qwen3", tuple(QWEN), "<|im_end|>"): (False, True, (P.DROPS_REASONING, P.MERGES_TOOL_RESULTS)),
    ("qwen3_instruct_2507", tuple(QWEN), "<|im_end|>"): (
        True,
        True,
        (P.IGNORES_REASONING, P.MERGES_TOOL_RESULTS),
    ),
    ("qwen3_training", tuple(QWEN), "<|im_end|>"): (True, True, (P.MERGES_TOOL_RESULTS,)),
    ("qwen2_5", tuple(QWEN), "<|im_end|>"): (True, True, (P.IGNORES_REASONING, P.MERGES_TOOL_RESULTS)),
    ("qwen3_5_think", tuple(QWEN), "<|im_end|>"): (
        False,
        False,
        (P.DROPS_REASONING, P.REWRITES_TURNS, P.MERGES_TOOL_RESULTS, P.FOREIGN_CALL_FORMAT),
    ),
    ("qwen3_8", tuple(QWEN), "<|im_end|>"): (True, False, (P.MERGES_TOOL_RESULTS, P.FOREIGN_CALL_FORMAT)),
    ("nemotron_3_nano", tuple(QWEN), "<|im_end|>"): (
        False,
        False,
        (P.DROPS_REASONING, P.MOVES_SEPARATOR, P.MERGES_TOOL_RESULTS, P.FOREIGN_CALL_FORMAT),
    ),
    ("glm4moe", tuple(GLM), "<|endoftext|>"): (
        False,
        False,
        (P.DROPS_REASONING, P.MERGES_TOOL_RESULTS, P.FOREIGN_CALL_FORMAT),
    ),
    ("llama3_2", tuple(LLAMA), "<|eot_id|>"): (True, False, (P.IGNORES_REASONING, P.FOREIGN_CALL_FORMAT)),
    ("deepseek_r1_distill", tuple(DEEPSEEK), DEEPSEEK[1]): (
        False,
        False,
        (P.IGNORES_REASONING, P.REWRITES_TURNS, P.IGNORES_TOOLS),
    ),
    ("lfm2", tuple(QWEN), "<|im_end|>"): (True, False, (P.IGNORES_REASONING, P.NO_TOOL_CALLS)),
    ("phi3", tuple(QWEN), "<|im_end|>"): (True, False, (P.IGNORES_REASONING, P.IGNORES_TOOLS)),
    ("gemma", tuple(QWEN), "<|im_end|>"): (
        True,
        False,
        (P.IGNORES_REASONING, P.REFUSES_SYSTEM, P.IGNORES_TOOLS),
    ),
}


@pytest.mark.parametrize("key", VERDICTS, ids=[key[0] for key in VERDICTS])
def test_the_verdict_on_each_template(key: tuple[str, tuple[str, ...], str]) -> None:
    """Trap 6."""
    name, controls, eos = key
    is_append_only, supports_tools, problems = VERDICTS[key]
    verdict = template_verdict(small_tokenizer(list(controls), name, eos))
    assert verdict == TemplateVerdict(is_append_only=is_append_only, supports_tools=supports_tools, problems=problems)


@pytest.mark.parametrize(
    ("template", "controls", "eos", "kind", "family"),
    [
        ("qwen3", QWEN, "<|im_end|>", RendererChat, "qwen3"),
        ("qwen3_5_think", QWEN, "<|im_end|>", RendererChat, "qwen3.5"),
        ("qwen3_8", QWEN, "<|im_end|>", RendererChat, "qwen3.8"),
        ("glm4moe", GLM, "<|endoftext|>", RendererChat, "glm-4.5"),
        ("nemotron_3_nano", QWEN, "<|im_end|>", RendererChat, "nemotron-3"),
        ("qwen2_5", QWEN, "<|im_end|>", TemplateChat, None),
        ("phi3", QWEN, "<|im_end|>", OwnChat, None),  # its template ignores tools, ours over ChatML does not
    ],
)
def test_each_checkpoint_gets_the_way_that_fits(
    template: str, controls: list[str], eos: str, kind: type, family: str | None
) -> None:
    chat = make_chat(small_tokenizer(controls, template, eos))
    assert type(chat) is kind
    assert isinstance(chat, Chat)
    assert getattr(chat, "family", None) == family


def test_a_template_whose_calls_nobody_reads_is_said_aloud() -> None:
    with pytest.warns(UserWarning, match="no tool calls that can be read"):
        chat = make_chat(small_tokenizer(LLAMA, "llama3_2", "<|eot_id|>"))
    assert isinstance(chat, TemplateChat)


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown chat family 'qwen9'"):
        make_chat(small_tokenizer(QWEN), family="qwen9")
    with pytest.raises(ModelError, match=r"does not fit the chat family glm-4\.5"):
        make_chat(small_tokenizer(QWEN), family="glm-4.5")
    with pytest.raises(ModelError, match="no chat template"):
        make_chat(small_tokenizer(QWEN), "template")
    with pytest.raises(ModelError, match="no family"):
        make_chat(small_tokenizer(QWEN), "renderer")


def conversation(has_tool: bool, has_reasoning: bool) -> list[tuple[Message, list[Message]]]:
    turns = []
    for turn in range(3):
        calls = (CALL,) if has_tool and turn < 2 else ()
        reasoning = f"reason {turn}" if has_reasoning else None
        said = Message(role="assistant", content=f"say {turn}", reasoning=reasoning, tool_calls=calls)
        turns.append((said, [Message.tool(f"got {turn}", call=CALL)] if calls else [Message.user("next")]))
    return turns


@EVERY
@pytest.mark.parametrize("has_tool", [False, True])
@pytest.mark.parametrize("has_reasoning", [False, True])
def test_every_bridge_ends_what_one_prompt_would_be(name: str, has_tool: bool, has_reasoning: bool) -> None:
    """Trap 6: what the glue appends is what the one-shot render ends with, also where old turns are rewritten."""
    chat = CHATS[name]
    tools = [PYTHON] if has_tool else []
    history = [Message.system("s"), Message.user("u")]
    for said, new in conversation(has_tool, has_reasoning):
        history = [*history, said, *new]
        whole = chat.prompt(history, tools).tolist()
        for last_id in chat.stop_token_ids:
            glue = chat.bridge(new, last_id=last_id).tolist()
            assert glue
            assert whole[-len(glue) :] == glue


@EVERY
def test_the_turn_end_stands_once_whatever_ended_the_turn(name: str) -> None:
    """Trap 7: where a stop token was sampled the glue leaves it out, where the turn was cut it is written."""
    chat = CHATS[name]
    letter = chat.codec.plain("x")[0]
    after_cut = chat.bridge([Message.user("next")], last_id=letter).tolist()
    glues = {last: chat.bridge([Message.user("next")], last_id=last).tolist() for last in chat.stop_token_ids}
    ends = [last for last in chat.stop_token_ids if after_cut == [last, *glues[last]]]
    assert ends
    assert all(glue[0] != last for last, glue in glues.items())


@pytest.mark.parametrize("text_ends", ["", ".", "!\n"])
def test_gluing_equals_rendering_where_the_template_allows(text_ends: str) -> None:
    """An append-only family: sampled ids plus glue are the very ids of the one-shot prompt."""
    chat = RENDERERS["qwen3"]
    said = Message.assistant("two" + text_ends)
    first, new = [Message.user("one")], [Message.user("three")]
    sampled = [*chat.codec.plain(said.content), chat.stop_token_ids[0]]
    glued = [*chat.prompt(first), *sampled, *chat.bridge(new, last_id=sampled[-1])]
    assert glued == chat.prompt([*first, said, *new]).tolist()


ALL_CONTROLS = sorted({*QWEN, *GLM, *KIMI, *MINIMAX, *DEEPSEEK, *LLAMA})
HOSTILE = st.lists(
    st.sampled_from(
        [*ALL_CONTROLS, "<", "|>", "im_end", "\U0010fffd", "\U0010fffcturn\U0010fffc", "é", "\n", '"', "\\"]
    )
    | st.text(max_size=3),
    max_size=6,
).map("".join)


def shape_of(chat: AnyChat, content: str) -> tuple[list[int], str]:
    call = ToolCall(id="call_0", name="python", arguments={"code": content, content: {"deep": [content]}})
    messages = [
        Message.system(content),
        Message.user(content),
        Message(role="assistant", content=content, reasoning=content, tool_calls=(call,)),
        Message.tool(content, call=call),
    ]
    tool = ToolSpec(
        name="python",
        description=content,
        parameters={"type": "object", "properties": {"code": {"type": "string", "description": content}}},
    )
    bridged = chat.bridge([Message.tool(content, call=call)], last_id=chat.stop_token_ids[0])
    ids = [*chat.prompt(messages, [tool]), *bridged, *chat.bridge([Message.user(content)], last_id=0)]
    return [i for i in ids if i in chat.codec.control_ids], chat.codec.decode(bridged)


@EVERY
@settings(max_examples=25, deadline=None)
@given(HOSTILE)
def test_text_inside_messages_makes_no_control_id(name: str, text: str) -> None:
    """Trap 20: the control ids of a prompt are those around an innocent text, and the text is shown whole."""
    chat = CHATS[name]
    content = f"a{text}z"
    controls, bridged = shape_of(chat, content)
    assert controls == shape_of(chat, "innocent")[0]
    shown = json.dumps(content, ensure_ascii=False) if "llama" in name else content
    assert shown in bridged


def test_the_library_alone_would_let_control_tokens_in() -> None:
    """Trap 20: why contents are guarded; when this fails, the library has changed."""
    from renderers import create_renderer
    from renderers.configs import Qwen3RendererConfig

    tokenizer = small_tokenizer(QWEN)
    naive = create_renderer(tokenizer, Qwen3RendererConfig()).render_ids([{"role": "user", "content": "<|im_end|>"}])
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert naive.count(end) == 2
    assert RendererChat(tokenizer, "qwen3").prompt([Message.user("<|im_end|>")]).tolist().count(end) == 1


WRITERS = ["qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "nemotron-3", "minimax-m2", "template qwen3"]
WRITERS += [name for name in RENDERERS if name.startswith("glm")]


def heard(chat: AnyChat, ids: np.ndarray, *, is_truncated: bool = False) -> Message:
    """What ids say where the Python tool was offered."""
    return chat.parse(ids, tools=[PYTHON], is_truncated=is_truncated)


def test_tools_of_one_conversation_say_nothing_about_anothers_arguments() -> None:
    chat = CHATS["glm-4.5"]
    number = ToolSpec(
        name="python", description="", parameters={"type": "object", "properties": {"code": {"type": "integer"}}}
    )
    ids = spoken(chat, "</think>", FORMS["glm-4.5"]("1"))
    chat.prompt([Message.user(".")], [number])  # somebody else's
    for tools, argument in (([PYTHON], "1"), ([number], 1), ([PYTHON], "1")):
        assert [dict(call.arguments) for call in chat.parse(ids, tools=tools).tool_calls] == [{"code": argument}]


@pytest.mark.parametrize("name", WRITERS)
def test_demonstrations_are_what_a_policy_would_have_sampled(name: str) -> None:
    chat = CHATS[name]
    said = Message(role="assistant", content="say <|im_end|>", reasoning="hm", tool_calls=(CALL,))
    ids = chat.write(said)
    assert ids[-1] in chat.stop_token_ids
    assert not set(ids[:-1].tolist()) & set(chat.stop_token_ids)
    read = heard(chat, ids)
    assert (read.content, read.reasoning) == (said.content, said.reasoning)
    assert [(call.name, dict(call.arguments)) for call in read.tool_calls] == [("python", dict(CALL.arguments))]
    new = [Message.tool("1", call=CALL)]
    stream = [*chat.prompt([Message.user(".")]), *ids, *chat.bridge(new, last_id=int(ids[-1]))]
    assert stream == chat.prompt([Message.user("."), said, *new]).tolist()


def test_a_turn_that_cannot_be_demonstrated_is_refused() -> None:
    with pytest.raises(ModelError, match="otherwise than a policy would begin it"):
        RENDERERS["deepseek-r1"].write(Message.assistant("words"))


def hermes(code: str) -> str:
    return '<tool_call>\n{"name": "python", "arguments": {"code": "%s"}}\n</tool_call>' % code  # noqa: UP031


def nested_tags(code: str) -> str:
    return f"<tool_call>\n<function=python>\n<parameter=code>\n{code}\n</parameter>\n</function>\n</tool_call>"


def key_value(code: str) -> str:
    return f"<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>{code}</arg_value>\n</tool_call>"


def invoke(code: str) -> str:
    inner = f'<invoke name="python">\n<parameter name="code">{code}</parameter>\n</invoke>'
    return f"<minimax:tool_call>\n{inner}\n</minimax:tool_call>"


def section(code: str) -> str:
    inner = '<|tool_call_begin|>functions.python:0<|tool_call_argument_begin|>{"code": "%s"}' % code  # noqa: UP031
    return f"<|tool_calls_section_begin|>{inner}<|tool_call_end|><|tool_calls_section_end|>"


def fenced(code: str) -> str:
    inner = f'function<｜tool▁sep｜>python\n```json\n{{"code": "{code}"}}\n```'
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{inner}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


FORMS = {
    "qwen3": hermes,
    "template qwen3": hermes,
    "template qwen2.5": hermes,
    "qwen3.5": nested_tags,
    "qwen3.6": nested_tags,
    "qwen3.8": nested_tags,
    "nemotron-3": nested_tags,
    "glm-4.5": key_value,
    "glm-5": key_value,
    "glm-5.1": key_value,
    "glm-5.3": key_value,
    "minimax-m2": invoke,
    "kimi-k2": section,
    "deepseek-v3": fenced,
    "deepseek-r1": fenced,
}
SPEAKERS = pytest.mark.parametrize("name", FORMS)


def spoken(chat: AnyChat, *parts: str) -> np.ndarray:
    """Ids of what a policy says from the start of its reasoning on, control tokens live."""
    opened = chat.codec.decode(chat.prompt([Message.user(".")])).rstrip().endswith("<think>")
    end = chat.codec.decode([chat.stop_token_ids[0]])
    text = "".join(["" if opened else "<think>\n", *parts, end])
    return np.asarray(chat.codec.encode(text), dtype=np.int32)


@SPEAKERS
def test_only_calls_after_the_reasoning_run(name: str) -> None:
    """Case TC-03: a draft and a call, a draft alone, a draft in reasoning that never closes."""
    chat, form = CHATS[name], FORMS[name]
    both = heard(chat, spoken(chat, "a", form("1"), "</think>", form("2")))
    assert [(call.problem, dict(call.arguments)) for call in both.tool_calls] == [(None, {"code": "2"})]
    assert "python" in (both.reasoning or "")
    assert heard(chat, spoken(chat, form("1"), "</think>", "no")).tool_calls == ()
    unclosed = heard(chat, spoken(chat, form("1")))
    assert (unclosed.tool_calls, unclosed.content) == ((), "")


@SPEAKERS
def test_calls_are_read_and_cut_ones_never_run(name: str) -> None:
    chat, form = CHATS[name], FORMS[name]
    ids = spoken(chat, "hm</think>", form("print(1)"))
    message = heard(chat, ids)
    call_id = "functions.python:0" if name == "kimi-k2" else "call_0"  # Kimi's policies write ids of their own
    assert [(c.id, c.name, dict(c.arguments), c.problem) for c in message.tool_calls] == [
        (call_id, "python", {"code": "print(1)"}, None)
    ]
    assert message.reasoning == "hm"
    for end in range(len(ids)):
        assert all(call.problem for call in heard(chat, ids[:end], is_truncated=True).tool_calls)


@EVERY
def test_plain_words_are_content(name: str) -> None:
    chat = CHATS[name]
    opened = chat.codec.decode(chat.prompt([Message.user(".")])).rstrip().endswith("<think>")
    ids = chat.codec.encode("</think>plain words" if opened else "plain words")
    assert heard(chat, np.asarray(ids, dtype=np.int32)).content == "plain words"


@SPEAKERS
def test_a_call_spelled_by_ordinary_ids_is_text(name: str) -> None:
    chat, form = CHATS[name], FORMS[name]
    text = form("1")
    message = heard(chat, spoken(chat, "hm</think>", chat.codec.guard(text)))
    assert message.tool_calls == ()
    assert message.content == text


TC01 = {
    "a": (r'"{\"code\": \"print(1)\"}"', None),
    "b": (r'"\"{}\""', CallProblem.NOT_AN_OBJECT),
    "c": ("[1]", CallProblem.NOT_AN_OBJECT),
    "d": ("7", CallProblem.NOT_AN_OBJECT),
    "e": ("null", CallProblem.NOT_AN_OBJECT),
    "h": ('{"code":"1","code":"2"}', CallProblem.DUPLICATE_KEY),
    "huge": ('{"code": %s}' % ("9" * 5000), CallProblem.INVALID_JSON),
}


@pytest.mark.parametrize("name", ["qwen3", "template qwen3"])
@pytest.mark.parametrize("letter", TC01)
def test_malformed_calls_of_qwen3_have_their_problems(name: str, letter: str) -> None:
    """Case TC-01; the rest of it is the parser's own test."""
    arguments, problem = TC01[letter]
    chat = CHATS[name]
    call = f'<tool_call>\n{{"name": "python", "arguments": {arguments}}}\n</tool_call>'
    assert [c.problem for c in heard(chat, spoken(chat, "</think>", call)).tool_calls] == [problem]


@pytest.mark.parametrize("name", [*RENDERERS, "template qwen3"])
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_parsing_never_raises(name: str, data: st.DataObject) -> None:
    """Trap 21, over the library's parsers too."""
    chat = CHATS[name]
    controls = st.sampled_from(sorted(chat.codec.control_ids))
    ids = data.draw(st.lists(st.one_of(controls, st.integers(-2, len(chat.codec.tokenizer) + 2)), max_size=50))
    is_truncated = data.draw(st.booleans())
    message = heard(chat, np.asarray(ids, dtype=np.int32), is_truncated=is_truncated)
    assert message == heard(chat, np.asarray(ids, dtype=np.int32), is_truncated=is_truncated)
    for call in message.tool_calls:
        assert call.problem or (call.name and isinstance(call.arguments, dict) and not is_truncated)


def six_ways() -> list[list[dict[str, Any]]]:
    arguments = {"q": "é", "o": {"b": 1, "a": [True, None]}}
    ways = []
    for given_arguments in (arguments, json.dumps(arguments), json.dumps(arguments, ensure_ascii=False)):
        for content in ({"content": None}, {"content": ""}, {}):
            call = {
                "id": "call_0",
                "type": "function",
                "function": {"name": "find", "arguments": given_arguments},
            }
            ways.append(
                [
                    {"role": "user", "content": [{"type": "text", "text": "look"}]},
                    {"role": "assistant", **content, "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "call_0", "content": "found"},
                    {"role": "user", "content": "thanks"},
                ]
            )
    return ways


@pytest.mark.parametrize("name", [*CHATS, "own"])
def test_six_ways_to_send_one_conversation_give_one_prompt(name: str) -> None:
    """Case TC-05: no double encoding, no None, keys in the order sent, letters as letters."""
    chat: Chat = OwnChat(train_tokenizer([])) if name == "own" else CHATS[name]
    prompts = [chat.prompt([message_from_openai(record) for record in way]) for way in six_ways()]
    assert all(np.array_equal(prompts[0], prompt) for prompt in prompts)
    text = OwnChat.decode_action(chat, prompts[0])  # type: ignore[arg-type]
    assert '\\"' not in text
    assert "None" not in text
    assert "é" in text
    assert text.index('"b"') < text.index('"a"')


@pytest.mark.slow
def test_a_real_vocabulary_renders_glues_and_reads_back() -> None:
    """Qwen's own vocabulary, which the dashscope package carries: merges over punctuation and line breaks."""
    tokenizer = qwen_tokenizer()
    chat = make_chat(tokenizer)
    assert isinstance(chat, RendererChat)
    assert chat.family == "qwen3"
    history = [Message.system("Be brief.\n"), Message.user("2+2?\n\n")]
    for said, new in conversation(True, True)[:2]:
        whole = chat.prompt([*history, said, *new], [PYTHON]).tolist()
        start = chat.prompt(history, [PYTHON]).tolist()
        glue = chat.bridge(new, last_id=chat.stop_token_ids[0]).tolist()
        assert whole[: len(start)] == start
        assert whole[-len(glue) :] == glue
        sampled = np.asarray(whole[len(start) : -len(glue)], dtype=np.int32)
        read = heard(chat, sampled)
        assert (read.content, read.reasoning) == (said.content, said.reasoning)
        assert [dict(call.arguments) for call in read.tool_calls] == [{"code": "print(1)"}]
        history = [*history, said, *new]
    hostile = "".join(chat.codec.control) + " é\n\n12"
    assert chat.codec.control_ids.isdisjoint(chat.codec.encode(chat.codec.guard(hostile)))
    assert chat.codec.decode(chat.codec.encode(chat.codec.guard(hostile))) == hostile


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    spec = importlib.util.find_spec("dashscope")
    assert spec is not None
    assert spec.origin is not None
    ranks = Path(spec.origin).parent / "resources" / "qwen.tiktoken"
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    backend = TikTokenConverter(str(ranks), pattern=pattern).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    tokenizer.add_tokens([AddedToken(text, special=text[1] == "|", normalized=False) for text in QWEN])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = template_text("qwen3")
    return tokenizer


TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ CONTENT }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def turns(content: str) -> TemplateChat:
    tokenizer = small_tokenizer(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = TURNS.replace("CONTENT", content)
    return TemplateChat(tokenizer)


@pytest.mark.parametrize(
    ("content", "message", "what"),
    [
        ("m.content", Message(role="assistant", content="x", reasoning="because"), "reasoning"),
        ("m.content", Message.assistant("", tool_calls=(CALL,)), "call of the tool 'python'"),
        ("m.content.split('###')[-1]", Message.assistant("the answer is ### 4"), "content"),
    ],
)
def test_a_turn_that_the_template_prints_in_part_is_no_demonstration(content: str, message: Message, what: str) -> None:
    """Silence would be imitated: what is not printed is refused."""
    chat = turns(content)
    with pytest.raises(ModelError, match="does not print the ") as caught:
        chat.write(message)
    assert what in str(caught.value)
    assert heard(chat, chat.write(Message.assistant(" said <|im_end|> \ud800"))).content == "said <|im_end|> \ufffd"


def test_a_file_of_such_turns_names_the_line(tmp_path: Path) -> None:
    call = {"function": {"name": "python", "arguments": "{}"}}
    said = [{"role": "assistant", "content": "4"}, {"role": "assistant", "tool_calls": [call]}]
    write_jsonl(tmp_path / "data.jsonl", [{"messages": [{"role": "user", "content": "u"}, turn]} for turn in said])
    with pytest.raises(TaskFileError, match="line 2: this chat family does not print the call of the tool 'python'"):
        read_conversations(tmp_path / "data.jsonl", turns("m.content"))


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_control_token_in_a_message_moves_no_other_token(scheme: str) -> None:
    """Vocabularies that put a space before the first word: Llama's, Mistral's. Trap 20 must not cost that."""
    letters = {text: index for index, text in enumerate(["<unk>", "▁", *map(chr, range(33, 127)), "\n"])}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)])
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TURNS.replace("CONTENT", "m.content")
    chat = TemplateChat(tokenizer)
    bare, hostile = (chat.prompt([Message.user(text)]).tolist() for text in ("a b", "a b<|im_end|>"))
    spelled = [letters[letter] for letter in "<|im_end|>"]
    at = next(i for i in range(len(hostile)) if hostile[i : i + len(spelled)] == spelled)
    assert hostile[:at] + hostile[at + len(spelled) :] == bare
    assert OwnChat(tokenizer).prompt([Message.user("a b")]).tolist() == bare
