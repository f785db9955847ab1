"""What a run is evaluated on: held-out tasks of its own environment, a benchmark, another environment, a file.

Invariant: tasks that were named (a benchmark, an environment, a file) and that share a text or a run of ten words with
the training tasks are refused, or, with `evaluation.allow_overlap`, marked in manifest and metrics. The held-out split
of an environment is apart from its training split by construction.

Example:
    heldout = open_tasks(config, training_tasks)
    heldout.name, len(heldout.tasks), heldout.is_contaminated
"""

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sao_gym.commands.environments import Environments
from sao_gym.commands.policy import env_options, heldout_options, judged_at_once
from sao_gym.errors import ConfigError
from sao_gym.evaluation import take
from sao_gym.protocols import Task, TaskSet
from sao_gym.registry import make_tasks, resolve, spec
from sao_gym.tasks._swe_overlap import are_of_repositories, swe_overlaps
from sao_gym.tasks.base import hash_tasks
from sao_gym.tasks.benchmarks import BENCHMARKS, environment_of, load_benchmark
from sao_gym.tasks.overlap import Overlap, describe_overlaps, find_overlaps
from sao_gym.trainer.config import EvalConfig, TrainConfig

SHOWN = 20
"""Overlaps that the manifest lists by name."""


@dataclass(frozen=True, kw_only=True)
class HeldoutTasks:
    """Environments and the tasks taken. `origin` are facts about a benchmark's file, `overlaps` what training shares."""

    name: str
    environments: Environments
    tasks: tuple[Task, ...]
    overlaps: tuple[Overlap, ...] = ()
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def is_contaminated(self) -> bool:
        """Whether training tasks overlap."""
        return bool(self.overlaps)

    def describe(self) -> str:
        """For people: what, how many, and what is wrong with it."""
        known = [*self.origin.get("differences", ())]
        if self.overlaps:
            known.append("contaminated: " + describe_overlaps(self.overlaps, benchmark=self.name))
        where = "" if self.environments.name == self.name else f", in {self.environments.name}"
        return "; ".join([f"{len(self.tasks)} tasks of {self.name}{where}", *known])

    def facts(self) -> dict[str, Any]:
        """What the manifest says."""
        shown = [
            {"task": one.benchmark_id, "training": list(one.training_ids[:SHOWN]), "words": one.words}
            for one in self.overlaps[:SHOWN]
        ]
        return {
            "environment": self.environments.name,
            "tasks": {"name": self.name, "count": len(self.tasks), "hash": hash_tasks(self.tasks), **self.origin},
            "contaminated": self.is_contaminated,
            "overlaps": {"count": len(self.overlaps), "first": shown},
        }


def open_tasks(config: TrainConfig, training: TaskSet, judging: Any = None) -> HeldoutTasks:
    """The tasks that `config.evaluation` asks for. Raises ConfigError where there are none, or training shares them.

    `judging` is what the training environments share, where they have a judge: the held-out ones share it too.
    """
    given, size = config.evaluation, config.rollout.max_in_flight
    if not given.has_own_tasks:
        shared = {} if judging is None else {"judging": judging}
        environments = Environments(config.env.name, heldout_options(config.env) | shared, size=size)
        tasks = take(environments.tasks, min(given.episodes, len(environments.tasks)))
        # apart by construction, unless the training tasks were named: then the run says so itself, and it is marked here
        are_swe = are_of_repositories(tasks) and are_of_repositories(training)
        known = swe_overlaps(tasks, training) if are_swe else ()
        return HeldoutTasks(name=environments.tasks.name, environments=environments, tasks=tasks, overlaps=known)
    name, options, origin = _named(config)
    environments = Environments(name, options, size=size)
    tasks = take(environments.tasks, min(given.episodes, len(environments.tasks)))
    title = str(given.bench) if "source" in origin else environments.tasks.name
    are_swe = are_of_repositories(tasks) and are_of_repositories(training)
    overlaps = swe_overlaps(tasks, training) if are_swe else find_overlaps(tasks, training)
    if overlaps and not given.allow_overlap:
        raise ConfigError(
            f"{describe_overlaps(overlaps, benchmark=title)}; take other tasks, or add --evaluation.allow-overlap to "
            "have every result marked as contaminated"
        )
    return HeldoutTasks(name=title, environments=environments, tasks=tasks, overlaps=overlaps, origin=origin)


def _named(config: TrainConfig) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Environment, its arguments, and what is known of the benchmark's file."""
    given = config.evaluation
    if given.bench in BENCHMARKS:
        return _benchmark(given)
    if given.data is not None:
        raise ConfigError(
            f"evaluation.data = {given.data}: {given.bench!r} is an environment, which reads no such file"
        )
    name = given.bench or config.env.name
    options = dict(given.options) if given.bench else judged_at_once(env_options(config.env))
    if given.tasks is not None:
        return name, {**_without_split(options), "tasks": make_tasks(name, tasks=given.tasks)}, {"file": given.tasks}
    return name, _heldout(name, options), {}


def _benchmark(given: EvalConfig) -> tuple[str, dict[str, Any], dict[str, Any]]:
    if given.tasks is not None:
        raise ConfigError(f"evaluation.bench = {given.bench} has tasks of its own: leave evaluation.tasks out")
    loaded = load_benchmark(str(given.bench), data=Path(given.data) if given.data else None)
    origin = {
        "source": loaded.source,
        "file_hash": loaded.file_hash,
        "differences": list(loaded.differences),
        "repairs": len(loaded.repairs),
    }
    return environment_of(loaded.benchmark), {**given.options, "tasks": loaded.tasks}, origin


def _without_split(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in ("split", "pool", "tasks")}


def _heldout(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The held-out split, where the environment's tasks have splits."""
    factory = spec(name).tasks
    found = resolve(factory) if isinstance(factory, str) else factory
    has_split = found is not None and "split" in inspect.signature(found).parameters
    return {"split": "heldout", **options} if has_split else options
