"""Two hundred episodes while containers, shells and the process that holds them are killed at random: nothing is left."""

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path

import pytest
from sandbox_backends import processes_with, wait_until_gone

from sao_gym.envs.sandboxes.docker import DockerEngine
from sao_gym.envs.sandboxes.docker_reaper import held

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

EPISODES = 200
SIDE_BY_SIDE = 8
TRAINER = """
import asyncio, sys
from sao_gym.envs.sandboxes.docker import DockerEngine, DockerSandbox
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits
from sao_gym.errors import SandboxError

image, marker = sys.argv[1:3]
numbers = iter(map(int, sys.argv[3].split(",")))
SPEC = SandboxSpec(image=image, limits=ShellLimits(memory_bytes=128 * MIB, processes=40))

async def episode(engine, number):
    async with await DockerSandbox.start(engine, SPEC) as box:
        await box.exec(f"sleep 1000.{marker} & (setsid sleep 1000.{marker} & exit 0)")
        if number % 5 == 0:
            await box.exec("kill -9 -1; kill -9 1")
        await box.exec("sleep 0.5")
        await box.exec(f"echo {number}")

async def worker(engine):
    for number in numbers:
        print("start", number, flush=True)
        try:
            await episode(engine, number)
            print("done", number, flush=True)
        except SandboxError as error:
            print("error", number, error, flush=True)

async def main():
    engine = await DockerEngine.connect()
    await asyncio.gather(*(worker(engine) for _ in range(int(sys.argv[4]))))
    await engine.close()

asyncio.run(main())
"""


class Trainers:
    """A process that runs episodes, started again where it left off each time that it is killed."""

    def __init__(self, image: str, marker: str, chance: random.Random, temporary: Path) -> None:
        self.image = image
        self.environment = {**os.environ, "TMPDIR": str(temporary)}
        self.marker = marker
        self.chance = chance
        self.outcomes: Counter[int] = Counter()
        self.errors = 0
        self.lost = 0

    def run(self) -> None:
        """Run every episode to an outcome; the first four processes are killed on their way."""
        for turn in range(EPISODES):
            left = [number for number in range(EPISODES) if not self.outcomes[number]]
            if not left:
                return
            kill_after = self.chance.uniform(0.1, 0.2) * len(left) if turn < 4 else EPISODES + 1
            self.run_once(left, round(kill_after))

    def run_once(self, numbers: list[int], kill_after: int) -> None:
        """One process: the containers that it holds are killed at random, itself after so many outcomes."""
        listed = ",".join(map(str, numbers))
        command = [sys.executable, "-c", TRAINER, self.image, self.marker, listed, str(SIDE_BY_SIDE)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment) as process:
            assert process.stdout is not None
            started: set[int] = set()
            count = 0
            for line in process.stdout:
                kind, number = line.split()[:2]
                if kind == "start":
                    started.add(int(number))
                    continue
                self.outcomes[int(number)] += 1
                self.errors += kind == "error"
                count += 1
                started.discard(int(number))
                if count == kill_after:
                    process.kill()
            self.lost += len(started)


async def kill_containers(engine: DockerEngine, chance: random.Random) -> int:
    """Kill one of the running containers from time to time; returns how many were."""
    killed = 0
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(chance.uniform(0.2, 1.0))
            running = await engine.call(lambda api: [each["Id"] for each in api.containers()])
            if running:
                name = chance.choice(running)
                with contextlib.suppress(Exception):  # it may be gone already
                    await engine.call(lambda api, name=name: api.kill(name))
                    killed += 1
    return killed


async def test_two_hundred_episodes_with_kills_leave_nothing(tmp_path: Path) -> None:
    import docker
    import docker_image

    with contextlib.closing(docker.from_env()) as client:
        if reason := docker_image.missing_image(client):
            pytest.skip(reason)
    chance = random.Random(5)
    marker = str(uuid.uuid4().int)[:12]
    engine = await DockerEngine.connect()
    trainers = Trainers(docker_image.IMAGE, marker, chance, tmp_path)
    killing = asyncio.ensure_future(kill_containers(engine, random.Random(6)))
    await asyncio.to_thread(trainers.run)
    killing.cancel()
    killed = await killing
    assert all(trainers.outcomes[number] == 1 for number in range(EPISODES))  # each accounted for, once
    assert killed >= trainers.errors > 0  # a killed container is an error, and nothing else is
    assert trainers.lost > 0
    wait_until_gone(f"sleep\x001000.{marker}")
    await engine.close()
    engine = await DockerEngine.connect()  # its reaper has run
    assert await engine.call(held) == []
    assert not (await engine.call(lambda api: api.volumes()))["Volumes"]
    await engine.close()
    assert processes_with(marker) == []
    assert list(tmp_path.iterdir()) == []
