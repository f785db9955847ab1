import json

import pytest

from sao_gym.errors import ConfigError
from sao_gym.messages import CallProblem, Message, ToolCall, ToolSpec
from sao_gym.openai_format import message_from_openai, message_to_openai, tool_from_openai, tool_to_openai

CALL = ToolCall(id="call_0", name="python", arguments={"z": "é", "a": [1, None]})


@pytest.mark.parametrize(
    "message",
    [
        Message.system("s"),
        Message.user("u"),
        Message(role="assistant", content="c", reasoning="r"),
        Message(role="tool", content="t", tool_call_id="call_0", name="python"),
    ],
)
def test_messages_come_back_as_they_went(message: Message) -> None:
    assert message_from_openai(message_to_openai(message)) == message


def test_a_call_goes_as_text_and_comes_back_as_an_object() -> None:
    record = message_to_openai(Message.assistant(tool_calls=(CALL,)))
    assert record["content"] is None
    assert record["tool_calls"] == [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "python", "arguments": '{"z": "é", "a": [1, null]}'},
        }
    ]
    (call,) = message_from_openai(record).tool_calls
    assert (call.id, call.name, list(call.arguments.items())) == ("call_0", "python", list(CALL.arguments.items()))


@pytest.mark.parametrize("arguments", ["{oops", "[1]", '"x"', "7"])
def test_arguments_that_are_no_object_are_a_problem_and_no_exception(arguments: str) -> None:
    record = {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": arguments}}]}
    (call,) = message_from_openai(record).tool_calls
    assert call.problem in (CallProblem.INVALID_JSON, CallProblem.NOT_AN_OBJECT)
    assert arguments in call.raw
    assert call.id == "call_0"
    sent = message_to_openai(Message.assistant(tool_calls=(call,)))
    assert sent["tool_calls"][0]["function"]["arguments"] == call.raw


def test_absent_arguments_are_no_arguments() -> None:
    for arguments in ({}, None, ""):
        record = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": arguments}}]}
        (call,) = message_from_openai(record).tool_calls
        assert (call.problem, dict(call.arguments)) == (None, {})


def test_text_parts_are_joined_and_developers_are_the_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message_from_openai({"role": "developer", "content": parts}) == Message.system("ab")


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"role": "robot", "content": ""}, "robot"),
        ({"content": ""}, "None"),
        ({"role": "user", "content": 7}, "int"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "image_url"),
        ({"role": "assistant", "tool_calls": [7]}, "7"),
        ({"role": "assistant", "reasoning_content": 7}, "reasoning_content"),
        ({"role": "tool", "tool_call_id": 7}, "tool_call_id"),
    ],
)
def test_what_cannot_be_read_is_named(record: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        message_from_openai(record)


def test_tools_come_back_as_they_went() -> None:
    tool = ToolSpec(name="python", description="Run.", parameters={"type": "object", "properties": {"z": {}, "a": {}}})
    assert tool_from_openai(tool_to_openai(tool)) == tool
    assert json.dumps(tool_to_openai(tool)).index('"z"') < json.dumps(tool_to_openai(tool)).index('"a"')
    assert tool_from_openai({"name": "bare"}).parameters == {"type": "object", "properties": {}}
    with pytest.raises(ConfigError, match="with a name"):
        tool_from_openai({"function": {}})
