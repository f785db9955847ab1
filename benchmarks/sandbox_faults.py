"""Episodes of the terminal environment while sandboxes, the agent's shells and whole trainers are killed at random.

Run: python benchmarks/sandbox_faults.py [--episodes 200] [--backend local] [--image NAME] [--trainers 10] [--seed 0]

Each episode is a scripted repair that is graded. In one of three the sandbox is killed meanwhile, from outside; in another
third the agent kills its own shell, and all that it may, inside. `--trainers` of the episodes' worth run in processes of their
own, each killed with SIGKILL at a random moment. Afterwards nothing may be left: no process, container, volume, temporary
folder or control group that this process made or that nobody holds. Every episode ends exactly once, as a verdict or as an error; an
episode in which nothing that it depends on was killed must be graded 1.
The last line is one JSON object. `ok`: each episode is accounted for once, and nothing is left.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from sao_gym.envs.sandboxes.backends import open_backend
from sao_gym.envs.sandboxes.cgroups import PREFIX, homes
from sao_gym.envs.sandboxes.docker_reaper import OWNER
from sao_gym.envs.sandboxes.owner import is_alive, owner, parse_owner
from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.terminal import TerminalEnv
from sao_gym.errors import SandboxError
from sao_gym.loops import on_background, run_blocking
from sao_gym.messages import Message, ToolCall
from sao_gym.tasks.terminal import terminal_tasks

SIDE_BY_SIDE = 6
GONE_S = 15.0
SUICIDE = "kill -9 $$ $PPID 1; kill -9 -1"
CHILD = "faults_child"


def act(command: str) -> Message:
    return Message.assistant(tool_calls=(ToolCall(id="c", name="bash", arguments={"command": command}),))


def processes() -> set[str]:
    """Processes of sandboxes, and trainers, that this process holds or that nobody holds any more."""
    words, parents = {}, {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if entry.name.isdigit():
                pid = int(entry.name)
                words[pid] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                parents[pid] = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    ours = {pid for pid, text in words.items() if any(mark in text for mark in ("bwrap", "_sg_", CHILD))}
    found = set()
    for pid in ours:
        top = parents[pid]
        while top in ours:
            top = parents[top]
        if top in (0, 1, os.getpid()):
            found.add(f"process {pid}: {words[pid][:80]}")
    return found


def groups() -> set[str]:
    """Control groups whose maker is this process or is dead."""
    found = set()
    for home in homes().values():
        for folder in home.glob(f"{PREFIX}*"):
            maker = parse_owner(folder.name.removeprefix(PREFIX).rpartition("|")[0].replace("|", "/"))
            if maker is not None and (maker == owner() or not is_alive(maker)):
                found.add(str(folder))
    return found


def containers(backend: str) -> set[str]:
    """Containers whose owner is this process or is dead, and volumes without a container."""
    if backend != "docker":
        return set()
    import docker

    with closing(docker.from_env()) as client:
        made = client.api.containers(all=True, filters={"label": OWNER})
        dead = {item["Id"] for item in made if _is_left(item["Labels"][OWNER])}
        return dead | {item["Name"] for item in client.api.volumes(filters={"dangling": True})["Volumes"] or []}


def _is_left(label: str) -> bool:
    maker = parse_owner(label)
    return maker is not None and (maker == owner() or not is_alive(maker))


def left_over(backend: str) -> set[str]:
    """Everything of sandboxes that is there; `tempfile.tempdir` is a folder of this benchmark alone."""
    return {*processes(), *groups(), *containers(backend), *map(str, Path(tempfile.gettempdir()).iterdir())}


async def kill_from_outside(env: TerminalEnv, delay_s: float) -> None:
    """Kill what the episode's sandbox is, without a word to who holds it."""
    while env._box is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(delay_s)
    lease = env._box
    box: Any = getattr(lease, "box", None)
    if box is None:
        return
    process = getattr(box, "_process", None)
    if process is not None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    elif hasattr(box, "name"):
        with suppress(SandboxError):
            await box._engine.call(lambda api: api.kill(box.name))
    else:
        await box.close()


async def episode(env: TerminalEnv, number: int, rng: random.Random, delay_s: float) -> str:
    """One episode; says how it ended."""
    task = env.tasks[number % len(env.tasks)]
    gold = env.demonstrate(task)[0]
    fault = ("none", "outside", "inside")[number % 3]
    killer = None
    try:
        if fault == "outside":
            killer = asyncio.create_task(on_background(kill_from_outside(env, delay_s)))
        await env.reset_async(options={"task": task})
        for command in ("ls", SUICIDE if fault == "inside" else "pwd", "python3 -m unittest"):
            await env.step_async(act(command))
            await asyncio.sleep(rng.random() * 0.05)
        await env.step_async(gold)
        *_, info = await env.step_async("Done.")
        return f"{fault}: graded {info['score'].value:g}"
    except SandboxError:
        return f"{fault}: error"
    finally:
        if killer is not None:
            killer.cancel()
            with suppress(asyncio.CancelledError, SandboxError):
                await killer
        await env.close_async()


async def episodes(options: argparse.Namespace, first: int, count: int, log: Any = None) -> Counter[str]:
    rng = random.Random(options.seed + first)
    boxes = SharedSandboxes(SIDE_BY_SIDE, backend=options.backend)
    places = asyncio.Semaphore(SIDE_BY_SIDE)
    tasks = terminal_tasks("train")

    async def one(number: int) -> str:
        delay_s = rng.random() * 2.0
        async with places:
            env = TerminalEnv(tasks, sandboxes=boxes, image=options.image)
            ended = await episode(env, number, rng, delay_s)
        if log is not None:
            log(number, ended)
        return ended

    ended = Counter(await asyncio.gather(*(one(number) for number in range(first, first + count))))
    await on_background(boxes.close())
    return ended


def killed_trainers(options: argparse.Namespace) -> int:
    """Processes that run episodes, each killed at a random moment; how many died so."""
    rng, killed = random.Random(options.seed), 0
    for number in range(options.trainers):
        words = [sys.executable, __file__, "--backend", options.backend, "--image", options.image, "--episodes", "12"]
        child = subprocess.Popen([*words, "--child", CHILD, "--seed", str(number)], stdout=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(1.0 + rng.random() * 6.0)
        if child.poll() is None:
            child.kill()
            killed += 1
        child.wait()
    return killed


def reap(backend: str) -> None:
    """What the next run does at its start."""

    async def open_and_close() -> None:
        await (await open_backend(backend)).close()

    run_blocking(open_and_close())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--backend", default="local")
    parser.add_argument("--image", default="")
    parser.add_argument("--trainers", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        asyncio.run(episodes(options, 0, options.episodes))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # what is left there is ours
        return measured(options)


def measured(options: argparse.Namespace) -> int:
    """The episodes, the killed trainers, and what is left."""
    reap(options.backend)
    before, started = left_over(options.backend), time.monotonic()
    seen: list[int] = []
    ended = asyncio.run(episodes(options, 0, options.episodes, lambda number, how: seen.append(number)))
    print(dict(sorted(ended.items())), flush=True)
    killed = killed_trainers(options)
    until = time.monotonic() + GONE_S
    while (left := left_over(options.backend) - before) and time.monotonic() < until:
        time.sleep(0.1)
        reap(options.backend)  # not only once: what a killed one held takes a moment to end
    once = sorted(seen) == list(range(options.episodes)) and ended.total() == options.episodes
    undisturbed = sum(count for how, count in ended.items() if how.startswith("none"))
    record = {
        "benchmark": "sandbox_faults",
        "backend": options.backend,
        "episodes": options.episodes,
        "ended": dict(sorted(ended.items())),
        "accounted_once": once,
        "trainers_killed": killed,
        "left": sorted(map(str, left))[:10],
        "seconds": round(time.monotonic() - started, 1),
        "ok": once and not left and ended["none: graded 1"] == undisturbed,
    }
    print(json.dumps(record))
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
