"""What tests of agent programs share: worker environments made once, and a policy that says what it was told to."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "sao_gym" / "gateway"))
from traces import Record, packed, recorded

from sao_gym.budgets import Budgets
from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.envs.terminal import apply_patch_command
from sao_gym.errors import ConfigError
from sao_gym.messages import Message, ToolCall
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.protocols import Sampling, Task
from sao_gym.registry import make
from sao_gym.rollout import EnvPool, Episode
from sao_gym.stream import Trajectory
from sao_gym.worker_python import find_python
from sao_gym.workers import KINDS, environment

CHAT = make_chat(byte_tokenizer())


def require_program(kind: str) -> None:
    """Skip where no Python is new enough; else have its environment, made now if it is not there."""
    try:
        find_python(KINDS[kind].oldest_python)
    except ConfigError as error:
        pytest.skip(str(error))
    environment(kind)


def call(tool: str, **arguments: Any) -> Message:
    """A message that says why and calls one tool."""
    return Message.assistant(f"Now {tool}.", tool_calls=(ToolCall(id="c", name=tool, arguments=arguments),))


def play(kind: str, turns: Sequence[Message], task: Task | None = None, *, scaffold: Any = None) -> Trajectory:
    """An episode of the terminal environment's first task, driven by a program whose policy says `turns`."""
    return asyncio.run(_play(kind, turns, task, scaffold))


async def _play(kind: str, turns: Sequence[Message], task: Task | None, scaffold: Any) -> Trajectory:
    engine = ScriptedEngine.from_lists([CHAT.write(message) for message in turns], context_length=1 << 20)
    pool = EnvPool(
        lambda: make("terminal", scaffold=scaffold or kind),
        CHAT,
        Budgets(wall_clock_s=240.0),
        context_length=engine.context_length,
    )
    async with pool.lease() as env:
        episode = Episode(uid="e", task=task or first_task(), env_id="terminal", attempt=0, run_seed=0)
        made = await pool.run(env, engine, episode, sampling=Sampling(max_tokens=20_000), clock=SystemClock())
        await env.close_async()
    await pool.close()
    return made


def first_task() -> Task:
    env = make("terminal")
    task: Task = env.unwrapped.tasks[0]  # type: ignore[attr-defined]
    env.close()
    return task


def _openhands_mends() -> list[Message]:
    return [
        call("terminal", command="ls"),
        call("file_editor", command="view", path="/workspace/shelf/money.py"),
        call("think", thought="The sign is taken twice."),
        call("terminal", command=apply_patch_command(first_task().answer)),
        Message.assistant("Is that all?"),  # nobody is there: the benchmark's user says to go on
        call("finish", message="Mended."),
    ]


def _mini_mends() -> list[Message]:
    return [
        call("bash", command="ls; echo oops >&2"),
        call("bash", command="sleep 1; cat shelf/money.py | head -5"),
        call("bash", command=apply_patch_command(first_task().answer)),
        call("bash", command="cd shelf && pwd"),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]


def _mini_only_talks() -> list[Message]:
    return [
        call("bash", command="ls"),
        Message.assistant("I only talk."),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]


SCENES: dict[str, tuple[str, Callable[[], list[Message]]]] = {
    "openhands": ("openhands", _openhands_mends),
    "mini": ("mini", _mini_mends),
    "mini_only_talks": ("mini", _mini_only_talks),
}
"""By the name of the recorded trace: which program, and what its policy says."""


def traced(scene: str) -> tuple[Trajectory, Record]:
    """The scene played, and the trace of what the program asked."""
    kind, turns = SCENES[scene]
    said = turns()
    with recorded() as requests:
        made = play(kind, said)
    return made, packed(requests, [CHAT.codec.decode(CHAT.write(message)[:-1]) for message in said])  # type: ignore[attr-defined]


def heard(made: Trajectory) -> list[str]:
    """What the policy was told after each of its turns, as text."""
    (stream,) = made.streams
    said = []
    for index, segment in enumerate(stream.segments):
        if not segment.is_action and index:
            said.append(CHAT.codec.decode(segment.token_ids))  # type: ignore[attr-defined]
    return said
