"""`sao-gym swe`: what tasks of repositories need that no package brings, the images of their environments.

Images come one after another; what is there is passed over, so the same command goes on where an earlier one stopped. It
stops by itself at a budget, at a registry's limit, and before the disk is full, and says what is left.

Example:
    sao-gym swe pull --bench swe_verified --limit 20
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sao_gym.clock import SystemClock
from sao_gym.commands.base import Options, run_command, take_options
from sao_gym.envs.sandboxes.docker_images import free_bytes, open_engine, own_bytes, present, tagged
from sao_gym.envs.sandboxes.docker_pull import PULL_S, Layers, PullError, PullProblem, pull
from sao_gym.envs.sandboxes.registry_limits import remaining_pulls
from sao_gym.envs.swe_preflight import images_of
from sao_gym.errors import ConfigError, SandboxUnavailableError
from sao_gym.loops import run_blocking
from sao_gym.preflight import GIB, gib
from sao_gym.protocols import Clock, Task

TRIES = 3
KEEP_FREE_GIB = 10.0
HELP = """usage: sao-gym swe pull [--bench swe_verified | --tasks SET] [--limit N] [options]

Fetch the images that tasks of repositories run in, into the Docker engine that DOCKER_HOST or the default socket names.

what
  --bench NAME            a benchmark of repositories (swe_verified)
  --tasks SET             swe_gym, swe_gym_lite, a task file, or hf:owner/name:split
  --limit N               so many of its tasks: the ones that --limit takes in an evaluation, env.options.limit in training
  --data PATH             the benchmark's file or its folder; unset: SAO_GYM_DATA, else the Hub
  --images PATTERN        names of images where rows have none, such as owner/prefix.{id_1776}:latest

how much
  --budget-images N       stop after N images; unset: what the registry says is left, else all
  --budget-gib X          stop after the image with which X GiB have come over the network
  --keep-free-gib X       stop before less than this is free for the engine (10), where its disk can be seen from here
  --registry HOST         fetch from a mirror; images keep their own names
  --dry-run               say what is there and what is missing, fetch nothing

The same command goes on where it stopped. Exit codes: 0 all there, or a budget reached; 2 something kept an image away.
"""


@dataclass(slots=True)
class Fetching:
    """A run of the command: what it may take, and what it has taken."""

    names: Sequence[str]
    clock: Clock = field(default_factory=SystemClock)
    registry: str = ""
    budget_images: int | None = None
    budget_bytes: int | None = None
    keep_free_bytes: int = 0
    fetched: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    came_bytes: int = 0

    @property
    def left(self) -> int:
        """Images that did not come yet, whatever the reason."""
        return len(self.names) - len(self.fetched)

    def spent(self) -> str:
        """Which budget is used up, in words; empty while none is."""
        if self.budget_images is not None and len(self.fetched) >= self.budget_images:
            return f"the budget of {_images(self.budget_images)} is used up"
        if self.budget_bytes is not None and self.came_bytes >= self.budget_bytes:
            return f"the budget of {gib(self.budget_bytes)} is used up"
        return ""


@run_command
def main(argv: list[str]) -> int | None:
    """Entry point of `sao-gym swe`."""
    options = take_options(
        argv,
        values=(
            "bench",
            "tasks",
            "limit",
            "data",
            "images",
            "registry",
            "budget-images",
            "budget-gib",
            "keep-free-gib",
        ),
        switches=("help", "dry-run"),
        positionals=True,
    )
    if options.has("help") or not argv:
        print(HELP)
        return None
    if options.all("") != ("pull",):
        raise ConfigError(f"sao-gym swe knows the word pull, got {' '.join(options.all('')) or 'none'}; see --help")
    if options.rest:
        raise ConfigError(f"unexpected argument {options.rest[0]!r}; see sao-gym swe --help")
    return _pull(options)


def _pull(options: Options) -> int:
    tasks, title = tasks_of(options)
    names = images_of_tasks(tasks)
    with open_engine(PULL_S) as client:
        there = present(client)
        missing = [name for name in names if tagged(name) not in there]
        print(about(client, title, names, missing), flush=True)
        if options.has("dry-run") or not missing:
            return 0
        job = Fetching(
            names=missing,
            registry=options.value("registry") or "",
            budget_images=_images_budget(options, missing[0]),
            budget_bytes=_gib_option(options, "budget-gib", None),
            keep_free_bytes=_gib_option(options, "keep-free-gib", KEEP_FREE_GIB) or 0,
        )
        return fetch(client, job)


def tasks_of(options: Options) -> tuple[Sequence[Task], str]:
    """The tasks whose images are wanted, and what they are called. Raises UserError."""
    from sao_gym.tasks.benchmarks import find_benchmark, load_benchmark
    from sao_gym.tasks.swe import swe_tasks

    bench, named = options.value("bench"), options.value("tasks")
    if (bench is None) == (named is None):
        raise ConfigError("say what the images are for: --bench swe_verified, or --tasks SET, and not both")
    limit, data, images = _whole(options, "limit"), options.value("data"), options.value("images")
    if bench is None:
        tasks = swe_tasks(named, limit=limit, data=data, images=images or "")
        return tuple(tasks), tasks.name
    if not find_benchmark(bench).is_of_repositories:
        raise ConfigError(f"the benchmark {bench!r} is not about repositories: it needs no images")
    loaded = load_benchmark(bench, data=Path(data) if data else None)
    return loaded.take(limit), bench


def images_of_tasks(tasks: Sequence[Task]) -> tuple[str, ...]:
    """Images of containers that tasks name. Raises ConfigError where there are none."""
    from sao_gym.tasks.base import ListTaskSet

    names = images_of(ListTaskSet("wanted", tasks)) or ()
    if folders := [name for name in names if name.startswith(("/", "."))]:
        raise ConfigError(f"{folders[0]} is a folder and no image of containers: these tasks are for the backend local")
    if not names:
        raise ConfigError("none of these tasks names an image")
    return names


def about(client: Any, title: str, names: Sequence[str], missing: Sequence[str]) -> str:
    """What is there, what is missing, and how much room that takes."""
    free = free_bytes(client)
    room = "the engine's disk cannot be seen from here" if free is None else f"{gib(free)} free"
    sizes = own_bytes(client, frozenset(map(tagged, names))) if missing else []
    guess = f", about {gib(len(missing) * sum(sizes) / len(sizes))} by the {len(sizes)} that are there" if sizes else ""
    return f"{title}: {_images(len(names))}, {len(names) - len(missing)} there, {len(missing)} to fetch{guess}; {room}"


def fetch(client: Any, job: Fetching) -> int:
    """Fetch until all came, a budget is used up, or something stops it. Raises SandboxUnavailableError for the last."""
    for number, name in enumerate(job.names, start=1):
        if why := job.spent():
            print(f"{why}: {_so_far(job)}", flush=True)
            return 0
        _require_room(client, job)
        began = job.clock.now()
        try:
            came = _fetch_one(client, job, name)
        except PullError as error:
            if error.problem is PullProblem.LIMITED:
                raise SandboxUnavailableError(f"{error}; {_so_far(job)}") from error
            job.failed[name] = str(error)
            print(f"[{number}/{len(job.names)}] {name}: {error}", flush=True)
            continue
        job.fetched.append(name)
        job.came_bytes += came
        print(
            f"[{number}/{len(job.names)}] {name}: {gib(came)} in {job.clock.now() - began:.0f} s{_ahead(client, job)}",
            flush=True,
        )
    if job.failed:
        listed = "; ".join(f"{name}: {why}" for name, why in list(job.failed.items())[:3])
        raise SandboxUnavailableError(f"{_images(len(job.failed))} did not come ({listed}); {_so_far(job)}")
    print(f"all {len(job.names)} came, {gib(job.came_bytes)} over the network", flush=True)
    return 0


def _fetch_one(client: Any, job: Fetching, name: str) -> int:
    """Fetch an image, and again where the network failed. Raises PullError."""
    for attempt in range(TRIES - 1):
        try:
            return pull(client, name, registry=job.registry, on_progress=_shown(name))
        except PullError as error:
            if error.problem is not PullProblem.FAILED:
                raise
            print(f"{name}: {error}; once more", flush=True)
            run_blocking(job.clock.sleep(2.0**attempt))
    return pull(client, name, registry=job.registry, on_progress=_shown(name))


def _shown(name: str) -> Any:
    """Shows how far an image is, where a person looks on."""
    if not sys.stderr.isatty():
        return None

    def show(layers: Layers) -> None:
        print(
            f"\r{name}: {gib(layers.bytes_done)} of {gib(layers.bytes_total)}\x1b[K\r",
            end="",
            file=sys.stderr,
            flush=True,
        )

    return show


def _require_room(client: Any, job: Fetching) -> None:
    """Raises SandboxUnavailableError before an image would leave too little room."""
    free = free_bytes(client)
    expected = _expected_bytes(client, job)
    if free is not None and free - expected < job.keep_free_bytes:
        raise SandboxUnavailableError(
            f"{gib(free)} are free where the engine keeps images, and one more takes about {gib(expected)}, while "
            f"{gib(job.keep_free_bytes)} are to stay free (--keep-free-gib); {_so_far(job)}"
        )


def _expected_bytes(client: Any, job: Fetching) -> int:
    """What an image takes on the disk by itself, going by those that came; 0 before the first one."""
    sizes = own_bytes(client, frozenset(map(tagged, job.fetched))) if job.fetched else []
    return sum(sizes) // len(sizes) if sizes else 0


def _ahead(client: Any, job: Fetching) -> str:
    """What is still to come, by what came."""
    if not job.left:
        return ""
    free, expected = free_bytes(client), _expected_bytes(client, job)
    room = "" if free is None else f", {gib(free)} free"
    mean = job.came_bytes / len(job.fetched)
    return f"; {job.left} left: about {gib(job.left * mean)} to fetch, {gib(job.left * expected)} of disk{room}"


def _so_far(job: Fetching) -> str:
    return f"{_images(len(job.fetched))} came, {job.left} to go; the same command goes on with them"


def _images(count: int) -> str:
    return f"{count} image{'' if count == 1 else 's'}"


# -- options


def _images_budget(options: Options, name: str) -> int | None:
    asked = _whole(options, "budget-images")
    left = remaining_pulls(name, options.value("registry") or "")
    if left == 0:
        raise SandboxUnavailableError("the registry lets no more images pass for now; the same command goes on later")
    if left is not None:
        print(f"the registry says that it lets {_images(left)} more pass for now", flush=True)
    known = [number for number in (asked, left) if number is not None]
    return min(known) if known else None


def _whole(options: Options, name: str) -> int | None:
    text = options.value(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--{name} is {text!r}; give a whole number from 1 on")
    return int(text)


def _gib_option(options: Options, name: str, default: float | None) -> int | None:
    text = options.value(name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = -1.0
    if value is not None and not 0 <= value < float("inf"):
        raise ConfigError(f"--{name} is {text!r}; give a number of GiB from 0 on")
    return None if value is None else int(value * GIB)
