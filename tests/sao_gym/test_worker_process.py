"""Driver programs in processes of their own: what libraries print, what crashes, hangs or lies takes one run alone."""

import asyncio
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sao_gym.errors import SandboxError
from sao_gym.worker_process import (
    AgentProgramError,
    AskRefusedError,
    WorkerCommand,
    WorkerError,
    WorkerPool,
    WorkerProcess,
)

DRIVERS = Path(__file__).resolve().parents[2] / "envs" / "scaffolds" / "drivers"
PROGRAM = """
import os, sys, threading, time
from driver_lines import Lines, AskError
lines = Lines()
print("a library's banner")                      # must not be taken for a line of the protocol
os.write(1, b"and from below python\\n")
def run(given):
    print("noise", given)
    do = given["do"]
    if do == "echo": return {"said": lines.ask("echo", text=given["text"])}
    if do == "many":
        got = [None] * 20
        def one(i): got[i] = lines.ask("echo", text=str(i))
        threads = [threading.Thread(target=one, args=(i,)) for i in range(20)]
        [t.start() for t in threads]; [t.join() for t in threads]
        return {"said": got}
    if do == "refused":
        try: lines.ask("no")
        except AskError as error: return {"told": str(error)}
    if do == "fails": raise ValueError("this agent cannot")
    if do == "dies": print("my last words", flush=True); os._exit(3)
    if do == "hangs": time.sleep(600)
    if do == "lies": os.write(lines._outgoing.fileno(), b"no json at all\\n"); time.sleep(600)
    if do == "environment": return {"keys": sorted(os.environ), "home": os.environ["HOME"], "stdin": sys.stdin.read()}
    if do == "child":
        import subprocess
        return {"pid": subprocess.Popen(["sleep", "600"]).pid}
lines.serve({"version": "1"}, run)
"""


async def answer(do: str, given: Mapping[str, Any]) -> Any:
    if do == "echo":
        await asyncio.sleep(0)
        return given["text"]
    if do == "no":
        raise AskRefusedError("there is no such thing")
    raise SandboxError("the sandbox is gone")


@pytest.fixture
def command(tmp_path: Path) -> WorkerCommand:
    program = tmp_path / "program.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(DRIVERS)!r})\n{PROGRAM}")
    return WorkerCommand(argv=(sys.executable, "-I", str(program)))


def is_there(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


async def test_a_process_answers_many_runs_and_is_reaped(command: WorkerCommand) -> None:
    pool = WorkerPool(command, size=1)
    assert await pool.run({"do": "echo", "text": "é \ud83d\n"}, answer) == {"said": "é \ud83d\n"}
    pids = {worker.pid for worker in pool._alive}
    assert await pool.run({"do": "many"}, answer) == {"said": [str(i) for i in range(20)]}
    assert await pool.run({"do": "refused"}, answer) == {"told": "there is no such thing"}
    assert {worker.pid for worker in pool._alive} == pids, "one process served all three"
    await pool.close()
    assert not any(map(is_there, pids))
    with pytest.raises(WorkerError, match="closed"):
        await pool.run({"do": "many"}, answer)


async def test_it_inherits_nothing_of_ours(command: WorkerCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    pool = WorkerPool(command, size=1)
    told = await pool.run({"do": "environment"}, answer)
    await pool.close()
    assert set(told["keys"]) - {"LC_CTYPE"} == {"PATH", "LANG", "HOME", "TMPDIR"}
    assert told["stdin"] == ""
    assert not Path(told["home"]).exists(), "its folder ends with it"


async def test_an_agent_that_fails_keeps_its_process(command: WorkerCommand) -> None:
    pool = WorkerPool(command, size=1)
    with pytest.raises(AgentProgramError, match="ValueError: this agent cannot"):
        await pool.run({"do": "fails"}, answer)
    (worker,) = pool._alive
    assert await pool.run({"do": "echo", "text": "x"}, answer) == {"said": "x"}
    assert pool._alive == {worker}
    await pool.close()


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("dies", "ended by itself; its last words: .*my last words"),
        ("lies", "no JSON"),
        ("hangs", "had not ended after"),
    ],
)
async def test_what_breaks_takes_its_own_run_alone(command: WorkerCommand, do: str, message: str) -> None:
    pool = WorkerPool(command, size=2)
    good = asyncio.ensure_future(pool.run({"do": "many"}, answer))
    with pytest.raises(WorkerError, match=message) as raised:
        await pool.run({"do": do}, answer, timeout_s=1.0)
    assert raised.value.kind == ("worker_timeout" if do == "hangs" else "worker")
    assert len((await good)["said"]) == 20
    assert pool.processes == 1, "the broken one is gone"
    assert await pool.run({"do": "echo", "text": "x"}, answer) == {"said": "x"}
    await pool.close()


async def test_a_sandbox_that_is_gone_ends_the_run(command: WorkerCommand) -> None:
    """The program must not go on as if its tools had merely failed."""
    pool = WorkerPool(command, size=1)

    async def gone(do: str, given: Mapping[str, Any]) -> Any:
        raise SandboxError("the sandbox is gone")

    with pytest.raises(SandboxError, match="gone"):
        await pool.run({"do": "echo", "text": "x"}, gone)
    assert pool.processes == 0
    await pool.close()


async def test_cancelling_a_run_ends_its_process_and_what_it_started(command: WorkerCommand) -> None:
    pool = WorkerPool(command, size=1)
    child = (await pool.run({"do": "child"}, answer))["pid"]
    assert is_there(child)
    run = asyncio.ensure_future(pool.run({"do": "hangs"}, answer))
    while not any(worker.runs == 2 for worker in pool._alive):
        await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert pool.processes == 0
    assert not is_there(child)
    await pool.close()


async def test_a_program_ends_with_whoever_started_it(command: WorkerCommand) -> None:
    worker = await WorkerProcess.start(command)
    assert worker.facts == {"version": "1"}
    stdin = worker._process.stdin
    assert stdin is not None
    stdin.close()  # what the death of this process would do
    async with asyncio.timeout(10):
        assert await worker._process.wait() == 0
    await worker.kill()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("/nonexistent/python",), "could not be started"),
        ((sys.executable, "-c", "raise SystemExit('no such library')"), "last words: no such library"),
        ((sys.executable, "-c", "import time; time.sleep(60)"), "not ready within"),
    ],
)
async def test_a_program_that_does_not_start_says_why(argv: tuple[str, ...], message: str) -> None:
    before = set(Path(tempfile.gettempdir()).glob("sao-gym-worker-*"))
    pool = WorkerPool(WorkerCommand(argv=argv, startup_s=1.5))
    with pytest.raises(WorkerError, match=message):
        await pool.run({}, answer)
    await pool.close()
    assert pool.processes == 0
    assert set(Path(tempfile.gettempdir()).glob("sao-gym-worker-*")) <= before, "its folder went with it"


async def test_processes_are_started_ahead(command: WorkerCommand) -> None:
    pool = WorkerPool(command, size=3, warm=3)
    await pool.run({"do": "many"}, answer)
    await asyncio.gather(*pool._starting)
    assert pool.processes == 3
    await pool.close()
    assert pool.processes == 0
