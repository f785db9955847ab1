"""One session: retries, budgets, poisoned answers, stop strings, its end, who may speak. Cases GW-02, GW-06."""

import asyncio
import json
import logging
from typing import Any

import numpy as np
import pytest
from gateway_world import (
    CHAT,
    END,
    Agent,
    calls,
    counting_engine,
    engine_of,
    episode,
    reasons,
    result,
    said,
    user,
)

from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock, VirtualClock
from sao_gym.engines.scripted import Completion, ScriptedEngine, constant_logprobs
from sao_gym.errors import ConfigError, EngineError
from sao_gym.gateway import Gateway, GatewaySettings
from sao_gym.protocols import AGENT_FAILED, Generation, Sampling
from sao_gym.stream import Outcome, StopReason

BODY = {"model": "policy", "messages": [user("hi")]}
RETRY = {"x-stainless-retry-count": "1"}


async def content(agent: Agent, headers: dict[str, str] | None = None, body: Any = BODY) -> str:
    answer = await agent.post("/chat/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


# GW-02


async def test_a_retry_gets_the_answer_that_was_made() -> None:
    """Case GW-02: (a) in the making, (b) made, (c) without the signal."""
    agent = Agent(counting_engine(latency_s=0.02))
    both = await asyncio.gather(content(agent, {"x-stainless-retry-count": "0"}), content(agent, RETRY))
    assert both == ["answer 0", "answer 0"]
    assert await content(agent, RETRY) == "answer 0"
    assert await content(agent, {"x-stainless-retry-count": "0"}) == "answer 1"
    assert await content(agent) == "answer 2"
    assert await content(agent, RETRY) == "answer 2"
    assert len(agent.engine.calls) == 3
    record = await agent.close()
    assert len(record.streams) == 3
    assert reasons(record) == {"start": 1, "repeated": 2}
    assert record.info["replays"] == 3


async def test_an_idempotency_key_is_such_a_signal() -> None:
    agent = Agent(counting_engine())
    key = {"idempotency-key": "k1"}
    assert [await content(agent, key) for _ in range(2)] == ["answer 0"] * 2
    assert await content(agent, key, {**BODY, "messages": [user("other")]}) == "answer 1"
    assert await content(agent, {"idempotency-key": "k2"}) == "answer 2"
    assert await content(agent, RETRY, {**BODY, "messages": [user("never sent before")]}) == "answer 3"
    await agent.close()


@pytest.mark.parametrize("count", ["", "one", "-1", "²", "0"])
async def test_an_odd_retry_count_is_no_signal(count: str) -> None:
    agent = Agent(counting_engine())
    given = {"x-stainless-retry-count": count.encode()}
    assert await content(agent, given) == "answer 0"  # type: ignore[arg-type]
    assert await content(agent, given) == "answer 1"  # type: ignore[arg-type]


async def test_a_client_that_gave_up_finds_its_answer() -> None:
    agent = Agent(counting_engine(latency_s=0.05))
    pending = asyncio.ensure_future(agent.post("/chat/completions", BODY))
    while not agent.engine.calls:
        await asyncio.sleep(0.001)
    pending.cancel()
    assert await content(agent, RETRY) == "answer 0"
    assert len(agent.engine.calls) == 1
    assert (await agent.close()).info["delivered_fraction"] == 1


# Budgets


async def test_tokens_of_an_episode_are_counted_once_each() -> None:
    agent = Agent(engine_of(*[""] * 9), budgets=Budgets(max_tokens_per_episode=80))
    messages, spent = [user("hi")], 0
    while (answer := await agent.post("/chat/completions", {"messages": messages})).status_code == 200:
        messages += [answer.json()["choices"][0]["message"], user("go on")]
        spent = agent.nodes[-1].n_tokens
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "budget_exhausted")
    assert spent <= 80
    record = await agent.close(Outcome.error(AGENT_FAILED))
    assert record.outcome == Outcome.truncated("episode_tokens")
    assert record.info["refusals"] == {"budget_exhausted": 1}


@pytest.mark.parametrize(
    ("budgets", "context", "reason"),
    [
        (Budgets(max_tokens_per_turn=20), 1000, "turn_tokens"),
        (Budgets(max_tokens_per_episode=25), 1000, "episode_tokens"),
        (Budgets(), 25, "context"),
        (Budgets(max_tokens_per_episode=25), 25, "episode_tokens"),
    ],
)
async def test_a_cut_answer_ends_the_episode(budgets: Budgets, context: int, reason: str) -> None:
    """Trap 19."""
    agent = Agent(engine_of("x" * 100, "more", context_length=context), budgets=budgets)
    answer = await agent.post("/chat/completions", {"messages": [user("hi")]})
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    again = await agent.post("/chat/completions", {"messages": [user("hi again")]})
    assert (again.status_code, again.json()["error"]["code"]) == (401, "episode_over")
    auxiliary = await agent.post("/chat/completions", BODY, headers={"x-sao-gym-auxiliary": "1"})
    assert auxiliary.status_code == 200
    record = await agent.close(Outcome.terminated())
    assert record.outcome == Outcome.truncated(reason)
    assert record.streams[0].actions[-1].stop is StopReason.LENGTH


async def test_a_whole_call_before_the_cut_is_not_shown_either() -> None:
    agent = Agent(engine_of(calls("1") + "and then some more text"))
    answer = await agent.post("/chat/completions", {"messages": [user("hi")], "max_tokens": len(said(calls("1"))) + 3})
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    await agent.close()


async def test_auxiliary_calls_are_bounded_by_number() -> None:
    agent = Agent(counting_engine(), settings=GatewaySettings(max_auxiliary_calls=2), budgets=Budgets(max_turns=1))
    mark = {"x-sao-gym-auxiliary": "1"}
    found = [(await agent.post("/chat/completions", BODY, headers=mark)).status_code for _ in range(3)]
    assert found == [200, 200, 401]
    assert await content(agent) == "answer 2"
    assert (await agent.close()).outcome == Outcome.terminated()


async def test_concurrent_calls_share_the_turns() -> None:
    agent = Agent(counting_engine(latency_s=0.01), budgets=Budgets(max_turns=2))
    answers = await asyncio.gather(*(agent.post("/chat/completions", BODY) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 401, 401, 401]
    await agent.close()


# GW-06


def answering(**changes: Any) -> Any:
    class Engine(ScriptedEngine):
        async def generate(self, token_ids: Any, sampling: Any, session: str | None = None) -> Generation:
            good = await super().generate(token_ids, sampling, session)
            fields = {
                name: getattr(good, name) for name in ("token_ids", "logprobs", "versions", "stop", "temperature")
            }
            return Generation(**{**fields, **{name: change(good) for name, change in changes.items()}})

    return Engine(lambda prompt: said("abc"))


POISON = {
    "one log-prob fewer": {"logprobs": lambda g: g.logprobs[:-1]},
    "NaN": {"logprobs": lambda g: np.where(np.arange(len(g.logprobs)) == 1, np.nan, g.logprobs)},
    "above zero": {"logprobs": lambda g: -g.logprobs},
    "no versions": {"versions": lambda g: g.versions[:0]},
    "another temperature": {"temperature": lambda g: 1.0},
    "negative ids": {"token_ids": lambda g: -g.token_ids},
}


@pytest.mark.parametrize("changes", POISON.values(), ids=POISON)
async def test_arrays_that_do_not_fit_never_reach_a_stream(changes: Any) -> None:
    """Case GW-06: a typed error of the episode; nothing is padded."""
    agent = Agent(answering(**changes))
    answer = await agent.post("/chat/completions", BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "episode_failed")
    record = await agent.close(Outcome.terminated())
    assert record.outcome == Outcome.error("poisoned_output")
    assert record.streams == ()


async def test_what_an_engine_raises_is_an_error_of_the_episode() -> None:
    for error, kind in ((EngineError("x", kind="lost"), "lost"), (KeyError("x"), "KeyError")):
        agent = Agent(engine_of("a", failures={0: error}))
        assert (await agent.post("/chat/completions", BODY)).status_code == 401
        assert (await agent.post("/chat/completions", BODY, headers=RETRY)).status_code == 401
        assert (await agent.close(Outcome.truncated("wall_clock"))).outcome == Outcome.error(kind)


async def test_a_generation_has_a_deadline() -> None:
    clock = VirtualClock()
    agent = Agent(counting_engine(latency_s=50, clock=clock), clock=clock, settings=GatewaySettings(call_s=10))
    pending = asyncio.ensure_future(agent.post("/chat/completions", BODY))
    await clock.run(pending.done, settle=50)
    assert (await pending).json()["error"]["code"] == "episode_failed"
    assert clock.now() == 10
    assert (await agent.close()).outcome == Outcome.error("engine_timeout")


# Stop strings


@pytest.mark.parametrize("stop", ["Observation:", ["never", "Observation:"]])
async def test_a_stop_string_trims_the_text_and_stays_in_the_ids(stop: Any) -> None:
    """Trap 7: what came after it was never said."""
    agent = Agent(engine_of("Thought: é. Observation: 5 Observation: 6", "done"))
    message = await agent.ask([user("hi")], stop=stop)
    assert message["content"] == "Thought: é."
    await agent.ask([user("hi"), message, user("Observation: 7")])
    record = await agent.close()
    (stream,) = record.streams
    action = stream.actions[0]
    assert CHAT.codec.decode(action.token_ids) == "Thought: é. Observation:"
    np.testing.assert_array_equal(action.behavior_logprobs, constant_logprobs(len(action.token_ids)))
    assert action.stop is StopReason.STOP_STRING
    assert CHAT.codec.decode(stream.segments[2].token_ids).startswith("<|end|><|user|>Observation: 7")
    assert reasons(record) == {"start": 1, "continued": 1}
    assert record.outcome == Outcome.terminated()


# Malformed calls

BAD = {
    "broken": ('{"name": "python", "arguments": {"code": ', "python", "invalid_json"),
    "unclosed": ('<tool_call>{"name": "python", "arguments": {"code": "1"}}', "python", "unclosed"),
    "no object": ('{"name": "python", "arguments": [1]}', "python", "not_an_object"),
    "no name": ('{"arguments": {"code": "1"}}', "unreadable_call", "missing_name"),
    "half a pair": ('{"name": "python", "arguments": {"code": "\\ud800"}}', "python", "invalid_json"),
}


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@pytest.mark.parametrize(("body", "name", "problem"), BAD.values(), ids=BAD)
async def test_a_malformed_call_is_passed_on_as_it_is(body: str, name: str, problem: str) -> None:
    text = body if body.startswith("<tool_call>") else f"<tool_call>{body}</tool_call>"
    agent = Agent(engine_of(text, "done"))
    message = await agent.ask([user("hi")])
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == name
    if problem not in ("missing_name",) and "ud800" not in body:
        assert not is_object(call["function"]["arguments"])
    rewritten = {**message, "tool_calls": [{**call, "function": {"name": name, "arguments": "{}"}}]}
    await agent.ask([user("hi"), rewritten, result(message, "Error: no such call")])
    record = await agent.close()
    assert record.info["malformed_calls"] == {problem: 1}
    assert reasons(record) == {"start": 1, "continued": 1}
    assert record.streams[0].actions[0].token_ids.tolist() == said(text)


async def test_calls_that_were_not_wanted_are_text() -> None:
    agent = Agent(engine_of(calls("1", before="So: ")))
    message = await agent.ask([user("hi")], tool_choice="none")
    assert "tool_calls" not in message
    assert '"code": "1"' in message["content"]
    await agent.close()


# The end


async def test_closing_cancels_and_refuses() -> None:
    agent = Agent(counting_engine(latency_s=60))
    pending = [asyncio.ensure_future(agent.post("/chat/completions", BODY)) for _ in range(3)]
    while len(agent.engine.calls) < 3:
        await asyncio.sleep(0.001)
    record = await agent.close(Outcome.truncated("wall_clock"))
    codes = [(answer.status_code, answer.json()["error"]["code"]) for answer in await asyncio.gather(*pending)]
    assert codes == [(401, "episode_over")] * 3
    assert record.outcome == Outcome.truncated("wall_clock")
    assert record.streams == ()
    assert await agent.close() is record
    assert agent.engine._running == 0
    assert agent.gateway._gate.running == 0
    assert agent.engine.ended_sessions == ["e0"]


async def test_an_outcome_of_the_driver_stands_where_nothing_says_more() -> None:
    for given in (
        None,
        Outcome.terminated(),
        Outcome.truncated("wall_clock"),
        Outcome.error("sandbox"),
        Outcome.error(AGENT_FAILED),
    ):
        agent = Agent(counting_engine())
        await content(agent)
        assert (await agent.close(given)).outcome == (given or Outcome.terminated())
    agent = Agent(counting_engine(), budgets=Budgets(max_turns=1))
    await content(agent)
    await agent.post("/chat/completions", BODY)
    assert (await agent.close(Outcome.error("sandbox"))).outcome == Outcome.error("sandbox")


async def test_versions_are_told_when_they_are_known() -> None:
    heard: list[int] = []
    agent = Agent(counting_engine(version=4), on_version=heard.append)
    await content(agent)
    await content(agent)
    record = await agent.close()
    assert heard == [4, 4]
    assert record.admitted_version == 4
    assert set(record.streams[0].versions.tolist()) == {4}


# Who may speak


async def test_episodes_do_not_reach_each_other() -> None:
    agent = Agent(counting_engine())
    other = agent.gateway.open(episode("e1"), sampling=Sampling(max_tokens=9))
    await content(agent)
    bearer = {"authorization": f"Bearer {other.api_key}"}
    by_key = await agent.http.post("/v1/chat/completions", json=BODY, headers=bearer)
    assert by_key.status_code == 200
    anthropic = await agent.http.post("/v1/messages", json=BODY, headers={"x-api-key": other.api_key})
    assert anthropic.status_code == 200
    for path, headers in (
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"authorization": "Bearer e1"}),
        ("/v1/chat/completions", {"authorization": f"Basic {other.api_key}"}),
        (f"/s/{other.api_key[:-1]}/v1/chat/completions", bearer),
        ("/s/é/v1/chat/completions", {}),
        (f"/s/{other.api_key}x/v1/chat/completions", {}),
    ):
        refused = await agent.http.post(path, json=BODY, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key"), path
    mine, theirs = await agent.close(), await other.close()
    assert (mine.info["calls"], theirs.info["calls"]) == (1, 2)
    assert len({agent.episode.api_key, other.api_key}) == 2
    assert other.api_key not in repr(other)
    late = await agent.http.post("/v1/chat/completions", json=BODY, headers=bearer)
    assert late.json()["error"]["code"] == "episode_over"


async def test_no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="sao_gym")
    agent = Agent(engine_of("a", failures={1: RuntimeError("broken")}))
    for _ in range(3):
        await agent.post("/chat/completions", BODY)
    await agent.close()
    assert "broken" in caplog.text
    assert agent.episode.api_key not in caplog.text


async def test_models_and_unknown_paths() -> None:
    agent = Agent(counting_engine(context_length=77))
    models = (await agent.http.get(agent.episode.path + "/models")).json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [("policy", 77)]
    assert (await agent.http.get("/v1/models")).status_code == 401
    for method, path, status in (
        ("GET", "/chat/completions", 405),
        ("POST", "/embeddings", 404),
        ("DELETE", "/models", 405),
    ):
        answer = await agent.http.request(method, agent.episode.path + path)
        assert answer.status_code == status
        assert answer.json()["error"]["message"]
    assert (await agent.http.get("/")).json()["error"]["code"] == "not_found"


# The gate


async def test_only_so_many_sample_at_a_time() -> None:
    settings = GatewaySettings(max_running=2, max_waiting=3, retry_after_s=7)
    agent = Agent(counting_engine(latency_s=0.05), settings=settings)
    pending = [asyncio.ensure_future(agent.post("/chat/completions", BODY)) for _ in range(7)]
    while len(agent.engine.calls) < 2:
        await asyncio.sleep(0.001)
    assert agent.engine._running == 2
    answers = await asyncio.gather(*pending)
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 2
    assert {answer.headers.get("retry-after") for answer in answers} == {None, "7"}
    assert agent.gateway._gate.running == 0
    await agent.close()


async def test_who_gives_up_waiting_leaves_its_place() -> None:
    gateway = Gateway(counting_engine(), CHAT, SystemClock(), GatewaySettings(max_running=1))
    gate = gateway._gate
    async with gate.entered():
        waiting = [asyncio.ensure_future(gate._enter()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.gather(waiting[0], return_exceptions=True)
        assert gate.waiting == 2
    await waiting[1]
    assert (gate.running, gate.waiting) == (1, 1)
    waiting[2].cancel()
    gate._leave()  # lets the third in while it is being cancelled
    await asyncio.gather(waiting[2], return_exceptions=True)
    assert (gate.running, gate.waiting) == (0, 0)


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match="call_s must be above 0, got 0"):
        GatewaySettings(call_s=0)
    with pytest.raises(ConfigError, match="marker"):
        GatewaySettings(auxiliary_markers=("",))


async def test_an_empty_generation_trains_nothing() -> None:
    class Aborted(ScriptedEngine):
        async def generate(self, token_ids: Any, sampling: Any, session: str | None = None) -> Generation:
            none = np.zeros(0, dtype=np.int32)
            return Generation(
                token_ids=none, logprobs=none.astype(np.float32), versions=none, stop=StopReason.ABORT, temperature=0.7
            )

    agent = Agent(Aborted(lambda prompt: Completion([END])))
    answer = await agent.post("/chat/completions", BODY)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    record = await agent.episode.close()
    assert (record.streams, record.outcome) == ((), Outcome.truncated("wall_clock"))
