"""Whatever is sent: an answer in the protocol's own form, never a 500, never a hang, never a failed episode."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from gateway_world import CHAT, END, SAMPLING, TOOLS, Agent, calls, episode, system, user
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.gateway import Gateway

PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
SCRAPS: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        2**70,
        1e308,
        "",
        "x",
        "\ud800",
        "<|end|>",
        "\x00",
        [],
        {},
        [[]],
        [None],
        {"type": 7},
    ),
    *([{}], [{"role": "user"}], {"role": "tool"}, "none", "auto", "required", {"type": "none"}, [1, 2], ["a"]),
)
VALID: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "model": "policy",
        "messages": [
            system("s"),
            user([{"type": "text", "text": "hi"}]),
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "python", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "1"},
        ],
        "tools": TOOLS,
        "tool_choice": "auto",
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "temperature": 1,
        "stop": ["x"],
        "stream": False,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "n": 1,
    },
    "/completions": {"prompt": "hi", "max_tokens": 3, "stop": "x", "logprobs": 1, "stream": True, "n": 1},
    "/responses": {
        "instructions": "s",
        "input": [
            user("hi"),
            {"type": "function_call", "call_id": "a", "name": "python", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
        ],
        "tools": [{"type": "function", "name": "python", "parameters": {}}],
        "max_output_tokens": 9,
        "stream": True,
        "previous_response_id": None,
    },
    "/messages": {
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            user("hi"),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "python", "input": {}}]},
            user([{"type": "tool_result", "tool_use_id": "a", "content": "1", "is_error": True}]),
        ],
        "tools": [{"name": "python", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "max_tokens": 9,
        "stop_sequences": ["x"],
    },
}


def broken(value: Any, draw: random.Random, chance: float) -> Any:
    """`value` with parts left out, doubled or replaced by scraps."""
    if draw.random() < chance:
        return draw.choice(SCRAPS)
    if isinstance(value, dict):
        kept = [(key, item) for key, item in value.items() if draw.random() > chance]
        return {
            draw.choice(["role", "x"]) if draw.random() < chance / 4 else key: broken(v, draw, chance)
            for key, v in kept
        }
    if isinstance(value, list):
        return [broken(item, draw, chance) for item in value for _ in range(draw.choice([1, 1, 1, 2, 0]))]
    return value


def cut_bytes(body: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(body) + 1)
    return draw.choice(
        [body[:place], body[:place] + b"\xff" + body[place:], body + b"}", b"[" * 5000, b"NaN", b'{"a":' * 3000]
    )


def sampled(draw: random.Random) -> Callable[[Any], list[int]]:
    """A policy that says anything at all."""
    words = [
        CHAT.codec.encode(text) for text in (calls("1"), "<tool_call>{", "<think>", "</think>", "é", "x", '{"name"')
    ]
    known = [index for index in range(len(CHAT.codec.tokenizer)) if index != END]

    def say(prompt: Any) -> list[int]:
        ids = [index for _ in range(draw.randrange(4)) for index in draw.choice(words)]
        return [*ids, *draw.choices(known, k=draw.randrange(6)), END]

    return say


async def exchanged(seed: int, n: int) -> dict[int, int]:
    draw = random.Random(seed)
    agent = Agent(ScriptedEngine(sampled(draw), context_length=1500))
    statuses: dict[int, int] = {}
    for _ in range(n):
        path = draw.choice(PATHS)
        body = broken(VALID[path], draw, draw.choice([0.0, 0.02, 0.1, 0.3]))
        raw = json.dumps(body).encode()
        raw = cut_bytes(raw, draw) if draw.random() < 0.1 else raw
        answer = await asyncio.wait_for(agent.post(path, None, content=raw), 20)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        check_form(answer, path, raw)
        assert agent.episode.session.failure is None, raw
        if agent.episode.truncation is not None and answer.status_code == 401:
            await agent.close()
            agent.episode = agent.gateway.open(episode(), sampling=SAMPLING)
    await agent.close()
    return statuses


def check_form(answer: Any, path: str, raw: bytes) -> None:
    assert answer.status_code in (200, 400, 401), raw
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert isinstance(error["message"], str), raw
        assert error["type"] in ("invalid_request_error", "authentication_error")
    elif not answer.headers["content-type"].startswith("text/event-stream"):
        assert {"id", "model", "usage"} <= set(answer.json()), raw
    elif path in ("/chat/completions", "/completions"):
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("seed", range(4))
async def test_a_thousand_broken_requests(seed: int) -> None:
    statuses = await exchanged(seed, 250)
    assert statuses[200] > 20
    assert statuses[400] > 50


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PATHS), st.data())
async def test_any_value_of_any_field(path: str, data: st.DataObject) -> None:
    agent = Agent(ScriptedEngine(lambda prompt: [END]))
    body = dict(VALID[path])
    for name in data.draw(st.lists(st.sampled_from(sorted(body)), min_size=1, max_size=3)):
        body[name] = data.draw(JSON)
    raw = json.dumps(body).encode()
    answer = await agent.post(path, None, content=raw)
    check_form(answer, path, raw)
    assert agent.episode.session.failure is None


async def test_a_body_that_is_too_large() -> None:
    from sao_gym.gateway import GatewaySettings

    agent = Agent(ScriptedEngine(lambda prompt: [END]), settings=GatewaySettings(max_body_bytes=1000))
    answer = await agent.post("/chat/completions", {"messages": [user("x" * 2000)]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_bug_of_ours_is_an_error_of_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the fuzzing above would see it: nothing hides behind a refusal."""
    agent = Agent(ScriptedEngine(lambda prompt: [END]))
    monkeypatch.setattr(agent.episode.session, "_node", lambda *args: 1 / 0)
    answer = await agent.post("/chat/completions", {"messages": [user("x")]})
    assert answer.status_code == 401
    assert agent.episode.session.failure == "ZeroDivisionError"
    assert isinstance(agent.gateway, Gateway)
