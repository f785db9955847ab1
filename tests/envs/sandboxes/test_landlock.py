"""The Python tool behind a wall without namespaces, where bubblewrap cannot be had: what holds, and what is said not to."""

import os
import struct
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandbox_backends import wait_until_gone, wait_until_there

from sao_gym.envs.sandboxes import landlock, python_session
from sao_gym.envs.sandboxes.bubblewrap import can_wall
from sao_gym.envs.sandboxes.local import PythonPool, PythonSession, SandboxLimits
from sao_gym.envs.sandboxes.seccomp import filter_program
from sao_gym.errors import SandboxUnavailableError

MIB = 1024 * 1024
LIMITS = SandboxLimits(cell_timeout_s=10.0, memory_bytes=256 * MIB, tmp_bytes=8 * MIB, processes=16)
pytestmark = pytest.mark.skipif(not can_wall(), reason=f"needs Landlock {landlock.NEEDED_VERSION} (Linux 6.12)")


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PythonPool]:
    def missing() -> str:
        raise SandboxUnavailableError("bubblewrap was not found")

    monkeypatch.setattr(python_session, "find_bwrap", missing)
    with pytest.warns(RuntimeWarning, match=r"command lines of this machine's other processes.*not all together"):
        pool = PythonPool(LIMITS, size=1)
    async with pool:
        yield pool


@pytest.fixture
async def session(pool: PythonPool) -> PythonSession:
    return await pool.lease()


async def test_cells_run_and_keep_their_state(session: PythonSession, pool: PythonPool) -> None:
    assert (await session.run("x = 6 * 7\nx")).output == "42\n"
    assert (await session.run("import json, math, subprocess, tempfile, decimal; x")).output == "42\n"
    assert (await session.run("subprocess.check_output(['echo', 'child'])")).output == "b'child\\n'\n"
    assert (await session.run("open('f', 'w').write('ok'); open('f').read()")).output == "'ok'\n"
    assert pool.guarantees.isolated
    assert pool.guarantees.network_cut
    assert len(pool.guarantees.warnings) == 2


async def test_bubblewrap_that_cannot_start_leads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sao_gym.envs.sandboxes.bubblewrap.find_bwrap", lambda: "/bin/false")
    async with PythonPool(LIMITS, size=1) as pool:
        with pytest.warns(RuntimeWarning, match="other processes"):
            session = await pool.lease()
        assert (await session.run("1 + 1")).output == "2\n"


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK", "AF_PACKET"])
async def test_no_socket_can_be_made(session: PythonSession, family: str) -> None:
    for kind in ("SOCK_STREAM", "SOCK_DGRAM", "SOCK_RAW"):
        code = f"import socket\nsocket.socket(socket.{family}, socket.{kind})"
        assert "PermissionError" in (await session.run(code)).output
    assert (await session.run("import socket; a, b = socket.socketpair(); a.send(b'x')")).output == "1\n"


async def test_files_of_the_host_are_out_of_reach(session: PythonSession, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("classified")
    secret.chmod(0o666)
    for code in (
        f"open({str(secret)!r}).read()",
        f"open({str(secret)!r}, 'w')",
        f"import os; os.symlink({str(secret)!r}, 'link'); open('link').read()",
        f"import os; os.link({str(secret)!r}, 'hard')",
        f"import os; os.rename({str(secret)!r}, 'moved')",
        f"import os; os.unlink({str(secret)!r})",
        f"import os; os.listdir({str(tmp_path)!r})",
        f"import os; os.truncate({str(secret)!r}, 0)",
        "open('/etc/passwd').read()",
        "open('/tmp/x', 'w')",
        "open('/usr/x', 'w')",
        "import os; os.listdir('/root')",
        "import os; os.listdir('/home')",
        "open('/dev/vda', 'rb').read(1)",
        "open('/dev/mem', 'rb').read(1)",
        "import os; os.mknod('d', 0o60000, 0x800)",
        "open('/proc/sys/kernel/panic', 'w')",
        f"open('/proc/{os.getpid()}/environ').read()",
        f"open('/proc/{os.getpid()}/mem', 'rb')",
        f"import os; os.listdir('/proc/{os.getpid()}/root/root')",
        f"import os; os.listdir('/proc/{os.getpid()}/cwd')",
    ):
        result = await session.run(code)
        assert "Error" in result.output, code
        assert "classified" not in result.output, code
    assert secret.read_text() == "classified"


async def test_no_right_is_left(session: PythonSession) -> None:
    shown = (await session.run("print(open('/proc/self/status').read())")).output
    values = dict(line.split(":\t") for line in shown.splitlines() if ":\t" in line)
    assert {values[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (values["NoNewPrivs"], values["Seccomp"]) == ("1", "2")
    for code in (
        f"import os; os.kill({os.getpid()}, 0)",
        f"import os; os.kill({os.getppid()}, 9)",
        "import os; os.setuid(1234)",
        "import os; os.chroot('/usr')",
        "import os; os.nice(-5)",
        f"import resource; resource.prlimit({os.getpid()}, resource.RLIMIT_CPU, (10, 10))",
        "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
        "import socket; socket.sethostname('x')",
    ):
        assert "PermissionError" in (await session.run(code)).output, code


async def test_time_processes_and_memory_are_bounded(session: PythonSession) -> None:
    assert (await session.run("while True: pass", timeout_s=0.3)).timed_out
    many = "import subprocess, time\na = [subprocess.Popen(['sleep', '30']) for _ in range(40)]\ntime.sleep(8)"
    assert (await session.run(many)).died
    assert "MemoryError" in (await session.run("a = []\nwhile True: a.append(bytearray(1 << 20))")).output
    assert "File too large" in (await session.run("del a; open('big', 'wb').write(bytes(20 << 20))")).output
    assert (await session.run("1 + 1")).output == "2\n"


async def test_nothing_is_left_behind(pool: PythonPool) -> None:
    marker = uuid.uuid4().hex
    session = await pool.lease()
    code = f"import subprocess, os\nsubprocess.Popen(['sh', '-c', 'sleep 60; : {marker}'])\n"
    code += f"subprocess.run(['sh', '-c', 'setsid sh -c \"sleep 60; : {marker}\" & exit 0'])\nprint(os.getcwd())"
    folder = (await session.run(code)).output.strip()
    wait_until_there(marker, 2)
    await session.close()
    wait_until_gone(marker)
    await pool.close()
    assert not Path(folder).exists()


def test_a_kernel_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "version", lambda: 5)
    with pytest.raises(OSError, match="Landlock 6 is needed, this kernel has 5"):
        landlock.main({})


def test_the_filter_without_sockets_has_one_rule_more() -> None:
    for machine, number in (("x86_64", 41), ("aarch64", 198)):
        with_sockets, without = filter_program(machine), filter_program(machine, sockets=False)
        assert with_sockets is not None
        assert without is not None
        assert len(without) == len(with_sockets) + 16
        assert struct.pack("=HBBI", 0x15, 0, 1, number) in without
