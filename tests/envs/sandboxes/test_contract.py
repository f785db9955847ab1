"""What every sandbox with a shell promises, on every backend: the cases of area sandbox, files, limits, abuse."""

import asyncio
import contextlib
import os
import random
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from abuses import ABUSES, Abuse
from sandbox_backends import LIMITS, MARKS, SPEC, WALLED, Start, wait_until_gone

from sao_gym.envs.sandboxes.spec import SandboxSpec, ShellLimits, ShellSandbox
from sao_gym.errors import ConfigError, SandboxError

# ---- commands


async def test_a_command_leaves_its_streams_and_its_exit_code(box: ShellSandbox) -> None:
    result = await box.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.timed_out) == ("out\n", "err\n", 3, False)
    assert (await box.exec("kill -9 $$")).exit_code == 137
    assert (await box.exec("no-such-program")).exit_code == 127
    assert (await box.exec("if")).exit_code == 2
    assert (await box.exec("")).exit_code == 0


async def test_argv_is_run_as_it_is(box: ShellSandbox) -> None:
    result = await box.exec(["printf", "%s|", "a b", "$HOME", "it's", "*", "", "\n"])
    assert result.stdout == "a b|$HOME|it's|*||\n|"
    assert (await box.exec(["no such program"])).exit_code == 127


async def test_folder_and_environment_are_those_of_spec_and_call(box: ShellSandbox) -> None:
    assert (await box.exec("pwd; echo $FROM_SPEC $HERE")).stdout == "/workspace\nit's so\n"
    shown = await box.exec('pwd; echo $FROM_SPEC; echo "$HERE"', cwd="/tmp", env={"FROM_SPEC": "call", "HERE": "a\n'b"})
    assert shown.stdout == "/tmp\ncall\na\n'b\n"
    assert (await box.exec("pwd; echo $HERE")).stdout == "/workspace\n\n"
    gone = await box.exec("echo not run", cwd="/no/such folder")
    assert (gone.stdout, gone.exit_code) == ("", 126)
    assert "/no/such folder" in gone.stderr
    with pytest.raises(ConfigError, match="BAD-NAME"):
        await box.exec("true", env={"BAD-NAME": "x"})


async def test_nothing_of_the_host_is_in_the_environment(box: ShellSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {line.partition("=")[0] for line in (await box.exec("env")).stdout.splitlines()}
    assert names <= {"PATH", "HOME", "LANG", "SHELL", "TERM", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "FROM_SPEC"}


async def test_commands_share_files_but_no_shell_state(box: ShellSandbox) -> None:
    await box.exec("x=1; cd /tmp; echo kept >/workspace/f")
    assert (await box.exec("echo [$x]; pwd; cat f")).stdout == "[]\n/workspace\nkept\n"


async def test_stdin_is_what_was_given(box: ShellSandbox) -> None:
    data = random.Random(0).randbytes(3_000_000)
    assert (await box.exec("wc -c", stdin=data)).stdout == "3000000\n"
    assert (await box.exec("cat", stdin=b"one\0two")).stdout == "one\0two"
    assert (await box.exec("wc -c")).stdout == "0\n"


@pytest.mark.parametrize("size", [100, 2047, 2049, 5000, 99_000, 131_000, 400_000])
async def test_a_command_may_be_long(box: ShellSandbox, size: int) -> None:
    result = await box.exec(f"cat <<'END' | wc -c\n{'x' * size}\nEND\nexit 4")
    assert (result.stdout, result.exit_code) == (f"{size + 1}\n", 4)


async def test_commands_of_one_sandbox_run_one_after_another(box: ShellSandbox) -> None:
    command = "read n <n; sleep 0.01; echo $((n + 1)) >n"
    await box.exec("echo 0 >n")
    await asyncio.gather(*(box.exec(command) for _ in range(10)))
    assert (await box.exec("cat n")).stdout == "10\n"


async def test_signals_are_as_in_any_shell(box: ShellSandbox) -> None:
    shown = await box.exec(
        "grep -E 'Sig(Ign|Blk)' /proc/self/status; trap 'echo heard' INT; kill -INT $$; yes | head -1"
    )
    assert shown.stdout == "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\nheard\ny\n"


# ---- time: SB-01


@pytest.mark.parametrize("trap", ["", "trap '' TERM; "])
async def test_a_command_that_hangs_is_ended_with_all_that_it_started(box: ShellSandbox, trap: str) -> None:
    """Case SB-01."""
    start = time.monotonic()
    script = f"{trap}echo before; (sleep 300 & echo $! > /tmp/p; wait)"
    result = await box.exec(["bash", "-c", script], timeout_s=1)
    assert (result.timed_out, result.stdout) == (True, "before\n")
    assert time.monotonic() - start < 3
    assert (await box.exec("kill -0 $(cat /tmp/p)")).exit_code != 0
    assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_a_daemon_of_a_command_that_hangs_is_ended_too_and_an_older_one_is_not(box: ShellSandbox) -> None:
    await box.exec("(setsid sleep 311 & exit 0); sleep 0.1")
    result = await box.exec("(setsid sleep 312 & exit 0); setsid --fork sleep 313; sleep 300", timeout_s=0.5)
    assert result.timed_out
    shown = await box.exec('for p in 311 312 313; do pgrep -f "^sleep $p" >/dev/null && echo $p; done; true')
    assert shown.stdout == "311\n"


async def test_a_call_that_is_given_up_ends_its_command(box: ShellSandbox) -> None:
    running = asyncio.ensure_future(box.exec("sleep 321", timeout_s=60))
    await asyncio.wait({running}, timeout=0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await box.exec("pgrep -f '^sleep 321'")).exit_code == 1


# ---- background and stdin: SB-02


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("sleep 60.{marker} & echo started", "started\n"),
        ("python3 -m http.server 8123 -d /tmp/{marker} 2>&1 & sleep 0.5; echo up", "up\n"),
    ],
)
async def test_a_background_child_does_not_hold_up_the_answer(start: Start, command: str, output: str) -> None:
    """Case SB-02."""
    marker = str(uuid.uuid4().int)[:12]
    async with start() as box:
        await box.exec(f"mkdir /tmp/{marker}")
        begin = time.monotonic()
        result = await box.exec(command.format(marker=marker), timeout_s=20)
        assert time.monotonic() - begin < 2
        assert result.stdout.startswith(output) or result.stdout.endswith(output)
        assert (await box.exec(f"pgrep -f {marker} | grep -vw $$")).stdout != ""
    wait_until_gone(marker)


@pytest.mark.parametrize(
    ("command", "output"), [("cat", ""), ("read x; echo got:$x", "got:\n"), ("python3 -c 'input()'", "")]
)
async def test_stdin_is_at_its_end(box: ShellSandbox, command: str, output: str) -> None:
    """Case SB-02."""
    begin = time.monotonic()
    assert (await box.exec(command, timeout_s=20)).stdout == output
    assert time.monotonic() - begin < 3


async def test_a_server_that_prints_all_the_time_disturbs_no_later_command(box: ShellSandbox) -> None:
    await box.exec("while :; do echo noise; done & true")
    for _ in range(3):
        result = await box.exec("echo mine >&2; exit 6")
        assert (result.stderr, result.exit_code) == ("mine\n", 6)


# ---- nothing stays: SB-04


async def test_close_ends_every_process(start: Start) -> None:
    """Case SB-04 (a)."""
    marker = str(uuid.uuid4().int)[:12]
    async with start() as box:
        await box.exec(f"sleep 1000.{marker} & (setsid sh -c 'sleep 1000.{marker}; :' & exit 0)")
        await box.close()
        wait_until_gone(marker)
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.exec("true")
        with pytest.raises(SandboxError, match="closed"):
            await box.read("/tmp/x")
        assert not await box.is_alive()


async def test_close_in_the_middle_of_a_command(start: Start) -> None:
    async with start() as box:
        running = asyncio.ensure_future(box.exec("sleep 60"))
        await asyncio.wait({running}, timeout=0.2)
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await running


# ---- bytes: SB-05


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (r"printf '\xff\xfe ok'", "\ufffd\ufffd ok"),
        (r"printf 'a\0b\r\x1b[31mc'", "a\0b\r\x1b[31mc"),
        (r"printf '\xed\xa0\x80'", "\ufffd\ufffd\ufffd"),
        ("printf '\udcff'", "\ufffd"),
        ("printf '%s' '\ud800'", "?"),
        ("printf €", "€"),
    ],
)
async def test_any_bytes_become_text(box: ShellSandbox, command: str, output: str) -> None:
    """Case SB-05."""
    assert (await box.exec(command)).stdout == output


async def test_random_bytes_become_text(box: ShellSandbox) -> None:
    """Case SB-05."""
    result = await box.exec("head -c 20000 /dev/urandom")
    assert result.truncated >= 20000 - LIMITS.output_bytes
    assert f"[{result.truncated} bytes left out]" in result.stdout


async def test_output_is_never_cut_inside_a_character(box: ShellSandbox) -> None:
    """Case SB-05."""
    for size in range(4):
        result = await box.exec(f"printf 'a%.0s' {' '.join('1' * size)}; yes '€😀' | head -n 3000 | tr -d '\\n'")
        assert "\ufffd" not in result.stdout
        shown = len(result.stdout.replace(f"\n[{result.truncated} bytes left out]\n", "").encode())
        assert shown + result.truncated == max(size, 1) + 7 * 3000


async def test_head_and_tail_of_each_stream_are_kept(box: ShellSandbox) -> None:
    result = await box.exec("echo start; seq 100000; echo end; seq 100000 >&2")
    assert result.stdout.startswith("start\n1\n")
    assert result.stdout.endswith("100000\nend\n")
    assert result.stderr.endswith("\n100000\n")
    assert max(len(result.stdout), len(result.stderr)) < LIMITS.output_bytes + 50
    assert result.truncated == 10 + 2 * 588895 - 2 * LIMITS.output_bytes


async def test_a_command_with_a_nul_is_a_result(box: ShellSandbox) -> None:
    result = await box.exec("echo a\0b")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "NUL" in result.stderr


# ---- files


@pytest.mark.parametrize("size", [0, 1, 65536, 3_000_001])
async def test_files_come_back_as_they_were(box: ShellSandbox, size: int) -> None:
    """Case SB-05."""
    data = random.Random(size).randbytes(size)
    for path in ("/tmp/new folder/it's", "/workspace/ümlaut\n", "/workspace/-n"):
        await box.write(path, data)
        assert await box.read(path) == data
    await box.write("/workspace/-n", b"shorter")
    assert await box.read("/workspace/-n") == b"shorter"


async def test_files_written_inside_are_read_outside_and_the_reverse(box: ShellSandbox) -> None:
    await box.exec(r"printf '\xff\0\r\n' >/workspace/f")
    assert await box.read("/workspace/f") == b"\xff\0\r\n"
    await box.write("/workspace/f", b"\xfe")
    assert (await box.exec("od -An -tx1 f")).stdout == " fe\n"


async def test_files_that_cannot_be_had_are_errors_that_say_why(box: ShellSandbox) -> None:
    with pytest.raises(SandboxError, match=r"'/no/such file'.*No such file"):
        await box.read("/no/such file")
    with pytest.raises(SandboxError, match="/tmp"):
        await box.read("/tmp")
    with pytest.raises(SandboxError, match="/proc/new"):
        await box.write("/proc/new", b"")
    await box.exec("head -c 9M /dev/zero >/tmp/large")
    with pytest.raises(SandboxError, match="file_bytes"):
        await box.read("/tmp/large")
    with pytest.raises(SandboxError, match="file_bytes"):
        await box.write("/tmp/larger", bytes(9 << 20))
    assert (await box.exec("echo alive")).stdout == "alive\n"


async def test_reading_a_link_that_leads_out_reads_nothing_of_the_host(box: ShellSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host")
    await box.exec(f"ln -s {secret} /workspace/link; ln -s {tmp_path} /workspace/folder")
    with pytest.raises(SandboxError):
        await box.read("/workspace/link")
    with contextlib.suppress(SandboxError):
        await box.write("/workspace/folder/secret", b"changed")
    assert secret.read_text() == "host"


# ---- many


async def test_sixteen_side_by_side(start: Start) -> None:
    spec = replace(SPEC, limits=replace(LIMITS, processes=32, disk_bytes=16 << 20))
    async with AsyncExitStack() as stack:
        boxes = await asyncio.gather(*(stack.enter_async_context(start(spec)) for _ in range(16)))
        for _ in range(3):
            results = await asyncio.gather(*(box.exec(f"echo {n} >>f; cat f") for n, box in enumerate(boxes)))
        assert [result.stdout for result in results] == [f"{n}\n" * 3 for n in range(16)]


async def test_many_commands_leave_no_zombie(box: ShellSandbox) -> None:
    for _ in range(30):
        await box.exec("(setsid true & exit 0); true & true")
    # One that has just ended may not have been waited for yet; two looks never see the same one.
    looks = [await box.exec("grep -l '^State:.Z' /proc/[0-9]*/status; sleep 0.2") for _ in range(2)]
    first, second = (set(look.stdout.split()) for look in looks)
    assert not first & second
    assert len(first) <= 2
    assert await box.is_alive()


def test_limits_and_specs_are_checked() -> None:
    with pytest.raises(ConfigError, match="processes is 0"):
        ShellLimits(processes=0)
    with pytest.raises(ConfigError, match="whole number"):
        ShellLimits(memory_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="workdir"):
        SandboxSpec(workdir="relative")
    with pytest.raises(ConfigError, match="A B"):
        SandboxSpec(env={"A B": ""})


# ---- abuse


@pytest.fixture
def host(tmp_path: Path) -> Iterator[dict[str, str]]:
    """What abuse is aimed at."""
    secret = tmp_path / "secret"
    secret.write_text("root:$secret$")
    secret.chmod(0o644)
    name = f"sao-gym-{uuid.uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind(f"\0{name}")
        local.listen()
        port = str(server.getsockname()[1])
        yield {"port": port, "socket": name, "secret": str(secret), "pid": str(os.getpid()), "other": "others-file"}


@pytest.mark.parametrize("backend", [pytest.param(name, marks=MARKS.get(name, [])) for name in WALLED], indirect=True)
@pytest.mark.parametrize("abuse", ABUSES, ids=[abuse.name for abuse in ABUSES])
async def test_abuse(start: Start, host: dict[str, str], abuse: Abuse) -> None:
    command = abuse.command
    for name, value in host.items():
        command = command.replace(f"{{{name}}}", value)
    async with AsyncExitStack() as stack:
        if "{other}" in abuse.command:
            other = await stack.enter_async_context(start())
            await other.exec("echo secret | tee /workspace/others-file /tmp/others-file")
        box = await stack.enter_async_context(start())
        result = await box.exec(command, timeout_s=abuse.timeout_s)
        assert abuse.check(result), result
        again = await box.exec("echo alive; rm -f /workspace/* /dev/shm/*", timeout_s=20)
        assert again.stdout.endswith("alive\n"), again
