"""A policy mends the small library through `bash` and `edit`, a whole episode in tokens, on every backend."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.core import Budgets, TokenEnv
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.terminal import TerminalEnv
from sao_gym.loops import on_background
from sao_gym.messages import Message, ToolCall
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.protocols import Sampling, Task
from sao_gym.rollout import Episode, white_box
from sao_gym.stream import Outcome, Trajectory
from sao_gym.tasks.terminal import SPLITS, task_of

BUG = SPLITS["train"][0]


@dataclass(frozen=True, slots=True)
class Place:
    """Shared sandboxes of a backend, the image for them, and the task whose folder is there."""

    boxes: SharedSandboxes
    image: str
    task: Task


@pytest.fixture
async def place(backend: str, request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    image = ""
    if backend == "local_root":
        image = str(request.getfixturevalue("root_folder"))
    elif backend == "docker":
        docker, docker_image = pytest.importorskip("docker"), pytest.importorskip("docker_image")
        with contextlib.closing(docker.from_env()) as client:
            if reason := docker_image.missing_image(client):
                pytest.skip(reason)
        image = docker_image.IMAGE
    elif backend == "e2b":
        request.getfixturevalue("e2b_service")
    boxes = SharedSandboxes(2, backend=backend.removesuffix("_root"))
    yield Place(boxes, image, task_of(BUG, "/workspace"))
    await on_background(boxes.close())


def call(name: str, **arguments: object) -> Message:
    return Message.assistant(tool_calls=(ToolCall(id="call_0", name=name, arguments=arguments),))


LOOK = (call("bash", command="python3 -m unittest"), call("edit", command="view", path="shelf/money.py"))
GOLD = (*LOOK, call("edit", command="replace", path="shelf/money.py", old=BUG.wrong, text=BUG.right))
GARBAGE = (*LOOK, call("edit", command="replace", path="shelf/money.py", old=BUG.wrong, text="{cents!"))


async def episode(place: Place, turns: Sequence[Message]) -> Trajectory:
    tokenizer = byte_tokenizer()
    chat = make_chat(tokenizer)
    env = TerminalEnv([place.task], sandboxes=place.boxes, image=place.image)
    lines = [chat.write(message) for message in (*turns, Message.assistant("Done."))]
    engine = ScriptedEngine.from_lists(lines)
    made = await white_box(
        TokenEnv(env, chat, Budgets(max_turns=10)),
        engine,
        Episode(uid="e0", task=place.task, env_id="terminal", attempt=0, run_seed=0),
        sampling=Sampling(max_tokens=4096, stop_token_ids=tuple(chat.stop_token_ids)),
        clock=SystemClock(),
    )
    await env.close_async()
    assert made.outcome == Outcome.terminated(), made.outcome
    assert made.n_action == sum(map(len, lines))
    return made


async def test_gold_is_1_and_empty_and_garbage_are_0(place: Place) -> None:
    for turns, value in ((GOLD, 1.0), ((), 0.0), (GARBAGE, 0.0)):
        made = await episode(place, turns)
        assert made.score is not None
        assert (made.score.value, made.score.passed) == (value, value == 1.0), made.score.detail
    assert place.boxes.metrics.leased == place.boxes.metrics.leaks == 0
