"""Episodes in a repository: the gates, all ways to an end, what an agent finds and what is kept."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import swe_instances

from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.core import Budgets, TokenEnv
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.swe import SweEnv, activation
from sao_gym.errors import ConfigError, SandboxError, TaskFileError
from sao_gym.loops import run_blocking
from sao_gym.messages import Message, ToolCall
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.protocols import Generation, Sampling, Task
from sao_gym.rollout import Episode, grading_limit, white_box
from sao_gym.stream import Ids, Outcome, Trajectory

pytest.importorskip("swebench")

FIX = "sed -i 's/a - b/a + b/' m.py"
ME = "git config user.name x; git config user.email x@y; "


def act(command: str) -> Message:
    return Message.assistant(tool_calls=(ToolCall(id="call_0", name="bash", arguments={"command": command}),))


@pytest.fixture(params=["local", pytest.param("docker", marks=pytest.mark.docker)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def task(request: pytest.FixtureRequest) -> Task:
    is_docker = "backend" in request.fixturenames and request.getfixturevalue("backend") == "docker"
    image = str(request.getfixturevalue("tiny_image" if is_docker else "tiny_root"))
    return swe_instances.task_of(swe_instances.tiny_row(image))


@pytest.fixture(scope="module")
def boxes() -> Iterator[SharedSandboxes]:
    boxes = SharedSandboxes(1)  # one place is enough for an episode, its patch and its grade
    yield boxes
    run_blocking(boxes.close())


@pytest.fixture
def env(task: Task, boxes: SharedSandboxes) -> Iterator[SweEnv]:
    """An environment that is closed whatever happens: the next test needs its place."""
    env = SweEnv([task], sandboxes=boxes)
    yield env
    env.close()


def play(env: SweEnv, *commands: str) -> tuple[float, str]:
    """(score, why) of an episode in which the agent runs commands and ends."""
    env.reset(seed=0)
    for command in commands:
        env.step(act(command))
    *_, info = env.step("Done.")
    return info["score"].value, info["score"].detail


def test_gold_is_1_and_empty_garbage_and_no_op_are_0(task: Task, backend: str) -> None:
    env = SweEnv([task], backend=backend)
    gold = env.demonstrate(task)[0].tool_calls[0].arguments["command"]
    assert play(env, gold) == (1.0, "resolved: 1 of 1 FAIL_TO_PASS, 1 of 1 PASS_TO_PASS pass")
    value, why = play(env)
    assert (value, "the patch is empty" in why) == (0.0, True)
    value, why = play(env, "echo '((' >m.py")
    assert (value, "0 of 1 FAIL_TO_PASS, 0 of 1 PASS_TO_PASS" in why) == (0.0, True)
    value, why = play(env, "echo >>README.md")
    assert (value, "0 of 1 FAIL_TO_PASS, 1 of 1 PASS_TO_PASS" in why) == (0.0, True)
    env.close()


class _Bell(SystemClock):
    """A clock on which an episode's seconds are over when it is rung; every other wait takes its time."""

    WALL_S = 3600.0

    def __init__(self) -> None:
        self.rung = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds == self.WALL_S:
            await self.rung.wait()
        else:
            await super().sleep(seconds)


class _Ringing(ScriptedEngine):
    """An engine that rings the bell when it is asked for a fourth turn, and then never answers."""

    bell: _Bell | None = None
    asked = 0

    async def generate(self, token_ids: Ids, sampling: Sampling, session: str | None = None) -> Generation:
        self.asked += 1
        if self.bell is not None and self.asked == 4:
            self.bell.rung.set()
            await asyncio.Event().wait()
        return await super().generate(token_ids, sampling, session)


async def episode(env: SweEnv, commands: Sequence[str], budgets: Budgets, *, is_rung: bool = False) -> Trajectory:
    """A whole episode in tokens."""
    chat = make_chat(byte_tokenizer())
    clock = _Bell()
    engine = _Ringing.from_lists([chat.write(m) for m in (*map(act, commands), Message.assistant("Done."))])
    engine.bell = clock if is_rung else None
    return await white_box(
        TokenEnv(env, chat, budgets),
        engine,
        Episode(uid="e0", task=env.tasks[0], env_id="swe_verified", attempt=0, run_seed=0),
        sampling=Sampling(max_tokens=4096, stop_token_ids=tuple(chat.stop_token_ids)),
        clock=clock,
    )


LOOK = ("head -c 4000 /dev/zero | tr '\\0' x",) * 8
CUT = ("ls", FIX, *LOOK)
PACKAGE = "mkdir m && sed 's/a - b/a + b/' m.py >m/__init__.py"
ENDINGS: dict[str, tuple[Sequence[str], Budgets, Outcome]] = {
    "turns": (CUT, Budgets(max_turns=4), Outcome.truncated("turns")),
    "tokens": (CUT, Budgets(max_tokens_per_episode=16_000), Outcome.truncated("episode_tokens")),
    "clock": (CUT, Budgets(wall_clock_s=_Bell.WALL_S), Outcome.truncated("wall_clock")),
    "committed": ((FIX, ME + "git commit -qam mine"), Budgets(), Outcome.terminated()),
    "staged in part": ((FIX + "; git add m.py; echo >>m.py",), Budgets(), Outcome.terminated()),
    "a new file only": ((PACKAGE,), Budgets(), Outcome.terminated()),
}


@pytest.mark.parametrize(
    "ending", [pytest.param(name, marks=() if name == "clock" else pytest.mark.slow) for name in ENDINGS]
)
async def test_sw_06_every_ending_has_its_patch_and_its_grade(env: SweEnv, boxes: SharedSandboxes, ending: str) -> None:
    commands, budgets, outcome = ENDINGS[ending]
    made = await episode(env, commands, budgets, is_rung=ending == "clock")
    assert made.outcome == outcome
    assert made.score is not None
    assert made.score.value == 1.0, made.score.detail
    kept = made.info["swe"]
    assert "return a + b" in kept["patch"]
    assert kept["grade"]["report"]["resolved"] is True
    assert boxes.metrics.leased == boxes.metrics.leaks == 0


async def test_a_sandbox_that_dies_is_an_error_without_a_grade(env: SweEnv) -> None:
    await env.reset_async(seed=0)
    await env.step_async(act(FIX))
    env_box: Any = env.sandbox
    run_blocking(env_box.box.close())
    with pytest.raises(SandboxError):
        await env.step_async("Done.")
    await env.close_async()


def test_an_agent_begins_in_the_project_s_environment_and_sees_no_future(env: SweEnv, task: Task) -> None:
    """Trap 17."""
    (system, user), _ = env.reset(seed=0)
    assert "/testbed" in system.content
    assert user.content == task.prompt
    said = [
        env.step(act(command))[0][0].content
        for command in (
            "pwd; which python; cd tests",
            "pwd; python -c 'import m; print(m.add(2, 3))'; python -m pytest -q 2>&1 | tail -1",
            "cd /testbed; git log --all --format=%s; git tag; git remote; git reflog; git stash list; git status --short",
            "git show v1.1; git cat-file -p main:m.py; git fetch origin; python -m pip install adder==2.0 2>&1 | tail -1",
            "grep -rl 'def test_add(' / --include=*.py --include=*.sh --exclude-dir=proc --exclude-dir=sys; ls -A /tmp",
        )
    ]
    assert said[0] == "/testbed\n/opt/miniconda3/envs/testbed/bin/python\n[exit code 0]"
    assert said[1].startswith("/testbed/tests\n-1\n1 passed")
    assert said[2] == "As it was\nv1.0\n[exit code 0]"
    assert "a + b" not in said[3]
    assert said[3].count("fatal:") >= 3
    assert said[4] == ".sao-gym-bash\n[exit code 0]"
    env.step(act("sed -i 's/== 4/== 5/' tests/test_m.py"))
    kept = env.episode_info["swe"]
    assert kept["signals"] == {"fix_search": 3, "network": 2, "network_failed": 1, "test_edit": 1}
    assert kept["repository"]["removed"] == 3
    *_, info = env.step("Done.")
    assert info["score"].value == 0.0
    assert env.episode_info["swe"]["left_out"] == {"test": 1}
    env.close()


async def test_a_grade_that_is_cut_short_goes_on_with_the_patch_that_it_had(
    env: SweEnv, boxes: SharedSandboxes
) -> None:
    await env.reset_async(seed=0)
    await env.step_async(act("echo >>README.md"))
    ending = asyncio.ensure_future(env.step_async("Done."))
    while env.patch is None:
        await asyncio.sleep(0.01)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert env.sandbox is None
    score = await env.finish_async("wall_clock")
    assert score is not None
    assert score.passed is False
    assert env.grading_s == grading_limit(env) > 1800
    await env.close_async()
    assert boxes.metrics.leased == 0


def test_work_that_cannot_be_taken_is_0_and_says_why(env: SweEnv) -> None:
    value, why = play(env, "rm -rf /testbed /usr/bin/find")
    assert (value, why.startswith("no patch: the repository's folder could not be listed")) == (0.0, True)
    env.close()


def test_what_cannot_be_is_refused_in_a_sentence(task: Task, boxes: SharedSandboxes) -> None:
    with pytest.raises(ConfigError, match="there is no scaffold 'maxi'"):
        SweEnv([task], sandboxes=boxes, scaffold="maxi")
    with pytest.raises(ConfigError, match="eval_timeout_s is 0"):
        SweEnv([task], sandboxes=boxes, eval_timeout_s=0)
    env = SweEnv([replace(task, info={})], sandboxes=boxes)
    with pytest.raises(TaskFileError, match="is about no repository"):
        env.reset(seed=0)
    assert env.episode_info == {}
    env.close()
    with pytest.raises(TaskFileError, match="no answer"):
        SweEnv.demonstrate(replace(task, answer=""))


def test_an_evaluation_s_way_into_the_environment_is_the_agent_s(data_dir: Path) -> None:
    assert activation("cd x\nconda activate y") == ""
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = parquet.read_table(data_dir / "swe_verified.parquet", columns=["eval_script"]).to_pylist()
    assert {activation(row["eval_script"]) for row in rows} == {
        "source /opt/miniconda3/bin/activate && conda activate testbed"
    }
