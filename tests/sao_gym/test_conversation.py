"""Episodes recorded as messages: nothing is lost, nothing invented, and nothing of it is trained on."""

import json

import pytest

from sao_gym.conversation import (
    MESSAGES,
    conversation_of,
    message_from_record,
    message_to_record,
    require_token_records,
    turns_of,
)
from sao_gym.errors import TaskFileError
from sao_gym.messages import CallProblem, Message, ToolCall
from sao_gym.openai_format import message_from_openai
from sao_gym.parquet import dumps, loads
from sao_gym.stream import Outcome, Segment, StopReason, TokenStream, Trajectory
from sao_gym.tool_calls import cut

CALL = ToolCall(id="c0", name="python", arguments={"code": "é\n", "n": [1, None, 1.5]}, raw="{...}")
BROKEN = message_from_openai(
    {"role": "assistant", "tool_calls": [{"function": {"name": "python", "arguments": text}} for text in ("[1]", "{")]}
)
SAID = (
    Message.system("s"),
    Message.user(""),
    Message(role="assistant", content="c", reasoning="r", tool_calls=(CALL,)),
    Message.tool("out\u2028", call=CALL),
    BROKEN,
    Message(role="assistant", reasoning=""),
    cut(Message.assistant("half", tool_calls=(CALL,))),
)


def recorded(messages: tuple[Message, ...] = SAID) -> Trajectory:
    return Trajectory(
        uid="e0",
        task_id="t",
        env_id="x",
        attempt=0,
        streams=(),
        outcome=Outcome.terminated(),
        info={MESSAGES: [message_to_record(message) for message in messages]},
    )


def test_every_message_comes_back_through_json_and_parquet() -> None:
    assert conversation_of(recorded()) == SAID
    assert conversation_of(loads(dumps(recorded()))) == SAID
    assert tuple(message_from_record(json.loads(json.dumps(message_to_record(m)))) for m in SAID) == SAID


def test_a_call_that_may_not_run_stays_one_that_may_not() -> None:
    said = conversation_of(loads(dumps(recorded((BROKEN,)))))
    assert said is not None
    assert [call.problem for call in said[0].tool_calls] == [CallProblem.NOT_AN_OBJECT, CallProblem.INVALID_JSON]


def test_an_episode_with_streams_is_no_conversation() -> None:
    action = Segment.action([2], logprobs=[-1.0], versions=[0], temperature=1.0, stop=StopReason.STOP)
    stream = TokenStream(segments=(Segment.observation([1]), action))
    sampled = Trajectory(
        uid="e1", task_id="t", env_id="x", attempt=0, streams=(stream,), outcome=Outcome.terminated(), info={"a": 1}
    )
    assert conversation_of(sampled) is None
    assert (turns_of(sampled), turns_of(recorded())) == (1, 4)
    require_token_records([sampled], "f")
    with pytest.raises(
        TaskFileError, match=r"^f holds episode e0 of a policy behind an API: messages without token ids"
    ):
        require_token_records([sampled, recorded()], "f")
