"""AgentEnv and ToolEnv: conversations with tools, limits and scores."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import TimeLimit

from sao_gym.core import AgentEnv, Reply, ToolEnv
from sao_gym.errors import ConfigError, SandboxError
from sao_gym.messages import CallProblem, Message, ToolCall
from sao_gym.protocols import Task
from sao_gym.stream import Score

TASKS = [Task(id=f"t{i}", prompt=f"What is {i}+{i}?", answer=str(2 * i)) for i in range(20)]


def exact(gold: str, response: str) -> Score:
    return Score(value=float(gold == response), passed=gold == response)


def call(name: str = "add", **arguments: Any) -> Message:
    return Message.assistant(tool_calls=(ToolCall(id="call_0", name=name, arguments=arguments),))


class Calculator(ToolEnv):
    """A tool with state, one that is asynchronous, one that fails, one whose sandbox dies."""

    def __init__(self, max_turns: int | None = None) -> None:
        super().__init__(TASKS, tools=[self.add, self.later, self.fail, self.die], grader=exact, max_turns=max_turns)
        self.total = 0
        self.threads: list[str] = []

    def add(self, x: int) -> int:
        """Add to the total."""
        self.threads.append(threading.current_thread().name)
        self.total += x
        return self.total

    async def later(self, x: int) -> int:
        """Add, after giving way."""
        await asyncio.sleep(0)
        self.total += x
        return self.total

    def fail(self) -> str:
        """Fail."""
        raise ZeroDivisionError("no")

    def die(self) -> str:
        """Die."""
        raise SandboxError("the box is gone")


def started(max_turns: int | None = None) -> Calculator:
    env = Calculator(max_turns)
    env.reset(options={"task_id": "t4"})
    return env


@pytest.mark.filterwarnings("ignore:.*alternative render modes")
def test_gymnasiums_checker_finds_nothing() -> None:
    check_env(Calculator())


def test_an_episode() -> None:
    env = Calculator()
    messages, info = env.reset(options={"task": TASKS[4]})
    assert messages == (Message.user("What is 4+4?"),)
    assert info == {"task_id": "t4"}
    messages, reward, terminated, truncated, info = env.step(call(x=8))
    assert [(m.role, m.content, m.tool_call_id, m.name) for m in messages] == [("tool", "8", "call_0", "add")]
    assert (reward, terminated, truncated) == (0.0, False, False)
    messages, reward, terminated, truncated, info = env.step("8")
    assert (messages, reward, terminated, truncated) == ((), 1.0, True, False)
    assert info["score"] == Score(value=1.0, passed=True)
    assert "truncation_reason" not in info
    assert [m.role for m in env.messages] == ["user", "assistant", "tool", "assistant"]


async def test_state_is_kept_whoever_calls() -> None:
    env = started()
    env.step(call(x=1))
    await env.step_async(call(x=1))
    await env.step_async(call("later", x=1))
    (message,), *_ = env.step(call("later", x=1))  # blocking, inside a running loop
    assert message.content == "4"
    assert env.threads[0] == threading.current_thread().name != env.threads[1]


def test_calls_of_one_message_run_in_order_up_to_a_limit() -> None:
    env = started()
    calls = tuple(ToolCall(id=f"c{i}", name="add", arguments={"x": 1}) for i in range(10))
    messages, *_, info = env.step(Message.assistant(tool_calls=calls))
    assert [m.content for m in messages[:8]] == [str(i) for i in range(1, 9)]
    assert all("at most 8 calls" in m.content for m in messages[8:])
    assert [m.tool_call_id for m in messages] == [f"c{i}" for i in range(10)]
    assert info["call_problems"] == {"too_many_calls": 2}


@pytest.mark.parametrize(
    ("message", "kind", "words"),
    [
        (call("ad", x=1), "unknown_tool", "did you mean 'add'"),
        (call(), "missing_argument", "missing argument 'x'"),
        (call(x=1, y=2), "unexpected_argument", "unexpected argument 'y'"),
        (call(x="1"), "wrong_type", "must be an integer"),
    ],
)
def test_a_broken_call_is_answered_and_counted(message: Message, kind: str, words: str) -> None:
    """Trap 21."""
    env = started()
    for _ in range(2):
        (answer,), reward, terminated, truncated, info = env.step(message)
        assert words in answer.content
        assert answer.role == "tool"
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert info["call_problems"] == {kind: 1}
    assert env.call_problems == {kind: 2}
    assert env.total == 0
    assert env.step("8")[1] == 1.0
    env.reset()
    assert not env.call_problems


def test_a_call_that_the_parser_could_not_read_never_runs() -> None:
    env = started()
    broken = ToolCall(id="c", name="add", arguments={"x": 1}, problem=CallProblem.INVALID_JSON, detail="bad comma")
    (answer,), *_, info = env.step(Message.assistant(tool_calls=(broken,)))
    assert answer.content == "Error (invalid_json): bad comma"
    assert info["call_problems"] == {"invalid_json": 1}
    assert env.total == 0


def test_a_failing_tool_is_an_observation_and_a_dying_sandbox_is_not() -> None:
    """Trap 15: infrastructure leaves the step as an error, and the episode cannot be stepped on."""
    env = started()
    (answer,), *_ = env.step(call("fail"))
    assert answer.content == "Error: ZeroDivisionError: no"
    with pytest.raises(SandboxError):
        env.step(call("die"))
    with pytest.raises(ResetNeeded):
        env.step("8")
    env.reset()
    assert env.step("x")[2]


def test_a_cut_message_runs_nothing_and_ends_the_episode_graded_as_it_stands() -> None:
    """Trap 19."""
    env = started()
    cut = Message(role="assistant", content="8", tool_calls=call(x=1).tool_calls, is_truncated=True)
    messages, reward, terminated, truncated, info = env.step(cut)
    assert (messages, reward, terminated, truncated) == ((), 1.0, False, True)
    assert info["truncation_reason"] == "turn_tokens"
    assert env.total == 0
    with pytest.raises(ResetNeeded):
        env.step("8")


def flags(env: gymnasium.Env[Any, Any], steps: int) -> list[tuple[bool, bool]]:
    seen = []
    env.reset(options={"task_id": "t4"})
    for _ in range(steps):
        *_, terminated, truncated, _ = env.step(call(x=1))
        seen.append((terminated, truncated))
    return seen


def test_a_larger_outer_limit_does_not_widen_the_inner_one() -> None:
    """Case EN-02 (a), trap 18."""
    env = TimeLimit(Calculator(max_turns=3), 10)
    assert flags(env, 3) == [(False, False), (False, False), (False, True)]
    for _ in range(9):
        with pytest.raises(ResetNeeded):
            env.step(call(x=1))


def test_the_final_answer_in_the_last_turn_terminates() -> None:
    """Case EN-02 (c)."""
    env = started(max_turns=3)
    env.step(call(x=1))
    env.step(call(x=1))
    _, reward, terminated, truncated, info = env.step("8")
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert "truncation_reason" not in info


def test_the_turn_limit_is_named_and_graded() -> None:
    env = started(max_turns=1)
    answer = Message.assistant("8", tool_calls=call(x=1).tool_calls)
    messages, reward, terminated, truncated, info = env.step(answer)
    assert [m.content for m in messages] == ["1"]
    assert (reward, terminated, truncated) == (1.0, False, True)
    assert (info["truncation_reason"], info["score"].passed) == ("turns", True)


def test_finish_ends_the_episode_once() -> None:
    env = started()
    env.step(Message.assistant("8", tool_calls=call(x=1).tool_calls))
    first = env.finish("wall_clock")
    assert first == env.finish("wall_clock") == Score(value=1.0, passed=True)
    assert env.episode_return == 1.0
    with pytest.raises(ResetNeeded):
        env.step("8")
    with pytest.raises(ResetNeeded):
        Calculator().finish("wall_clock")


class Guess(AgentEnv):
    """Rewards on the way: 0.25 for each hint asked for, and the answer."""

    grade_value: float | None = None
    closed = 0

    def respond(self, message: Message) -> Reply:
        if message.content == "hint":
            return Reply(messages=(Message.user("warm"),), reward=0.25)
        return Reply(reward=1.0, is_final=True)

    def grade(self) -> Score | None:
        if self.grade_value is None:
            score: Score = super().grade()
            return score
        return Score(value=self.grade_value, passed=True)

    def teardown(self) -> None:
        self.closed += 1


@pytest.mark.parametrize(("value", "last"), [(None, 1.0), (2.0, 1.75)])
def test_rewards_sum_to_the_score(value: float | None, last: float) -> None:
    env = Guess(TASKS)
    env.grade_value = value
    env.reset(seed=0)
    rewards = [float(env.step(text)[1]) for text in ("hint", "go")]
    assert rewards == [0.25, last]
    score = env.finish("x")
    assert score is not None
    assert score.value == sum(rewards)
    assert score.per_action == (0.25, last)


def test_teardown_runs_once_per_episode_however_it_ends() -> None:
    env = Guess(TASKS)
    env.close()
    assert env.closed == 0
    env.reset(seed=0)
    env.step("go")
    env.reset()
    env.close()
    env.close()
    assert env.closed == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [({"tsk": 1}, "unknown reset option 'tsk'"), ({"task": "t1"}, "must be a Task"), ({"task_id": "no"}, "no task")],
)
def test_reset_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Calculator().reset(options=options)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ToolEnv([]), "no tasks"),
        (lambda: ToolEnv(TASKS, max_turns=0), "max_turns"),
        (lambda: ToolEnv(TASKS, tools=[exact, exact]), "two tools are named"),
    ],
)
def test_what_cannot_work_is_refused_when_it_is_made(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_an_action_is_an_assistant_message() -> None:
    env = started()
    with pytest.raises(ConfigError, match="role 'user'"):
        env.step(Message.user("8"))
    assert env.step("8")[1] == 1.0
