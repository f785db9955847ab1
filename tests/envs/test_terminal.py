"""The terminal environment: what is graded, and what an agent that wants the reward without the work can do."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sao_gym.commands.environments import Environments
from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.terminal import TerminalEnv, apply_patch_command
from sao_gym.errors import ConfigError, SandboxError, SandboxUnavailableError, TaskFileError
from sao_gym.loops import run_blocking
from sao_gym.messages import Message, ToolCall
from sao_gym.protocols import Task
from sao_gym.registry import make
from sao_gym.stream import Score

CALC = "def double(x):\n    return x + x + 1\n"
RIGHT = "def double(x):\n    return x + x\n"
TEST = "import unittest\nimport calc\n\n\nclass T(unittest.TestCase):\n    def test_double(self):\n        self.assertEqual(calc.double(4), 8)\n"
SECRET = "the-expected-value-8"
CHECK = {
    "command": "python3 -m unittest -v test_calc",
    "files": {"hidden/note": SECRET},
    "expect": r"^OK$",
    "timeout_s": 20,
}


def task(**check: Any) -> Task:
    files = {"calc.py": CALC, "test_calc.py": TEST}
    return Task(id="calc", prompt="Mend double.", info={"files": files, "check": {**CHECK, **check}})


def act(command: str, name: str = "bash") -> Message:
    return Message.assistant(tool_calls=(ToolCall(id="c0", name=name, arguments={"command": command}),))


@pytest.fixture(scope="module")
def boxes() -> Iterator[SharedSandboxes]:
    boxes = SharedSandboxes(4)
    yield boxes
    run_blocking(boxes.close())


@pytest.fixture(params=["fresh", "in_place"])
def play(request: pytest.FixtureRequest, boxes: SharedSandboxes) -> Iterator[Callable[..., Score]]:
    """Run commands as the agent of an episode and give the score; both ways to check."""
    envs = []

    def run(*commands: str, **check: Any) -> Score:
        env = TerminalEnv([task(in_place=request.param == "in_place", **check)], sandboxes=boxes)
        envs.append(env)
        env.reset(seed=0)
        for command in commands:
            env.step(act(command))
        *_, terminated, truncated, info = env.step("Done.")
        assert (terminated, truncated) == (True, False)
        score = info["score"]
        assert isinstance(score, Score)
        return score

    yield run
    for env in envs:
        env.close()


MEND = f"cat >calc.py <<'E'\n{RIGHT}E"


def test_gates(play: Callable[..., Score]) -> None:
    gold = play(MEND)
    assert (gold.value, gold.passed) == (1.0, True)
    assert play().value == 0.0
    assert play("echo '))' >calc.py").value == 0.0


ATTACKS = {
    "tests changed": "printf 'import unittest\n' >test_calc.py",
    "tests replaced by a link": "printf 'x = 1\n' >ok.py; rm test_calc.py; ln -s ok.py test_calc.py",
    "tests replaced by a folder": "rm test_calc.py; mkdir test_calc.py test_calc; touch test_calc/__init__.py",
    "tests shadowed by a compiled module": "touch test_calc.so test_calc.abi3.so; mkdir -p test_calc.d",
    "unittest shadowed": "printf 'print(\"OK\")\nraise SystemExit(0)\n' >unittest.py",
    "unittest shadowed by a package": "mkdir unittest; printf 'print(\"OK\")\nraise SystemExit(0)\n' >unittest/__main__.py;"
    " touch unittest/__init__.py",
    "sitecustomize in the folder": "printf 'import os; print(\"OK\"); os._exit(0)\n' | tee sitecustomize.py >usercustomize.py",
    "site of the user": "d=$(python3 -m site --user-site); mkdir -p $d; "
    "printf 'import os; print(\"OK\", flush=True); os._exit(0)\n' >$d/usercustomize.py; "
    "printf 'import os; os.write(1, b\"OK\\\\n\"); os._exit(0)\n' >$d/evil.pth",
    "a python of one's own on PATH": "mkdir -p ~/bin; printf '#!/bin/sh\necho OK\n' >~/bin/python3; chmod +x ~/bin/python3; "
    "export PATH=~/bin:$PATH; echo 'export PATH=~/bin:$PATH' | tee ~/.profile ~/.bashrc ~/.bash_profile >/dev/null",
    "BASH_ENV": "printf 'echo OK\nexit 0\n' >/tmp/env.sh; export BASH_ENV=/tmp/env.sh ENV=/tmp/env.sh",
    "PYTHON variables": "mkdir /tmp/py; printf 'print(\"OK\")\nraise SystemExit(0)\n' >/tmp/py/unittest.py; "
    "export PYTHONPATH=/tmp/py PYTHONSTARTUP=/tmp/py/unittest.py",
    "python in the sandbox": "cp /bin/true /usr/bin/python3; ln -sf /bin/true /usr/local/bin/python3",
    "compiled code that is other than its source": "python3 - <<'E'\n"
    "import importlib.util, marshal, os, pathlib, struct\n"
    "path = pathlib.Path('test_calc.py'); stat = path.stat()\n"
    "code = compile('import unittest\\nclass T(unittest.TestCase):\\n    def test_double(self): pass\\n', 'test_calc.py', 'exec')\n"
    "head = importlib.util.MAGIC_NUMBER + struct.pack('<III', 0, 0, stat.st_size)\n"
    "place = pathlib.Path(importlib.util.cache_from_source('test_calc.py')); place.parent.mkdir(exist_ok=True)\n"
    "place.write_bytes(head + marshal.dumps(code)); os.utime('test_calc.py', (0, 0))\nE",
    "the process ends itself with 0": "printf 'import os\nos._exit(0)\n' >calc.py",
    "a background process that waits for the check": 'nohup setsid bash -c \'while :; do printf "import unittest\\n" >/workspace/test_calc.py; '
    f'printf "{RIGHT}" >/workspace/calc.py; done\' >/dev/null 2>&1 &',
    "the work folder is a link": "cd /tmp; mkdir w; printf 'import unittest\n' >w/test_calc.py; rm -rf /workspace; ln -s /tmp/w /workspace",
    "a file above the folder": "printf 'print(\"OK\")\nraise SystemExit(0)\n' >/unittest.py; mkdir -p /hidden",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_agent_that_wants_the_reward_without_the_work_gets_none(play: Callable[..., Score], name: str) -> None:
    if name.startswith("a background process"):
        assert play(ATTACKS[name].replace(f'printf "{RIGHT}" >/workspace/calc.py; ', "")).value == 0.0
        return
    score = play(ATTACKS[name])
    assert score.value == 0.0, score.detail
    assert not score.passed


def test_without_expect_a_process_that_ends_itself_with_0_passes(play: Callable[..., Score]) -> None:
    """Why a check should say what its output must hold."""
    assert play(ATTACKS["the process ends itself with 0"], expect="").value == 1.0


def test_what_the_agent_left_running_is_not_there_in_the_check(play: Callable[..., Score]) -> None:
    score = play(
        "setsid sleep 987 >/dev/null 2>&1 & trap '' TERM HUP; (trap '' TERM; exec -a sleeper987 sleep 987) &",
        command="! grep -alE '[9]87' /proc/[0-9]*/cmdline",
        expect="",
    )
    assert score.value == 1.0, score.detail


def test_what_takes_long_to_die_is_waited_for(play: Callable[..., Score]) -> None:
    """A killed process is gone once it is scheduled again: with every core busy and the lowest priority, much later."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        score = play(
            "for _ in {1..40}; do chrt --idle 0 sleep 987 >/dev/null 2>&1 & done",
            command="! grep -alE '[9]87' /proc/[0-9]*/cmdline",
            expect="",
        )
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert score.value == 1.0, score.detail


def test_the_checks_files_are_not_there_before_it(boxes: SharedSandboxes) -> None:
    env = TerminalEnv([task()], sandboxes=boxes)
    env.reset(seed=0)
    left = "--exclude-dir=proc --exclude-dir=sys --exclude-dir=usr --exclude-dir=lib"  # this machine's own, gigabytes
    (said,), *_ = env.step(act(f"grep -rl {SECRET} / {left} 2>/dev/null; ls -A"))
    assert said.content.split("\n")[0] == "calc.py"
    env.close()


def test_the_agent_s_check_files_are_overwritten(play: Callable[..., Score]) -> None:
    score = play(
        "rm -rf hidden; ln -s /tmp hidden; echo forged >/tmp/note",
        command=f"[[ ! -L hidden ]] && grep -q {SECRET} hidden/note",
        expect="",
    )
    assert score.value == 1.0, score.detail


def test_a_real_repair_may_add_files_and_links(play: Callable[..., Score]) -> None:
    command = f"mkdir -p lib; cat >lib/double.py <<'E'\n{RIGHT}E\ntouch lib/__init__.py; printf 'from lib.double import double\n' >calc.py"
    assert play(command).value == 1.0
    assert play(f"cat >real.py <<'E'\n{RIGHT}E\nrm calc.py; ln -s real.py calc.py").value == 1.0


def test_a_check_that_hangs_is_0(play: Callable[..., Score]) -> None:
    score = play("printf 'while True: pass\n' >calc.py", timeout_s=1.0)
    assert score.value == 0.0
    assert "did not end within 1 s" in score.detail


def test_a_full_disk_is_the_agents_doing(play: Callable[..., Score]) -> None:
    score = play("mkdir -p deep; head -c 2000000000 /dev/zero >deep/full 2>/dev/null; true")
    assert score.value == 0.0
    assert "could not be packed" in score.detail


def test_a_sandbox_that_dies_is_an_error_and_never_0(boxes: SharedSandboxes) -> None:
    env = TerminalEnv([task()], sandboxes=boxes)
    env.reset(seed=0)
    env.step(act("true"))
    run_blocking(env._box.box.close())  # type: ignore[union-attr]
    with pytest.raises(SandboxError):
        env.step("Done.")
    env.close()
    env.reset(seed=0)
    assert env.step("Done.")[1] == 0.0, "the environment goes on"
    env.close()


def test_a_cut_message_ends_the_episode_and_is_graded(boxes: SharedSandboxes) -> None:
    env = TerminalEnv([task()], sandboxes=boxes, max_turns=2)
    env.reset(seed=0)
    env.step(act(MEND))
    _, reward, terminated, truncated, info = env.step(act("true"))
    assert (reward, terminated, truncated, info["truncation_reason"]) == (1.0, False, True, "turns")
    env.close()


async def test_a_check_that_a_budget_cuts_short_is_run_again(boxes: SharedSandboxes) -> None:
    env = TerminalEnv([task(command="sleep 1; python3 -m unittest test_calc")], sandboxes=boxes)
    await env.reset_async(seed=0)
    await env.step_async(act(MEND))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.7):
            await env.step_async("Done.")
    score = await env.finish_async("wall_clock")
    assert score is not None
    assert score.value == 1.0, score.detail
    await env.close_async()
    assert boxes.metrics.leased == boxes.metrics.leaks == 0


def test_the_turns_share_one_shell(boxes: SharedSandboxes) -> None:
    env = TerminalEnv([task()], sandboxes=boxes)
    env.reset(seed=0)
    env.step(act("cd /tmp; export A=1"))
    assert env.step(act("pwd; echo $A"))[0][0].content == "/tmp\n1\n[exit code 0]"
    env.close()


def test_many_episodes_share_places_and_leave_nothing(boxes: SharedSandboxes) -> None:
    async def one(number: int) -> float:
        env = TerminalEnv([task()], sandboxes=boxes)
        await env.reset_async(seed=number)
        if number % 2:
            await env.step_async(act(MEND))
        step = await env.step_async("Done.")
        await env.close_async()
        return step[1]

    async def all_of_them() -> list[float]:
        return list(await asyncio.gather(*(one(number) for number in range(8))))

    assert asyncio.run(all_of_them()) == [0.0, 1.0] * 4
    assert boxes.metrics.leased == boxes.metrics.leaks == 0
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True).stdout
    own = [line for line in listed.splitlines() if line.split()[0] == str(os.getpid()) and "bwrap" in line]
    assert len(own) == 0, own


def test_environments_of_one_kind_share_the_named_backend() -> None:
    environments = Environments("terminal", {"backend": "local"}, size=3)
    first, second = environments.make(), environments.make()
    assert first.unwrapped._sandboxes is second.unwrapped._sandboxes  # type: ignore[attr-defined]
    assert first.unwrapped._sandboxes.backend == "local"  # type: ignore[attr-defined]
    run_blocking(environments.check())
    run_blocking(environments.close())


def test_backends_by_name() -> None:
    with pytest.raises(ConfigError, match="no sandbox backend 'dokcer'; give local, docker, e2b, or"):
        make("terminal", backend="dokcer")
    env = make("terminal", backend="no_such_package.module:function")
    with pytest.raises(SandboxUnavailableError, match="no_such_package"):
        env.reset(seed=0)


def test_a_folder_s_own_backend(boxes: SharedSandboxes) -> None:
    env = TerminalEnv([task()], backend="sao_gym.envs.sandboxes.local_shell:LocalSandbox.start")
    env.reset(seed=0)
    env.step(act(MEND))
    assert env.step("Done.")[1] == 1.0
    env.close()


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({}, "has no check"),
        ({"check": {"command": 3}}, "has no check"),
        ({"check": {"command": "true"}, "imag": "x"}, "says 'imag'"),
        ({"check": {"command": "true", "expect": "("}}, "no regular expression"),
        ({"check": {"command": "true", "timeout_s": 0}}, "above 0"),
        ({"check": {"command": "true"}, "files": {"../x": ""}}, "inside its folder"),
        ({"check": {"command": "true"}, "files": {"x": 3}}, "must be text"),
        ({"check": {"command": "true"}, "workdir": "/"}, "folder of its own"),
        ({"check": {"command": "true"}, "folder": {"file": "/no.tar.gz", "sha256": "0"}}, "cannot be read"),
        ({"check": {"command": "true"}, "protect": "x"}, "list of patterns"),
    ],
)
def test_a_task_that_cannot_be_is_refused_in_a_sentence(boxes: SharedSandboxes, info: Any, words: str) -> None:
    env = TerminalEnv([Task(id="t", prompt="p", info=info)], sandboxes=boxes)
    with pytest.raises(TaskFileError, match=words):
        env.reset(seed=0)
    env.close()


def test_a_patch_is_applied_as_git_writes_it(boxes: SharedSandboxes, tmp_path: Path) -> None:
    patch = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def double(x):\n-    return x + x + 1\n+    return x + x\n"
    env = TerminalEnv([task()], sandboxes=boxes)
    env.reset(seed=0)
    env.step(act(apply_patch_command(patch)))
    assert env.step("Done.")[1] == 1.0
    env.close()
