"""Our own template over our own tokenizer and over a foreign one with ChatML's control tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from sao_gym.chat import make_chat
from sao_gym.errors import ConfigError, ModelError
from sao_gym.messages import Message, ToolCall, ToolSpec
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Chat
from sao_gym.tokenizer import SPECIALS, train_tokenizer

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PYTHON = ToolSpec(
    name="python",
    description="Run Python.",
    parameters={"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
CALL = ToolCall(id="call_0", name="python", arguments={"code": "print(1)"})


def own() -> OwnChat:
    return OwnChat(train_tokenizer(["print(1)"] * 3, vocab_size=280))


def chatml() -> OwnChat:
    tokenizer = train_tokenizer(["user\nassistant\n"] * 3, vocab_size=300, specials=CHATML)
    tokenizer.eos_token = "<|endoftext|>"
    return OwnChat(tokenizer)


CHATS = {"own": own(), "chatml": chatml()}
BOTH = pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS.keys())


@BOTH
def test_the_protocol_holds(chat: OwnChat) -> None:
    assert isinstance(chat, Chat)


def test_how_turns_are_spelled() -> None:
    messages = [Message.user("2+2?"), Message.assistant("4"), Message.user("3?")]
    texts = {name: chat.codec.decode(chat.prompt(messages)) for name, chat in CHATS.items()}
    assert texts == {
        "own": "<|user|>2+2?<|end|><|assistant|>4<|end|><|user|>3?<|end|><|assistant|>",
        "chatml": "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\n3?<|im_end|>\n<|im_start|>assistant\n",
    }


@BOTH
def test_tools_are_described_once_in_the_system_turn(chat: OwnChat) -> None:
    text = chat.codec.decode(chat.prompt([Message.system("Be brief."), Message.user("hi")], [PYTHON]))
    assert text.count("Be brief.") == 1
    assert text.count('{"name":"python","description":"Run Python."') == 1
    assert text.index("Be brief.") < text.index("python") < text.index("hi")
    quiet = OwnChat(chat.codec.tokenizer, describe_tools=False)
    assert "python" not in quiet.codec.decode(quiet.prompt([Message.user("hi")], [PYTHON]))


@BOTH
def test_what_is_written_is_read_back(chat: OwnChat) -> None:
    message = Message(role="assistant", content="so", reasoning="hm", tool_calls=(CALL,))
    read = chat.parse(chat.write(message))
    assert (read.content, read.reasoning) == ("so", "hm")
    assert [(c.id, c.name, c.arguments, c.problem) for c in read.tool_calls] == [
        ("call_0", "python", {"code": "print(1)"}, None)
    ]


@BOTH
def test_a_bridge_continues_what_one_prompt_would_be(chat: OwnChat) -> None:
    """Trap 6: three turns with tool and reasoning, glued from bridges, equal the one-shot prompt."""
    turns = [
        Message(role="assistant", content="", reasoning="think", tool_calls=(CALL,)),
        Message(role="assistant", content="again", tool_calls=(CALL, CALL)),
        Message.assistant("done"),
    ]
    news = [
        [Message.tool("1", call=CALL)],
        [Message.tool("2", call=CALL), Message.tool("3", call=CALL)],
        [Message.user("and now?")],
    ]
    history = [Message.system("s"), Message.user("u")]
    ids = chat.prompt(history, [PYTHON])
    for turn, new in zip(turns, news, strict=True):
        sampled = chat.write(turn)
        ids = np.concatenate([ids, sampled, chat.bridge(new, last_id=int(sampled[-1]))])
        history += [turn, *new]
        assert ids.tolist() == chat.prompt(history, [PYTHON]).tolist()


@BOTH
def test_the_turn_end_stands_once_whatever_ended_the_turn(chat: OwnChat) -> None:
    """Trap 7: sampled, it belongs to the action; cut off, the bridge writes it."""
    end = chat.stop_token_ids[0]
    full = chat.write(Message.assistant("four"))
    cut = full[:-1]
    after_stop = chat.bridge([Message.user("x")], last_id=int(full[-1]))
    after_cut = chat.bridge([Message.user("x")], last_id=int(cut[-1]))
    assert [end, *after_stop] == list(after_cut)
    assert [*full, *after_stop] == [*cut, *after_cut]
    for other in chat.stop_token_ids[1:]:
        assert list(chat.bridge([Message.user("x")], last_id=other)) == list(after_cut)


def test_a_second_end_token_also_ends_a_turn() -> None:
    chat = CHATS["chatml"]
    assert [chat.codec.decode([i]) for i in chat.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    ids = [*chat.codec.plain("four"), chat.stop_token_ids[1]]
    assert chat.parse(np.asarray(ids)).content == "four"


HOSTILE = st.lists(
    st.sampled_from([*SPECIALS, *CHATML, "<", "|>", "im_end", "\U0010fffd", "é", "\n", " "]) | st.text(max_size=3),
    max_size=8,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(HOSTILE)
def test_text_inside_messages_makes_no_control_id(text: str) -> None:
    """Trap 20: user, tool, argument, reasoning, description: the control ids are those of an innocent text."""
    for chat in CHATS.values():
        codec = chat.codec
        shapes = []
        for content in (text, "innocent"):
            call = ToolCall(id="call_0", name="python", arguments={content: content})
            messages = [
                Message.system(content),
                Message.user(content),
                Message(role="assistant", content=content, reasoning=content, tool_calls=(call,)),
                Message.tool(content, call=call),
            ]
            tool = ToolSpec(name="t", description=content, parameters={})
            ids = [*chat.prompt(messages, [tool]), *chat.bridge([Message.user(content)], last_id=0)]
            shapes.append([i for i in ids if i in codec.control_ids])
        assert shapes[0] == shapes[1]
        assert codec.control_ids.isdisjoint(codec.encode(codec.guard(text)))
        assert codec.decode(codec.encode(codec.guard(text))) == text
        assert codec.decode(codec.plain(text)) == text


def test_unflagged_added_tokens_are_control_tokens_too() -> None:
    """Trap 20: the tokenizers library itself splits only what is flagged special; Qwen3's `<think>` is not."""
    tokenizer = train_tokenizer([], vocab_size=300, specials=CHATML)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    naive = tokenizer.encode("<think>", add_special_tokens=False, split_special_tokens=True)
    codec = OwnChat(tokenizer).codec
    assert naive == [codec.control["<think>"]]
    assert codec.control_ids.isdisjoint(codec.encode(codec.guard("<think>")))
    assert codec.encode("<think>") == naive


def test_half_a_surrogate_pair_is_shown_as_a_replacement_character() -> None:
    chat = CHATS["own"]
    assert "\ufffd" in chat.codec.decode(chat.prompt([Message.user("a\ud800b")]))


def test_a_call_that_could_not_be_read_is_written_as_it_was() -> None:
    chat = CHATS["own"]
    ids = chat.codec.join([chat.codec.control["<tool_call>"], "{oops", chat.codec.control["</tool_call>"], 1])
    assert list(chat.write(chat.parse(ids))) == list(ids)


def test_make_chat_names_what_does_not_fit() -> None:
    assert isinstance(make_chat(CHATS["own"].codec.tokenizer), OwnChat)
    with pytest.raises(ConfigError, match="'hermes'"):
        make_chat(CHATS["own"].codec.tokenizer, "hermes")  # type: ignore[arg-type]
    bare = train_tokenizer([], specials=("<a>",))
    with pytest.raises(ModelError, match="ChatML"):
        make_chat(bare, "own")
    with pytest.raises(ModelError, match="fast tokenizer"):
        OwnChat(object())
    assert isinstance(bare, PreTrainedTokenizerFast)
