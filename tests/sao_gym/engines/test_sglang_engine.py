"""The sglang engine against a stand-in of the server: sampling, faults, publication (cases EG-02, EG-03, PB-02)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang_exact import PROMPT, assert_exact, logprobs_of, other
from sglang_standin import StandIn

from sao_gym.engines import sglang
from sao_gym.engines.sglang import SGLangEngine
from sao_gym.engines.sglang_cargo import Transport
from sao_gym.engines.sglang_disk import DiskTransport
from sao_gym.engines.sglang_tensor import TensorTransport
from sao_gym.errors import ConfigError, DeadlineError, EngineError
from sao_gym.loops import on_background
from sao_gym.models import tiny_qwen3
from sao_gym.protocols import CountsWork, Sampling
from sao_gym.stream import StopReason
from sao_gym.weights import ModuleWeights

VOCAB = 40


def make_model(seed: int = 0) -> Any:
    return tiny_qwen3(VOCAB, 1, 32, heads=2, kv_heads=1, context_length=256, seed=seed).eval()


class House:
    """Stand-ins and engines, all taken down at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_model()
        self.stands: list[StandIn] = []
        self.engines: list[SGLangEngine] = []

    async def stand(self, **settings: Any) -> StandIn:
        made = StandIn(make_model(seed=9), **settings)
        await on_background(made.start())
        self.stands.append(made)
        return made

    async def engine(self, *stands: StandIn, transport: Transport | None = None, **settings: Any) -> SGLangEngine:
        engine = SGLangEngine(
            [stand.url for stand in stands],
            self.model,
            transport or DiskTransport(self.folder / f"weights-{len(self.engines)}", timeout_s=30),
            **settings,
        )
        self.engines.append(engine)
        await engine.start(ModuleWeights(self.model), 0)
        return engine

    async def close(self) -> None:
        for stand in self.stands:
            stand.hold.set()
        for engine in self.engines:
            await engine.close()
        for stand in self.stands:
            await on_background(stand.die())


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    made = House(tmp_path)
    yield made
    await made.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


async def test_tokens_are_those_of_the_published_weights(house: House) -> None:
    stand = await house.stand()
    engine = await house.engine(stand)
    assert engine.publications[0].check == "bytes"
    made = await engine.generate(PROMPT, Sampling(max_tokens=20, temperature=0.7, seed=3), "s")
    assert made.stop is StopReason.LENGTH
    assert_exact(made, {0: house.model}, temperature=0.7)
    scored = await engine.score(PROMPT)
    np.testing.assert_allclose(scored, logprobs_of(house.model, PROMPT.tolist()), atol=1e-5)
    health = await engine.health()
    assert (health.version, health.running) == (0, 0)
    assert health.weight_hash == ModuleWeights(house.model).weight_hash


@pytest.mark.parametrize("form", ["all", "log-probs all", "ids all", "new"])
async def test_eg_03_every_form_of_stream_survives_a_lost_connection(house: House, form: str) -> None:
    stand = await house.stand(form=form)
    engine = await house.engine(stand)
    sampling = Sampling(max_tokens=100, seed=11)
    whole = await engine.generate(PROMPT, sampling, "whole")
    stand.drop_after = [2]
    resumed = await engine.generate(PROMPT, sampling, "resumed")
    assert len(whole.token_ids) == len(resumed.token_ids) == 100
    assert engine.counts.lost == engine.counts.resumed == 1
    assert engine.counts.redone == 0
    assert resumed.token_ids[:64].tolist() == whole.token_ids[:64].tolist()
    assert_exact(resumed, {0: house.model})


@pytest.mark.parametrize("eos", [3, 7])
async def test_eg_02_all_declared_ids_stop_and_stop_wins_over_length(house: House, eos: int) -> None:
    stand = await house.stand(eos=(5,))
    engine = await house.engine(stand)
    free = await engine.generate(PROMPT, Sampling(max_tokens=60, seed=2), "free")
    ids = free.token_ids.tolist()
    last = next(i for i in range(3, 60) if ids[i] != 5 and ids[i] not in ids[:i])
    sampling = Sampling(max_tokens=60, seed=2, stop_token_ids=(ids[last], VOCAB - 1 if VOCAB - 1 not in ids else 0))
    stopped = await engine.generate(PROMPT, Sampling(max_tokens=60, seed=2, stop_token_ids=(ids[last],)), "stopped")
    if 5 not in ids[:last]:
        assert stopped.token_ids.tolist() == ids[: last + 1]
    assert stopped.stop is StopReason.STOP
    assert int(stopped.token_ids[-1]) in sampling.stop_token_ids
    cut = await engine.generate(
        PROMPT, Sampling(max_tokens=len(stopped.token_ids), seed=2, stop_token_ids=(ids[last],))
    )
    assert cut.stop is StopReason.STOP
    assert_exact(stopped, {0: house.model})


async def test_a_servers_own_end_of_text_does_not_stop_what_it_was_not_told_to(house: House) -> None:
    stand = await house.stand(eos=tuple(range(20)))
    engine = await house.engine(stand)
    made = await engine.generate(PROMPT, Sampling(max_tokens=30, stop_token_ids=(VOCAB - 1,), seed=1), "s")
    assert made.stop is (StopReason.STOP if made.token_ids[-1] == VOCAB - 1 else StopReason.LENGTH)
    assert VOCAB - 1 not in made.token_ids[:-1]
    assert_exact(made, {0: house.model})


async def test_trap_34_every_sampling_key_is_said(house: House) -> None:
    stand = await house.stand()
    engine = await house.engine(stand)
    await engine.generate(PROMPT, Sampling(max_tokens=4), "s")
    (body,) = [body for path, body in stand.calls if path == "generate"]
    said = body["sampling_params"]
    assert (said["top_p"], said["top_k"], said["min_p"], said["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
    assert (said["frequency_penalty"], said["presence_penalty"], said["min_new_tokens"]) == (0.0, 0.0, 0)


@pytest.mark.parametrize(("kind", "mode"), [("disk", "in_place"), ("tensor", "retract"), ("disk", "abort")])
async def test_requests_go_on_through_publications(house: House, mode: Any, kind: str) -> None:
    stand = await house.stand()
    transport = TensorTransport(timeout_s=30, bucket_bytes=3000) if kind == "tensor" else None
    engine = await house.engine(stand, mode=mode, transport=transport)
    models = {0: house.model}
    flights = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=80, seed=i), f"s{i}")) for i in range(4)]
    for version in (1, 2, 3):
        await asyncio.sleep(0.05)
        models[version] = other(models[version - 1], seed=version)
        await engine.publish(ModuleWeights(models[version]), version)
        assert engine.version == version
    for made in await asyncio.gather(*flights):
        assert len(made.token_ids) == 80
        assert (np.diff(made.versions) >= 0).all()
        assert_exact(made, models)


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20, 1 << 40])
async def test_pb_02_bucket_sizes_change_nothing(house: House, bucket_bytes: int) -> None:
    stand = await house.stand()
    engine = await house.engine(stand, transport=TensorTransport(timeout_s=30, bucket_bytes=bucket_bytes))
    moved = other(house.model, seed=5)
    flight = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=70), "s"))
    await engine.publish(ModuleWeights(moved), 1)
    for name, parameter in stand.model.named_parameters():
        assert torch.equal(parameter, dict(moved.named_parameters())[name])
    labels = [body["weight_version"] for path, body in stand.calls if path == "update_weights_from_tensor"]
    assert [label for label in labels if label] == [labels[len(labels) // 2 - 1], labels[-1]]  # once a publication
    assert_exact(await flight, {0: house.model, 1: moved})


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
async def test_pb_02_the_order_of_parameters_changes_nothing(house: House, order: str) -> None:
    class Ordered(ModuleWeights):
        def tensors(self) -> Iterator[tuple[str, Any]]:
            found = list(super().tensors())
            places = (
                np.arange(len(found))[::-1] if order == "reversed" else np.random.default_rng(0).permutation(len(found))
            )
            return iter([found[place] for place in places])

    stand = await house.stand()
    engine = await house.engine(stand, transport=TensorTransport(timeout_s=30, bucket_bytes=5000))
    moved = other(house.model, seed=5)
    await engine.publish(Ordered(moved), 1)
    assert engine.publications[-1].check == "bytes"
    for name, parameter in stand.model.named_parameters():
        assert torch.equal(parameter, dict(moved.named_parameters())[name])


async def test_a_mismatch_names_the_first_wrong_parameter_and_the_old_version_serves(house: House) -> None:
    stand = await house.stand()
    engine = await house.engine(stand)
    stand.corrupts = "model.layers.0.mlp.down_proj.weight"
    with pytest.raises(EngineError, match=r"model\.layers\.0\.mlp\.down_proj\.weight differs in version 1"):
        await engine.publish(ModuleWeights(other(house.model, seed=1)), 1)
    assert engine.version == 0
    made = await engine.generate(PROMPT, Sampling(max_tokens=10), "s")
    assert set(made.versions.tolist()) == {0}
    assert_exact(made, {0: house.model})


@pytest.mark.parametrize(
    "path",
    ["pause_generation", "begin_weight_update", "update_weights_from_tensor", "end_weight_update", "flush_cache"],
)
async def test_trap_14_a_publication_that_fails_anywhere_leaves_the_old_version(house: House, path: str) -> None:
    stand = await house.stand()
    engine = await house.engine(stand, transport=TensorTransport(timeout_s=30, bucket_bytes=3000), mode="retract")
    flight = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=80), "flight"))
    stand.answers[path] = [(400, {"success": False, "message": "told to fail"})]
    moved = other(house.model, seed=1)
    with pytest.raises(EngineError, match="told to fail"):
        await engine.publish(ModuleWeights(moved), 1)
    assert engine.version == 0
    made = await engine.generate(PROMPT, Sampling(max_tokens=10), "s")
    assert set(made.versions.tolist()) == {0}
    assert_exact(made, {0: house.model})
    await engine.publish(ModuleWeights(moved), 1)
    assert engine.version == 1
    assert_exact(await flight, {0: house.model, 1: moved})


async def test_a_session_that_a_dead_trainer_left_open_is_closed(house: House) -> None:
    stand = await house.stand()
    stand._session = True
    engine = await house.engine(stand, transport=TensorTransport(timeout_s=30))
    assert engine.version == 0


async def test_a_server_that_dies_takes_no_request_with_it(house: House) -> None:
    stands = [await house.stand(), await house.stand()]
    engine = await house.engine(*stands)
    sampling = Sampling(max_tokens=100, seed=4)
    flights = [asyncio.create_task(engine.generate(PROMPT, sampling, f"s{i}")) for i in range(6)]
    await until(lambda: all(any(path == "generate" for path, _ in stand.calls) for stand in stands))
    await asyncio.sleep(0.1)
    await on_background(stands[0].die())
    for made in await asyncio.gather(*flights):
        assert len(made.token_ids) == 100
        assert_exact(made, {0: house.model})
    assert engine.counts.lost >= 3
    await engine.publish(ModuleWeights(other(house.model, seed=1)), 1)
    assert (await engine.generate(PROMPT, Sampling(max_tokens=4), "s0")).versions.tolist() == [1] * 4


async def test_a_server_that_missed_a_version_is_out_until_it_has_caught_up(house: House) -> None:
    stands = [await house.stand(), await house.stand()]
    engine = await house.engine(*stands)
    moved = other(house.model, seed=1)
    refusal = (400, {"success": False, "message": "told to fail"})
    stands[1].answers["update_weights_from_disk"] = [refusal, refusal]
    await engine.publish(ModuleWeights(moved), 1)
    assert engine.version == 1
    before = len([path for path, _ in stands[1].calls if path == "generate"])
    for index in range(4):
        made = await engine.generate(PROMPT, Sampling(max_tokens=3), f"s{index}")
        assert set(made.versions.tolist()) == {1}
    assert len([path for path, _ in stands[1].calls if path == "generate"]) == before
    await until(lambda: stands[1].version == stands[0].version)


async def test_sessions_stay_with_their_server_and_share_the_load(house: House) -> None:
    stands = [await house.stand(), await house.stand()]
    engine = await house.engine(*stands)
    for stand in stands:
        stand.hold.clear()
    flights = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=2), f"s{i}")) for i in range(8)]
    sent = [lambda stand=stand: [b for p, b in stand.calls if p == "generate"] for stand in stands]
    await until(lambda: sum(len(of()) for of in sent) == 8)
    assert [len(of()) for of in sent] == [4, 4]
    for stand in stands:
        stand.hold.set()
    await asyncio.gather(*flights)
    homes = {body["rid"] for body in sent[0]()}
    for _ in range(3):
        await engine.generate(PROMPT, Sampling(max_tokens=2), "s0")
    moved = [len(of()) for of in sent]
    assert sorted(moved) == [4, 7]
    assert homes


async def test_prefixes_of_versions_are_kept_apart(house: House) -> None:
    stand = await house.stand()
    engine = await house.engine(stand)
    await engine.generate(PROMPT, Sampling(max_tokens=2), "s")
    await engine.publish(ModuleWeights(house.model), 1)
    await engine.generate(PROMPT, Sampling(max_tokens=2), "s")
    salts = [body["extra_key"] for path, body in stand.calls if path == "generate"]
    assert len(set(salts)) == 2


@pytest.mark.slow
async def test_a_thousand_requests_are_in_flight(house: House) -> None:
    stand = await house.stand()
    engine = await house.engine(stand)
    stand.hold.clear()
    flights = [asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=1), f"s{i}")) for i in range(1000)]
    await until(lambda: stand.peak >= 1000)
    stand.hold.set()
    made = await asyncio.gather(*flights)
    assert {len(one.token_ids) for one in made} == {1}


async def test_cancelling_frees_the_request(house: House) -> None:
    stand = await house.stand()
    engine = await house.engine(stand)
    flight = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200), "s"))
    await until(lambda: bool(stand._active))
    (rid,) = stand._active
    flight.cancel()
    with pytest.raises(asyncio.CancelledError):
        await flight
    await until(lambda: ("abort_request", {"rid": rid}) in stand.calls and not stand._active)


async def test_an_abort_returns_what_was_sampled(house: House) -> None:
    stand = await house.stand()
    engine = await house.engine(stand)
    flight = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200), "s"))
    await until(lambda: bool(stand._active))
    await asyncio.sleep(0.1)
    await engine.abort("s")
    made = await flight
    assert made.stop is StopReason.ABORT
    assert 0 < len(made.token_ids) < 200
    assert_exact(made, {0: house.model})


async def test_a_server_that_says_nothing_meets_the_deadline(house: House) -> None:
    from sao_gym.engines.local import EngineDeadlines

    stand = await house.stand()
    engine = await house.engine(stand, deadlines=EngineDeadlines(generate_s=0.3))
    stand.hold.clear()
    with pytest.raises(DeadlineError, match="a generation of 5 tokens"):
        await engine.generate(PROMPT, Sampling(max_tokens=5), "s")


async def test_what_the_server_could_not_survive_is_not_sent(house: House) -> None:
    stand = await house.stand()
    engine = await house.engine(stand)
    with pytest.raises(EngineError, match="different tokenizers"):
        await engine.generate(np.array([1, VOCAB], dtype=np.int32), Sampling(max_tokens=2))
    with pytest.raises(EngineError, match="top_p 1"):
        await engine.generate(PROMPT, Sampling(max_tokens=2, top_p=0.9))
    with pytest.raises(EngineError, match="at temperature 1"):
        await engine.score(PROMPT, 0.7)
    assert not [path for path, _ in stand.calls if path == "generate"]


async def test_another_publisher_is_noticed(house: House) -> None:
    stand = await house.stand()
    engine = await house.engine(stand)
    stand.version = "somebody else's"
    with pytest.raises(EngineError, match="did not publish"):
        await engine.generate(PROMPT, Sampling(max_tokens=3), "s")


async def test_a_server_that_was_started_again_serves_once_it_has_the_weights(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers before anybody noticed that it was gone: what its checkpoint samples is nobody's token."""
    monkeypatch.setattr(sglang, "MONITOR_S", 0.05)
    stands = [await house.stand(), await house.stand()]
    engine = await house.engine(*stands)
    await engine.generate(PROMPT, Sampling(max_tokens=3), "s0")
    first = next(stand for stand in stands if any(path == "generate" for path, _ in stand.calls))
    port = first.port
    await on_background(first.die())
    first.version, first.model = "default", make_model(seed=77)
    await on_background(first.start(port))
    for length in (3, 100):  # whole, and streamed
        made = await engine.generate(PROMPT, Sampling(max_tokens=length), "s0")
        assert_exact(made, {0: house.model})
    np.testing.assert_allclose(await engine.score(PROMPT), logprobs_of(house.model, PROMPT.tolist()), atol=1e-5)
    await until(lambda: engine.counters()["servers_in_service"] == 2)
    assert first.version != "default"
    assert engine.counters()["servers_taken_out"] >= 1
    assert_exact(await engine.generate(PROMPT, Sampling(max_tokens=3), "s0"), {0: house.model})


async def test_what_is_counted(house: House) -> None:
    engine = await house.engine(await house.stand())
    await engine.generate(PROMPT, Sampling(max_tokens=3), "s0")
    counted = engine.counters()
    assert isinstance(engine, CountsWork)
    assert (counted["requests"], counted["fed_tokens"], counted["servers_in_service"]) == (1, len(PROMPT), 1)
    assert (counted["lost"], counted["publications_failed"], counted["servers_taken_out"]) == (0, 0, 0)


async def test_a_context_that_no_server_has_is_refused(house: House) -> None:
    stand = await house.stand()
    with pytest.raises(ConfigError, match="takes prompts of at most 256"):
        await house.engine(stand, context_length=1000)
