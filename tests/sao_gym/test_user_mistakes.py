"""What people get wrong in tools, graders, environments and files: one sentence, and nothing beyond it is harmed."""

import argparse
import asyncio
import dataclasses
import enum
import functools
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded

from sao_gym.chat import make_chat
from sao_gym.core import AgentEnv, Budgets, Reply, TokenEnv, ToolEnv
from sao_gym.demonstrations import read_conversations
from sao_gym.errors import ConfigError, GradingError, RegistryError, SaoGymError, TaskFileError
from sao_gym.jsonl import write_jsonl
from sao_gym.messages import Message, ToolCall
from sao_gym.openai_format import message_from_openai, tool_from_openai
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.protocols import Task
from sao_gym.registry import make
from sao_gym.stream import Score
from sao_gym.tools import Tool, result_text

TASK = Task(id="t", prompt="2+2?", answer="4")
ASKED = (Message.user("?"),)


def stops() -> str:
    return next(iter([]))


def exits() -> str:
    argparse.ArgumentParser().exit(3)


async def exits_later() -> str:
    sys.exit("bye")


async def cancelled() -> str:
    raise asyncio.CancelledError


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def speechless() -> str:
    raise SpeechlessError


def half(x: float) -> float:
    return x / 2


def echo(function: str, call: str = "", self: str = "") -> str:
    return function


def step_of(env: AgentEnv, action: Message | str, how: str) -> Any:
    env.reset(seed=0)
    if how == "blocking":
        return env.step(action)
    return asyncio.run(asyncio.wait_for(env.step_async(action), 20))


def answer(tool: Callable[..., Any], how: str = "blocking", **arguments: Any) -> str:
    call = ToolCall(id="c", name=tool.__name__, arguments=arguments)
    return str(step_of(ToolEnv([TASK], tools=[tool]), Message.assistant(tool_calls=(call,)), how)[0][0].content)


@pytest.mark.parametrize("how", ["blocking", "async"])
@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        (stops, {}, "stops raised StopIteration"),  # in a worker thread: no future can carry it, the wait never ends
        (exits, {}, "exits raised SystemExit(3)"),
        (exits_later, {}, "exits_later raised SystemExit(bye)"),
        (cancelled, {}, "cancelled raised CancelledError"),
        (speechless, {}, "SpeechlessError: (no message: ValueError)"),
        (half, {"x": 10**400}, "Error (wrong_type): argument 'x' of tool 'half' must be a number"),
        (echo, {"function": "said", "self": "x"}, "said"),
    ],
)
def test_no_tool_harms_more_than_its_call(tool: Callable[..., Any], arguments: Any, words: str, how: str) -> None:
    assert words in answer(tool, how, **arguments)


def test_an_interrupt_is_the_persons() -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer(interrupted)


async def test_a_tool_that_was_cancelled_from_outside_stays_cancelled() -> None:
    begun = asyncio.Event()

    async def wait() -> str:
        begun.set()
        await asyncio.Event().wait()
        return ""

    env = ToolEnv([TASK], tools=[wait])
    await env.reset_async(seed=0)
    step = asyncio.create_task(env.step_async(Message.assistant(tool_calls=(ToolCall(id="c", name="wait"),))))
    await begun.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step


def test_what_a_tool_says_is_bounded_and_the_policy_is_told() -> None:
    def shout(times: int) -> str:
        return "a" * times + "end"

    def fail() -> str:
        raise ValueError("x" * 10**6)

    for text in (answer(shout, times=10**6), answer(fail)):
        assert "characters left out" in text
        assert len(text) < 101_000
    assert answer(shout, times=10**6).endswith("end")
    assert answer(shout, times=5) == "aaaaaend"


@pytest.mark.parametrize(("name", "key"), [("q" * 10**6, "x"), ("half", "z" * 10**6)])
def test_a_name_of_a_million_letters_is_not_said_back(name: str, key: str) -> None:
    call = ToolCall(id="c", name=name, arguments={key: 1, "x": 1})
    said = step_of(ToolEnv([TASK], tools=[half]), Message.assistant(tool_calls=(call,)), "blocking")[0][0].content
    assert said.startswith("Error (un")
    assert len(said) < 300


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (b"hi\xff", "hi\ufffd"),
        ({"a": np.float32(0.5), "b": np.arange(2)}, '{"a": 0.5, "b": [0, 1]}'),
        ({2, 1}, "[1, 2]"),
        ([Colour.RED, Point(3)], '["red", {"x": 3}]'),
        ({(1, 2): 3}, "{(1, 2): 3}"),
    ],
)
def test_results_are_written_as_what_they_hold(result: Any, text: str) -> None:
    assert result_text(result) == text


def test_a_result_that_holds_itself_is_text() -> None:
    ring: list[Any] = []
    ring.append(ring)
    assert result_text(ring) == "[[...]]"


def generates() -> Iterator[str]:
    yield "a"


async def generates_later() -> AsyncIterator[str]:
    yield "a"


def unknown_hint(x: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
    return str(x)


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        (generates, "is a generator"),
        (generates_later, "is a generator"),
        (unknown_hint, "the signature of tool 'unknown_hint' cannot be read"),
        (lambda: "x", "cannot be named '<lambda>'"),
        (int, "the signature of tool 'int' cannot be read"),
        ("search", "must be a function or a Tool, got str"),
    ],
)
def test_what_is_no_tool_is_refused_when_it_is_made(tool: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Tool.from_function(tool)
    assert words in str(caught.value)


class Doubler:
    def __call__(self, x: int) -> int:
        """Twice x."""
        return 2 * x


def test_objects_and_partials_are_tools() -> None:
    doubler, partial = Tool.from_function(Doubler()), Tool.from_function(functools.partial(half, x=1.0))
    assert (doubler.spec.name, doubler.spec.description) == ("Doubler", "Twice x.")
    assert (partial.spec.name, partial.spec.description) == ("half", "")
    assert partial.spec.parameters["properties"] == {"x": {"type": "number", "default": 1.0}}


def test_a_default_that_json_cannot_say_is_left_out_of_the_schema() -> None:
    def paint(colour: str | None = Colour.RED) -> str:  # type: ignore[assignment]
        return str(colour)

    env = TokenEnv(ToolEnv([TASK], tools=[paint]), make_chat(byte_tokenizer()))
    ids, _ = env.reset(seed=0)
    assert len(ids)
    assert answer(paint) == "Colour.RED"


class Says(AgentEnv):
    def __init__(self, reply: Callable[[], Any], opening: Any = ASKED) -> None:
        super().__init__([TASK])
        self.reply, self.first = reply, opening

    def opening(self, task: Task) -> Any:
        return self.first

    def respond(self, message: Message) -> Any:
        return self.reply()


@pytest.mark.parametrize("how", ["blocking", "async"])
@pytest.mark.parametrize(
    ("env", "error", "words"),
    [
        (Says(lambda: None), ConfigError, "must return a Reply, got NoneType"),
        (Says(lambda: "hi"), ConfigError, "must return a Reply, got str"),
        (Says(lambda: Reply(messages="hi")), ConfigError, "must be a list or tuple of Messages, got str"),  # type: ignore[arg-type]
        (Says(lambda: Reply(reward="1")), ConfigError, "must be a number, got str"),  # type: ignore[arg-type]
        (Says(lambda: Reply(reward=float("nan"))), GradingError, "gave the reward nan"),
        (Says(Reply, opening="hi"), ConfigError, "must be a list or tuple of Messages, got str"),
        (Says(Reply, opening=({"role": "user"},)), ConfigError, "got tuple of dict"),
        (ToolEnv([TASK], grader=lambda gold, said: 1.0), ConfigError, "must return a Score"),  # type: ignore[arg-type,return-value]
        (ToolEnv([TASK], grader=lambda gold, said: Score(value=float("nan"), passed=True)), GradingError, "score nan"),
        (ToolEnv([TASK], grader=lambda gold, said: Score(value="1", passed=True)), ConfigError, "number as value"),  # type: ignore[arg-type]
        (
            ToolEnv([TASK], grader=lambda gold, said: Score(value=1.0, passed=True, per_action=(0.5, 0.5))),
            GradingError,
            "2 shares for 1 actions",
        ),
        (
            ToolEnv([TASK], grader=lambda gold, said: Score(value=1.0, passed=True, per_action=(0.5,))),
            GradingError,
            "shares sum to 0.5",
        ),
        (ToolEnv([TASK], grader=lambda gold, said: sys.exit(1)), GradingError, "raised SystemExit(1)"),
        (ToolEnv([TASK], grader=lambda gold, said: next(iter([]))), GradingError, "raised StopIteration"),
    ],
)
def test_an_environment_that_answers_otherwise_is_one_sentence(
    env: AgentEnv, error: type[SaoGymError], words: str, how: str
) -> None:
    with pytest.raises(error) as caught:
        step_of(env, "4", how)
    assert words in str(caught.value)


def test_a_list_of_messages_and_numpys_numbers_are_a_reply() -> None:
    reply = Reply(messages=[Message.user("x")], reward=np.float32(0.5))  # type: ignore[arg-type]
    observation, reward, *_ = step_of(Says(lambda: reply), "4", "blocking")
    assert (type(observation), reward, type(reward)) == (tuple, 0.5, float)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: ToolEnv([{"id": "a", "prompt": "p"}]), "got one that holds a dict"),  # type: ignore[list-item]
        (lambda: ToolEnv(task for task in [TASK]), "got generator"),  # type: ignore[arg-type]
        (lambda: ToolEnv("tasks.jsonl"), "got str"),  # type: ignore[arg-type]
        (lambda: ToolEnv([TASK], max_turns="3"), "whole number"),  # type: ignore[arg-type]
        (lambda: ToolEnv([TASK], tools=half), "put it in a list"),  # type: ignore[arg-type]
        (lambda: ToolEnv([TASK], max_calls_per_turn=0), "at least 1"),
        (lambda: Task(id="t", prompt="2+2?", answer=4), "the answer of a Task must be text, got int 4"),  # type: ignore[arg-type]
        (lambda: Message(role="assistant", content=None), "must be text, got NoneType"),  # type: ignore[arg-type]
        (lambda: Reply(info={"score": 0.5}), "cannot say 'score'"),
        (lambda: Budgets(max_turns=1.5), "max_turns must be a whole number"),  # type: ignore[arg-type]
        (lambda: Budgets(max_turns="3"), "max_turns must be a whole number"),  # type: ignore[arg-type]
        (lambda: Budgets(wall_clock_s=float("nan")), "wall_clock_s must be a number"),
        (lambda: message_from_openai({"role": "assistant", "tool_calls": 5}), "tool_calls must be a list, got int"),
        (lambda: tool_from_openai({"name": "f", "parameters": "x"}), "a JSON schema as parameters"),
    ],
)
def test_arguments_of_an_environment_are_looked_at(made: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made()
    assert words in str(caught.value)


@pytest.mark.parametrize("is_async", [False, True])
def test_no_step_after_close_takes_anything_again(is_async: bool) -> None:
    env = ToolEnv([TASK], tools=[half])
    env.reset(seed=0)
    asyncio.run(env.close_async()) if is_async else env.close()
    with pytest.raises(ResetNeeded):
        env.step("4")
    env.reset(seed=0)
    assert env.step("4")[2]


ENVIRONMENTS = """
from sao_gym.core import ToolEnv
class Level(ToolEnv):
    def __init__(self, tasks, level): super().__init__(tasks)
"""


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("import sys\nsys.exit('done')\n", RegistryError, "SystemExit: done"),
        ("import a_module_beside_it\n", RegistryError, "put the folder of what it imports on PYTHONPATH"),
        (ENVIRONMENTS, ConfigError, "needs the argument 'tasks'; it takes tasks, level"),
    ],
)
def test_a_file_that_makes_no_environment_is_one_sentence(
    text: str, error: type[SaoGymError], words: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(error) as caught:
        make(f"{tmp_path / 'own.py'}:Level")
    assert words in str(caught.value)


USER, SAID = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": ["hi", SAID]}, "a message must be an object"),
        ({"messages": [USER, SAID], "tools": {"name": "f"}}, "tools must be a list, got dict"),
        ({"messages": [USER, SAID], "tools": "[{"}, "tools is text that holds no JSON list"),
        ({"messages": [USER, SAID], "tools": ["f"]}, "a tool must be a function with a name"),
        ({"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]}, "give tool_calls"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "says nothing"),
    ],
)
def test_a_conversation_of_another_shape_names_its_line(record: Any, words: str, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data.jsonl", [{"messages": [USER, SAID]}, record])
    with pytest.raises(TaskFileError, match="line 2") as caught:
        read_conversations(tmp_path / "data.jsonl", make_chat(byte_tokenizer()))
    assert words in str(caught.value)


def test_reasoning_that_opens_the_content_is_reasoning(tmp_path: Path) -> None:
    """As text it would teach the policy to spell `<think>` by ordinary ids, which no reader takes for the marker."""
    chat, tools = make_chat(byte_tokenizer()), [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    apart = {"role": "assistant", "reasoning_content": "hm", "content": "4"}
    inline = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}
    records = [{"messages": [USER, apart], "tools": tools}, {"messages": [USER, inline], "tools": json.dumps(tools)}]
    write_jsonl(tmp_path / "data.jsonl", records)
    one, two = read_conversations(tmp_path / "data.jsonl", chat)
    assert one.streams[0].token_ids.tolist() == two.streams[0].token_ids.tolist()
    assert chat.parse(two.streams[0].actions[0].token_ids).reasoning == "hm"


def test_an_environment_that_speaks_no_messages_is_one_sentence() -> None:
    env = TokenEnv(gymnasium.make("CartPole-v1"), make_chat(byte_tokenizer()))
    with pytest.raises(ConfigError, match=r"what CartPoleEnv.reset returns must be a list or tuple of Messages"):
        env.reset(seed=0)
