"""A pool of sandboxes: ready before they are wanted, looked at before they are given, taken back, and none ever lost.

Faults are put into real sandboxes of the local backend: one that is killed, one that does not start, one that does not
close.
"""

import asyncio
import gc
import random
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from sandbox_backends import SPEC, wait_until_gone, wait_until_there

from sao_gym.clock import SystemClock, VirtualClock
from sao_gym.envs.sandboxes.backends import open_backend
from sao_gym.envs.sandboxes.lease import Lease
from sao_gym.envs.sandboxes.local_shell import LocalSandbox
from sao_gym.envs.sandboxes.pool import SandboxPool
from sao_gym.envs.sandboxes.pool_records import PoolSettings
from sao_gym.envs.sandboxes.spec import SandboxSpec, ShellSandbox
from sao_gym.errors import ConfigError, SandboxDiskError, SandboxError, SandboxLeaseError

COLD = PoolSettings(warm=0, free_disk_bytes=0, backoff_s=0.01)


class Faulty:
    """The local backend; its first `failures` starts fail, and none goes on while `gate` is shut."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.gate = asyncio.Event()
        self.gate.set()
        self.boxes: list[LocalSandbox] = []
        self.calls = self.starting = self.most = 0
        self.is_closed = False

    async def start(self, spec: SandboxSpec) -> ShellSandbox:
        self.calls += 1
        self.starting += 1
        self.most = max(self.most, self.starting)
        try:
            await self.gate.wait()
            if self.failures > 0:
                self.failures -= 1
                raise SandboxError("it did not start")
            box = await LocalSandbox.start(spec)
            self.boxes.append(box)
            return box
        finally:
            self.starting -= 1

    async def close(self) -> None:
        self.is_closed = True

    def kill(self, box: LocalSandbox) -> None:
        """As the kernel would when memory runs out."""
        assert box._process is not None
        box._process.send_signal(signal.SIGKILL)


class Recording(SystemClock):
    """The machine's clock, which remembers how long it was asked to sleep."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await super().sleep(seconds)


@asynccontextmanager
async def pool_of(
    backend: Faulty, *, size: int = 4, settings: PoolSettings = COLD, **more: Any
) -> AsyncIterator[SandboxPool]:
    """A pool; after it, every sandbox is gone."""
    pool = SandboxPool(backend, size=size, settings=settings, **more)
    try:
        yield pool
    finally:
        await pool.close()
        await asyncio.gather(*(box.close() for box in backend.boxes))
    assert backend.is_closed


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until it holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


# ---- ahead of demand


async def test_a_warm_sandbox_is_handed_out_at_once() -> None:
    waits = []
    async with pool_of(Faulty(), settings=replace(COLD, warm=1)) as pool:
        pool.prepare(SPEC)
        for _ in range(5):
            await until(lambda: pool.metrics.ready == 1)
            begin = time.perf_counter()
            lease = await pool.lease(SPEC)
            waits.append(time.perf_counter() - begin)
            assert (await lease.exec("echo hello")).stdout == "hello\n"
            await lease.close()
        assert pool.metrics.warm_leases == 5
        assert pool.metrics.queue_s < pool.metrics.boot_s
    assert statistics.median(waits) < 0.05


async def test_a_label_belongs_to_an_episode_and_does_not_make_a_sandbox_another_one() -> None:
    async with pool_of(Faulty(), settings=replace(COLD, warm=1)) as pool:
        pool.prepare(replace(SPEC, label="one"))
        await until(lambda: pool.metrics.ready == 1)
        await pool.lease(replace(SPEC, label="two"))
        assert pool.metrics.warm_leases == 1


async def test_a_sandbox_of_another_kind_makes_room() -> None:
    backend = Faulty()
    async with pool_of(backend, settings=replace(COLD, warm=1)) as pool:
        pool.prepare(SPEC)
        await until(lambda: pool.metrics.ready == 1)
        other = replace(SPEC, env={"OTHER": "1"})
        pool.prepare(other)
        await until(lambda: len(backend.boxes) == 2 and pool.metrics.ready == 1)
        lease = await pool.lease(other)
        assert (await lease.exec("echo $OTHER")).stdout == "1\n"
        assert pool.metrics.warm_leases == 1
        assert not await backend.boxes[0].is_alive()


async def test_only_a_spec_that_comes_often_is_started_ahead_of_demand() -> None:
    backend = Faulty()
    async with pool_of(backend, settings=replace(COLD, warm=1)) as pool:
        for number in range(4):
            lease = await pool.lease(replace(SPEC, env={"TASK": str(number)}))
            await lease.close()
        assert backend.calls == 4
        for _ in range(3):
            lease = await pool.lease(SPEC)
            await lease.close()
        await until(lambda: pool.metrics.ready == 1)
        assert backend.calls == 4 + 3 + 1


async def test_a_start_that_is_under_way_serves_who_asks_first() -> None:
    backend = Faulty()
    backend.gate.clear()
    async with pool_of(backend, settings=replace(COLD, warm=1)) as pool:
        pool.prepare(SPEC)
        await until(lambda: backend.starting == 1)
        wanted = asyncio.ensure_future(pool.lease(SPEC))
        await until(lambda: backend.starting == 2)  # one for the lease, one that is to stand ready: not three
        backend.gate.set()
        await wanted
        await until(lambda: pool.metrics.ready == 1)
        assert backend.calls == 2


async def test_only_so_many_start_side_by_side() -> None:
    backend = Faulty()
    backend.gate.clear()
    async with pool_of(backend, size=6, settings=replace(COLD, boots=2)) as pool:
        leases = [asyncio.ensure_future(pool.lease(SPEC)) for _ in range(6)]
        await until(lambda: backend.starting == 2)
        backend.gate.set()
        await asyncio.gather(*leases)
        assert (backend.most, pool.metrics.boots, pool.metrics.leased) == (2, 6, 6)


# ---- what fails before a command is tried again


async def test_a_sandbox_that_died_while_it_stood_ready_is_replaced() -> None:
    backend = Faulty()
    async with pool_of(backend, settings=replace(COLD, warm=2)) as pool:
        pool.prepare(SPEC)
        await until(lambda: pool.metrics.ready == 2)
        for box in backend.boxes[:2]:
            backend.kill(box)
            while await box.is_alive():  # its end takes a moment
                await asyncio.sleep(0.01)
        lease = await pool.lease(SPEC)
        assert (await lease.exec("echo alive")).stdout == "alive\n"
        assert pool.metrics.replaced == 2
        assert pool.metrics.leaks == 0


async def test_a_start_that_fails_is_tried_again_later_each_time() -> None:
    backend, clock = Faulty(failures=2), Recording()
    async with pool_of(backend, clock=clock) as pool:
        lease = await pool.lease(SPEC)
        assert (await lease.exec("echo alive")).stdout == "alive\n"
        assert (pool.metrics.boot_failures, pool.metrics.boots) == (2, 1)
        assert [slept for slept in clock.slept if slept < 1] == [0.01, 0.02]


async def test_the_tries_are_bounded_and_the_place_is_free_again() -> None:
    backend = Faulty(failures=3)
    async with pool_of(backend, size=1) as pool:
        with pytest.raises(SandboxError, match=r"3 tries.*it did not start") as caught:
            await pool.lease(SPEC)
        assert caught.value.kind == "sandbox"
        await pool.lease(SPEC)
        assert pool.metrics.boot_failures == 3


async def test_what_the_user_must_change_is_not_tried_again() -> None:
    backend = Faulty()
    async with pool_of(backend, size=1) as pool:
        with pytest.raises(ConfigError, match="network"):
            await pool.lease(replace(SPEC, network=True))
        assert backend.calls == 1
        await pool.lease(SPEC)


async def test_no_sandbox_is_started_on_a_full_disk_and_ready_ones_are_still_given() -> None:
    free = [1 << 40]
    settings = replace(COLD, warm=1, free_disk_bytes=1 << 30)
    async with pool_of(Faulty(), settings=settings, free_disk=lambda: free[0]) as pool:
        pool.prepare(SPEC)
        await until(lambda: pool.metrics.ready == 1)
        free[0] = 1000
        await pool.lease(SPEC)
        with pytest.raises(SandboxDiskError, match=r"1000 bytes are free.*free_disk_bytes") as caught:
            await pool.lease(SPEC)
        assert caught.value.kind == "sandbox_disk"


# ---- the queue


async def test_who_waits_is_served_in_order() -> None:
    async with pool_of(Faulty(), size=1) as pool:
        first = await pool.lease(SPEC)
        served: list[int] = []

        async def wait(number: int) -> None:
            lease = await pool.lease(SPEC)
            served.append(number)
            await lease.close()

        waiting = [asyncio.ensure_future(wait(number)) for number in range(3)]
        await until(lambda: pool.metrics.queued == 3)
        assert served == []
        await first.close()
        await asyncio.gather(*waiting)
        assert served == [0, 1, 2]
        assert pool.metrics.queue_s > 0


async def test_a_wait_has_an_end_and_one_that_is_given_up_costs_no_place() -> None:
    async with pool_of(Faulty(), size=1, settings=replace(COLD, queue_timeout_s=0.2)) as pool:
        first = await pool.lease(SPEC)
        with pytest.raises(SandboxError, match=r"none of 1 sandboxes came free within 0.2 s.*queue_timeout_s"):
            await pool.lease(SPEC)
        given_up = asyncio.ensure_future(pool.lease(SPEC))
        await until(lambda: pool.metrics.queued == 1)
        given_up.cancel()
        await asyncio.wait({given_up})
        assert pool.metrics.queued == 0
        await first.close()
        await pool.lease(SPEC)


async def test_a_lease_that_is_given_up_while_it_starts_costs_no_place_and_leaves_no_sandbox() -> None:
    backend = Faulty()
    backend.gate.clear()
    async with pool_of(backend, size=1) as pool:
        given_up = asyncio.ensure_future(pool.lease(SPEC))
        await until(lambda: backend.starting == 1)
        given_up.cancel()
        await asyncio.wait({given_up})
        backend.gate.set()
        await pool.lease(SPEC)
        await until(lambda: backend.starting == 0)
    assert pool.metrics.ready == 0
    assert pool.metrics.leaks == 0


# ---- taken back


async def test_a_lease_that_nobody_holds_any_more_is_taken_back() -> None:
    clock = VirtualClock()
    async with pool_of(Faulty(), size=1, clock=clock) as pool:
        lease: Lease | None = await pool.lease(SPEC)
        await clock.run(lambda: clock.now() > 60)
        assert pool.metrics.taken_back == 0
        del lease
        gc.collect()
        await clock.run(lambda: pool.metrics.taken_back == 1)
        await pool.lease(SPEC)
        assert pool.metrics.leased == 1


async def test_a_lease_ends_at_its_deadline_whatever_it_runs() -> None:
    clock = VirtualClock()
    settings = replace(COLD, lease_timeout_s=1000, silence_timeout_s=100)
    async with pool_of(Faulty(), clock=clock, settings=settings) as pool:
        lease = await pool.lease(SPEC)
        running = asyncio.ensure_future(lease.exec("echo x >started; sleep 60", timeout_s=60))
        await clock.run(lambda: clock.now() > 500)
        assert not lease.is_over  # a command that runs is no silence
        await clock.run(lambda: lease.is_over)
        assert 1000 <= clock.now() <= 1000 + settings.look_s
        with pytest.raises(SandboxLeaseError, match="lease_timeout_s = 1000") as caught:
            await running
        assert caught.value.kind == "sandbox_lease"
        with pytest.raises(SandboxLeaseError, match="taken back"):
            await lease.write("/tmp/x", b"")
        assert not await lease.is_alive()
        await lease.close()
        assert (pool.metrics.taken_back, pool.metrics.leased) == (1, 0)


async def test_a_holder_that_is_silent_loses_its_lease_and_one_that_beats_does_not() -> None:
    clock = VirtualClock()
    async with pool_of(Faulty(), clock=clock, settings=replace(COLD, silence_timeout_s=100)) as pool:
        silent, beating = await pool.lease(SPEC), await pool.lease(SPEC)
        for minute in range(1, 4):
            await clock.run(lambda minute=minute: clock.now() >= 60 * minute)  # type: ignore[misc]
            beating.beat()
        assert silent.is_over
        assert not beating.is_over
        with pytest.raises(SandboxLeaseError, match="silence_timeout_s = 100"):
            silent.beat()


async def test_a_lease_that_was_given_back_reaches_nothing() -> None:
    async with pool_of(Faulty()) as pool:
        async with await pool.lease(SPEC) as lease:
            assert lease.spec == SPEC
            await lease.write("/tmp/f", b"\xff")
            assert await lease.read("/tmp/f") == b"\xff"
            assert await lease.is_alive()
            assert (await lease.exec("od -An -tx1 /tmp/f")).stdout == " ff\n"
        for call in (lease.exec("true"), lease.read("/tmp/f"), lease.write("/tmp/f", b"")):
            with pytest.raises(SandboxLeaseError, match="given back"):
                await call
        await lease.close()
        assert (pool.metrics.leases, pool.metrics.leased, pool.metrics.execs) == (1, 0, 1)
        assert pool.metrics.exec_s > 0


async def test_a_sandbox_that_dies_under_a_command_is_an_error_and_not_a_result() -> None:
    backend = Faulty()
    async with pool_of(backend, size=1) as pool:
        lease = await pool.lease(SPEC)
        running = asyncio.ensure_future(lease.exec("sleep 60"))
        await asyncio.sleep(0.1)
        backend.kill(backend.boxes[0])
        with pytest.raises(SandboxError, match="ended by itself"):
            await running
        await lease.close()
        await pool.lease(SPEC)


# ---- the end


async def test_close_ends_every_sandbox_and_every_wait() -> None:
    marker = str(uuid.uuid4().int)[:12]
    backend = Faulty()
    async with pool_of(backend, size=2, settings=replace(COLD, warm=1)) as pool:
        pool.prepare(SPEC)
        leases = [await pool.lease(SPEC) for _ in range(2)]
        for lease in leases:
            await lease.exec(f"sleep 1000.{marker} & (setsid sh -c 'sleep 1000.{marker}; :' & exit 0)")
        running = asyncio.ensure_future(leases[0].exec("sleep 60"))
        waiting = asyncio.ensure_future(pool.lease(SPEC))
        await until(lambda: pool.metrics.queued == 1 and pool.metrics.ready == 1)
        await pool.close()
        for task in (running, waiting):
            with pytest.raises(SandboxError, match="closed"):
                await task
        with pytest.raises(SandboxError, match="closed"):
            await pool.lease(SPEC)
        wait_until_gone(marker)
        assert not any([await box.is_alive() for box in backend.boxes])
        assert (pool.metrics.ready, pool.metrics.leased, pool.metrics.leaks) == (0, 0, 0)


async def test_close_while_sandboxes_start_leaves_none() -> None:
    backend = Faulty()
    pool = SandboxPool(backend, size=4, settings=replace(COLD, warm=2))
    leases = [asyncio.ensure_future(pool.lease(SPEC)) for _ in range(4)]
    await until(lambda: backend.starting > 0)
    await pool.close()
    results = await asyncio.gather(*leases, return_exceptions=True)
    assert all(isinstance(result, SandboxError) for result in results)
    assert not any([await box.is_alive() for box in backend.boxes])
    assert backend.starting == 0


async def test_a_sandbox_that_cannot_be_closed_is_counted() -> None:
    class Stuck(LocalSandbox):
        async def close(self) -> None:
            await asyncio.get_running_loop().create_future()

    class Backend(Faulty):
        async def start(self, spec: SandboxSpec) -> ShellSandbox:
            return await Stuck.start(spec)

    pool = SandboxPool(Backend(), size=1, settings=replace(COLD, close_timeout_s=0.05))
    lease = await pool.lease(SPEC)
    await lease.close()
    assert pool.metrics.leaks == 1
    assert isinstance(lease.box, LocalSandbox)
    await LocalSandbox.close(lease.box)
    await pool.close()


@pytest.mark.slow
async def test_kills_at_random_lose_no_sandbox_and_no_place() -> None:
    """Every episode ends once, well or with an error, and nothing is left."""
    marker, chance, backend = str(uuid.uuid4().int)[:12], random.Random(0), Faulty()
    ended: list[str] = []
    async with pool_of(backend, size=4, settings=replace(COLD, warm=2)) as pool:

        async def episode(number: int) -> None:
            async with AsyncExitStack() as stack:
                try:
                    lease = await stack.enter_async_context(await pool.lease(SPEC))
                    await lease.exec(f"sleep 1000.{marker} & setsid sleep 1000.{marker} & exit 0")
                    if chance.random() < 0.3:
                        assert isinstance(lease.box, LocalSandbox)
                        backend.kill(lease.box)
                    await lease.exec("echo done")
                    ended.append("well")
                except SandboxError as error:
                    ended.append(error.kind)

        async def vandal() -> None:
            while True:
                await asyncio.sleep(0.3)
                backend.kill(chance.choice(backend.boxes[-4:]))

        raging = asyncio.ensure_future(vandal())
        await pool.lease(SPEC)
        await asyncio.gather(*(episode(number) for number in range(40)))
        raging.cancel()
        gc.collect()
        metrics = pool.metrics
    assert len(ended) == 40
    assert set(ended) == {"well", "sandbox"}
    assert (metrics.leases, metrics.leaks) == (41, 0)
    assert not any([await box.is_alive() for box in backend.boxes])
    wait_until_gone(marker)


HOLDER = """
import asyncio, sys
from sao_gym.envs.sandboxes.backends import open_backend
from sao_gym.envs.sandboxes.pool import SandboxPool
from sao_gym.envs.sandboxes.spec import SandboxSpec

async def main():
    pool = SandboxPool(await open_backend("local"), size=2)
    leases = [await pool.lease(SandboxSpec(env={"MARK": sys.argv[1]})) for _ in range(2)]
    for lease in leases:
        await lease.exec(f"sleep 1000.{sys.argv[1]} & setsid sleep 1000.{sys.argv[1]} & exit 0")
    print("ready", flush=True)
    await leases[0].exec("sleep 600", timeout_s=600)

asyncio.run(main())
"""


def test_a_killed_holder_leaves_no_process() -> None:
    marker = str(uuid.uuid4().int)[:12]
    with subprocess.Popen([sys.executable, "-c", HOLDER, marker], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        try:
            wait_until_there(f"1000.{marker}", 4)
        finally:
            holder.kill()
    wait_until_gone(marker)


async def test_a_pool_over_a_backend_by_name() -> None:
    async with SandboxPool(await open_backend("local"), size=1, settings=COLD) as pool, await pool.lease() as lease:
        assert (await lease.exec("pwd")).stdout == "/workspace\n"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("warm", -1, "whole number from 0 on"),
        ("tries", 0, "whole number from 1 on"),
        ("boots", 1.5, "whole number"),
        ("queue_timeout_s", 0, "number above 0"),
        ("look_s", True, "number above 0"),
    ],
)
def test_settings_are_checked(name: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*{expected}"):
        PoolSettings(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="size"):
        SandboxPool(None, size=0)  # type: ignore[arg-type]
