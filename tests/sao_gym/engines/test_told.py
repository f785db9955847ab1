"""An engine that says what it was told: the words are given, log-probs and versions are the policy's own."""

import numpy as np
import pytest

from sao_gym.engines.local import LocalEngine
from sao_gym.engines.told import ToldEngine
from sao_gym.errors import EngineError
from sao_gym.models import tiny_qwen3
from sao_gym.protocols import Sampling
from sao_gym.stream import StopReason
from sao_gym.weights import ModuleWeights

PROMPT = np.array([1, 2, 3], dtype=np.int32)
SAMPLING = Sampling(max_tokens=8, stop_token_ids=(9,))


@pytest.fixture
async def engine() -> ToldEngine:
    model = tiny_qwen3(32, layers=1, hidden=16, heads=2, kv_heads=1, context_length=64)
    return ToldEngine(LocalEngine(model.eval(), max_slots=2))


async def test_each_session_hears_its_own_lines_in_order_with_the_models_log_probs(engine: ToldEngine) -> None:
    engine.tell("a", [np.array([4, 9]), np.array([5, 6, 9])])
    engine.tell("b", [np.array([7])])
    first = await engine.generate(PROMPT, SAMPLING, "a")
    other = await engine.generate(PROMPT, SAMPLING, "b")
    second = await engine.generate(PROMPT, SAMPLING, "a")
    assert [list(made.token_ids) for made in (first, other, second)] == [[4, 9], [7], [5, 6, 9]]
    assert [made.stop for made in (first, other, second)] == [StopReason.STOP, StopReason.LENGTH, StopReason.STOP]
    scored = await engine.score(np.array([1, 2, 3, 5, 6, 9], dtype=np.int32))
    np.testing.assert_array_equal(second.logprobs, scored[3:])
    assert (second.logprobs < 0).all()
    await engine.close()


async def test_a_limit_cuts_and_silence_is_an_error(engine: ToldEngine) -> None:
    engine.tell("a", [np.array([4, 5, 6, 9])])
    made = await engine.generate(PROMPT, Sampling(max_tokens=2, stop_token_ids=(9,)), "a")
    assert (list(made.token_ids), made.stop) == ([4, 5], StopReason.LENGTH)
    with pytest.raises(EngineError, match="nothing"):
        await engine.generate(PROMPT, SAMPLING, "a")
    engine.tell("a", [np.array([4])])
    await engine.end_session("a")
    with pytest.raises(EngineError, match="nothing"):
        await engine.generate(PROMPT, SAMPLING, "a")
    await engine.close()


async def test_a_publication_reaches_the_model_and_its_version_the_tokens(engine: ToldEngine) -> None:
    other = tiny_qwen3(32, layers=1, hidden=16, heads=2, kv_heads=1, context_length=64, seed=1)
    engine.tell("a", [np.array([4, 9]), np.array([4, 9])])
    before = await engine.generate(PROMPT, SAMPLING, "a")
    await engine.publish(ModuleWeights(other), 1)
    after = await engine.generate(PROMPT, SAMPLING, "a")
    assert (list(before.versions), list(after.versions)) == ([0, 0], [1, 1])
    assert not np.allclose(before.logprobs, after.logprobs)
    await engine.close()
