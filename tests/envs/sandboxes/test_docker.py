"""Containers against a real engine: what they are given, how they end, and that nothing of them stays."""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_backends import wait_until_gone, wait_until_there

from sao_gym.envs.sandboxes import docker as backend
from sao_gym.envs.sandboxes.docker import DockerEngine, DockerSandbox
from sao_gym.envs.sandboxes.docker_engine import MISSING_PACKAGE
from sao_gym.envs.sandboxes.docker_reaper import EPISODE, OWNER, RUN, held
from sao_gym.envs.sandboxes.owner import owner
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits
from sao_gym.errors import SandboxError, SandboxUnavailableError

pytestmark = pytest.mark.docker

HOLDER = """
import asyncio, sys
from sao_gym.envs.sandboxes.docker import DockerEngine, DockerSandbox
from sao_gym.envs.sandboxes.spec import SandboxSpec

async def main():
    engine = await DockerEngine.connect()
    if "race" in sys.argv:
        print("starting", flush=True)
    box = await DockerSandbox.start(engine, SandboxSpec(image=sys.argv[1]))
    await box.exec(f"sleep 1000.{sys.argv[2]} & setsid sh -c 'sleep 1000.{sys.argv[2]} & exit' & exit 0")
    print(box.name, flush=True)
    await box.exec("sleep 600", timeout_s=600)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def image() -> str:
    import docker
    import docker_image

    with contextlib.closing(docker.from_env()) as client:
        if reason := docker_image.missing_image(client):
            pytest.skip(reason)
    return str(docker_image.IMAGE)


@pytest.fixture
async def engine(image: str) -> AsyncIterator[DockerEngine]:
    engine = await DockerEngine.connect()
    yield engine
    await engine.close()


@pytest.fixture
async def box(engine: DockerEngine, image: str) -> AsyncIterator[DockerSandbox]:
    box = await DockerSandbox.start(engine, SandboxSpec(image=image))
    yield box
    await box.close()


async def own_containers(engine: DockerEngine) -> list[tuple[str, str]]:
    return await engine.call(lambda api: held(api, is_ours=True))


async def containers_of(engine: DockerEngine, name: str) -> list[Any]:
    return list(await engine.call(lambda api: api.containers(all=True, filters={"name": name})))


# ---- what a container is given


async def test_bounds_rights_and_labels_are_those_of_the_spec(engine: DockerEngine, image: str) -> None:
    limits = ShellLimits(memory_bytes=100 * MIB, processes=33, cpus=0.5, disk_bytes=50 * MIB)
    spec = SandboxSpec(image=image, limits=limits, label="episode-7", env={"A": "it's"}, workdir="/some/where")
    box = await DockerSandbox.start(engine, spec, run="run-3")
    facts = await engine.call(lambda api: api.inspect_container(box.name))
    host, config = facts["HostConfig"], facts["Config"]
    assert (host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (100 * MIB, 100 * MIB, 33)
    assert host["NanoCpus"] == 500_000_000
    assert host["NetworkMode"] == "none"
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["LogConfig"]["Type"] == "none"
    assert not host["Privileged"]
    assert not host["Binds"]
    assert config["StdinOnce"]
    assert config["Labels"][OWNER] == str(owner())
    assert (config["Labels"][RUN], config["Labels"][EPISODE]) == ("run-3", "episode-7")
    shown = await box.exec("pwd; echo $A; grep CapBnd /proc/self/status; ls /sys/class/net; ulimit -c")
    assert shown.stdout == "/some/where\nit's\nCapBnd:\t0000000000000000\nlo\n0\n"
    await box.close()


async def test_another_user_can_write_to_the_workdir(engine: DockerEngine, image: str) -> None:
    box = await DockerSandbox.start(engine, SandboxSpec(image=image, user="65534:65534", workdir="/a/b"))
    await box.write("c/file", b"x")
    assert (
        await box.exec("id -u; pwd; ls c; touch /root/x 2>/dev/null || echo no")
    ).stdout == "65534\n/a/b\nfile\nno\n"
    await box.close()


@pytest.fixture
async def special(engine: DockerEngine, image: str) -> AsyncIterator[str]:
    """The image with a user and a volume of its own."""
    name = "sao-gym-test-special"
    changes = {"User": "nobody", "Volumes": {"/data": {}}}

    def make(api: Any) -> None:
        made = api.create_container(image, "true")
        api.commit(made, repository=name, conf=changes)
        api.remove_container(made)

    await engine.call(make)
    yield name
    await engine.call(lambda api: api.remove_image(name))


async def test_an_images_user_and_volumes_are_kept_and_bounded(engine: DockerEngine, special: str) -> None:
    limits = ShellLimits(disk_bytes=5 * MIB)
    box = await DockerSandbox.start(engine, SandboxSpec(image=special, limits=limits))
    assert (await box.exec("id -un; touch here /data/there && echo ok")).stdout == "nobody\nok\n"
    full = await box.exec("for i in 1 2 3; do head -c 4M /dev/zero > /data/$i; done")
    assert "No space left on device" in full.stderr
    assert not (await engine.call(lambda api: api.volumes()))["Volumes"]
    await box.close()


async def test_the_shell_outlives_whatever_a_command_kills(box: DockerSandbox) -> None:
    for command in ("kill -9 -1", "kill -9 1; kill -TERM 1", "pkill -9 bash; pkill -STOP bash", "kill -9 $PPID"):
        await box.exec(command, timeout_s=5)
        assert (await box.exec("echo alive")).stdout == "alive\n", command
    assert await box.is_alive()


async def test_memory_taken_by_a_command_ends_the_command_alone(engine: DockerEngine, image: str) -> None:
    spec = SandboxSpec(image=image, limits=ShellLimits(memory_bytes=64 * MIB))
    box = await DockerSandbox.start(engine, spec)
    for _ in range(3):
        result = await box.exec(["python3", "-c", "x = bytearray(500 << 20); print(len(x))"], timeout_s=20)
        assert (result.stdout, result.exit_code) == ("", 137)
        files = await box.exec("for f in /tmp/x /dev/shm/x; do head -c 500M /dev/zero > $f; done; rm /tmp/x /dev/shm/x")
        assert "No space left on device" in files.stderr
        assert (await box.exec("echo alive")).stdout == "alive\n"
    await box.close()


# ---- the disk


async def test_a_command_that_fills_the_disk_is_stopped_and_may_clean_up(engine: DockerEngine, image: str) -> None:
    limits = ShellLimits(disk_bytes=20 * MIB)
    box = await DockerSandbox.start(engine, SandboxSpec(image=image, limits=limits))
    one_file = await box.exec("head -c 30M /dev/zero > one")
    assert one_file.exit_code != 0
    assert int((await box.exec("stat -c %s one; rm one")).stdout) == 20 * MIB
    many = await box.exec(
        "for ((i = 0; i < 600; i++)); do head -c 2M /dev/zero > many.$i; sleep 0.1; done", timeout_s=90
    )
    assert many.exit_code == 137
    assert many.stderr == "[stopped: more than 20 MiB written to disk]\n"
    assert (await box.exec("rm many.*; sleep 1.5; ls")).exit_code == 0
    assert (await box.exec("head -c 60M /dev/zero > /tmp/x")).exit_code != 0
    assert (await box.exec("head -c 90M /dev/zero > /dev/shm/x")).exit_code != 0
    await box.close()


async def test_a_background_writer_costs_the_sandbox(
    engine: DockerEngine, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "LOOK_S", 0.1)
    box = await DockerSandbox.start(engine, SandboxSpec(image=image, limits=ShellLimits(disk_bytes=10 * MIB)))
    await box.exec("for ((i = 0; i < 100; i++)); do head -c 1M /dev/zero > many.$i; sleep 0.05; done &")
    until = time.monotonic() + 60
    while await box.is_alive() and time.monotonic() < until:
        await asyncio.sleep(0.1)
    with pytest.raises(SandboxError, match="a sandbox was ended: more than 10 MiB written to disk"):
        await box.exec("true")
    await box.close()


# ---- how it ends


async def test_close_ends_everything_also_in_the_middle_of_a_command(engine: DockerEngine, image: str) -> None:
    box = await DockerSandbox.start(engine, SandboxSpec(image=image))
    marker = uuid.uuid4().int % 10**9
    await box.exec(f"sleep 1000.{marker} & setsid sh -c 'sleep 1000.{marker} & exit'")
    wait_until_there(f"sleep\x001000.{marker}", 2)
    running = asyncio.ensure_future(box.exec("sleep 100", timeout_s=100))
    await asyncio.wait({running}, timeout=0.2)
    await asyncio.gather(box.close(), box.close())
    with pytest.raises(SandboxError, match="this sandbox is closed"):
        await running
    wait_until_gone(f"1000.{marker}")
    assert await own_containers(engine) == []
    await box.close()
    with pytest.raises(SandboxError, match="closed"):
        await box.exec("true")
    assert not await box.is_alive()


async def test_the_connections_end_removes_what_was_not_closed(image: str) -> None:
    engine = await DockerEngine.connect()
    boxes = [await DockerSandbox.start(engine, SandboxSpec(image=image)) for _ in range(2)]
    await engine.close()
    await engine.close()
    other = await DockerEngine.connect()
    assert await own_containers(other) == []
    for box in boxes:
        with pytest.raises(SandboxError):
            await box.exec("true")
        await box.close()
    await other.close()


async def test_a_container_killed_from_outside_is_a_sandbox_error(box: DockerSandbox, engine: DockerEngine) -> None:
    running = asyncio.ensure_future(box.exec("sleep 100", timeout_s=100))
    await asyncio.wait({running}, timeout=0.2)
    await engine.call(lambda api: api.kill(box.name))
    with pytest.raises(SandboxError, match=r"^a container ended by itself \(exit code 137\)$") as caught:
        await asyncio.wait_for(running, 10)
    assert caught.value.kind == "sandbox"
    assert not await box.is_alive()
    await box.close()
    assert await own_containers(engine) == []


async def test_a_start_that_is_given_up_leaves_no_container(engine: DockerEngine, image: str) -> None:
    for delay_s in (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.5):
        start = asyncio.ensure_future(DockerSandbox.start(engine, SandboxSpec(image=image)))
        await asyncio.wait({start}, timeout=delay_s)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await start).close()
    short = SandboxSpec(image=image, limits=ShellLimits(startup_timeout_s=0.05))
    with pytest.raises(SandboxError, match=r"did not start within 0\.05 s"):
        await DockerSandbox.start(engine, short)
    await engine.close()
    other = await DockerEngine.connect()
    assert await own_containers(other) == []
    await other.close()


async def test_sixteen_work_side_by_side(engine: DockerEngine, image: str) -> None:
    boxes = await asyncio.gather(*[DockerSandbox.start(engine, SandboxSpec(image=image)) for _ in range(16)])
    answers = await asyncio.gather(*[box.exec(f"sleep 0.2; echo {number}") for number, box in enumerate(boxes)])
    assert [answer.stdout for answer in answers] == [f"{number}\n" for number in range(16)]
    await asyncio.gather(*[box.close() for box in boxes])
    assert await own_containers(engine) == []


# ---- the holder dies


@pytest.fixture
def hold(image: str) -> Iterator[Any]:
    started: list[subprocess.Popen[str]] = []

    def start(marker: str, *more: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", HOLDER, image, marker, *more]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


async def test_a_killed_holder_leaves_no_process_and_the_next_connection_no_container(hold: Any, image: str) -> None:
    marker = str(uuid.uuid4().int % 10**9)
    holder = hold(marker)
    name = holder.stdout.readline().strip()
    wait_until_there(f"sleep\x001000.{marker}", 2)
    engine = await DockerEngine.connect()
    assert len(await containers_of(engine, name)) == 1  # of a living owner: not touched
    os.kill(holder.pid, signal.SIGKILL)
    wait_until_gone(f"sleep\x001000.{marker}")
    await engine.close()
    engine = await DockerEngine.connect()
    assert await containers_of(engine, name) == []
    await engine.close()


async def test_a_holder_that_forgets_to_close_leaves_no_container(engine: DockerEngine, image: str) -> None:
    ending = HOLDER.replace('await box.exec("sleep 600", timeout_s=600)', "")
    command = [sys.executable, "-c", ending, image, "1"]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert await containers_of(engine, ended.stdout.strip()) == []


async def test_a_holder_killed_while_it_starts_leaves_nothing(hold: Any, image: str) -> None:
    random_s = random.Random(0)
    marker = str(uuid.uuid4().int % 10**9)
    owners = []
    for _ in range(10):
        holder = hold(marker, "race")
        holder.stdout.readline()
        time.sleep(random_s.random() * 0.4)
        holder.kill()
        holder.wait()
        owners.append(holder.pid)
    wait_until_gone(f"sleep\x001000.{marker}")
    time.sleep(1)  # a request that was under way when its sender died may still make a container
    engine = await DockerEngine.connect()
    left = await engine.call(held)
    assert [text for _, text in left if int(text.split("/")[3]) in owners] == []
    await engine.close()


# ---- what is not there


async def test_an_image_that_is_not_there_is_one_sentence(engine: DockerEngine) -> None:
    with pytest.raises(SandboxUnavailableError) as caught:
        await DockerSandbox.start(engine, SandboxSpec(image="nobody/has-this:1"))
    assert str(caught.value) == (
        "the Docker engine has no image 'nobody/has-this:1'; get it with `docker pull nobody/has-this:1`, "
        "or build or import it"
    )


async def test_an_image_without_bash_is_refused_and_leaves_nothing(engine: DockerEngine, tmp_path: Path) -> None:
    import tarfile

    with tarfile.open(tmp_path / "empty.tar", "w") as archive:
        archive.add(__file__, "file")
    name = "sao-gym-test-empty"
    await engine.call(lambda api: api.import_image(str(tmp_path / "empty.tar"), repository=name))
    with pytest.raises(SandboxError, match="bash"):
        await DockerSandbox.start(engine, SandboxSpec(image=name))
    assert await own_containers(engine) == []
    await engine.call(lambda api: api.remove_image(name))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("unix:///not/there.sock", "no Docker engine answers at unix:///not/there.sock"),
        ("tcp://127.0.0.1:9", "no Docker engine answers at tcp://127.0.0.1:9"),
        ("ssh://somewhere", "attached shells do not work over ssh"),
        ("nonsense://x", "no Docker engine answers at nonsense://x"),
    ],
)
async def test_an_engine_that_is_not_there_is_one_sentence(url: str, words: str) -> None:
    with pytest.raises(SandboxUnavailableError, match=words) as caught:
        await DockerEngine.connect(url)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(SandboxUnavailableError) as caught:
        asyncio.run(DockerEngine.connect())
    assert str(caught.value) == MISSING_PACKAGE


# ---- the engine is reached with TLS


@contextlib.asynccontextmanager
async def tls_in_front_of_the_engine(folder: Path) -> AsyncIterator[str]:
    """Address of a server that speaks TLS and passes all on to the engine's socket; certificates lie in `folder`."""
    socket_path = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if not socket_path.startswith("unix://"):
        pytest.skip("the engine is not at a socket of this machine")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names, *files]
    subprocess.run(command, check=True, capture_output=True)
    shutil.copy(folder / "cert.pem", folder / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(writer):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = await asyncio.open_unix_connection(socket_path.removeprefix("unix://"))
        await asyncio.gather(copy(reader, far), copy(near, writer))

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield f"tcp://localhost:{server.sockets[0].getsockname()[1]}"


async def test_a_shell_works_over_tls(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with tls_in_front_of_the_engine(tmp_path) as url:
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
        for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):  # they would come before it
            monkeypatch.delenv(name, raising=False)
        engine = await DockerEngine.connect(url)
        async with await DockerSandbox.start(engine, SandboxSpec(image=image)) as box:
            assert (await box.exec("echo hello")).stdout == "hello\n"
            data = random.Random(1).randbytes(2_000_000)
            await box.write("file", data)
            assert await box.read("file") == data
            assert (await box.exec("sleep 60", timeout_s=0.5)).timed_out
        assert await own_containers(engine) == []
        await engine.close()
