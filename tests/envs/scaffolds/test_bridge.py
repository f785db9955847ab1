"""What an agent program asks of its sandbox: done inside, refused in words, and the end of the episode if that is gone."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from sao_gym.envs.sandboxes.backends import make_sandbox
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits, ShellSandbox
from sao_gym.envs.scaffolds.bridge import SandboxBridge
from sao_gym.envs.scaffolds.mini import MiniScaffold
from sao_gym.envs.scaffolds.names import make_scaffold
from sao_gym.envs.scaffolds.openhands import OpenHandsScaffold
from sao_gym.envs.scaffolds.shell import STATE
from sao_gym.errors import ConfigError, SandboxError, SandboxUnavailableError
from sao_gym.loops import run_blocking
from sao_gym.protocols import AGENT_FAILED
from sao_gym.stream import Outcome, TruncationReason
from sao_gym.worker_process import AskRefusedError


@pytest.fixture(scope="module")
def box() -> Iterator[ShellSandbox]:
    try:
        box = run_blocking(make_sandbox("local", SandboxSpec(limits=ShellLimits(output_bytes=MIB))))
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    yield box
    run_blocking(box.close())


def ask(box: ShellSandbox, do: str, **given: Any) -> Any:
    return run_blocking(SandboxBridge(box)(do, given))


def test_commands_run_inside(box: ShellSandbox) -> None:
    done = ask(box, "exec", command="pwd; echo oops >&2; exit 3", timeout_s=20)
    assert (done["stdout"], done["stderr"], done["exit_code"]) == ("/workspace\n", "oops\n", 3)
    merged = ask(box, "exec", command="echo a; echo b >&2; echo c", timeout_s=20, merged=True, env={"X": "1"})
    assert merged["stdout"] == "a\nb\nc\n"
    assert ask(box, "exec", command="cat", stdin="é\ud83d", timeout_s=20)["stdout"] == "é?"
    assert ask(box, "exec", command="sleep 60", timeout_s=0.5)["timed_out"]


def test_what_the_environment_has_prepared_holds_for_those_who_enter(box: ShellSandbox) -> None:
    ask(box, "exec", command=f"echo 'export PREPARED=yes; cd /' >{STATE}", timeout_s=20)
    asked = {"command": "echo $PREPARED; pwd", "timeout_s": 20}
    assert ask(box, "exec", **asked)["stdout"] == "\n/workspace\n"
    assert ask(box, "exec", **asked, entered=True)["stdout"] == "yes\n/workspace\n"
    assert ask(box, "exec", **asked, entered=True, cwd="/tmp")["stdout"] == "yes\n/tmp\n"


def test_files_are_written_and_read_inside(box: ShellSandbox) -> None:
    data = bytes(range(256))
    ask(box, "write", path="/workspace/new/file", data=base64.b64encode(data).decode())
    assert base64.b64decode(ask(box, "read", path="/workspace/new/file")["data"]) == data


@pytest.mark.parametrize(
    ("do", "given"),
    [
        ("read", {"path": "/nothing/there"}),
        ("write", {"path": "/proc/nothing", "text": "x"}),
        ("write", {"path": "/workspace/x", "data": "no base64!"}),
        ("exec", {"command": "echo \0"}),
        ("exec", {"command": "true", "env": {"no name": "x"}}),
        ("format_disk", {}),
    ],
)
def test_what_cannot_be_is_refused_and_the_sandbox_lives(box: ShellSandbox, do: str, given: dict[str, Any]) -> None:
    with pytest.raises(AskRefusedError):
        ask(box, do, **given)
    assert ask(box, "exec", command="echo on", timeout_s=20)["stdout"] == "on\n"


def test_a_sandbox_that_is_gone_is_no_refusal() -> None:
    box = run_blocking(make_sandbox("local", SandboxSpec()))
    run_blocking(box.close())
    with pytest.raises(SandboxError) as raised:
        ask(box, "exec", command="true", timeout_s=20)
    assert not isinstance(raised.value, AskRefusedError)


def test_scaffolds_have_names() -> None:
    assert make_scaffold("shell", 2) is None
    assert isinstance(make_scaffold("openhands", 2), OpenHandsScaffold)
    assert isinstance(make_scaffold("sao_gym.envs.scaffolds.mini:MiniScaffold", 2), MiniScaffold)
    with pytest.raises(ConfigError, match="no scaffold 'openhand'; give shell, openhands, mini"):
        make_scaffold("openhand", 2)
    with pytest.raises(ConfigError, match="cannot be had"):
        make_scaffold("no.such:Thing", 2)
    with pytest.raises(ConfigError, match="one of mini-swe-agent's own files"):
        MiniScaffold(config="../../secret.yaml")


def test_how_a_program_ended_is_how_the_episode_did() -> None:
    openhands, mini = OpenHandsScaffold(), MiniScaffold()
    for status in ("finished", "talked", "stuck"):
        assert openhands.outcome({"status": status}) == Outcome.terminated()
    assert openhands.outcome({"status": "MaxIterationsReached"}) == Outcome.truncated(TruncationReason.TURNS)
    assert openhands.outcome({"status": "LLMBadRequestError"}) == Outcome.error(AGENT_FAILED)
    assert mini.outcome({"status": "Submitted"}) == Outcome.terminated()
    assert mini.outcome({"status": "LimitsExceeded"}) == Outcome.truncated(TruncationReason.TURNS)
