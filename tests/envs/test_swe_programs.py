"""The real agent programs in a repository of SWE-Bench's form: what they leave becomes a patch, and the patch is judged."""

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "scaffolds"))
import swe_instances
from program_world import CHAT, call, heard, require_program

from sao_gym.budgets import Budgets
from sao_gym.clock import SystemClock
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.swe import SweEnv
from sao_gym.loops import run_blocking
from sao_gym.messages import Message
from sao_gym.protocols import Sampling, Task
from sao_gym.rollout import EnvPool, Episode
from sao_gym.stream import Outcome, Trajectory

pytest.importorskip("swebench")
pytestmark = [pytest.mark.openhands, pytest.mark.timeout(900)]

FIX = "sed -i 's/a - b/a + b/' m.py; git log --oneline --all | wc -l"
TURNS = {
    "mini": [
        call("bash", command="pwd"),
        call("bash", command=FIX),
        call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ],
    "openhands": [
        call("terminal", command="pwd"),
        call("terminal", command=FIX),
        call("finish", message="Mended."),
    ],
}


async def play(kind: str, turns: list[Message], task: Task, boxes: SharedSandboxes) -> Trajectory:
    engine = ScriptedEngine.from_lists([CHAT.write(message) for message in turns], context_length=1 << 20)
    pool = EnvPool(lambda: SweEnv([task], sandboxes=boxes, scaffold=kind), CHAT, Budgets(wall_clock_s=400.0))
    async with pool.lease() as env:
        episode = Episode(uid="e", task=task, env_id="swe_verified", attempt=0, run_seed=0)
        made = await pool.run(env, engine, episode, sampling=Sampling(max_tokens=9999), clock=SystemClock())
        await env.close_async()
    await pool.close()
    return made


@pytest.mark.parametrize("kind", sorted(TURNS))
def test_a_program_resolves_an_issue(kind: str, tiny_root: Path) -> None:
    require_program(kind)
    task = swe_instances.task_of(swe_instances.tiny_row(str(tiny_root)))
    boxes = SharedSandboxes(1)
    try:
        made = asyncio.run(play(kind, TURNS[kind], task, boxes))
    finally:
        run_blocking(boxes.close())
    assert made.outcome == Outcome.terminated()
    assert made.score is not None
    assert made.score.value == 1.0, made.score.detail
    assert "+    return a + b" in made.info["swe"]["patch"]
    assert len(made.streams) == 1
    assert "/testbed" in heard(made)[0]
