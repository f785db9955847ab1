"""What an evaluation runs on: for each benchmark its environments, the tasks taken, and the facts that name them.

Invariant: a benchmark's `limit` is the same draw in every run (`LoadedBenchmark.take`), so runs compare; the tasks of a
file and of an environment are taken from the first on.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sao_gym.commands.environments import Environments
from sao_gym.commands.eval_config import EvalConfig, TasksConfig
from sao_gym.errors import ConfigError, RegistryError
from sao_gym.evaluation import episode_uid, take
from sao_gym.protocols import Task, TaskSet
from sao_gym.registry import file_options, make_tasks, names, spec
from sao_gym.registry import resolve as find_object
from sao_gym.tasks.base import ListTaskSet, hash_tasks
from sao_gym.tasks.benchmarks import BENCHMARKS, environment_of, load_benchmark
from sao_gym.tools import nearest

PAPER_SAMPLES = 16
WITHOUT_TOOLS: Mapping[str, str] = MappingProxyType({"python_math": "math"})
"""The environment that asks the same problems without a tool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One benchmark of an evaluation: `samples` episodes of each task, in environments of one kind."""

    name: str
    label: str
    environments: Environments
    tasks: tuple[Task, ...]
    samples: int
    facts: Mapping[str, Any]

    def uids(self) -> list[str]:
        """The uid of every episode, in order of tasks and attempts."""
        pairs = ((index, attempt) for index in range(len(self.tasks)) for attempt in range(self.samples))
        return [episode_uid(self.label, index, attempt) for index, attempt in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What an earlier run took: the facts of its manifest, and its tasks."""

    facts: Mapping[str, Any]
    tasks: tuple[Task, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """One benchmark before anything is opened; without `tasks` it is the environment that has them.

    `used` are the environment's options that went into the making of the tasks.
    """

    name: str
    env: str
    samples: int
    tasks: TaskSet | None = None
    taken: tuple[Task, ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    used: tuple[str, ...] = ()


async def open_targets(
    config: EvalConfig,
    closing: AsyncExitStack,
    recorded: Mapping[str, Recorded] = MappingProxyType({}),
    *,
    will_run: bool = True,
) -> tuple[Target, ...]:
    """Every benchmark, with environments that can start if they `will_run`; `closing` gives them back.

    `recorded` holds what an earlier run took, by name: its tasks are taken again. Raises UserError.
    """
    targets: list[Target] = []
    for plan in _plans(config, recorded):
        target = _open(plan, config, recorded, f"{len(targets)}-" if targets else "")
        closing.push_async_callback(target.environments.close)
        if will_run and target.environments.name not in [one.environments.name for one in targets]:
            await target.environments.check(target.tasks[0])
        targets.append(target)
    return tuple(targets)


def _plans(config: EvalConfig, recorded: Mapping[str, Recorded]) -> list[_Plan]:
    env = config.env
    if not env.bench:
        name = _env_name(env, env.name or "python_math")
        given, for_tasks = None, {}
        if env.tasks is not None:
            again = next((_again(recorded, known) for known in recorded), None)  # there is but one
            for_tasks = {key: env.options[key] for key in file_options(name) if key in env.options}
            given = again or make_tasks(name, tasks=env.tasks, mapping=env.mapping, **for_tasks)
        title = given.name if given else name
        return [_Plan(name=title, env=name, samples=_samples(config, None), tasks=given, used=tuple(for_tasks))]
    return [_bench_plan(config, name, recorded) for name in env.bench]


def _again(recorded: Mapping[str, Recorded], name: str) -> ListTaskSet | None:
    return ListTaskSet(name, recorded[name].tasks) if name in recorded else None


def _bench_plan(config: EvalConfig, name: str, recorded: Mapping[str, Recorded]) -> _Plan:
    benchmark = BENCHMARKS.get(name)
    samples = _samples(config, name)
    if benchmark is None:
        if config.env.name is not None:
            raise ConfigError(
                f"--env says in which environment a benchmark's problems are asked, and {name!r} is no benchmark; "
                "leave --env out"
            )
        _require_env(name)
        return _Plan(name=name, env=_env_name(config.env, name), samples=samples)
    env = _env_name(config.env, config.env.name or environment_of(benchmark))
    if (again := _again(recorded, name)) is not None:
        return _Plan(name=name, env=env, samples=samples, tasks=again, taken=tuple(again))
    loaded = load_benchmark(name, data=Path(config.env.data) if config.env.data else None)
    taken = loaded.take(config.env.limit)
    return _Plan(name=name, env=env, samples=samples, tasks=loaded.tasks, taken=taken, facts=loaded.facts())


def _require_env(name: str) -> None:
    try:
        spec(name)
    except RegistryError as error:
        if ":" in name:
            raise
        known = (*BENCHMARKS, *names())
        raise ConfigError(
            f"unknown benchmark {name!r}; {nearest(name, known, what='benchmark or environment')}"
        ) from error


def _env_name(config: TasksConfig, name: str) -> str:
    if config.tools == "python":
        return name
    if name not in WITHOUT_TOOLS:
        raise ConfigError(
            f"--tools none: {name!r} has no form without its tools; it is for {', '.join(WITHOUT_TOOLS)} alone"
        )
    return WITHOUT_TOOLS[name]


def _samples(config: EvalConfig, name: str | None) -> int:
    if config.sampling.n is not None:
        return config.sampling.n
    benchmark = BENCHMARKS.get(name or "")
    return PAPER_SAMPLES if benchmark is None else benchmark.samples


def _open(plan: _Plan, config: EvalConfig, recorded: Mapping[str, Recorded], prefix: str) -> Target:
    options = {key: value for key, value in config.env.options.items() if key not in plan.used}
    if plan.tasks is not None:
        options["tasks"] = plan.tasks
    elif split := config.env.split or ("heldout" if _has_split(plan.env) else None):
        options.setdefault("split", split)
    environments = Environments(plan.env, options, size=config.concurrency)
    given = environments.tasks
    tasks = plan.taken or take(given, config.env.limit)
    name = plan.name if config.env.bench or plan.tasks is not None else str(getattr(given, "name", plan.name))
    before = recorded.get(name)
    facts: Mapping[str, Any] = before.facts if before and plan.tasks is not None else _facts(given, tasks, plan)
    if before is not None and facts["tasks"]["taken_hash"] != before.facts["tasks"]["taken_hash"]:
        raise ConfigError(
            f"the tasks of environment {plan.env!r} are not those of the run: what decides them has changed since"
        )
    return Target(
        name=name,
        label=prefix + re.sub(r"[^A-Za-z0-9_.]+", "-", name.rpartition("/")[2]).strip("-"),
        environments=environments,
        tasks=tasks,
        samples=plan.samples,
        facts=facts,
    )


def _facts(given: TaskSet, tasks: Sequence[Task], plan: _Plan) -> dict[str, Any]:
    known = {
        "name": getattr(given, "name", plan.name),
        "content_hash": getattr(given, "content_hash", None) or hash_tasks(take(given)),
    }
    taken = {"taken": len(tasks), "taken_hash": hash_tasks(tasks)}
    return {"env": plan.env, "samples": plan.samples, "tasks": {**known, **plan.facts, **taken}}


def _has_split(name: str) -> bool:
    factory = spec(name).tasks
    found = find_object(factory) if isinstance(factory, str) else factory
    return found is not None and "split" in inspect.signature(found).parameters
