"""Names of environments, and the factory that joins environment, task set and grader from their string names.

A name is one of: a built-in (`arithmetic`, `python_math`, `math`, or a Gymnasium id), what `register` was given, an
entry point of the group `sao_gym.envs`, `package.module:Class`, or `path/to/file.py:Class`. Invariant: nothing is
imported before an environment is made, and no name is ever guessed.

Example:
    >>> spec("arithmetic").entry_point
    'sao_gym.envs.arithmetic:ArithmeticEnv'
    >>> make("arithmetics")
    Traceback (most recent call last):
    ...
    sao_gym.errors.RegistryError: unknown environment 'arithmetics'; did you mean 'arithmetic' or 'sao_gym/Arithmetic-v0'?
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import gymnasium

from sao_gym.errors import ConfigError, RegistryError
from sao_gym.protocols import TaskSet
from sao_gym.tools import nearest

Reference = str | Callable[..., Any]
ENTRY_POINT_GROUP = "sao_gym.envs"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvSpec:
    """How an environment is made. `tasks` makes the task set, `grader` judges; references are `module:name` or objects.

    `kwargs` are defaults for the environment or the task factory. A task factory with an argument `tasks` reads task files
    and names of sets itself. `preflight` takes (tasks or None, the environment's options) and returns `preflight.Check`s: what
    must be there before a run starts, found out without starting anything.
    """

    id: str
    entry_point: Reference
    tasks: Reference | None = None
    grader: Reference | None = None
    preflight: Reference | None = None
    description: str = ""
    kwargs: Mapping[str, Any] = field(default_factory=dict)


BUILT_IN: Mapping[str, EnvSpec] = MappingProxyType(
    {
        "arithmetic": EnvSpec(
            id="arithmetic",
            entry_point="sao_gym.envs.arithmetic:ArithmeticEnv",
            tasks="sao_gym.tasks.arithmetic:arithmetic_tasks",
            description="multi-step arithmetic that a small model gets right only through the Python tool",
        ),
        "python_math": EnvSpec(
            id="python_math",
            entry_point="sao_gym.envs.python_math:PythonMathEnv",
            tasks="sao_gym.tasks.mathematics:math_tasks",
            grader="sao_gym.tasks.grading:score_response_async",
            description="mathematics with a persistent Python tool and a boxed answer",
        ),
        "math": EnvSpec(
            id="math",
            entry_point="sao_gym.envs.plain_math:MathEnv",
            tasks="sao_gym.tasks.mathematics:math_tasks",
            grader="sao_gym.tasks.grading:score_response_async",
            description="the same mathematics in one turn, without a tool",
        ),
        "swe_verified": EnvSpec(
            id="swe_verified",
            entry_point="sao_gym.envs.swe:SweEnv",
            tasks="sao_gym.tasks.swe:swe_tasks",
            preflight="sao_gym.envs.swe_preflight:preflight",
            description="issues of real repositories, judged by the projects' own tests as SWE-Bench does",
        ),
        "terminal": EnvSpec(
            id="terminal",
            entry_point="sao_gym.envs.terminal:TerminalEnv",
            tasks="sao_gym.tasks.terminal:terminal_tasks",
            description="work in a sandbox with bash and an editor, judged by a check command",
        ),
        "writing_style": EnvSpec(
            id="writing_style",
            entry_point="sao_gym.envs.writing:WritingEnv",
            tasks="sao_gym.tasks.writing:writing_tasks",
            description="one request, one answer, one verdict, under a preference for a style that drifts",
        ),
        "feedback": EnvSpec(
            id="feedback",
            entry_point="sao_gym.envs.feedback:FeedbackEnv",
            tasks="sao_gym.tasks.places:feedback_places",
            description="what an application asks, judged by its users; python -m sao_gym.feedback serves it",
        ),
    }
)
GYMNASIUM_IDS: Mapping[str, str] = MappingProxyType(
    {
        "sao_gym/Arithmetic-v0": "arithmetic",
        "sao_gym/PythonMath-v0": "python_math",
        "sao_gym/SweVerified-v0": "swe_verified",
        "sao_gym/Terminal-v0": "terminal",
        "sao_gym/WritingStyle-v0": "writing_style",
    }
)
_registered: dict[str, EnvSpec] = {}


def register(
    id: str,  # Gymnasium's own word for it
    *,
    entry_point: Reference,
    tasks: Reference | None = None,
    grader: Reference | None = None,
    preflight: Reference | None = None,
    description: str = "",
    **kwargs: Any,
) -> EnvSpec:
    """Give an environment a name. The same again does nothing; raises RegistryError if the name means another one."""
    made = EnvSpec(
        id=id,
        entry_point=entry_point,
        tasks=tasks,
        grader=grader,
        preflight=preflight,
        description=description,
        kwargs=kwargs,
    )
    known = BUILT_IN.get(GYMNASIUM_IDS.get(id, id)) or _registered.get(id)
    if known is not None and known != made:
        raise RegistryError(f"the name {id!r} is taken by {known.entry_point}; choose another")
    if ":" in id:
        raise RegistryError(f"the name {id!r} holds ':', which stands for module:Class; choose another")
    _registered[id] = made
    return made


def names() -> tuple[str, ...]:
    """Every name that is known without importing anything."""
    plugged = (point.name for point in entry_points(group=ENTRY_POINT_GROUP))
    return tuple(dict.fromkeys((*BUILT_IN, *GYMNASIUM_IDS, *_registered, *plugged)))


def spec(name: str) -> EnvSpec:
    """What a name stands for. Raises RegistryError, with the nearest names."""
    short = GYMNASIUM_IDS.get(name, name)
    if short in BUILT_IN:
        return BUILT_IN[short]
    if name in _registered:
        return _registered[name]
    if ":" in name:
        return EnvSpec(id=name, entry_point=name)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            found = resolve(point.value)
            return found if isinstance(found, EnvSpec) else EnvSpec(id=name, entry_point=found)
    raise RegistryError(f"unknown environment {name!r}; {nearest(name, names(), what='environment')}")


def make(name: str, **kwargs: Any) -> gymnasium.Env[Any, Any]:
    """An environment by name, without Gymnasium's wrappers.

    `tasks` may be a task set, a list of tasks or the path of a task file; `grader` a function or `module:name`. Other
    arguments go to the environment, or to the factory of its tasks (`split`, `pool`, ...). Raises RegistryError for
    names, ConfigError for arguments.
    """
    made = spec(name)
    factory = _callable(made.entry_point, made.id)
    arguments = {**made.kwargs, **kwargs}
    accepted = _parameters(factory)
    if made.tasks is not None or isinstance(arguments.get("tasks"), str | os.PathLike):
        arguments = _with_tasks(made, arguments, accepted)
    if made.grader is not None:
        arguments.setdefault("grader", made.grader)
    if isinstance(arguments.get("grader"), str):
        arguments["grader"] = resolve(arguments["grader"])
    _refuse_unknown(made, arguments, accepted, _task_parameters(made))
    _require(made, factory, arguments)
    env = factory(**arguments)
    if not isinstance(env, gymnasium.Env):
        raise RegistryError(f"{made.entry_point} made a {type(env).__name__}, expected a gymnasium.Env")
    return env


def make_tasks(name: str, **kwargs: Any) -> TaskSet:
    """The task set alone, e.g. `make_tasks("arithmetic", split="heldout")`. Raises RegistryError, ConfigError."""
    made = spec(name)
    if "tasks" in kwargs and not _reads(made, kwargs["tasks"]):
        given: TaskSet = _loaded(kwargs["tasks"], kwargs.get("mapping"))
        return given
    if made.tasks is None:
        raise ConfigError(f"environment {made.id!r} has no task set of its own; give tasks=FILE")
    accepted = _task_parameters(made)
    _refuse_unknown(made, kwargs, accepted, None)
    tasks: TaskSet = _callable(made.tasks, made.id)(**kwargs)
    return tasks


def task_options(name: str) -> tuple[str, ...]:
    """Arguments that `make_tasks` takes for this environment. Raises RegistryError."""
    return tuple(dict.fromkeys(("tasks", "mapping", *(_task_parameters(spec(name)) or ()))))


def file_options(name: str) -> tuple[str, ...]:
    """Arguments that `make_tasks` takes beside `tasks` and `mapping` where `tasks` names a file. Raises RegistryError."""
    made = spec(name)
    own = _task_parameters(made) or ()
    return tuple(key for key in own if key not in ("tasks", "mapping", "split")) if "tasks" in own else ()


def resolve(reference: str) -> Any:
    """The object behind `package.module:name` or `path/file.py:name`. Raises RegistryError."""
    module_name, _, attribute = reference.rpartition(":")
    if not module_name or not attribute:
        raise RegistryError(f"{reference!r} names nothing; expected package.module:Class or path/file.py:Class")
    module = _load_file(module_name) if module_name.endswith(".py") else _load_module(module_name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise RegistryError(f"{module_name} has no {attribute!r}; {nearest(attribute, public, what='name')}") from None


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RegistryError(
            f"cannot import {name!r}: {error}; is it installed, or is its folder on the path?"
        ) from error
    except (Exception, SystemExit) as error:
        raise RegistryError(f"importing {name!r} failed: {type(error).__name__}: {error}") from error


def _load_file(file_name: str) -> ModuleType:
    path = Path(file_name).resolve()
    if not path.is_file():
        raise RegistryError(f"there is no file {file_name}; expected path/file.py:Class")
    # A name of its own, so that classes of the file can be found again by pickle and dataclasses.
    name = f"sao_gym_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    location = importlib.util.spec_from_file_location(name, path)
    if location is None or location.loader is None:
        raise RegistryError(f"{file_name} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(location)
    sys.modules[name] = module
    try:
        location.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script without a main guard may end the process
        del sys.modules[name]
        advice = "; put the folder of what it imports on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
        raise RegistryError(f"importing {file_name} failed: {type(error).__name__}: {error}{advice}") from error
    return module


def _callable(reference: Reference, name: str) -> Callable[..., Any]:
    found = resolve(reference) if isinstance(reference, str) else reference
    if not callable(found):
        raise RegistryError(f"{reference} of environment {name!r} is a {type(found).__name__}, expected a class")
    return found


def _parameters(factory: Callable[..., Any]) -> tuple[str, ...] | None:
    """Names that a factory takes, None if it takes any."""
    parameters = inspect.signature(factory).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return tuple(parameter.name for parameter in parameters)


def _task_parameters(made: EnvSpec) -> tuple[str, ...] | None:
    return _parameters(_callable(made.tasks, made.id)) if made.tasks is not None else ()


def _with_tasks(made: EnvSpec, arguments: Mapping[str, Any], accepted: tuple[str, ...] | None) -> dict[str, Any]:
    """`arguments` with a task set under `tasks` and without what went into making it."""
    rest = dict(arguments)
    reads = "tasks" in rest and _reads(made, rest["tasks"])
    if "tasks" in rest and not reads:
        mapping = rest.pop("mapping", None)
        return {**rest, "tasks": _loaded(rest["tasks"], mapping)}
    takes = _task_parameters(made)
    for_tasks = {
        key: rest.pop(key)
        for key in arguments
        if (takes is None or key in takes) and (accepted is None or key not in accepted or (reads and key == "tasks"))
    }
    if takes is not None and "mapping" not in takes:
        rest.pop("mapping", None)
    if made.tasks is None:
        return rest
    return {**rest, "tasks": _callable(made.tasks, made.id)(**for_tasks)}


def _reads(made: EnvSpec, tasks: Any) -> bool:
    """Whether the task factory makes a set of what `tasks` names."""
    return isinstance(tasks, str | os.PathLike) and "tasks" in (_task_parameters(made) or ())


def _loaded(tasks: Any, mapping: Mapping[str, str] | None) -> Any:
    if isinstance(tasks, str | os.PathLike):
        return resolve("sao_gym.tasks.base:load_tasks")(tasks, mapping)
    return tasks


def _require(made: EnvSpec, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    required = [
        parameter.name
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    missing = [name for name in required if name not in arguments]
    if missing:
        raise ConfigError(f"environment {made.id!r} needs the argument {missing[0]!r}; it takes {', '.join(required)}")


def _refuse_unknown(
    made: EnvSpec,
    arguments: Mapping[str, Any],
    accepted: tuple[str, ...] | None,
    also: tuple[str, ...] | None,
) -> None:
    if accepted is None:
        return
    unknown = [key for key in arguments if key not in accepted]
    if unknown:
        known = [*accepted, *(also or ())]
        raise ConfigError(
            f"environment {made.id!r} takes no argument {unknown[0]!r}; {nearest(unknown[0], known, what='argument')}"
        )
