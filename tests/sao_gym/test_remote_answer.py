"""An API's answer as a message: many servers' forms, and bodies that hold none."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.messages import CallProblem
from sao_gym.remote_answer import (
    Answer,
    BadAnswerError,
    Finish,
    has_unreadable_arguments,
    read_answer,
    with_readable_arguments,
    without_reasoning,
)


def answer(finish: Any = "stop", **message: Any) -> Answer:
    return read_answer({"choices": [{"message": message, "finish_reason": finish}]}, turn=3)


def call(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("message", "content", "reasoning"),
    [
        ({"content": "4"}, "4", None),
        ({"content": None}, "", None),
        ({"content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}, "42", None),
        ({"content": "4", "reasoning_content": "r"}, "4", "r"),
        ({"content": "4", "reasoning": "r"}, "4", "r"),
        ({"content": "4", "reasoning": {"odd": 1}}, "4", None),
        (
            {
                "content": [
                    {"type": "thinking", "thinking": [{"type": "text", "text": "r"}]},
                    {"type": "text", "text": "4"},
                ]
            },
            "4",
            "r",
        ),
        ({"content": "<think>r</think>\n\n4"}, "4", "r"),
        ({"content": "r</think>4"}, "4", "r"),
        ({"content": "<think>r and no end"}, "", "r and no end"),
        ({"content": "a <think> in the text"}, "a <think> in the text", None),
        ({"content": None, "refusal": "I cannot."}, "I cannot.", None),
        ({"content": "4", "annotations": [], "audio": None}, "4", None),
    ],
)
def test_content_and_reasoning(message: dict[str, Any], content: str, reasoning: str | None) -> None:
    read = answer(**message)
    assert (read.message.content, read.message.reasoning) == (content, reasoning)
    assert read.echo["content"] in (message["content"], "")


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("stop", Finish.STOP),
        ("tool_calls", Finish.STOP),
        (None, Finish.STOP),
        ("length", Finish.LENGTH),
        ("MAX_TOKENS", Finish.LENGTH),
        ("model_length", Finish.LENGTH),
        ("content_filter", Finish.FILTER),
        ("error", Finish.FAILED),
    ],
)
def test_why_an_answer_ended(reason: Any, finish: Finish) -> None:
    read = answer(reason, content="x")
    assert read.finish is finish
    assert read.message.is_truncated is (finish is Finish.LENGTH)


def test_arguments_may_be_an_object_or_text_and_badly_written() -> None:
    listed = [call('{"x": 1}'), call({"x": 1}), call("{x"), call('{"x": 1, "x": 2}'), call(""), call(None)]
    read = answer("tool_calls", tool_calls=listed)
    problems = [each.problem for each in read.message.tool_calls]
    assert problems == [None, None, CallProblem.INVALID_JSON, CallProblem.DUPLICATE_KEY, None, None]
    assert [dict(each.arguments) for each in read.message.tool_calls[:2]] == [{"x": 1}, {"x": 1}]


def test_every_call_has_an_id_of_its_own_and_the_echo_the_same() -> None:
    listed = [call(), call(), call(id=""), call(id=None), call(id=7, extra_content={"signature": "s"})]
    read = answer("tool_calls", tool_calls=listed)
    ids = [each.id for each in read.message.tool_calls]
    assert ids == ["a", "call00301", "call00302", "call00303", "call00304"]
    assert [each["id"] for each in read.echo["tool_calls"]] == ids
    assert read.echo["tool_calls"][4]["extra_content"] == {"signature": "s"}
    assert read.echo["content"] is None


def test_what_goes_back_can_be_made_readable_and_stripped_of_reasoning() -> None:
    echo = answer("tool_calls", tool_calls=[call("{x"), call('{"y": 1}')], reasoning_content="r").echo
    assert has_unreadable_arguments(echo)
    mended = with_readable_arguments(echo)
    assert not has_unreadable_arguments(mended)
    texts = [each["function"]["arguments"] for each in mended["tool_calls"]]
    assert [json.loads(text) for text in texts] == [{"unreadable": "{x"}, {"y": 1}]
    assert "reasoning_content" in echo
    assert without_reasoning(echo).keys() == {"role", "content", "tool_calls"}


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [None]},
        {"choices": [{}]},
        {"choices": [{"message": "x"}]},
        {"choices": [{"message": {"content": 7}}]},
        {"choices": [{"message": {"content": [{"type": "image_url"}]}}]},
        {"choices": [{"message": {"tool_calls": "x"}}]},
        {"choices": [{"message": {"tool_calls": [{"id": "a"}]}}]},
        {"choices": [{"message": {"function_call": {"name": "f", "arguments": "{}"}}}]},
    ],
)
def test_bodies_without_an_answer(record: Any) -> None:
    with pytest.raises(BadAnswerError):
        read_answer(record, turn=0)


NAMES = [
    *("choices", "message", "content", "tool_calls", "function", "name", "arguments", "id", "type", "text"),
    *("thinking", "finish_reason", "usage", "reasoning", "reasoning_content", "role", "refusal"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_any_message_is_an_answer_or_none(message: Any) -> None:
    for record in (message, {"choices": [message]}, {"choices": [{"message": message}]}):
        try:
            read = read_answer(record, turn=0)
        except BadAnswerError:
            continue
        has_unreadable_arguments(read.echo)
        json.dumps(with_readable_arguments(read.echo))
