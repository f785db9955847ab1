"""The sglang engine against the real server on this CPU: exact log-probs, publication in flight, two servers."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_environment import CPU_ARGS, sglang_python
from sglang_exact import PROMPT, assert_exact, logprobs_of, other
from sglang_session import compare, converse

from sao_gym.clock import SystemClock
from sao_gym.engines.sglang import SGLangEngine
from sao_gym.engines.sglang_cargo import Transport
from sao_gym.engines.sglang_disk import DiskTransport
from sao_gym.engines.sglang_group import GroupTransport
from sao_gym.engines.sglang_process import OwnServer, ServerCommand
from sao_gym.engines.sglang_tensor import TensorTransport
from sao_gym.loops import run_blocking
from sao_gym.models import tiny_qwen3, tiny_qwen3_moe
from sao_gym.protocols import Sampling
from sao_gym.stream import StopReason
from sao_gym.weights import ModuleWeights

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1500)]
VOCAB = 64


def dense() -> Any:
    return tiny_qwen3(VOCAB, 2, 64, context_length=512).eval()


def started(folder: Path, name: str, model: Any, *extra: str) -> OwnServer:
    """A server of `model`, whose checkpoint would like other sampling than what is asked for (trap 34)."""
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.do_sample = True
    model.generation_config.top_k = 3
    model.save_pretrained(folder / name)
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    command = ServerCommand(
        python=sglang_python(), model=folder / name, log=folder / f"{name}.log", args=[*CPU_ARGS, *extra]
    )
    return OwnServer(command)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[OwnServer]]:
    folder = tmp_path_factory.mktemp("servers")
    made = [started(folder, f"dense-{index}", dense()) for index in range(2)]
    for server in made:
        run_blocking(server.wait_ready(600.0, SystemClock()))
    yield made
    for server in made:
        run_blocking(server.close())


def transport(kind: str, folder: Path) -> Transport:
    if kind == "tensor":
        return TensorTransport(timeout_s=60, bucket_bytes=50_000)
    if kind == "distributed":
        return GroupTransport("127.0.0.1", name="test", backend="gloo", timeout_s=60, bucket_bytes=50_000)
    return DiskTransport(folder, timeout_s=60, shard_bytes=50_000)


@pytest.fixture
async def engine(
    servers: list[OwnServer], tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[SGLangEngine]:
    kind, mode, count = getattr(request, "param", ("disk", "retract", 1))
    made = SGLangEngine([server.url for server in servers[:count]], dense(), transport(kind, tmp_path), mode=mode)
    await made.start(ModuleWeights(dense()), 0)
    yield made
    await made.close()


def test_the_server_answers_as_it_did_when_it_was_recorded(servers: list[OwnServer]) -> None:
    compare(run_blocking(converse(servers[0].url)))


async def test_log_probs_are_the_learners(engine: SGLangEngine) -> None:
    model = dense()
    assert engine.publications[0].check == "bytes"
    made = await engine.generate(PROMPT, Sampling(max_tokens=150, temperature=0.7, seed=3), "s")
    assert made.stop is StopReason.LENGTH
    assert_exact(made, {0: model}, temperature=0.7)
    np.testing.assert_allclose(await engine.score(PROMPT), logprobs_of(model, PROMPT.tolist()), atol=1e-5)
    stop = int(made.token_ids[5])
    stopped = await engine.generate(PROMPT, Sampling(max_tokens=100, stop_token_ids=(stop,)), "s")
    assert stopped.stop is (StopReason.STOP if stopped.token_ids[-1] == stop else StopReason.LENGTH)
    assert stop not in stopped.token_ids[:-1]


@pytest.mark.parametrize(
    "engine",
    [("disk", "retract", 1), ("tensor", "retract", 1), ("distributed", "retract", 1), ("distributed", "abort", 1)],
    indirect=True,
    ids=lambda asked: f"{asked[0]}-{asked[1]}",
)
async def test_sixty_four_requests_go_on_through_publications(engine: SGLangEngine) -> None:
    models = {0: dense()}
    flights = [
        asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=120, seed=i), f"s{i}")) for i in range(64)
    ]
    for version in range(1, 6):
        await asyncio.sleep(0.3)
        models[version] = other(models[version - 1], seed=version)
        await engine.publish(ModuleWeights(models[version]), version)
    made = await asyncio.gather(*flights)
    assert {len(one.token_ids) for one in made} == {120}
    assert len({int(version) for one in made for version in one.versions}) > 1
    for one in made:
        assert_exact(one, models)


@pytest.mark.parametrize("engine", [("tensor", "in_place", 1)], indirect=True)
async def test_kept_keys_and_values_keep_requests_and_their_versions(engine: SGLangEngine) -> None:
    flight = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200), "s"))
    await asyncio.sleep(0.5)
    moved = other(dense(), seed=1)
    await engine.publish(ModuleWeights(moved), 1)
    made = await flight
    assert len(made.token_ids) == 200
    assert sorted(set(made.versions.tolist())) == [0, 1]
    fresh = await engine.generate(PROMPT, Sampling(max_tokens=20), "s")
    assert_exact(fresh, {1: moved})


async def test_a_mixture_of_experts_is_exact_and_tells_its_experts(tmp_path: Path) -> None:
    model = tiny_qwen3_moe(VOCAB, 2, 64, context_length=512).eval()
    server = started(tmp_path, "moe", model, "--enable-return-routed-experts")
    try:
        await server.wait_ready(600.0, SystemClock())
        engine = SGLangEngine([server.url], model, TensorTransport(timeout_s=60), mode="retract")
        try:
            await engine.start(ModuleWeights(model), 0)
            moved = other(model, seed=2)
            await engine.publish(ModuleWeights(moved), 1)
            made = await engine.generate(PROMPT, Sampling(max_tokens=30), "s")
            assert_exact(made, {1: moved})
            assert made.extras["routed_experts"].shape == (30, 2, 2)
        finally:
            await engine.close()
    finally:
        await server.close()


@pytest.mark.parametrize("engine", [("distributed", "retract", 2)], indirect=True)
async def test_kill_9_of_one_of_two_servers_costs_no_request(engine: SGLangEngine, servers: list[OwnServer]) -> None:
    models = {0: dense(), 1: other(dense(), seed=1)}
    flights = [
        asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=150, seed=i), f"s{i}")) for i in range(16)
    ]
    await asyncio.sleep(1.0)
    found = subprocess.run(["pgrep", "-f", f"launch_server.*{servers[1].url.rsplit(':', 1)[1]}"], capture_output=True)
    for pid in found.stdout.split():
        if b"keeper" not in Path(f"/proc/{int(pid)}/cmdline").read_bytes():
            os.kill(int(pid), signal.SIGKILL)
    made = await asyncio.gather(*flights)
    assert {len(one.token_ids) for one in made} == {150}
    assert engine.counts.lost > 0
    for one in made:
        assert_exact(one, models)
    await engine.publish(ModuleWeights(models[1]), 1)
    assert_exact(await engine.generate(PROMPT, Sampling(max_tokens=10), "new"), models)
