"""Episodes that an agent drives: the promises of `white_box`, kept where nobody steps."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from sao_gym.black_box import BlackBoxEnv
from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock
from sao_gym.core import TokenEnv
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.errors import ConfigError, EngineError
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import AGENT_FAILED, Sampling, Task
from sao_gym.rollout import EnvPool, Episode, white_box
from sao_gym.stream import Outcome, Score, Trajectory
from sao_gym.tokenizer import train_tokenizer

CHAT = OwnChat(train_tokenizer(["The answer is 4."] * 4, vocab_size=270), describe_tools=False)
SAID = [*CHAT.codec.encode("The answer is 4."), CHAT.stop_token_ids[0]]
TASK = Task(id="t", prompt="2+2?", answer="4")
Agent = Callable[[Task, str], Awaitable[str | None]]


def grade(gold: str, answer: str) -> Score:
    return Score(value=float(gold in answer), passed=gold in answer)


async def ask(base_url: str, messages: list[dict[str, Any]]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(f"{base_url}/chat/completions", json={"model": "policy", "messages": messages})


async def answers(task: Task, base_url: str) -> str | None:
    """Asks twice, the second time with what it heard."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
    for _ in range(2):
        said = (await ask(base_url, messages)).json()["choices"][0]["message"]
        messages += [said, {"role": "user", "content": "Sure?"}]
    return str(said["content"])


async def run(agent: str | Agent, **more: Any) -> Trajectory:
    engine = more.pop("engine", None) or ScriptedEngine(lambda prompt: SAID)
    grader, budgets = more.pop("grader", grade), more.pop("budgets", Budgets())
    pool = EnvPool(lambda: BlackBoxEnv([TASK], agent=agent, grader=grader), CHAT, budgets)
    episode = Episode(uid="e", task=TASK, env_id="mine", attempt=0, run_seed=0)
    try:
        async with pool.lease() as env:
            return await pool.run(env, engine, episode, sampling=Sampling(max_tokens=64), clock=SystemClock())
    finally:
        await pool.close()


async def test_what_an_agent_did_becomes_one_stream_and_is_graded() -> None:
    heard: list[int] = []
    engine = ScriptedEngine(lambda prompt: SAID, version=7)
    pool = EnvPool(lambda: BlackBoxEnv([TASK], agent=answers, grader=grade), CHAT, Budgets())
    async with pool.lease() as env:
        made = await pool.run(
            env,
            engine,
            Episode(uid="e", task=TASK, env_id="mine", attempt=3, run_seed=0, group_id="g"),
            sampling=Sampling(max_tokens=64),
            clock=SystemClock(),
            on_version=heard.append,
        )
    await pool.close()
    assert made.outcome == Outcome.terminated()
    assert made.score is not None
    assert made.score.passed
    assert (made.attempt, made.group_id, made.admitted_version, heard) == (3, "g", 7, [7, 7])
    (stream,) = made.streams
    assert [action.token_ids.tolist() for action in stream.actions] == [SAID, SAID]
    assert made.info["response"] == "The answer is 4."
    assert made.info["gateway"]["break_rate"] == 0
    assert sum(rewards.sum() for rewards in made.rewards()) == 1.0


async def raises(task: Task, base_url: str) -> str:
    await ask(base_url, [{"role": "user", "content": "?"}])
    raise KeyError("agent's own bug")


async def says_nothing(task: Task, base_url: str) -> str:
    return "4"


async def test_an_agent_that_fails_or_never_asks_is_an_error_and_no_zero() -> None:
    for agent, reason in ((raises, AGENT_FAILED), (says_nothing, "agent_silent")):
        made = await run(agent)
        assert made.outcome == Outcome.error(reason)
        assert made.score is None
    assert (await run(raises)).n_action == len(SAID), "what was sampled is kept for the account"


async def test_a_grader_that_fails_and_an_engine_that_fails_are_errors() -> None:
    def broken(gold: str, answer: str) -> Score:
        raise ValueError("no verdict")

    assert (await run(answers, grader=broken)).outcome == Outcome.error("grading")
    failing = ScriptedEngine(lambda prompt: SAID, failures={1: EngineError("gone", kind="engine_gone")})
    made = await run(answers, engine=failing)
    assert made.outcome == Outcome.error("engine_gone"), "and not that the agent failed thereby"
    assert made.score is None


async def test_a_budget_ends_the_episode_as_it_stands() -> None:
    made = await run(answers, budgets=Budgets(max_turns=1))
    assert made.outcome == Outcome.truncated("turns")
    assert made.score is not None
    assert made.score.value == 0.0
    assert made.n_turns == 1


async def test_the_clock_ends_an_agent_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def waits(task: Task, base_url: str) -> str:
        await ask(base_url, [{"role": "user", "content": "?"}])
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")
        return ""

    made = await run(waits, budgets=Budgets(wall_clock_s=1.0))
    assert made.outcome == Outcome.truncated("wall_clock")
    assert made.score is not None
    assert ended == ["cancelled"]


async def test_an_agent_that_takes_no_for_no_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sao_gym.rollout_black_box.LINGER_S", 0.2)
    monkeypatch.setattr("sao_gym.rollout_black_box.LOOK_S", 0.05)

    async def stubborn(task: Task, base_url: str) -> str:
        while True:
            await ask(base_url, [{"role": "user", "content": "?"}])

    made = await run(stubborn, budgets=Budgets(max_turns=2))
    assert made.outcome == Outcome.truncated("turns")
    assert made.n_turns == 2


async def test_it_cannot_be_stepped() -> None:
    env = BlackBoxEnv([TASK], agent=answers, grader=grade)
    env.reset(seed=0)
    with pytest.raises(ConfigError, match="cannot be stepped"):
        env.step("4")
    episode = Episode(uid="e", task=TASK, env_id="mine", attempt=0, run_seed=0)
    with pytest.raises(ConfigError, match="cannot be stepped"):
        await white_box(
            TokenEnv(env, CHAT, Budgets()),
            ScriptedEngine(lambda prompt: SAID),
            episode,
            sampling=Sampling(max_tokens=8),
            clock=SystemClock(),
        )


@pytest.mark.parametrize("agent", [lambda task, url: "4", "", None, 3])
def test_an_agent_of_another_kind_is_refused(agent: Any) -> None:
    with pytest.raises(ConfigError, match="must be an async function of"):
        BlackBoxEnv([TASK], agent=agent, grader=grade)


PROGRAM = """
import json, os, sys, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": sys.stdin.read()}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
secret = os.environ["OPENAI_BASE_URL"].split("/")[4]
assert secret not in open("/proc/self/cmdline").read(), "a secret among the arguments"
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"], os.environ["SAO_GYM_TASK_ID"])
"""


async def test_a_command_line_is_an_agent(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    made = await run(f"{sys.executable} {tmp_path}/agent.py")
    assert made.outcome == Outcome.terminated()
    assert made.info["response"] == "The answer is 4. t\n"
    assert made.score is not None
    assert made.score.passed
    failed = await run(f"{sys.executable} {tmp_path}/agent.py; exit 3")
    assert failed.outcome == Outcome.error(AGENT_FAILED)


async def test_a_command_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    script = f"{sys.executable} {tmp_path}/agent.py; pwd; sleep 600 & echo $! >{tmp_path}/pid; wait"
    made = await run(script, budgets=Budgets(wall_clock_s=6.0))
    assert made.outcome == Outcome.truncated("wall_clock")
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            break
        await asyncio.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
