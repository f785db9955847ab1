"""The host's end of the shell channel by itself: marks found whatever pieces they come in, output bounded."""

import asyncio
import re
import subprocess
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.envs.sandboxes import channel as channel_module
from sao_gym.envs.sandboxes.channel import DATA, STDERR, STDOUT, ShellChannel
from sao_gym.envs.sandboxes.driver import driver_argv, encode
from sao_gym.envs.sandboxes.output import BoundedOutput
from sao_gym.envs.sandboxes.spec import ShellLimits
from sao_gym.errors import SandboxError
from sao_gym.protocols import ExecResult

LIMITS = ShellLimits(output_bytes=10_000)
# Bytes that look like the beginning of a mark, and any others.
OUTPUT = st.lists(
    st.sampled_from([b"\0", b"\0a1b2", b":0\n", b"\n", "é".encode(), b"\xff", b"text "]), max_size=30
).map(b"".join)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


async def answered(stdout: bytes, stderr: bytes, cuts: list[int], code: int) -> ExecResult:
    """What a channel makes of these bytes, cut anywhere, before a command's marks and noise after them."""
    sent: list[bytes] = []

    async def send(data: bytes) -> None:
        sent.append(data)

    channel = ShellChannel(send, LIMITS, env={}, workdir="/", data_fd=20)
    running = asyncio.ensure_future(channel.exec("anything"))
    while not sent:
        await asyncio.sleep(0)
    found = re.search(rb"_sg_run ([0-9a-f]{24}) ", sent[-1])
    assert found is not None
    mark = b"\0" + found[1] + b":"
    for stream, data in (
        (STDERR, stderr + mark + b"\n"),
        (DATA, mark + b"\n"),
        (STDOUT, stdout + mark + b"%d\n" % code),
    ):
        for piece in pieces(data, cuts):
            channel.feed(stream, piece)
    return await asyncio.wait_for(running, 5)


@settings(max_examples=60)
@given(stdout=OUTPUT, stderr=OUTPUT, cuts=st.lists(st.integers(0, 400), max_size=40), code=st.integers(0, 255))
def test_a_mark_is_found_whatever_pieces_it_comes_in(stdout: bytes, stderr: bytes, cuts: list[int], code: int) -> None:
    result = asyncio.run(answered(stdout, stderr, cuts, code))
    assert (result.stdout, result.stderr) == (stdout.decode("utf-8", "replace"), stderr.decode("utf-8", "replace"))
    assert (result.exit_code, result.timed_out, result.truncated) == (code, False, 0)


@given(data=st.binary(max_size=400), limit=st.integers(1, 100), cuts=st.lists(st.integers(0, 400), max_size=10))
def test_what_is_kept_does_not_depend_on_the_pieces(data: bytes, limit: int, cuts: list[int]) -> None:
    whole, parts = BoundedOutput(limit), BoundedOutput(limit)
    whole.add(data)
    for piece in pieces(data, cuts):
        parts.add(piece)
    assert parts.text() == whole.text()
    text, left_out = whole.text()
    assert (left_out == 0) == (len(data) <= limit)
    assert left_out == 0 or f"\n[{left_out} bytes left out]\n" in text


async def test_a_stream_that_ends_fails_whoever_waits_and_whoever_comes() -> None:
    async def send(data: bytes) -> None:
        pass

    channel = ShellChannel(send, LIMITS, env={}, workdir="/")
    running = asyncio.ensure_future(channel.exec("anything"))
    await asyncio.sleep(0)
    channel.feed_end("it is gone")
    channel.feed_end("another reason")
    with pytest.raises(SandboxError, match=r"^it is gone$"):
        await running
    with pytest.raises(SandboxError, match=r"^it is gone$"):
        await channel.exec("another")
    assert channel.is_broken
    assert not await channel.ping()


async def test_a_shell_that_cannot_be_written_to_is_a_sandbox_error() -> None:
    async def send(data: bytes) -> None:
        raise BrokenPipeError("gone")

    channel = ShellChannel(send, LIMITS, env={}, workdir="/")
    with pytest.raises(SandboxError, match=r"ended by itself \(gone\)"):
        await channel.open(1.0)


class _Driver:
    """Answers a look only after it has been asked again and again what it hears, and a run never."""

    def __init__(self, prints: bytes) -> None:
        self.channel = ShellChannel(self.send, LIMITS, env={}, workdir="/")
        self.prints, self.looks = prints, 0
        self._printing: asyncio.Task[None] | None = None

    async def send(self, data: bytes) -> None:
        if found := re.search(rb"_sg_look ([0-9a-f]{24})", data):
            self.looks += 1
            self._printing = asyncio.ensure_future(self._late(b"\0" + found[1] + b":"))

    async def _late(self, mark: bytes) -> None:
        for _ in range(8):
            await asyncio.sleep(0.02)
            self.channel.feed(STDOUT, self.prints)
        self.channel.feed(STDERR, mark + b"\n")
        self.channel.feed(STDOUT, mark + b"busy\n")


async def test_an_answer_behind_much_output_is_waited_for_and_silence_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "LOOK_S", 0.01)
    monkeypatch.setattr(channel_module, "KILL_S", 0.06)
    noisy, silent = _Driver(b"noise\n"), _Driver(b"")
    heard = asyncio.ensure_future(noisy.channel.exec("anything", timeout_s=60))
    while noisy.looks < 3:
        await asyncio.sleep(0.01)
        assert not heard.done()
    heard.cancel()
    with pytest.raises(SandboxError, match=r"did not answer 'look' within 0\.06 s"):
        await silent.channel.exec("anything", timeout_s=60)
    assert silent.looks == 1


async def test_a_look_that_is_late_holds_up_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "LOOK_S", 0.01)
    monkeypatch.setattr(channel_module, "KILL_S", 0.5)
    driver, now = _Driver(b"noise\n"), asyncio.get_running_loop().time
    began = now()
    assert (await driver.channel.exec("anything", timeout_s=0.05)).timed_out
    assert now() - began < 10
    with pytest.raises(SandboxError, match="did not answer 'end'"):
        await driver.channel.exec("another")


def test_the_driver_is_bash_that_parses() -> None:
    for argv in (driver_argv(), driver_argv(data_fd=20, setup="ulimit -u 5", processes=9)):
        for program in argv[3:6:2]:
            assert not re.search(r"@[A-Z]+@", program)
            done = subprocess.run(["bash", "-n"], input=program, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")


def test_text_keeps_the_bytes_that_it_came_from() -> None:
    assert encode("a\udcffb\u20ac") == b"a\xffb\xe2\x82\xac"
    assert encode("\ud800") == b"?"
