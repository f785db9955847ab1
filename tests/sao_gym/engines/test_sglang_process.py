"""Servers that a run starts: they end with it however it ends, and one that cannot start says why."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from sao_gym.clock import SystemClock
from sao_gym.engines.sglang_process import BACK_OFF_S, POLL_S, RESTARTS, OwnServer, ServerCommand
from sao_gym.errors import ConfigError
from sao_gym.loops import on_background


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def living(folder: Path) -> str:
    """A server that listens to nobody, with a child of its own."""
    return script(
        folder,
        f"trap '' TERM\nsleep 600 &\necho $! $$ > {folder}/pids.new\nmv {folder}/pids.new {folder}/pids\nwait\nwait",
    )


async def pids(folder: Path) -> list[int]:
    while not (folder / "pids").exists():
        await asyncio.sleep(0.01)
    return [int(word) for word in (folder / "pids").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_dead(found: list[int]) -> None:
    while any(is_alive(pid) for pid in found):
        await asyncio.sleep(0.02)


def test_the_command_says_what_every_server_needs(tmp_path: Path) -> None:
    command = ServerCommand(python="p", model=tmp_path, log=tmp_path / "log", args=["--x"], gpus=[2, 3])
    words = command.words(7)
    assert words[:3] == ["p", "-m", "sglang.launch_server"]
    assert words[-3:] == ["--tp-size", "2", "--x"]
    assert {"--incremental-streaming-output", "--skip-tokenizer-init"} <= set(words)


@pytest.mark.slow
async def test_closing_ends_the_server_and_its_children(tmp_path: Path) -> None:
    server = OwnServer(ServerCommand(python=living(tmp_path), model=tmp_path, log=tmp_path / "logs" / "server.log"))
    found = await pids(tmp_path)
    assert all(is_alive(pid) for pid in found)
    await server.close()
    await server.close()
    await until_dead(found)


@pytest.mark.slow
async def test_a_run_that_is_killed_leaves_no_server(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, time\n"
        "from sao_gym.engines.sglang_process import OwnServer, ServerCommand\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        f"OwnServer(ServerCommand(python={living(tmp_path)!r}, model=folder, log=folder / 'log'))\n"
        "while not (folder / 'pids').exists(): time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", program], cwd=Path.cwd())
    assert done.returncode == -9
    await until_dead(await pids(tmp_path))


async def test_a_server_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    server = OwnServer(
        ServerCommand(python=script(tmp_path, "echo no such model; exit 3"), model=tmp_path, log=tmp_path / "log")
    )
    with pytest.raises(ConfigError, match=r"(?s)ended while it started.*no such model"):
        await on_background(server.wait_ready(60.0, SystemClock()))
    await server.close()


class Waits:
    """A clock that writes down what is waited for, and waits a little."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0.01)


async def test_a_server_that_ends_by_itself_is_started_again_so_often(tmp_path: Path) -> None:
    python = script(tmp_path, f"echo once >> {tmp_path}/starts\nexit 3")
    server = OwnServer(ServerCommand(python=python, model=tmp_path, log=tmp_path / "log"))
    clock = Waits()
    await server.watch(clock)
    await server.close()
    assert server.restarts == RESTARTS
    assert [slept for slept in clock.slept if slept != POLL_S] == [BACK_OFF_S * 2**n for n in range(RESTARTS)]
    assert (tmp_path / "starts").read_text().split() in (["once"] * (RESTARTS + 1), ["once"] * RESTARTS), (
        "the last one may have been closed before it began"
    )


@pytest.mark.slow
async def test_a_server_that_is_closed_is_not_started_again(tmp_path: Path) -> None:
    server = OwnServer(ServerCommand(python=living(tmp_path), model=tmp_path, log=tmp_path / "log"))
    watching = asyncio.create_task(server.watch(Waits()))
    await pids(tmp_path)
    await server.close()
    await watching
    assert server.restarts == 0
