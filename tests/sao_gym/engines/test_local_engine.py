"""The engine in its thread: many loops and sessions, cancellation, deadlines, publication in flight, and its death."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from sao_gym.engines.local import EngineDeadlines, LocalEngine
from sao_gym.errors import ConfigError, DeadlineError, EngineError, ModelError
from sao_gym.models import tiny_qwen3
from sao_gym.protocols import Generation, Sampling
from sao_gym.stream import StopReason
from sao_gym.weights import ModuleWeights

VOCAB = 40
Make = Callable[..., LocalEngine]


@pytest_asyncio.fixture
async def make_engine(make_model: Any) -> AsyncIterator[Make]:
    engines: list[LocalEngine] = []

    def make(model: Any = None, **options: Any) -> LocalEngine:
        engine = LocalEngine(make_model() if model is None else model, threads=1, **options)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        await engine.close()


def ids_of(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


class Gate:
    """Holds the engine thread before each forward pass once it is shut."""

    def __init__(self, model: Any) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        model.register_forward_pre_hook(self._hold)

    def _hold(self, *args: Any) -> None:
        if not self.open.is_set():
            self.reached.set()
            self.open.wait(20)

    async def shut_and_wait(self) -> None:
        self.reached.clear()
        self.open.clear()
        await asyncio.to_thread(self.reached.wait, 20)


async def test_sixteen_sessions_of_three_turns_equal_sequential_full_prefills(
    make_engine: Make, make_model: Any
) -> None:
    async def episode(engine: LocalEngine, index: int, session: str | None) -> list[Generation]:
        ids, turns = np.arange(3 + index) % VOCAB, []
        for turn in range(3):
            sampling = Sampling(max_tokens=10 + index % 5, seed=100 * index + turn, temperature=0.8)
            turns.append(await engine.generate(ids, sampling, session))
            ids = np.concatenate([ids, turns[-1].token_ids, np.arange(5 + turn)])
        return turns

    together, alone = make_engine(max_slots=7), make_engine()
    episodes = await asyncio.gather(*(episode(together, i, f"s{i}") for i in range(16)))
    assert together.counts.reused > 500
    for index, turns in enumerate(episodes):
        for got, expected in zip(turns, await episode(alone, index, None), strict=True):
            assert got.token_ids.tolist() == expected.token_ids.tolist()
            assert np.abs(got.logprobs - expected.logprobs).max() < 2e-5
    assert alone.counts.reused == 0


async def test_requests_from_loops_in_several_threads(make_engine: Make) -> None:
    engine = make_engine()
    expected = [await engine.generate(ids_of(1, 2), Sampling(max_tokens=8, seed=i)) for i in range(6)]
    results: dict[int, Generation] = {}

    def ask(index: int) -> None:
        results[index] = asyncio.run(engine.generate(ids_of(1, 2), Sampling(max_tokens=8, seed=index)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    await asyncio.to_thread(lambda: [thread.join(20) for thread in threads])
    assert [results[i].token_ids.tolist() for i in range(6)] == [g.token_ids.tolist() for g in expected]


async def test_publication_while_requests_are_in_flight(make_engine: Make, make_model: Any) -> None:
    engine = make_engine(version=3)
    before = await engine.health()
    tasks = [asyncio.create_task(engine.generate(ids_of(1, 2), Sampling(max_tokens=200, seed=i))) for i in range(4)]
    await until(lambda: engine.counts.sampled > 40)
    source = ModuleWeights(tiny_qwen3(VOCAB, 2, 32, seed=8))
    await engine.publish(source, 5)
    for generation in await asyncio.gather(*tasks):
        assert len(generation.token_ids) == 200
        assert set(generation.versions.tolist()) == {3, 5}
    after = await engine.health()
    assert (before.version, after.version, engine.version) == (3, 5, 5)
    assert after.weight_hash == source.weight_hash != before.weight_hash
    assert [(p.version, p.weight_hash) for p in engine.publications] == [(5, source.weight_hash)]
    assert engine.publications[0].seconds > 0
    with pytest.raises(EngineError, match="already serves 5"):
        await engine.publish(source, 5)


async def test_score_answers_while_requests_decode(make_engine: Make, make_model: Any, plain_logprobs: Any) -> None:
    engine = make_engine()
    task = asyncio.create_task(engine.generate(ids_of(1), Sampling(max_tokens=100)))
    ids = np.arange(20)
    scores = await engine.score(ids, 0.7)
    np.testing.assert_allclose(scores[1:], plain_logprobs(make_model(), ids.tolist(), 0.7), atol=2e-5)
    assert len((await task).token_ids) == 100


async def test_cancelling_the_task_frees_the_row(make_engine: Make) -> None:
    engine = make_engine(max_slots=2)
    expected = await engine.generate(ids_of(5), Sampling(max_tokens=30, seed=1))
    endless = [asyncio.create_task(engine.generate(ids_of(1, i), Sampling(max_tokens=250), f"s{i}")) for i in range(3)]
    await until(lambda: engine.counts.sampled > 40)
    for task in (endless[0], endless[2]):  # one decodes, one still waits for a row
        task.cancel()
    got = await engine.generate(ids_of(5), Sampling(max_tokens=30, seed=1))
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-5)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert len((await endless[1]).token_ids) == 250
    health = await engine.health()
    assert (health.running, health.waiting) == (0, 0)
    assert all(task.cancelled() for task in (endless[0], endless[2]))


async def test_abort_returns_what_was_sampled(make_engine: Make, make_model: Any) -> None:
    model = make_model()
    gate, engine = Gate(model), make_engine(model)
    task = asyncio.create_task(engine.generate(ids_of(1), Sampling(max_tokens=250), "s"))
    await until(lambda: engine.counts.sampled > 5)
    await gate.shut_and_wait()
    abort = asyncio.create_task(engine.abort("s"))
    await asyncio.sleep(0.01)
    gate.open.set()
    await abort
    generation = await task
    assert generation.stop is StopReason.ABORT
    assert 5 < len(generation.token_ids) == len(generation.logprobs) == len(generation.versions) < 250


async def test_waits_have_deadlines_that_say_what_for(make_engine: Make, make_model: Any) -> None:
    model = make_model()
    deadlines = EngineDeadlines(generate_s=0.05, score_s=0.05, publish_s=0.05, health_s=0.05)
    gate, engine = Gate(model), make_engine(model, deadlines=deadlines)
    gate.open.clear()
    with pytest.raises(DeadlineError, match=r"0\.05 s for a generation of 9 tokens after 2, session episode-1"):
        await engine.generate(ids_of(1, 2), Sampling(max_tokens=9), "episode-1")
    for call, what in (
        (engine.score(ids_of(1, 2)), "scoring 2 tokens"),
        (engine.publish(ModuleWeights(model), 1), "publication of version 1"),
        (engine.health(), "health"),
    ):
        with pytest.raises(DeadlineError, match=what):
            await call
    gate.open.set()
    await until(lambda: not engine._decoder.has_work)
    assert engine.version == 0  # what nobody waits for any more does not happen


async def test_a_dead_thread_fails_every_wait_and_every_later_call(make_engine: Make, make_model: Any) -> None:
    """Trap 24."""
    model = make_model()
    gate, engine = Gate(model), make_engine(model, max_slots=2)
    tasks = [asyncio.create_task(engine.generate(ids_of(1), Sampling(max_tokens=250))) for _ in range(3)]
    await until(lambda: engine.counts.sampled > 5)
    await gate.shut_and_wait()
    tasks += [asyncio.create_task(engine.score(ids_of(1, 2)))]  # type: ignore[list-item]
    await asyncio.sleep(0.01)

    def fail(*args: Any) -> None:
        raise MemoryError("no memory left")

    model.register_forward_pre_hook(fail)
    gate.open.set()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(result, EngineError)
        assert "the engine thread died: MemoryError: no memory left" in str(result)
    for call in (
        engine.generate(ids_of(1), Sampling(max_tokens=2)),
        engine.score(ids_of(1, 2)),
        engine.publish(ModuleWeights(model), 9),
        engine.health(),
        engine.end_session("s"),
    ):
        with pytest.raises(EngineError, match="no memory left"):
            await call


async def test_closing_fails_what_is_in_flight_and_is_idempotent(make_engine: Make) -> None:
    engine = make_engine()
    task = asyncio.create_task(engine.generate(ids_of(1), Sampling(max_tokens=250)))
    await until(lambda: engine.counts.sampled > 5)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="closed"):
        await engine.health()


async def test_an_idle_engine_uses_no_processor_and_needs_no_close(make_model: Any) -> None:
    engine = LocalEngine(make_model(), threads=1)
    await engine.generate(ids_of(1), Sampling(max_tokens=3))
    start = time.process_time()
    await asyncio.sleep(0.3)
    assert time.process_time() - start < 0.15
    thread = engine._thread
    del engine
    assert await asyncio.to_thread(thread.join, 20)


async def test_requests_that_cannot_be_served_are_refused_with_a_reason(make_engine: Make) -> None:
    engine = make_engine(context_length=32)
    one = Sampling(max_tokens=1)
    wrong: list[tuple[Any, Sampling, str]] = [
        (ids_of(*range(32)), one, "32 tokens leaves no room in a context of 32"),
        (ids_of(), one, "non-empty"),
        (np.array([0.5]), one, "integers"),
        (ids_of(VOCAB), one, "different tokenizers"),
        (ids_of(-1), one, "different tokenizers"),
        (ids_of(1), Sampling(max_tokens=0), "max_tokens"),
        (ids_of(1), Sampling(max_tokens=1, temperature=-1.0), "temperature"),
        (ids_of(1), Sampling(max_tokens=1, top_p=0.0), "top_p"),
    ]
    for ids, sampling, message in wrong:
        with pytest.raises(EngineError, match=message):
            await engine.generate(ids, sampling)
    with pytest.raises(EngineError, match="cannot score 33"):
        await engine.score(np.zeros(33, np.int32))
    assert len((await engine.generate(ids_of(1), Sampling(max_tokens=99))).token_ids) == 31


def test_settings_out_of_range_are_refused(make_model: Any) -> None:
    with pytest.raises(ConfigError, match="in_place"):
        LocalEngine(make_model(), kv="keep")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        LocalEngine(make_model(), max_slots=0)
    with pytest.raises(ModelError, match="2 to 256"):
        LocalEngine(make_model(), context_length=257)


async def test_deterministic_mode_is_bitwise_the_same_alone_and_in_company(make_engine: Make) -> None:
    alone, crowd = make_engine(deterministic=True), make_engine(deterministic=True, max_slots=3)
    prompts = [np.arange(3 + 5 * i) % VOCAB for i in range(6)]
    samplings = [Sampling(max_tokens=12, seed=i) for i in range(6)]
    expected = [await alone.generate(p, s, "one") for p, s in zip(prompts, samplings, strict=True)]
    got = await asyncio.gather(*(crowd.generate(prompts[i], samplings[i], f"s{i}") for i in (4, 2, 0, 5, 1, 3)))
    for index, generation in zip((4, 2, 0, 5, 1, 3), got, strict=True):
        assert generation.token_ids.tobytes() == expected[index].token_ids.tobytes()
        assert generation.logprobs.tobytes() == expected[index].logprobs.tobytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
async def test_logprobs_on_a_cuda_device(make_engine: Make, make_model: Any, plain_logprobs: Any) -> None:
    engine = make_engine(device="cuda")
    generation = await engine.generate(ids_of(1, 2, 3), Sampling(max_tokens=30, temperature=0.7))
    ids = [1, 2, 3, *generation.token_ids.tolist()]
    assert np.abs(plain_logprobs(make_model(), ids, 0.7)[2:] - generation.logprobs).max() < 1e-4


@pytest.mark.parametrize("temperature", [-1.0, 1e-46, 1e-7, float("inf"), float("nan")])
async def test_temperatures_that_cannot_be_sampled_are_named(make_engine: Make, temperature: float) -> None:
    """Not: the model's logits are not finite."""
    engine = make_engine()
    with pytest.raises(EngineError, match=r"cannot sample at temperature"):
        await engine.generate(ids_of(1, 2), Sampling(max_tokens=2, temperature=temperature))
    with pytest.raises(EngineError, match=r"cannot score 2 tokens at temperature"):
        await engine.score(ids_of(1, 2), temperature)
    with pytest.raises(EngineError, match=r"top_k >= 0"):
        await engine.generate(ids_of(1, 2), Sampling(max_tokens=2, top_k=-1))
    coldest = await engine.generate(ids_of(1, 2), Sampling(max_tokens=4, temperature=1e-6))
    greedy = await engine.generate(ids_of(1, 2), Sampling(max_tokens=4, temperature=0.0))
    assert coldest.token_ids.tolist() == greedy.token_ids.tolist()


async def test_a_checkpoint_with_weights_that_are_no_numbers_is_named(make_model: Any) -> None:
    model = make_model()
    model.lm_head.weight.data[1, 1] = torch.nan
    with pytest.raises(ModelError, match=r"logits that are not finite: its weights are damaged"):
        LocalEngine(model, threads=1)
