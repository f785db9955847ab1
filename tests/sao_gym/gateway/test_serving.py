"""Where a gateway listens: loopback, a unix socket, a forwarder inside a sandbox; and what is missing is said."""

import asyncio
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from gateway_world import CHAT, SAMPLING, counting_engine, episode, user

from sao_gym.errors import ConfigError
from sao_gym.gateway import Gateway, forwarder

BODY = {"messages": [user("hi")]}


@pytest.fixture
def gateway() -> Gateway:
    return Gateway(counting_engine(), CHAT)


async def test_a_port_of_loopback(gateway: Gateway) -> None:
    opened = gateway.open(episode(), sampling=SAMPLING)
    with pytest.raises(ConfigError, match="not serving"):
        _ = opened.base_url
    async with gateway.serving() as address, httpx.AsyncClient(trust_env=False) as client:
        assert opened.base_url.startswith(f"http://127.0.0.1:{address.port}/s/")
        for path in (opened.base_url, opened.auxiliary_url):
            assert (await client.post(f"{path}/chat/completions", json=BODY)).status_code == 200
        with pytest.raises(ConfigError, match="cannot listen"):
            async with gateway.serving(port=address.port or 0):
                pass
    with socket.socket() as left:  # the port is free again
        left.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        left.bind(("127.0.0.1", address.port or 0))
    assert (await opened.close()).info["calls"] == 1


async def test_a_unix_socket_and_the_forwarder_inside_a_sandbox(gateway: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "gateway.sock"
    opened = gateway.open(episode(), sampling=SAMPLING)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with gateway.serving(uds=path) as address:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600  # noqa: PTH116
        transport = httpx.AsyncHTTPTransport(uds=str(path))
        async with httpx.AsyncClient(transport=transport) as client:
            assert (await client.post(f"{opened.base_url}/chat/completions", json=BODY)).status_code == 200
        command = [sys.executable, "-I", "-S", str(forwarder.__file__), str(port), str(path)]
        process = await asyncio.create_subprocess_exec(*command)
        try:
            async with httpx.AsyncClient(trust_env=False) as client:
                await reached(client, port)
                asked = [
                    client.post(f"http://127.0.0.1:{port}{opened.path}/chat/completions", json=BODY) for _ in range(9)
                ]
                assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        finally:
            process.terminate()
            await process.wait()
    assert address.uds == path
    assert not path.exists()
    assert (await opened.close()).info["calls"] == 10


async def reached(client: httpx.AsyncClient, port: int) -> None:
    while True:
        try:
            await client.get(f"http://127.0.0.1:{port}/v1/models")
            return
        except httpx.ConnectError:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "example.org", "::"])
async def test_nothing_that_others_reach(gateway: Gateway, host: str) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        async with gateway.serving(host=host):
            pass


async def test_a_socket_that_cannot_be_made(gateway: Gateway, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        async with gateway.serving(uds=tmp_path / "none" / "gateway.sock"):
            pass


async def test_two_addresses_one_gateway(gateway: Gateway, tmp_path: Path) -> None:
    async with gateway.serving() as outer:
        async with gateway.serving(uds=tmp_path / "s"):
            assert gateway.address.uds is not None
        assert gateway.address == outer


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_what_is_missing_is_named(missing: str) -> None:
    code = f"""
import asyncio, sys
sys.modules[{missing!r}] = None
from sao_gym.errors import ConfigError
from sao_gym.gateway.app import make_app
from sao_gym.gateway.server import served
from sao_gym.gateway import Gateway
async def serve():
    gateway = Gateway(None, None)
    async with gateway.serving():
        pass
try:
    asyncio.run(serve())
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "the gateway needs starlette and uvicorn: pip install 'sao-gym[gateway]'"
