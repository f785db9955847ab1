"""A router's address in place of the servers': they are found, and asked themselves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from sglang_exact import PROMPT, assert_exact
from sglang_standin import StandIn

from sao_gym.engines.sglang import SGLangEngine
from sao_gym.engines.sglang_disk import DiskTransport
from sao_gym.errors import ConfigError, EngineError
from sao_gym.loops import on_background
from sao_gym.models import tiny_qwen3
from sao_gym.protocols import Sampling
from sao_gym.weights import ModuleWeights

MODEL = tiny_qwen3(40, 1, 32, heads=2, kv_heads=1, context_length=256).eval()


@pytest.fixture
async def router() -> AsyncIterator[Callable[..., Any]]:
    """Serves a list of workers in the form of sglang-router 0.3.2."""
    runners: list[web.AppRunner] = []

    async def make(*workers: Any) -> str:
        async def listed(_: web.Request) -> web.Response:
            return web.json_response({"workers": list(workers), "total": len(workers), "stats": {}})

        app = web.Application()
        app.router.add_get("/workers", listed)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        site = web.TCPSite(runners[-1], "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]

    yield make
    for runner in runners:
        await runner.cleanup()


def worker(url: str, kind: str = "regular", *, healthy: bool = True) -> dict[str, Any]:
    return {
        "id": url,
        "url": url,
        "model_id": "m",
        "priority": 50,
        "worker_type": kind,
        "is_healthy": healthy,
        "load": 0,
    }


def engine_at(url: str, folder: Path) -> SGLangEngine:
    return SGLangEngine([url], MODEL, DiskTransport(folder, timeout_s=30))


async def test_the_servers_behind_a_router_take_weights_and_requests(
    router: Callable[..., Any], tmp_path: Path
) -> None:
    stands = [StandIn(MODEL), StandIn(MODEL)]
    for stand in stands:
        await on_background(stand.start())
    engine = engine_at(await router(*(worker(stand.url) for stand in stands)), tmp_path)
    await engine.start(ModuleWeights(MODEL), 0)
    asked = (engine.generate(PROMPT, Sampling(max_tokens=3), f"s{index}") for index in range(4))
    for made in await asyncio.gather(*asked):
        assert_exact(made, {0: MODEL})
    assert {report.url for report in engine.publications} == {stand.url for stand in stands}
    assert all(any(path == "generate" for path, _ in stand.calls) for stand in stands)
    await engine.close()
    for stand in stands:
        await on_background(stand.die())


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([], "has no workers"),
        ([worker("http://a:1", "prefill")], "http://a:1 as a prefill worker"),
        ([worker("http://a:1", healthy=False)], "http://a:1 does not answer"),
    ],
    ids=["none", "prefill", "sick"],
)
async def test_workers_that_cannot_be_used_are_named(
    router: Callable[..., Any], tmp_path: Path, workers: list[Any], said: str
) -> None:
    engine = engine_at(await router(*workers), tmp_path)
    with pytest.raises(ConfigError, match=said):
        await engine.start(ModuleWeights(MODEL), 0)
    await engine.close()


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [(401, "no key", "does not tell its workers"), (200, "[]", "a form that is not known here")],
)
async def test_a_router_that_tells_nothing_is_no_server(tmp_path: Path, status: int, text: str, said: str) -> None:
    async def listed(_: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_get("/workers", listed)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine = engine_at(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", tmp_path)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=said):
        await engine.start(ModuleWeights(MODEL), 0)
    await engine.close()
    await runner.cleanup()


async def test_nobody_at_the_address(tmp_path: Path) -> None:
    engine = engine_at("http://127.0.0.1:9", tmp_path)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await engine.start(ModuleWeights(MODEL), 0)
    await engine.close()
