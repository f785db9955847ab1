"""Which environments can grade an episode from its record, and what they say then."""

import pytest

from sao_gym.core import AgentEnv, ToolEnv
from sao_gym.errors import ConfigError, GradingError
from sao_gym.messages import Message
from sao_gym.protocols import Task
from sao_gym.registry import make
from sao_gym.stream import Score

TASKS = [Task(id="a", prompt="Two?", answer="2"), Task(id="b", prompt="Three?", answer="3")]


def grade(gold: str, response: str) -> Score:
    if response == "fail":
        raise GradingError("no verdict")
    return Score(value=float(gold == response), passed=gold == response)


@pytest.mark.parametrize("name", ["arithmetic", "python_math", "math"])
async def test_final_answers_are_graded_from_their_record(name: str) -> None:
    env = make(name, tasks=TASKS).unwrapped
    assert isinstance(env, AgentEnv)
    assert env.is_graded_from_record
    for task, response, value in ((TASKS[0], r"\boxed{2}", 1.0), (TASKS[1], r"\boxed{2}", 0.0), (TASKS[0], "2", 0.0)):
        score = await env.regrade_async(task, response)
        assert score is not None
        assert (score.value, score.passed) == (value, value == 1.0)
        assert score.method == ("none" if response == "2" else "integer")
    await env.close_async()


async def test_a_grader_of_answers_is_enough_and_fails_as_it_does_in_an_episode() -> None:
    env = ToolEnv(TASKS, grader=grade)
    assert await env.regrade_async(TASKS[1], "3") == Score(value=1.0, passed=True)
    with pytest.raises(GradingError, match="no verdict"):
        await env.regrade_async(TASKS[1], "fail")
    env.reset(options={"task_id": "a"})  # the environment serves episodes afterwards
    assert env.step("2")[1] == 1.0


async def test_who_may_look_at_more_than_the_record_refuses() -> None:
    class Own(ToolEnv):
        def grade_final(self, message: Message | None) -> Score:
            return Score(value=float(self.turn), passed=True)

    for env in (AgentEnv(TASKS), ToolEnv(TASKS), Own(TASKS, grader=grade)):
        assert not env.is_graded_from_record
        with pytest.raises(ConfigError, match="cannot grade an episode from its record"):
            await env.regrade_async(TASKS[0], "2")
