"""Streams scored again by the engine's own model give the recorded log-probs: nothing lost, shifted or re-tokenised."""

from typing import Any

import numpy as np
import pytest
from gateway_world import CHAT, END, Agent, calls, result, said, user

from sao_gym.engines.local import LocalEngine
from sao_gym.engines.told import ToldEngine
from sao_gym.models import tiny_qwen3
from sao_gym.protocols import Engine, Sampling
from sao_gym.stream import TokenStream

N_IDS = len(CHAT.codec.tokenizer)
ENDS = (END, *range(40, 90))
"""A model made of noise has to stop at something: the turn's own end is then the bridge's to write."""


@pytest.fixture
def model() -> Any:
    return tiny_qwen3(N_IDS, layers=2, hidden=32, heads=2, kv_heads=1, context_length=2048, seed=3)


async def check_scores(engine: Engine, streams: tuple[TokenStream, ...]) -> None:
    for stream in streams:
        scores = await engine.score(stream.token_ids, 0.7)
        np.testing.assert_allclose(scores[stream.action_positions], stream.behavior_logprobs, atol=1e-4)


async def test_what_was_sampled_is_scored_the_same(model: Any) -> None:
    """With branches, an edited history, and content that comes back stripped and without its reasoning."""
    engine = LocalEngine(model, threads=1, context_length=2048)
    sampling = Sampling(max_tokens=400, temperature=0.7, stop_token_ids=ENDS)
    agent = Agent(engine, sampling=sampling)
    try:
        messages = [user("hi")]
        for turn in range(4):
            said_back = {"role": "assistant", **(await agent.ask(messages, tools=[]))}
            said_back.pop("reasoning_content", None)
            messages += [{**said_back, "content": (said_back.get("content") or "").strip()}, user(f"turn {turn}")]
        for part in ("a", "b"):
            await agent.ask([*messages, user(part)], tools=[])
        await agent.ask([user("other"), *messages[1:]], tools=[])
        record = await agent.close()
        assert len(record.streams) == 3
        assert record.info["breaks"] == {"history_edited": 1}
        assert [len(stream.actions) for stream in record.streams] == [5, 1, 1]
        await check_scores(engine, record.streams)
        stream = record.streams[0]
        shifted = (await engine.score(stream.token_ids, 0.7))[stream.action_positions - 1]
        assert abs(shifted - stream.behavior_logprobs).max() > 1e-2  # the check would see a shift by one
    finally:
        await engine.close()


async def test_calls_and_results_are_scored_the_same(model: Any) -> None:
    """Calls with white space and letters of their own, which no re-rendering would give again."""
    engine = ToldEngine(LocalEngine(model, threads=1, context_length=2048))
    odd = '<tool_call>\n{"arguments":  {"code": "print(\\"\\u00e9\\")"}, "name": "python"}\n</tool_call>'
    texts = ["<think>hm</think>" + odd, calls("1", "2"), '<tool_call>{"name": ', "done"]
    agent = Agent(engine)
    engine.tell("e0", [np.array(said(text), dtype=np.int32) for text in texts])
    try:
        messages = [user("hi")]
        while (message := await agent.ask(messages)).get("tool_calls"):
            results = [result(message, "é" * 9, place) for place in range(len(message["tool_calls"]))]
            messages += [{**message, "reasoning_content": None}, *results]
        record = await agent.close()
        (stream,) = record.streams
        assert [CHAT.codec.decode(action.token_ids) for action in stream.actions] == [t + "<|end|>" for t in texts]
        assert record.info["malformed_calls"] == {"unclosed": 1}
        await check_scores(engine, record.streams)
    finally:
        await engine.close()
