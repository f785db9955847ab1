"""The Python tool's sandbox against the real thing: what a policy may do, and what it must not."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from sandbox_backends import processes_with, wait_until_gone, wait_until_there

from sao_gym.envs.sandboxes import python_session
from sao_gym.envs.sandboxes.local import PythonPool, PythonSession, SandboxLimits, SyncPythonPool
from sao_gym.errors import ConfigError, SandboxError, SandboxUnavailableError

MIB = 1024 * 1024
LIMITS = SandboxLimits(cell_timeout_s=10.0, memory_bytes=256 * MIB, tmp_bytes=8 * MIB, processes=16)


@pytest.fixture
async def pool() -> AsyncIterator[PythonPool]:
    async with PythonPool(LIMITS, size=2) as pool:
        yield pool


@pytest.fixture
async def session(pool: PythonPool) -> PythonSession:
    return await pool.lease()


def sleeper(marker: str) -> str:
    """Code that leaves a plain child and a double-forked daemon behind, both named by `marker`."""
    return f"""
import subprocess, sys
code = "import time; time.sleep(60)"
subprocess.Popen([sys.executable, "-S", "-c", code, "{marker}"])
subprocess.run(["sh", "-c", f"setsid {{sys.executable}} -S -c '{{code}}' {marker} & exit 0"])
print("left")
"""


async def test_state_is_kept_and_shown_as_in_a_repl(session: PythonSession) -> None:
    assert (await session.run("x = 6 * 7\nx")).output == "42\n"
    assert (await session.run("print('a'); x + 1")).output == "a\n43\n"
    assert (await session.run("_")).output == "43\n"
    assert (await session.run("None")).output == ""
    assert (await session.run("")).output == ""


async def test_tracebacks_show_only_the_cells_own_frames(session: PythonSession) -> None:
    await session.run("def f():\n    return 1 / 0")
    result = await session.run("f()")
    assert result.output.splitlines() == [
        "Traceback (most recent call last):",
        '  File "<cell 2>", line 1, in <module>',
        "    f()",
        '  File "<cell 1>", line 2, in f',
        "    return 1 / 0",
        "           ~~^~~",
        "ZeroDivisionError: division by zero",
    ]
    assert not result.died
    recursion = (await session.run("def g(): g()\ng()")).output
    assert "RecursionError" in recursion
    assert len(recursion) < 1000
    assert "SyntaxError" in (await session.run("x = (")).output
    assert "null bytes" in (await session.run("x = '\0'")).output


async def test_order_of_streams_and_children(session: PythonSession) -> None:
    code = "import subprocess, sys\nprint('1')\nprint('2', file=sys.stderr)\nsubprocess.run(['echo', '3'])\n'four'"
    assert (await session.run(code)).output == "1\n2\n3\n'four'\n"


async def test_no_network(session: PythonSession) -> None:
    code = "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=5)"
    assert "Network is unreachable" in (await session.run(code)).output
    server = socket_server()
    with server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert "Connection refused" in (await session.run(code)).output


def socket_server() -> "contextlib.AbstractContextManager[object]":
    import socket

    return socket.create_server(("127.0.0.1", 0))


async def test_no_host_files_and_no_writing_outside(session: PythonSession, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    for path in (str(secret), "/etc/passwd", "/etc/shadow", __file__, "/proc/1/environ", "/proc/1/mem"):
        output = (await session.run(f"open({path!r}, 'rb').read()")).output
        assert "FileNotFoundError" in output or "PermissionError" in output, (path, output)
    assert (await session.run("import os; sorted(os.environ)")).output.count("PATH") == 1
    for path in ("/x", "/usr/x", "/dev/x", "/etc/x", f"{sys.base_prefix}/x", "/worker.py"):
        output = (await session.run(f"open({path!r}, 'w')")).output
        assert "Read-only file system" in output or "FileNotFoundError" in output, (path, output)
    assert (await session.run("open('/tmp/x', 'w').write('ok')")).output == "2\n"


@pytest.mark.parametrize("drops_root", [False, True])
async def test_the_kernels_settings_are_out_of_reach(drops_root: bool) -> None:
    async with PythonPool(LIMITS, size=1) as pool:
        if os.geteuid() == 0:
            pool._plan = replace(pool._plan, drops_root=drops_root)
        session = await pool.lease()
        assert (await session.run("import os; os.access('/proc/sys/kernel/core_pattern', os.W_OK)")).output == "False\n"
        code = "[name for name in sorted(os.listdir('/')) if os.access('/' + name, os.W_OK)]"
        assert (await session.run(code)).output == "['tmp']\n"
        code = "[name for name in sorted(os.listdir('/dev')) if os.path.isdir('/dev/' + name) and os.access('/dev/' + name, os.W_OK)]"
        assert (await session.run(code)).output == "['pts', 'shm']\n"  # a pseudo-terminal's folder takes no files


async def test_the_number_of_files_is_bounded(session: PythonSession) -> None:
    result = await session.run("i = 0\nwhile True:\n    open(f'/tmp/{i}', 'w').close()\n    i += 1")
    assert result.died
    assert "20000 files" in result.output
    assert (await session.run("import os; os.listdir('/tmp')")).output == "[]\n"


async def test_what_happens_between_cells_is_watched_and_told(session: PythonSession) -> None:
    code = "import threading, time\ndef grow():\n    time.sleep(0.2)\n    global b\n    b = bytearray(b'x') * (150 << 20)\n"
    code += "import os\nif os.fork() == 0:\n    grow()\n    time.sleep(60)\nthreading.Thread(target=grow).start()"
    assert (await session.run(code)).output == ""
    await asyncio.sleep(1.5)
    result = await session.run("b")
    assert result.died
    assert "256 MiB" in result.output
    assert (await session.run("1")).output == "1\n"


async def test_files_are_bounded(session: PythonSession) -> None:
    code = "for i in range(4):\n    with open(f'/tmp/{i}', 'wb') as f: f.write(bytes(4 << 20))"
    assert "No space left on device" in (await session.run(code)).output
    code = "open('/tmp/big', 'wb').write(bytes(9 << 20))"
    assert "OSError" in (await session.run(code)).output


async def test_infinite_loop_is_stopped_and_the_session_goes_on(session: PythonSession) -> None:
    await session.run("x = 1")
    start = time.monotonic()
    result = await session.run("print('before')\nwhile True: pass", timeout_s=0.3)
    assert result.timed_out
    assert time.monotonic() - start < 5
    assert result.output == "before\n[stopped after 0.3 s; the Python state is lost]\n"
    assert "NameError" in (await session.run("x")).output


async def test_timeout_ends_the_whole_tree(session: PythonSession) -> None:
    """Case SB-01: output before the limit is kept and the child of the command is gone."""
    marker = uuid.uuid4().hex
    code = sleeper(marker) + "\nimport signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)"
    result = await session.run(code, timeout_s=1.5)
    assert result.timed_out
    assert result.output.startswith("left\n")
    wait_until_gone(marker)
    assert (await session.run("'alive'")).output == "'alive'\n"


async def test_background_child_lives_on_until_the_session_ends(session: PythonSession) -> None:
    """Case SB-02: a child that holds the pipe does not hold up the cell."""
    marker = uuid.uuid4().hex
    start = time.monotonic()
    result = await session.run(sleeper(marker))
    assert result.output == "left\n"
    assert time.monotonic() - start < 5
    wait_until_there(marker)
    await session.close()
    wait_until_gone(marker)


@pytest.mark.parametrize(
    "code", ["input()", "import sys; sys.stdin.read()", "import subprocess; subprocess.run('cat')"]
)
async def test_stdin_is_at_its_end(session: PythonSession, code: str) -> None:
    """Case SB-02."""
    start = time.monotonic()
    await session.run(code)
    assert time.monotonic() - start < 5


async def test_fork_bomb(session: PythonSession) -> None:
    start = time.monotonic()
    result = await session.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", timeout_s=1.0)
    assert result.timed_out or result.died
    assert time.monotonic() - start < 10
    assert (await session.run("1 + 1")).output == "2\n"


async def test_memory_bomb_in_one_process(session: PythonSession) -> None:
    result = await session.run("a = []\nwhile True: a.append(bytearray(1 << 20))")
    assert "MemoryError" in result.output
    assert not result.timed_out


async def test_memory_bomb_over_many_processes(session: PythonSession) -> None:
    code = "import os, time\nfor i in range(6):\n    if os.fork() == 0: break\nb = bytearray(b'x') * (100 << 20)\ntime.sleep(20)"
    result = await session.run(code)
    assert result.died
    assert "256 MiB" in result.output


async def test_memory_that_no_limit_counts_is_refused(session: PythonSession) -> None:
    assert "PermissionError" in (await session.run("import os; os.memfd_create('x')")).output


async def test_output_flood(session: PythonSession) -> None:
    result = await session.run("print('start')\nfor i in range(20000): print('x' * 99)\nprint('end')")
    assert result.truncated == 6 + 20000 * 100 + 4 - LIMITS.output_bytes
    assert f"[{result.truncated} bytes left out]" in result.output
    assert result.output.startswith("start\n")
    assert result.output.endswith("end\n")
    assert len(result.output) < LIMITS.output_bytes + 50


async def test_output_is_never_cut_inside_a_character(session: PythonSession) -> None:
    """Case SB-05."""
    for size in range(4):
        result = await session.run(f"print('a' * {size} + '\u20ac\U0001f600' * 20000)")
        assert "\ufffd" not in result.output
        shown = len(result.output.replace(f"\n[{result.truncated} bytes left out]\n", "").encode())
        assert shown + result.truncated == size + 7 * 20000 + 1


@pytest.mark.parametrize(
    ("code", "output"),
    [
        (r"import sys; _ = sys.stdout.buffer.write(b'\xff\xfe ok')", "\ufffd\ufffd ok"),
        (r"print('\0\r\x1b[31m')", "\0\r\x1b[31m\n"),
        (r"print('\ud800')", "\\ud800\n"),
        ("print('\ud800')", "?\n"),
        (r"open('/tmp/x', 'wb').write(b'\xff\0'); open('/tmp/x', 'rb').read()", r"b'\xff\x00'" + "\n"),
    ],
)
async def test_arbitrary_bytes(session: PythonSession, code: str, output: str) -> None:
    """Case SB-05."""
    assert (await session.run(code)).output == output


async def test_random_bytes_are_decoded(session: PythonSession) -> None:
    result = await session.run("import os; os.write(1, os.urandom(20000)); None")
    assert result.truncated > 0


@pytest.mark.parametrize(
    "code",
    [
        "import os, signal\nfor s in range(1, 65):\n    try: os.kill(1, s)\n    except (OSError, ValueError): pass",
        "import os\nopen('/proc/1/mem', 'wb')",
        "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))",
        "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
        "import os; os.sched_setaffinity(1, {0})",
        "import ctypes; l = ctypes.CDLL(None); print(l.ptrace(16, 1, 0, 0), l.unshare(0x10000000))",
    ],
)
async def test_the_parent_cannot_be_harmed(session: PythonSession, code: str) -> None:
    await session.run(code)
    assert (await session.run("import resource; resource.prlimit(1, resource.RLIMIT_CPU)")).output == "(-1, -1)\n"
    assert (await session.run("l.ptrace(16, 1, 0, 0) if 'l' in globals() else -1")).output == "-1\n"
    assert (await session.run("1 + 1")).output == "2\n"


@pytest.mark.parametrize(
    ("code", "note"),
    [
        ("import os; os._exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL"),
        ("import os; os.closerange(3, 100)", "exit code 1"),
    ],
)
async def test_a_cell_that_ends_its_process(session: PythonSession, code: str, note: str) -> None:
    result = await session.run(code)
    assert result.died
    assert note in result.output
    assert "state is lost" in result.output
    assert (await session.run("1 + 1")).output == "2\n"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os.closerange(0, 3)",
        "import sys; sys.stdout.close(); sys.stderr = None",
        "import os\npid = os.fork()\nif pid: _ = os.waitpid(pid, 0)",
        "import os\nfor fd in range(3, 10):\n    try: _ = os.write(fd, bytes(64))\n    except OSError: pass",
        "import sys; sys.exit(1)",
        "raise KeyboardInterrupt",
        "class E(BaseException):\n    def __str__(self): raise E\nraise E",
    ],
)
async def test_odd_cells_leave_a_working_session(session: PythonSession, code: str) -> None:
    await session.run(code)
    await session.run("import sys; sys.stdout = sys.__stdout__")
    result = await session.run("import os; os.getpid() > 1")
    assert not result.timed_out
    fresh = await session.run("import os; os.kill(os.getpid(), 9)")
    assert fresh.died
    assert (await session.run("1 + 1")).output == "2\n"


async def test_nothing_passes_from_one_session_to_the_next() -> None:
    async with PythonPool(LIMITS, size=1) as pool:
        first = await pool.lease()
        await first.run(
            "import os\nsecret = 1\nos.makedirs('/tmp/a/b'); open('/tmp/a/b/c', 'w').close(); os.chmod('/tmp/a', 0)\n"
            "open('/dev/shm/d', 'w').close(); os.symlink('/usr', '/tmp/link')"
        )
        await first.close()
        second = await pool.lease()
        code = "import os; (os.listdir('/tmp'), os.listdir('/dev/shm'), 'secret' in globals())"
        assert (await second.run(code)).output == "([], [], False)\n"


async def test_a_box_that_cannot_be_cleaned_is_replaced() -> None:
    async with PythonPool(LIMITS, size=1) as pool:
        first = await pool.lease()
        deep = "import os\nfor i in range(60):\n    os.mkdir('x' * 100); os.chdir('x' * 100)"
        assert (await first.run(deep)).output == ""
        await first.close()
        second = await pool.lease()
        assert (await second.run("import os; os.listdir('/tmp')")).output == "[]\n"


async def test_pool_waits_for_a_free_box_and_closes_twice() -> None:
    pool = PythonPool(LIMITS, size=1)
    first = await pool.lease()
    waiting = asyncio.ensure_future(pool.lease())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await first.close()
    await first.close()
    second = await waiting
    assert (await second.run("2")).output == "2\n"
    with pytest.raises(SandboxError, match="closed"):
        await first.run("1")
    await pool.close()
    await pool.close()
    await second.close()
    with pytest.raises(SandboxError, match="closed"):
        await pool.lease()


async def test_a_box_that_dies_by_itself_is_an_error_and_is_replaced() -> None:
    """Trap 15: infrastructure that fails is an error, never an answer."""
    async with PythonPool(LIMITS, size=1) as pool:
        first = await pool.lease()
        running = asyncio.ensure_future(first.run("import time; time.sleep(30)"))
        await asyncio.sleep(0.3)
        for box in pool._leased:
            os.kill(box._process.pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await running
        await first.close()
        second = await pool.lease()
        assert (await second.run("1")).output == "1\n"


async def test_cancelled_cell_leaves_nothing_and_the_box_is_used_again() -> None:
    marker = uuid.uuid4().hex
    async with PythonPool(LIMITS, size=1) as pool:
        first = await pool.lease()
        await first.run("1")
        running = asyncio.ensure_future(first.run(sleeper(marker) + "\nimport time; time.sleep(60)"))
        while not processes_with(marker):
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(SandboxError):
            await first.run("1")
        await first.close()
        wait_until_gone(marker)
        second = await pool.lease()
        assert (await second.run("1")).output == "1\n"


@pytest.mark.parametrize("closes_pool", [False, True])
async def test_close_in_the_middle_of_a_cell(closes_pool: bool) -> None:
    async with PythonPool(LIMITS, size=1) as pool:
        first = await pool.lease()
        running = asyncio.ensure_future(first.run("import time; time.sleep(60)"))
        await asyncio.sleep(0.1)
        await (pool if closes_pool else first).close()
        with pytest.raises(SandboxError, match="closed while"):
            await running
        if not closes_pool:
            assert (await (await pool.lease()).run("1")).output == "1\n"


async def test_cells_of_one_session_run_one_after_another(session: PythonSession) -> None:
    await session.run("seen = []")
    cells = (session.run(f"import time; time.sleep(0.02); seen.append({n})") for n in range(5))
    await asyncio.gather(*cells)
    assert (await session.run("seen")).output == "[0, 1, 2, 3, 4]\n"


async def test_nothing_leaks() -> None:
    def figures() -> tuple[int, int, list[str]]:
        mounts = len(Path("/proc/self/mounts").read_text().splitlines())
        return len(list(Path("/proc/self/fd").iterdir())), mounts, children()

    def children() -> list[str]:
        return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()

    before = figures()
    for _ in range(2):
        async with PythonPool(LIMITS, size=3) as pool:
            sessions = [await pool.lease() for _ in range(3)]
            await asyncio.gather(*(s.run("import subprocess; subprocess.Popen(['sleep', '60'])") for s in sessions))
    assert figures() == before


@pytest.mark.parametrize("delay_s", [None, 0.0, 0.005, 0.01, 0.015, 0.02, 0.04])
def test_kill_of_the_owner_ends_everything(delay_s: float | None) -> None:
    """Case SB-04: also within the first moments of a start."""
    marker = uuid.uuid4().hex
    program = f"""
import asyncio
from sao_gym.envs.sandboxes.local import PythonPool, SandboxLimits
async def main():
    pool = PythonPool(SandboxLimits(cell_timeout_s=30.0, output_bytes=0x{marker[:7]}), size=1)
    print("go", flush=True)
    session = await pool.lease()
    await session.run({sleeper(marker)!r})
    print("up", flush=True)
    await session.run("import time; time.sleep(60)")
asyncio.run(main())
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    owner.stdout.readline()
    if delay_s is None:
        owner.stdout.readline()
        wait_until_there(marker)
    else:
        time.sleep(delay_s)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    wait_until_gone(marker)
    wait_until_gone(f'"output_bytes": {int(marker[:7], 16)}')


def test_pool_in_a_background_loop_for_plain_callers() -> None:
    with SyncPythonPool(LIMITS, size=2) as pool:
        with pool.lease() as session:
            session.run("x = 2")
            assert session.run("x").output == "2\n"
        assert pool.guarantees.isolated
    session.close()
    pool.close()
    with pytest.raises(SandboxError):
        pool.lease()


async def test_preloaded_modules_cost_no_import() -> None:
    async with PythonPool(SandboxLimits(), size=1, preload=("fractions",)) as pool:
        session = await pool.lease()
        assert (await session.run("import sys; 'fractions' in sys.modules")).output == "True\n"
        assert (await session.run("'numpy' in sys.modules")).output == "False\n"
    async with PythonPool(SandboxLimits(), size=1, preload=("numpy",), site_packages=True) as pool:
        session = await pool.lease()
        assert (await session.run("import numpy; int(numpy.ones((9, 9)).dot(numpy.ones(9)).sum())")).output == "81\n"
    with pytest.raises(SandboxUnavailableError, match="no_such_module"):
        await PythonPool(SandboxLimits(), preload=("no_such_module",)).lease()


async def test_refusal_and_the_unsafe_switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("sao_gym.envs.sandboxes.bubblewrap.find_bwrap", lambda: str(broken))
    monkeypatch.setattr(python_session, "can_wall", lambda: False)
    with pytest.raises(SandboxUnavailableError, match=r"No permissions.*allow_unsafe=True"):
        await PythonPool(LIMITS).lease()
    async with PythonPool(LIMITS, size=1, allow_unsafe=True) as pool:
        with pytest.warns(RuntimeWarning, match="network open"):
            session = await pool.lease()
        assert not pool.guarantees.isolated
        assert len(pool.guarantees.warnings) == 6
        marker = uuid.uuid4().hex
        assert (await session.run("x = 5\nx")).output == "5\n"
        assert (await session.run(sleeper(marker))).output == "left\n"
        assert (await session.run("while True: pass", timeout_s=0.2)).timed_out
        wait_until_gone(marker)
        folder = (await session.run("import os; print(os.getcwd())")).output.strip()
        assert Path(folder).is_dir()
        await session.close()
    assert not Path(folder).exists()


def test_no_bubblewrap_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise SandboxUnavailableError("bubblewrap was not found")

    monkeypatch.setattr(python_session, "find_bwrap", missing)
    monkeypatch.setattr(python_session, "can_wall", lambda: False)
    with pytest.raises(SandboxUnavailableError):
        PythonPool(LIMITS)
    with pytest.warns(RuntimeWarning, match="leaves the network open"):
        assert not PythonPool(LIMITS, allow_unsafe=True).guarantees.network_cut


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match="processes is 0"):
        SandboxLimits(processes=0)
    with pytest.raises(ConfigError, match="whole number"):
        SandboxLimits(memory_bytes=1.5e9)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="startup_timeout_s is nan"):
        SandboxLimits(startup_timeout_s=float("nan"))
    with pytest.raises(ConfigError, match="at least 1"):
        PythonPool(size=0)
