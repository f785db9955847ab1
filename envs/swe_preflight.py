"""What an environment of repositories needs before a run starts: a container backend, its images, room for those.

Example:
    preflight(make_tasks("swe_verified", split="heldout"), {"backend": "docker"})
"""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sao_gym.envs.sandboxes.backends import make_sandbox
from sao_gym.envs.sandboxes.docker_images import START_ENGINE, free_bytes, open_engine, own_bytes, present, tagged
from sao_gym.envs.scaffolds.names import SHELL
from sao_gym.errors import EpisodeError, UserError
from sao_gym.loops import run_blocking
from sao_gym.preflight import Check, gib
from sao_gym.protocols import TaskSet
from sao_gym.workers import KINDS, find

BACKEND = "docker"
SHOWN = 2
BACKEND_NAME, IMAGES, DISK, GRADER, AGENT = "containers", "images", "disk for images", "grader", "agent"


def preflight(tasks: TaskSet | None, options: Mapping[str, Any]) -> Sequence[Check]:
    """The checks of a set of tasks with these options of the environment."""
    backend = str(options.get("backend") or BACKEND)
    images = images_of(tasks, str(options.get("image") or ""))
    by_backend = {"docker": _docker, "local": _local, "e2b": _e2b}
    checks = by_backend[backend](images, options) if backend in by_backend else [Check.unknown(BACKEND_NAME, backend)]
    return [grader_check(), agent_check(str(options.get("scaffold") or SHELL)), *checks]


def images_of(tasks: TaskSet | None, default: str = "") -> tuple[str, ...] | None:
    """The images that tasks run in, each once; None where there are no tasks to ask."""
    if tasks is None:
        return None
    each = (tasks[index].info for index in range(len(tasks)))
    named = (str((info.get("swe") or info).get("image") or default) for info in each)
    return tuple(dict.fromkeys(name for name in named if name))


def grader_check() -> Check:
    """The library that reads what tests print."""
    if find_spec("swebench") is None:
        return Check.missing(GRADER, "the package swebench is not installed", "pip install 'sao-gym[swe]'")
    return Check.ok(GRADER, "swebench")


def agent_check(name: str) -> Check:
    """Who works: the environment's own tools, or an agent program, which has an environment of its own."""
    if name == SHELL:
        return Check.ok(AGENT, "shell: bash and edit, stepped by us")
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        return Check.missing(AGENT, f"{name} needs the gateway", "pip install 'sao-gym[gateway]'")
    if name not in KINDS:
        return Check.unknown(AGENT, name)
    if (found := find(name)) is None:
        command = f"sao-gym workers install {name}"
        return Check.unknown(
            AGENT, f"{name} has no environment yet; the run makes it first, which takes minutes", command
        )
    return Check.ok(AGENT, f"{name}, Python {found.version}")


# -- containers of an engine


def _docker(images: Sequence[str] | None, options: Mapping[str, Any]) -> list[Check]:
    try:
        with open_engine() as client:
            where = f"docker {client.version().get('Version', '')}".strip()
            engine = Check.ok(BACKEND_NAME, f"{where} at {os.environ.get('DOCKER_HOST') or 'the default socket'}")
            return [engine, *_images(client, images, options)]
    except (UserError, OSError) as error:
        remedy = START_ENGINE if find_spec("docker") else "pip install 'sao-gym[docker]'"
        count = "" if images is None else f"{len(images)} are needed; "
        unknown = Check.unknown(IMAGES, f"{count}there is no engine to ask", pull_command(options))
        return [Check.missing(BACKEND_NAME, str(error), remedy), unknown, Check.unknown(DISK, "no engine to ask")]


def _images(client: Any, images: Sequence[str] | None, options: Mapping[str, Any]) -> list[Check]:
    free = free_bytes(client)
    room = "the engine's folder is not on this machine" if free is None else f"{gib(free)} free"
    if images is None:
        return [Check.unknown(IMAGES, "there are no tasks to say which are needed"), Check.unknown(DISK, room)]
    there = present(client)
    lacking = [name for name in images if tagged(name) not in there]
    if not lacking:
        return [Check.ok(IMAGES, f"{len(images)} of {len(images)}"), Check.ok(DISK, room)]
    listed = ", ".join(lacking[:SHOWN]) + (f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else "")
    found = f"{len(images) - len(lacking)} of {len(images)}; missing {listed}"
    return [Check.missing(IMAGES, found, pull_command(options)), disk_check(client, images, len(lacking), free)]


def disk_check(client: Any, images: Sequence[str], lacking: int, free: int | None) -> Check:
    """Room for what is missing, going by what the images that are there have taken each."""
    sizes = own_bytes(client, frozenset(map(tagged, images)))
    room = "unknown room" if free is None else f"{gib(free)} free"
    if not sizes:
        return Check.unknown(
            DISK, f"{room}; none of the images is there to go by, sao-gym swe pull says more as it goes"
        )
    needed = lacking * sum(sizes) // len(sizes)
    found = f"{room}; {lacking} more images take about {gib(needed)}, by the {len(sizes)} that are there"
    if free is not None and needed > free:
        return Check.missing(
            DISK, found, "move the engine's data-root to a larger disk, or take fewer tasks by --env.options.limit N"
        )
    return Check.ok(DISK, found)


def pull_command(options: Mapping[str, Any]) -> str:
    """The command that fetches the images of these tasks."""
    name = options.get("tasks") or "swe_gym"
    what = "--bench swe_verified" if name == "swe_verified" else f"--tasks {name}"
    limit = f" --limit {options['limit']}" if options.get("limit") else ""
    return f"sao-gym swe pull {what}{limit}"


# -- without an engine


def _local(images: Sequence[str] | None, options: Mapping[str, Any]) -> list[Check]:
    try:
        run_blocking(_start_one())
        backend = Check.ok(BACKEND_NAME, "local, without a daemon")
    except (UserError, EpisodeError) as error:
        backend = Check.missing(BACKEND_NAME, str(error), "mend that, or --env.options.backend docker")
    if images is None:
        return [backend, Check.unknown(IMAGES, "there are no tasks to say which are needed")]
    lacking = [name for name in images if not Path(name).is_dir()]
    if lacking:
        found = f"{len(images) - len(lacking)} of {len(images)} are folders with an unpacked root; missing {lacking[0]}"
        return [backend, Check.missing(IMAGES, found, "--env.options.backend docker runs images of containers")]
    return [backend, Check.ok(IMAGES, f"{len(images)} of {len(images)}, unpacked folders")]


async def _start_one() -> None:
    box = await make_sandbox("local")
    await box.close()


def _e2b(images: Sequence[str] | None, options: Mapping[str, Any]) -> list[Check]:
    count = "" if images is None else f"{len(images)} templates are needed; "
    templates = Check.unknown(IMAGES, f"{count}the service is not asked")
    if find_spec("e2b") is None:
        return [
            Check.missing(BACKEND_NAME, "the package e2b is not installed", "pip install 'sao-gym[e2b]'"),
            templates,
        ]
    if not os.environ.get("E2B_API_KEY"):
        return [Check.missing(BACKEND_NAME, "e2b needs a key", "set E2B_API_KEY"), templates]
    return [Check.ok(BACKEND_NAME, "e2b"), templates]
