"""The scripted engine keeps an engine's promises with ids that were given."""

import asyncio
from typing import Any

import numpy as np
import pytest

from sao_gym.clock import VirtualClock
from sao_gym.engines.scripted import Completion, ScriptedEngine, constant_logprobs
from sao_gym.errors import EngineError
from sao_gym.models import tiny_qwen3
from sao_gym.protocols import Engine, Sampling
from sao_gym.stream import Segment, StopReason
from sao_gym.weights import ModuleWeights

PROMPT = np.array([1, 2, 3], dtype=np.int32)
ASK = Sampling(max_tokens=10, stop_token_ids=(9,))


async def test_each_session_hears_the_script_from_its_start() -> None:
    engine: Engine = ScriptedEngine.from_lists([[4, 9], [5, 6, 9]])
    said = {name: [(await engine.generate(PROMPT, ASK, name)).token_ids.tolist() for _ in range(2)] for name in "ab"}
    assert said == {"a": [[4, 9], [5, 6, 9]], "b": [[4, 9], [5, 6, 9]]}
    with pytest.raises(EngineError, match=r"call 3 of session a, but 2"):
        await engine.generate(PROMPT, ASK, "a")


async def test_scripts_by_session_prompt_and_function() -> None:
    by_session = ScriptedEngine.from_sessions({"a": [[4, 9]], "b": [[5, 9]]})
    assert (await by_session.generate(PROMPT, ASK, "b")).token_ids.tolist() == [5, 9]
    with pytest.raises(EngineError, match="0 completions"):
        await by_session.generate(PROMPT, ASK, "c")
    by_prompt = ScriptedEngine.from_prompts({(1, 2, 3): [7, 9]})
    assert (await by_prompt.generate(PROMPT, ASK)).token_ids.tolist() == [7, 9]
    with pytest.raises(EngineError, match="no completion is scripted"):
        await by_prompt.generate(PROMPT[:2], ASK)
    by_function = ScriptedEngine(lambda prompt: [int(prompt[-1]) + 1, 9])
    assert (await by_function.generate(PROMPT, ASK)).token_ids.tolist() == [4, 9]


async def test_texts_are_encoded_and_ended() -> None:
    class Letters:
        eos_token_id = 9

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) - ord("a") for letter in text]

    engine = ScriptedEngine.from_texts(["abc"], Letters())
    assert (await engine.generate(PROMPT, ASK)).token_ids.tolist() == [0, 1, 2, 9]
    Letters.eos_token_id = None  # type: ignore[assignment]
    with pytest.raises(EngineError, match="give stop_id"):
        ScriptedEngine.from_texts(["abc"], Letters())


@pytest.mark.parametrize(
    ("said", "limit", "kept", "stop"),
    [
        ([4, 9, 5], 10, [4, 9], StopReason.STOP),
        ([4, 9], 2, [4, 9], StopReason.STOP),
        ([4, 5, 9], 2, [4, 5], StopReason.LENGTH),
        ([4, 5], 10, [4, 5], StopReason.LENGTH),
    ],
)
async def test_finish_reasons(said: list[int], limit: int, kept: list[int], stop: StopReason) -> None:
    """Trap 7: last id, log-prob and version agree in number."""
    engine = ScriptedEngine(lambda prompt: said, version=3)
    generation = await engine.generate(PROMPT, Sampling(max_tokens=limit, stop_token_ids=(9,), temperature=0.5))
    assert (generation.token_ids.tolist(), generation.stop) == (kept, stop)
    assert generation.versions.tolist() == [3] * len(kept)
    np.testing.assert_array_equal(generation.logprobs, constant_logprobs(len(kept)))
    Segment.action(
        generation.token_ids,
        logprobs=generation.logprobs,
        versions=generation.versions,
        temperature=generation.temperature,
        stop=generation.stop,
    )


async def test_given_logprobs_are_kept_and_must_fit() -> None:
    engine = ScriptedEngine.from_lists([Completion([4, 9], [-1.5, -2.5]), Completion([4, 9], [-1.0]), []])
    assert (await engine.generate(PROMPT, ASK)).logprobs.tolist() == [-1.5, -2.5]
    for message in ("2 ids and 1 log-probs", "0 ids"):
        with pytest.raises(EngineError, match=message):
            await engine.generate(PROMPT, ASK)


async def test_failures_come_at_the_named_calls_and_are_not_heard() -> None:
    engine = ScriptedEngine.from_lists([[4, 9]], failures={0: EngineError("the link broke")})
    with pytest.raises(EngineError, match="the link broke"):
        await engine.generate(PROMPT, ASK, "a")
    assert (await engine.generate(PROMPT, ASK, "a")).token_ids.tolist() == [4, 9]
    assert [(call.session, call.generation is None) for call in engine.calls] == [("a", True), ("a", False)]


async def test_tokens_carry_the_version_in_force_when_they_were_due() -> None:
    clock = VirtualClock()
    engine = ScriptedEngine(lambda prompt: [4] * 9 + [9], latency_s=lambda n: 1.0 * n, clock=clock)
    source = ModuleWeights(tiny_qwen3(10, 1, 16, heads=2, kv_heads=1))

    async def publish() -> None:
        for version in (2, 5):
            await clock.sleep(3.5)
            await engine.publish(source, version)

    tasks = [asyncio.create_task(engine.generate(PROMPT, ASK)), asyncio.create_task(publish())]
    await clock.run(lambda: all(task.done() for task in tasks))
    generation: Any = tasks[0].result()
    assert generation.versions.tolist() == [0, 0, 0, 2, 2, 2, 5, 5, 5, 5]
    assert clock.now() == 10.0
    assert (await engine.health()).weight_hash == source.weight_hash
    with pytest.raises(EngineError, match="already serves 5"):
        await engine.publish(source, 5)


async def test_cancelling_a_request_leaves_the_engine_whole() -> None:
    clock = VirtualClock()
    engine = ScriptedEngine(lambda prompt: [4, 9], latency_s=5.0, clock=clock)
    task = asyncio.create_task(engine.generate(PROMPT, ASK))
    await asyncio.sleep(0)
    assert (await engine.health()).running == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engine.health()).running == 0
    assert engine.calls[0].generation is None


async def test_a_closed_engine_refuses_and_limits_hold() -> None:
    engine = ScriptedEngine(lambda prompt: [4] * 50, context_length=8)
    assert len((await engine.generate(PROMPT, Sampling(max_tokens=40))).token_ids) == 5
    with pytest.raises(EngineError, match="do not fit a context of 8"):
        await engine.generate(np.zeros(8, np.int32), ASK)
    assert (await engine.score(PROMPT))[0] == 0
    await engine.end_session("a")
    await engine.close()
    await engine.close()
    for call in (engine.generate(PROMPT, ASK), engine.health()):
        with pytest.raises(EngineError, match="closed"):
            await call
