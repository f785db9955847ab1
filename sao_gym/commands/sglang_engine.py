"""The sglang engine as a configuration asks for it: servers started or attached to, and how weights reach them."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from sao_gym.engines.local import EngineDeadlines
from sao_gym.engines.sglang import SGLangEngine
from sao_gym.engines.sglang_cargo import Transport
from sao_gym.engines.sglang_disk import DiskTransport
from sao_gym.engines.sglang_group import GroupTransport
from sao_gym.engines.sglang_process import OwnServer, ServerCommand
from sao_gym.engines.sglang_tensor import TensorTransport
from sao_gym.errors import ConfigError
from sao_gym.loops import run_blocking, submit
from sao_gym.protocols import Clock
from sao_gym.trainer.config import SGLangConfig, TrainConfig
from sao_gym.weights import ModuleWeights

FOLDER = "engine"
PAUSES: dict[str, Literal["in_place", "retract", "abort"]] = {
    "in_place": "in_place",
    "recompute": "retract",
    "abort": "abort",
}


def require_sglang(config: TrainConfig) -> None:
    """Refuse what the sglang engine cannot do. Raises ConfigError."""
    if config.evaluation.every is not None and config.evaluation.weights == "copy":
        raise ConfigError(
            "evaluation.weights = copy needs a second engine: with engine.kind = sglang, evaluate on the servers of the "
            "rollouts (--evaluation.weights live) or at the ends alone (--evaluation.at-ends)"
        )


def make_sglang_engine(
    config: TrainConfig, model: Any, run: Path, *, version: int, clock: Clock, stack: ExitStack
) -> SGLangEngine:
    """A started engine, closed with `stack`. Raises ConfigError, and EngineError where no server took the weights."""
    require_sglang(config)
    settings, deadline_s = config.engine.sglang, config.deadline_s
    folder = run / FOLDER
    urls = settings.urls or _started(settings, model, folder, clock, stack)
    wanted = config.engine.context_length or config.rollout.max_tokens_per_episode
    engine = SGLangEngine(
        urls,
        model,
        _transport(settings, folder, deadline_s),
        context_length=wanted,
        mode=PAUSES[config.engine.kv],
        clock=clock,
        deadlines=EngineDeadlines(generate_s=deadline_s, publish_s=deadline_s),
    )
    stack.callback(lambda: run_blocking(engine.close()))
    run_blocking(engine.start(ModuleWeights(model), version))
    return engine


def _started(settings: SGLangConfig, model: Any, folder: Path, clock: Clock, stack: ExitStack) -> list[str]:
    """The URLs of servers that were started one beside the other, each ready."""
    python = settings.python or _worker_python()
    if not Path(python).is_file():
        raise ConfigError(f"engine.sglang.python = {python} is no file; give the python of an SGLang environment")
    model_folder = folder / "model"
    model.save_pretrained(model_folder)
    each = len(settings.gpus) // settings.servers
    servers = []
    for index in range(settings.servers):
        command = ServerCommand(
            python=python,
            model=model_folder.resolve(),
            log=folder / f"server-{index}.log",
            args=settings.args,
            gpus=settings.gpus[index * each : (index + 1) * each],
        )
        server = OwnServer(command)
        stack.callback(_close, server)
        servers.append(server)
    for server in servers:
        run_blocking(server.wait_ready(settings.start_s, clock))
    for server in servers:
        stack.callback(submit(server.watch(clock)).cancel)
    return [server.url for server in servers]


def _close(server: OwnServer) -> None:
    run_blocking(server.close())


def _worker_python() -> str:
    from sao_gym.workers import environment

    return str(environment("sglang").python)


def _transport(settings: SGLangConfig, folder: Path, timeout_s: float) -> Transport:
    bucket_bytes = settings.bucket_mb << 20
    if settings.transport == "tensor":
        return TensorTransport(timeout_s=timeout_s, bucket_bytes=bucket_bytes)
    if settings.transport == "distributed":
        return GroupTransport(
            settings.host,
            name="sao-gym",
            backend=settings.backend,
            timeout_s=min(timeout_s, 300.0),
            bucket_bytes=bucket_bytes,
        )
    weights = Path(settings.folder) if settings.folder else folder / "weights"
    return DiskTransport(weights, timeout_s=timeout_s)
