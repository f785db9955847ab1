"""The e2b backend by the real SDK against a stand-in of its service; what every backend promises is in test_contract."""

import asyncio
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest
from e2b_stand_in import Machine, StandIn
from sandbox_backends import SPEC, wait_until_gone

from sao_gym.envs.sandboxes.backends import open_backend
from sao_gym.envs.sandboxes.e2b import E2BSandbox
from sao_gym.envs.sandboxes.e2b_service import reap
from sao_gym.envs.sandboxes.owner import owner
from sao_gym.envs.sandboxes.pool import SandboxPool
from sao_gym.envs.sandboxes.pool_records import PoolSettings
from sao_gym.envs.sandboxes.spec import SandboxSpec
from sao_gym.errors import SandboxError, SandboxUnavailableError

pytestmark = pytest.mark.usefixtures("e2b_service")


def machine_of(service: StandIn, box: E2BSandbox) -> Machine:
    return service.machines[box.sandbox_id]


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


# ---- what is asked of the service


async def test_a_sandbox_is_labelled_cut_from_the_network_and_of_the_template(e2b_service: StandIn) -> None:
    async with await E2BSandbox.start(replace(SPEC, image="no-account", label="episode-1")) as box:
        body = machine_of(e2b_service, box).body
        assert body["templateID"] == "no-account"
        assert body["allow_internet_access"] is False
        assert body["metadata"]["sao-gym.owner"] == str(owner())
        assert body["metadata"]["sao-gym.episode"] == "episode-1"
        assert (await box.exec("id -un")).stdout == "root\n"  # where a template has no account for it
        assert len(box.guarantees) == 2
    async with await E2BSandbox.start(SandboxSpec(network=True)) as box:
        assert machine_of(e2b_service, box).body["allow_internet_access"] is True
        assert machine_of(e2b_service, box).body["templateID"] == "base"


async def test_commands_have_no_rights_and_their_shell_is_the_first_process() -> None:
    async with await E2BSandbox.start() as box:
        shown = await box.exec(
            "grep -h Cap /proc/self/status; readlink /proc/1/exe; kill -9 1; head -c 1 /proc/1/environ"
        )
        for line in shown.stdout.splitlines()[:5]:
            assert line.endswith("\t0000000000000000")
        assert shown.exit_code == 1
        assert await box.is_alive()
        await box.write("mine", b"1")
        assert (await box.exec("stat -c %U mine; id -un")).stdout.split() == 2 * (
            await box.exec("id -un")
        ).stdout.split()
        assert await box.read("mine") == b"1"


async def test_a_user_may_be_asked_for() -> None:
    async with await E2BSandbox.start(SandboxSpec(user="root")) as box:
        assert (await box.exec("id -un; touch /root/x && echo may")).stdout == "root\nmay\n"
    with pytest.raises(SandboxUnavailableError, match="no user nobody-here in this template"):
        await E2BSandbox.start(SandboxSpec(user="nobody-here"))


# ---- what fails is told apart


async def test_no_key_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("E2B_API_KEY")
    with pytest.raises(SandboxUnavailableError, match=r"^the e2b sandbox needs a key: set E2B_API_KEY"):
        await open_backend("e2b")


async def test_a_key_that_is_refused_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_1111")
    with pytest.raises(SandboxUnavailableError, match=r"refuses the key in E2B_API_KEY"):
        await E2BSandbox.start()


async def test_no_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "e2b", None)
    with pytest.raises(SandboxUnavailableError, match=r"pip install 'sao-gym\[e2b\]'"):
        await E2BSandbox.start()


async def test_a_template_that_is_not_there_is_named() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"template 'no-such'.*that your account has"):
        await E2BSandbox.start(SandboxSpec(image="no-such"))


async def test_a_service_that_does_not_answer_is_an_error_of_the_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("E2B_CONNECTION_RETRIES", "0")
    with pytest.raises(SandboxError, match="e2b service failed") as caught:
        await E2BSandbox.start()
    assert caught.value.kind == "sandbox"


async def test_a_sandbox_that_is_gone_is_an_error_and_not_a_result(e2b_service: StandIn) -> None:
    box = await E2BSandbox.start()
    running = asyncio.ensure_future(box.exec("echo x; sleep 60", timeout_s=60))
    await asyncio.wait({running}, timeout=0.3)
    await on_loop(e2b_service, box.sandbox_id)
    with pytest.raises(SandboxError, match="ended by itself"):
        await asyncio.wait_for(running, 20)
    for call in (box.exec("true"), box.read("/etc/passwd"), box.write("/tmp/x", b"")):
        with pytest.raises(SandboxError):
            await call
    assert not await box.is_alive()
    await box.close()
    await box.close()


async def on_loop(service: StandIn, name: str) -> None:
    """End a sandbox behind its holder's back."""
    assert service.loop is not None
    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(service.remove(name), service.loop))


# ---- nothing stays


async def test_close_ends_the_sandbox_at_the_service(e2b_service: StandIn) -> None:
    marker = str(uuid.uuid4().int)[:12]
    box = await E2BSandbox.start()
    name, folder = box.sandbox_id, machine_of(e2b_service, box).folder
    await box.exec(f"sleep 1000.{marker} & setsid sleep 1000.{marker} & exit 0")
    await box.close()
    assert name not in e2b_service.machines
    wait_until_gone(marker)
    assert not folder.exists()


async def test_close_ends_though_a_request_swallows_its_cancellation(
    e2b_service: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await E2BSandbox.start()
    send, under_way = box._shell.send_stdin, asyncio.Event()

    async def answered_just_then(data: bytes) -> None:
        await send(data)
        under_way.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return

    monkeypatch.setattr(box._shell, "send_stdin", answered_just_then)
    asking = asyncio.ensure_future(box.is_alive())
    await under_way.wait()
    async with asyncio.timeout(10):
        await box.close()
    await asking
    assert box.sandbox_id not in e2b_service.machines


async def test_a_sandbox_is_prolonged_while_it_is_held_and_ends_by_itself_when_it_is_not(e2b_service: StandIn) -> None:
    box = await E2BSandbox.start(lifetime_s=1)
    name = box.sandbox_id
    begin = time.monotonic()
    await until(lambda: e2b_service.requests.count(f"POST /sandboxes/{name}/timeout") >= 5)
    assert time.monotonic() - begin > 1
    assert (await box.exec("echo alive")).stdout == "alive\n"
    for task in box._tasks:  # as if its holder had died
        task.cancel()
    await until(lambda: name not in e2b_service.machines)
    await box.close()


async def test_a_start_that_is_given_up_leaves_no_sandbox(e2b_service: StandIn) -> None:
    before = set(e2b_service.machines)
    for delay_s in (0, 0.01, 0.05, 0.1, 0.2):
        starting = asyncio.ensure_future(E2BSandbox.start())
        await asyncio.wait({starting}, timeout=delay_s)
        starting.cancel()
        await asyncio.wait({starting})
        if not starting.cancelled():
            await starting.result().close()
    assert set(e2b_service.machines) == before


async def test_the_reaper_ends_sandboxes_of_the_dead_and_no_others(e2b_service: StandIn) -> None:
    code = "from sao_gym.envs.sandboxes.owner import owner; print(owner())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    boxes = [await E2BSandbox.start() for _ in range(3)]
    machines = [machine_of(e2b_service, box) for box in boxes]
    machines[0].body["metadata"]["sao-gym.owner"] = dead
    machines[1].body["metadata"].pop("sao-gym")  # somebody else's
    machines[1].body["metadata"]["sao-gym.owner"] = dead
    assert await reap() == 1
    assert [machine.id in e2b_service.machines for machine in machines] == [False, True, True]
    assert (await boxes[2].exec("echo alive")).stdout == "alive\n"
    for box in boxes:
        await box.close()


async def test_a_pool_of_them(e2b_service: StandIn) -> None:
    settings = PoolSettings(warm=1, free_disk_bytes=0)
    async with SandboxPool(await open_backend("e2b"), size=2, settings=settings) as pool:
        pool.prepare(SPEC)
        await until(lambda: pool.metrics.ready == 1)
        async with await pool.lease(SPEC) as lease:
            assert (await lease.exec("echo hello")).stdout == "hello\n"
        await until(lambda: pool.metrics.ready == 1 and len(e2b_service.machines) == 1)
        await on_loop(e2b_service, next(iter(e2b_service.machines)))
        async with await pool.lease(SPEC) as lease:
            assert (await lease.exec("echo hello")).stdout == "hello\n"
        assert (pool.metrics.warm_leases, pool.metrics.replaced) == (1, 1)
    assert pool.metrics.leaks == 0
    assert e2b_service.machines == {}
