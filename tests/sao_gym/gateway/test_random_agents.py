"""Agents that do anything to their history: every sampled token is trained once, every path is an exact extension."""

import asyncio
import random
from typing import Any

from gateway_world import Agent, Record, calls, engine_of, reasons, result, said, system, user
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.gateway import Reason

TEXTS = ("ok", "ok", "I look.", calls("1"), calls("1", "2"), "<think>hm</think>" + calls("é"), '<tool_call>{"name"', "")
MOVES = st.sampled_from(
    ["go on", "go on", "go on", "branch", "drop", "edit", "cut", "again", "restart", "aside", "tools"]
)


def answered(message: Record, draw: random.Random) -> list[Record]:
    called = range(len(message.get("tool_calls") or ()))
    return [message, *([result(message, f"r{place}", place) for place in called] or [user(draw.choice("abc"))])]


@settings(max_examples=60, deadline=None)
@given(st.lists(MOVES, max_size=14), st.integers(0, 2**20))
async def test_any_agent(moves: list[str], seed: int) -> None:
    draw = random.Random(seed)
    agent = Agent(ScriptedEngine(lambda prompt: said(draw.choice(TEXTS))))
    begun: list[Record] = [system("s"), user("hi")]
    history = list(begun)
    past: list[list[Record]] = []
    for move in ["go on", *moves]:
        headers = {"x-sao-gym-auxiliary": "1"} if move == "aside" else {}
        tools: Any = [] if move == "tools" else agent_tools()
        asked = moved(move, history, past, begun, draw)
        message = await agent.ask(asked, headers=headers, tools=tools)
        if move not in ("aside", "again"):
            history = [*asked, *answered(message, draw)]
            past.append(history)
    record = await agent.close()  # checks prefixes and tokens
    assert set(reasons(record)) <= set(Reason)
    assert sum(reasons(record).values()) == record.info["calls"]
    assert record.info["streams"] == len(record.streams) <= record.info["calls"]
    if set(moves) <= {"go on", "branch", "aside"}:
        assert record.info["breaks"] == {}
    if set(moves) <= {"go on"}:
        assert len(record.streams) == 1


def agent_tools() -> Any:
    from gateway_world import TOOLS

    return TOOLS


def moved(move: str, history: list[Record], past: list[list[Record]], begun: list[Record], draw: random.Random) -> Any:
    place = draw.randrange(len(history))
    if move == "branch" and past:
        return [*draw.choice(past), user(f"way {draw.random()}")]
    if move == "drop":
        return [*history[:place], *history[place + 1 :]] or begun
    if move == "edit":
        return [*history[:place], {**history[place], "content": "edited"}, *history[place + 1 :]]
    if move == "cut":
        return history[: place + 1]
    if move == "restart":
        return begun
    if move == "aside":
        return [*history, user("Give it a title.")]
    return history


async def test_many_sessions_at_once_stay_apart() -> None:
    agent = Agent(engine_of())
    agents = [Agent(ScriptedEngine(lambda prompt, n=n: said(f"agent {n}"), latency_s=0.001)) for n in range(20)]

    async def live(one: Agent) -> list[str]:
        history = [user("hi")]
        for _ in range(5):
            history += [await one.ask(history), user("go on")]
        return [message["content"] for message in history if message["role"] == "assistant"]

    told = await asyncio.gather(*map(live, agents))
    assert told == [[f"agent {n}"] * 5 for n in range(20)]
    for one in agents:
        assert reasons(await one.close()) == {"start": 1, "continued": 4}
    await agent.close()
