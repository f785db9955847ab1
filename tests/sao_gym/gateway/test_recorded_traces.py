"""What the real OpenHands and mini-swe-agent ask, recorded, sent to a gateway again: one stream each, nothing lost."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from gateway_world import CHAT, END, SAMPLING, Agent, check, engine_of, episode, reasons, said
from traces import Request, load, packed, unpacked

from sao_gym.engines.scripted import ScriptedEngine

TRACES = {
    "openhands": {"start": 1, "continued": 5},
    "mini": {"start": 1, "continued": 4},
    "mini_only_talks": {"start": 1, "continued": 1, "assistant_dropped": 1},
}


async def sent(agent: Agent, request: Request, *, path: str | None = None, **headers: str) -> Any:
    """One recorded request, which must succeed: the answer's message."""
    url = f"{path or agent.episode.path}/{request.path}"
    answer = await agent.http.post(url, json=request.body, headers={**request.headers, **headers})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


@pytest.mark.parametrize("name", TRACES)
async def test_a_recorded_agent_leaves_exact_streams(name: str) -> None:
    trace = load(name)
    agent = Agent(engine_of(*trace["says"]))
    for request in unpacked(trace):
        await sent(agent, request)
    record = await agent.close()
    assert reasons(record) == TRACES[name]
    n_dropped = TRACES[name].get("assistant_dropped", 0)
    assert len(record.streams) == 1 + n_dropped
    assert record.info["break_rate"] == n_dropped / 2
    assert record.info["echoes"] == {"exact": len(agent.nodes) - 1}
    ends = [action.token_ids.tolist() for stream in record.streams for action in stream.actions]
    assert sorted(ends) == sorted(said(text) for text in trace["says"][: len(unpacked(trace))])


@pytest.mark.parametrize("name", TRACES)
async def test_each_request_sent_again_after_a_lost_answer_is_trained_once(name: str) -> None:
    trace = load(name)
    agent = Agent(engine_of(*trace["says"]))
    for request in unpacked(trace):
        first = await sent(agent, request)
        again = await sent(agent, request, **{"x-stainless-retry-count": "1"})
        assert again == first
    assert reasons(await agent.close()) == TRACES[name]


async def test_recorded_agents_side_by_side_do_not_meet() -> None:
    """Every trace twice at one gateway, in turns: what an episode sees of the others is nothing."""
    names = [*TRACES, *TRACES]
    traces = [load(name) for name in names]
    says: dict[str, list[str]] = {}
    agent = Agent(ScriptedEngine(lambda prompt: said(says[_last_user(prompt)].pop(0))))
    opened = [agent.gateway.open(episode(f"e{i}"), sampling=SAMPLING) for i in range(len(names))]
    told = [[_marked(request, i) for request in unpacked(trace)] for i, trace in enumerate(traces)]
    says.update({f"agent {i}.": list(trace["says"]) for i, trace in enumerate(traces)})
    for turn in range(max(len(requests) for requests in told)):
        due = [(handle, requests[turn]) for handle, requests in zip(opened, told, strict=True) if turn < len(requests)]
        await asyncio.gather(*(sent(agent, request, path=handle.path) for handle, request in due))
    for handle, name in zip(opened, names, strict=True):
        record = await handle.close()
        check(handle.session.tree.nodes, record.streams)
        assert reasons(record) == TRACES[name]


def _marked(request: Request, place: int) -> Request:
    """The same with its agent's number in the first message."""
    first, *others = request.body["messages"]
    marked = {**first, "content": f"You are agent {place}."}
    return Request(request.path, request.headers, {**request.body, "messages": [marked, *others]})


def _last_user(prompt: Sequence[int]) -> str:
    text = CHAT.codec.decode(list(prompt)).partition("You are ")[2]
    return text[: text.index(".") + 1]


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_is_packed_without_loss(name: str) -> None:
    trace = load(name)
    assert packed(unpacked(trace), trace["says"]) == trace
    assert END not in CHAT.codec.encode(trace["says"][0])
