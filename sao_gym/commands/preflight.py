"""What `sao_gym.train` looks at before it starts: model, memory, engine, tasks, disk, and the environment's own checks.

Nothing of torch is imported, nothing is downloaded, and nothing takes longer than a few seconds: where something is missing,
a person hears it at once, all of it together, with the command that brings each thing.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sao_gym.errors import ConfigError, SaoGymError
from sao_gym.model_size import folder_parameters, known_parameters
from sao_gym.preflight import Check, gib, table
from sao_gym.protocols import Task, TaskSet
from sao_gym.registry import make, make_tasks, resolve, spec, task_options
from sao_gym.tasks.base import ListTaskSet
from sao_gym.trainer.config import SGLangConfig, TrainConfig
from sao_gym.workers import find as find_worker

WEIGHT_BYTES, MOMENT_BYTES, OPTIMIZER_BYTES = 4, 8, 12
"""Per parameter: a float32 weight; AdamW's two moments; those and a gradient."""
EMBEDDED = ("local", "scripted")
SHARDED = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED")
"""What `accelerate launch` sets where it shards weights."""


def require_ready(config: TrainConfig) -> None:
    """Where the environment has checks of its own and anything is missing, show all of them and raise ConfigError."""
    if spec(config.env.name).preflight is None:
        return
    checks = training_checks(config)
    if missing := [one for one in checks if one.is_missing]:
        print(table(checks), flush=True)
        listed = "; ".join(f"{one.name}: {one.remedy}" for one in missing)
        raise ConfigError(f"{len(missing)} thing{'s are' if len(missing) > 1 else ' is'} missing ({listed})")


def training_checks(config: TrainConfig) -> list[Check]:
    """Every check of a training run."""
    parameters = parameters_of(config)
    checks = [
        model_check(config),
        memory_check(config, parameters),
        engine_check(config),
        disk_check(config, parameters),
    ]
    tasks, about_tasks = tasks_check(config)
    heldout, about_heldout = heldout_check(config)
    return [*checks, about_tasks, *about_heldout, *_own_checks(config, _both(tasks, heldout))]


def _both(tasks: TaskSet | None, heldout: Sequence[Task]) -> TaskSet | None:
    """Training tasks, and those that are evaluated on in the same environment."""
    if tasks is None or not heldout:
        return tasks
    named = {task.id: task for task in (*(tasks[index] for index in range(len(tasks))), *heldout)}
    return ListTaskSet(tasks.name, named.values())


def _own_checks(config: TrainConfig, tasks: TaskSet | None) -> Sequence[Check]:
    """Those of the environment; one that has none is made, which says what it lacks."""
    options = environment_options(config)
    try:
        hook = own_checks_of(config)
        if hook is not None:
            own: Sequence[Check] = hook(tasks, options)
            return own
        if tasks is None:
            return ()  # it could not be made, for a reason that is said already
        make(config.env.name, **options).close()
    except SaoGymError as error:
        return [Check.missing("environment", str(error), "--env NAME --env.options '{...}'")]
    return [Check.ok("environment", config.env.name)]


def environment_options(config: TrainConfig) -> dict[str, Any]:
    """What the environment is made with."""
    return dict(config.env.options) | ({"tasks": config.env.tasks} if config.env.tasks else {})


def _task_options(config: TrainConfig) -> dict[str, Any]:
    """What the factory of the tasks takes of the environment's options."""
    known = task_options(config.env.name)
    return {key: value for key, value in environment_options(config).items() if key in known}


def own_checks_of(config: TrainConfig) -> Any:
    """The function that makes an environment's own checks; None where it has none. Raises RegistryError."""
    reference = spec(config.env.name).preflight
    return resolve(reference) if isinstance(reference, str) else reference


# -- the model


def parameters_of(config: TrainConfig) -> int | None:
    """How many parameters the policy has, or would have; None where nothing says it."""
    if config.model.path is not None and Path(config.model.path).is_dir():
        return folder_parameters(Path(config.model.path))
    return None if config.engine.kind == "scripted" else known_parameters(config.model.hub)


def model_check(config: TrainConfig) -> Check:
    """Whether there is a checkpoint."""
    path, hub = config.model.path, config.model.hub
    place = path or (f"models/{hub.rpartition('/')[2]}" if hub else "DIR")
    option = "" if path else f"--model {place}"
    remedy = " and ".join(filter(None, (f"hf download {hub} --local-dir {place}" if hub else "", option)))
    if path is None and config.engine.kind == "scripted":
        return Check.ok("model", "a tiny one made from nothing, as the engine is scripted")
    if path is None and config.model.start is not None:
        return Check.ok("model", f"a tiny one made first, by imitation ({config.model.start})")
    if path is None:
        return Check.missing("model", f"none was given{f'; the preset is for {hub}' if hub else ''}", remedy)
    folder = Path(path)
    if folder.suffix == ".gguf" and folder.is_file():
        return Check.ok("model", path)
    if not folder.is_dir():
        return Check.missing("model", f"there is no folder {path}", remedy or "--model DIR")
    if not (folder / "config.json").is_file() and len(list(folder.glob("*.gguf"))) != 1:
        return Check.missing("model", f"{path} holds no config.json", remedy or "--model DIR")
    return Check.ok("model", path)


# -- memory and disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """At least, and at most: how much of the critic is frozen, and needs no more than its weights, is not known yet."""

    least: int
    most: int

    def __str__(self) -> str:
        return gib(self.least) if gib(self.least) == gib(self.most) else f"{gib(self.least)} to {gib(self.most)}"


def training_bytes(parameters: int, config: TrainConfig) -> Bytes:
    """What one device holds, without activations and KV cache.

    Policy and critic have float32 weights, and for what is trained a gradient and AdamW's two moments; an embedded engine
    holds one more copy of the policy's weights, and so does a second one for evaluations.
    """
    evaluates = config.evaluation.every is not None and config.evaluation.weights == "copy"
    copies = (1 + int(evaluates)) * int(config.engine.kind in EMBEDDED)
    per = WEIGHT_BYTES + OPTIMIZER_BYTES + copies * WEIGHT_BYTES
    critic = (
        Bytes(least=WEIGHT_BYTES, most=WEIGHT_BYTES + OPTIMIZER_BYTES)
        if config.loss.has_critic
        else Bytes(least=0, most=0)
    )
    return Bytes(least=parameters * (per + critic.least), most=parameters * (per + critic.most))


def memory_check(config: TrainConfig, parameters: int | None) -> Check:
    """Memory of the largest GPU, or of the machine where there is none, against what a run holds."""
    gpus = gpu_bytes()
    there = max(gpus) if gpus else _machine_bytes()
    count = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, the largest with" if gpus else "no GPU, memory of"
    if parameters is None:
        return Check.unknown("memory", f"{count} {gib(there)}; how much is needed is known with the model")
    needed = training_bytes(parameters, config)
    found = f"{needed} needed for {parameters / 1e9:.3g} billion parameters, activations aside; {count} {gib(there)}"
    if needed.least <= there:
        return Check.ok("memory", found)
    if any(os.environ.get(name) for name in SHARDED):
        return Check.unknown("memory", f"{found}, over which the launcher shards the weights")
    remedy = "a smaller --model, or a machine with more; weights are not sharded over devices here"
    return Check.missing("memory", found, remedy)


def gpu_bytes() -> list[int]:
    """Memory of each GPU, from its driver; empty where there is none. ROCm and others are not asked."""
    if shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return []
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=4, check=True).stdout
        return [int(line) << 20 for line in said.split()]
    return []


def _machine_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def disk_check(config: TrainConfig, parameters: int | None) -> Check:
    """Room for the checkpoints that a run keeps, and one more while it is written."""
    free = shutil.disk_usage(Path.cwd()).free
    if parameters is None:
        return Check.unknown("disk", f"{gib(free)} free here; how much is needed is known with the model")
    trained, weights = WEIGHT_BYTES + MOMENT_BYTES, WEIGHT_BYTES if config.loss.has_critic else 0
    count = (config.checkpoint.keep + 1) * parameters
    needed = Bytes(least=count * (trained + weights), most=count * (trained + (trained if weights else 0)))
    found = f"{needed} needed for {config.checkpoint.keep} checkpoints and one in the making; {gib(free)} free here"
    if needed.least > free:
        return Check.missing("disk", found, "--out on a larger disk, or a smaller --checkpoint.keep")
    return Check.ok("disk", found)


# -- engine and tasks


def engine_check(config: TrainConfig) -> Check:
    """What samples."""
    words = {"local": "local: transformers in this process", "scripted": "scripted: says what it is told"}
    if config.engine.completions is not None and not Path(config.engine.completions).is_file():
        return Check.missing("engine", f"there is no file {config.engine.completions}", "--engine.completions FILE")
    if config.engine.kind == "sglang":
        return _sglang_check(config.engine.sglang)
    return Check.ok("engine", words.get(config.engine.kind, config.engine.kind))


def _sglang_check(settings: SGLangConfig) -> Check:
    """Whether there is a Python to start servers with, where none that run were given."""
    if settings.urls:
        return Check.unknown("engine", f"sglang: servers at {', '.join(settings.urls)}, asked when the run starts")
    made = None if settings.python else find_worker("sglang")
    python = settings.python or (str(made.python) if made else None)
    if python is None:
        remedy = "sao-gym workers install sglang --existing PYTHON, or --engine.sglang.urls '[\"http://...\"]'"
        return Check.missing("engine", "sglang: no environment of it is known", remedy)
    if not Path(python).is_file():
        return Check.missing("engine", f"sglang: there is no {python}", "--engine.sglang.python FILE")
    return Check.ok("engine", f"sglang: {settings.servers} server{'s' * (settings.servers > 1)} started by {python}")


def tasks_check(config: TrainConfig) -> tuple[TaskSet | None, Check]:
    """The tasks, where they can be had, and what there is to say about them."""
    options = environment_options(config)
    try:
        tasks = make_tasks(config.env.name, **_task_options(config))
    except (SaoGymError, OSError) as error:
        needs_library = str(options.get("tasks", "hf:")).startswith("hf:") and find_spec("datasets") is None
        remedy = "pip install 'sao-gym[hub]'" if needs_library else "--tasks FILE"
        return None, Check.missing("tasks", str(error), remedy)
    caution, left_out = str(getattr(tasks, "contamination", "")), getattr(tasks, "left_out", {})
    notes = [f"{count} left out, {why}" for why, count in left_out.items()]
    notes += [f"CONTAMINATED: {caution}"] if caution else []
    return tasks, Check.ok("tasks", "; ".join([f"{len(tasks)} of {tasks.name}", *notes]))


def heldout_check(config: TrainConfig) -> tuple[Sequence[Task], list[Check]]:
    """The held-out tasks that an evaluation takes, where the environment's own checks want to know them."""
    if not config.evaluation.is_asked_for or config.evaluation.has_own_tasks:
        return (), []
    try:
        if spec(config.env.name).preflight is None:
            return (), []
        tasks = make_tasks(config.env.name, **_task_options(config), split="heldout")
    except (SaoGymError, OSError) as error:
        return (), [Check.missing("held-out tasks", str(error), "--evaluation.tasks FILE")]
    count = min(len(tasks), config.evaluation.episodes)
    return [tasks[index] for index in range(count)], [Check.ok("held-out tasks", f"{count} of {tasks.name}")]
