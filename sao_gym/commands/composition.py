"""A training run put together: policy, critic, engine, environments, ledger, runtime, learner.

`opened` builds all of it and takes it down again whatever happens. Everything that can be refused is refused before
the run folder says that it holds a run.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from sao_gym import __version__
from sao_gym.budgets import Budgets
from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.commands.environments import Environments
from sao_gym.commands.heldout import Heldout, rewind_evaluations
from sao_gym.commands.heldout_tasks import open_tasks
from sao_gym.commands.policy import env_options, make_budgets, make_engine, training_sampling
from sao_gym.commands.scripted_policy import ScriptedTurns, tiny_policy
from sao_gym.commands.serving import Serving, kept_feedback
from sao_gym.commands.sglang_engine import make_sglang_engine
from sao_gym.engines.told import ToldEngine
from sao_gym.errors import CheckpointError, ConfigError, RunFolderError
from sao_gym.ledger import LEDGER_FILE, Ledger, LedgerRow, RowStatus
from sao_gym.loops import run_blocking
from sao_gym.models import LoadedPolicy, copy_model, load_policy
from sao_gym.protocols import Chat, CountsWork, Engine, Task, TaskSet
from sao_gym.rollout import EnvPool, Episode
from sao_gym.runfolder import MANIFEST, RunFolder
from sao_gym.stream import Trajectory
from sao_gym.trainer.checkpoint import RunState, find_checkpoints, load_optimizers
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.critic import Critic, critic_from_model, load_critic
from sao_gym.trainer.events import EVENTS, EventLog, PartFiles, recorded
from sao_gym.trainer.failures import ErrorBudget
from sao_gym.trainer.files import CHECKPOINTS, row_uid
from sao_gym.trainer.learner import Learner
from sao_gym.trainer.loop import Parts
from sao_gym.trainer.metrics import HISTOGRAMS
from sao_gym.trainer.parity import PARITY
from sao_gym.trainer.prompts import PromptOrder
from sao_gym.trainer.resume import recovered
from sao_gym.trainer.runtime import Runtime, RuntimeOptions
from sao_gym.trainer.staleness import Outstanding
from sao_gym.trainer.survival import Survival
from sao_gym.weights import module_tensors, weight_hash


@dataclass(frozen=True, kw_only=True)
class Run:
    """An opened run. `start_hash` is the hash of the weights that it starts from; `heldout` evaluates, where asked for."""

    parts: Parts
    state: RunState
    chat: Chat
    budgets: Budgets
    tasks: TaskSet
    pool: EnvPool
    critic_origin: str
    start_hash: str
    heldout: Heldout | None
    serving: Serving | None = None


@contextmanager
def opened(config: TrainConfig, folder: RunFolder, *, resume: bool = False, is_training: bool = True) -> Iterator[Run]:
    """Build a run; where it is no training, nothing is evaluated and no application served.

    Raises UserError for a model, critic, task set or environment that cannot be used.
    """
    clock = SystemClock()
    with ExitStack() as stack:
        environments = _environments(config)
        stack.callback(lambda: run_blocking(environments.close()))
        if resume:
            _require_same_tasks(folder, environments.tasks)
        _say_contamination(environments.tasks, folder)
        judging = environments.judging
        if resume and judging is not None:
            judging.progress.note_spent(sum(record.get("time_step_s") or 0.0 for record in folder.read_metrics()))
        asked = is_training and config.evaluation.is_asked_for
        given = open_tasks(config, environments.tasks, judging) if asked else None
        if given:
            stack.callback(lambda: run_blocking(given.environments.close()))
        trainee = load_trainee(config, folder.path if resume else None, clock)
        stack.callback(trainee.learner.stop)
        learner, state = trainee.learner, trainee.state
        chat = make_chat(trainee.tokenizer, config.model.chat, describe_tools=config.model.describe_tools)
        engine = _engine(config, learner, state, clock, stack, folder.path)
        is_copied = given is not None and config.evaluation.every is not None and config.evaluation.weights == "copy"
        copy = _engine(config, learner, state, clock, stack, folder.path) if is_copied else None
        budgets = make_budgets(config.rollout)
        pool = EnvPool(environments.make, chat, budgets, context_length=engine.context_length)
        stack.callback(lambda: run_blocking(pool.close()))
        ledger = Ledger(folder.file(LEDGER_FILE))
        stack.callback(ledger.close)
        if resume:
            bound = {"batch_rows": config.batch_size, "max_staleness": config.staleness.max_staleness}
            with kept_feedback(folder.path, ledger, state, config.feedback.keep):
                recovered(ledger, folder, state, **bound)
            for name in (EVENTS, HISTOGRAMS, PARITY):
                PartFiles(folder.file(name)).rewind(state.step)
            rewind_evaluations(folder.path, state.step)
        events = EventLog(clock)
        is_scripted = config.engine.kind == "scripted"
        turns = (
            ScriptedTurns(config.engine.completions, chat, trainee.tokenizer, environments.tasks)
            if is_scripted
            else None
        )
        serving = None
        if config.serves_applications and is_training:
            serving = Serving.opened(config, folder, engine, chat, budgets, clock, stack)
        parts = Parts(
            config=config,
            folder=folder,
            ledger=ledger,
            learner=learner,
            engine=engine,
            runtime=_runtime(config, ledger, environments, engine, pool, state, clock, events, turns, serving),
            clock=clock,
            tokenizer=trainee.tokenizer,
            events=events,
            counting=_counting(engine, environments.judging, serving),
        )
        yield Run(
            parts=parts,
            state=state,
            chat=chat,
            budgets=budgets,
            tasks=environments.tasks,
            pool=pool,
            critic_origin=trainee.critic_origin,
            start_hash=trainee.state.weight_hash,
            heldout=None
            if given is None
            else Heldout(
                config=config,
                folder=folder,
                chat=chat,
                budgets=budgets,
                clock=clock,
                given=given,
                engine=engine,
                copy=copy,
            ),
            serving=serving,
        )


def _counting(engine: Engine, judging: Any, serving: Serving | None) -> dict[str, CountsWork]:
    """Who counts what a run's metrics tell."""
    parts = {
        "engine": engine,
        "judge": getattr(judging, "judge", None),
        "feedback": serving.desk if serving else None,
    }
    return {name: part for name, part in parts.items() if isinstance(part, CountsWork)}


def contamination_of(tasks: TaskSet) -> str | None:
    """What a task set knows of a benchmark's tasks among its own, empty if there are none; None if it knows nothing."""
    said = getattr(tasks, "contamination", None)
    return said if isinstance(said, str) else None


def _say_contamination(tasks: TaskSet, folder: RunFolder) -> None:
    """In the log and, from here on, in every line of metrics."""
    caution = contamination_of(tasks)
    if caution is not None:
        folder.mark(contaminated=bool(caution))
    if caution:
        print(f"CONTAMINATED: {caution}; what this run learns says nothing about that benchmark", flush=True)


def _engine(
    config: TrainConfig, learner: Learner, state: RunState, clock: SystemClock, stack: ExitStack, run: Path
) -> Engine:
    """An engine with the learner's present weights, closed with the run."""
    if config.engine.kind == "sglang":
        return make_sglang_engine(config, learner.model, run, version=state.version, clock=clock, stack=stack)
    engine: Engine = make_engine(
        config.engine,
        config.rollout,
        copy_model(learner.model),
        version=state.version,
        clock=clock,
        device=learner.accelerator.device,
        deadline_s=config.deadline_s,
    )
    stack.callback(lambda: run_blocking(engine.close()))
    return ToldEngine(engine) if config.engine.kind == "scripted" else engine


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """What every rank holds: the learner with its networks, and where they stand."""

    learner: Learner
    tokenizer: Any
    state: RunState
    critic_origin: str


def load_trainee(config: TrainConfig, resumed: Path | None, clock: SystemClock) -> Trainee:
    """Policy, critic and optimisers, from the start or from the newest whole checkpoint of the run `resumed`."""
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.seed)
    state, checkpoint = _newest(resumed) if resumed else (None, None)
    policy = _policy(config, checkpoint)
    critic, origin = _critic(config, policy.model, checkpoint)
    start_hash = weight_hash(module_tensors(policy.model))
    if state and state.weight_hash != start_hash:
        raise CheckpointError(
            f"the weights in {checkpoint} have the hash {start_hash}, were written with {state.weight_hash}: the "
            "checkpoint is damaged; take it away, and --resume goes on from the one before"
        )
    # A rank waits in the broadcast of the next plan for as long as rank 0 waits for its batch.
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=2 * config.deadline_s + 600))
    accelerator = Accelerator(mixed_precision=config.learner.precision, kwargs_handlers=[patience])
    learner = Learner(config, policy.model, critic, accelerator, clock)
    if checkpoint:
        load_optimizers(checkpoint, learner)
    return Trainee(
        learner=learner,
        tokenizer=policy.tokenizer,
        state=state or RunState(step=0, version=0, weight_hash=start_hash),
        critic_origin=origin,
    )


def _environments(config: TrainConfig) -> Environments:
    """The environments, seen to work, with enough tasks."""
    environments = Environments(config.env.name, env_options(config.env), size=config.rollout.max_in_flight)
    if len(environments.tasks) < config.batch_size // config.group_size:
        raise ConfigError(
            f"{len(environments.tasks)} prompts are too few for batch_size {config.batch_size}: a batch holds distinct "
            "prompts (one a group), so give more tasks or a smaller --batch-size"
        )
    run_blocking(environments.check())
    return environments


def _require_same_tasks(folder: RunFolder, tasks: TaskSet) -> None:
    """The n-th row of a run is the n-th prompt of its tasks. Raises CheckpointError if those are others by now."""
    try:
        before = json.loads(folder.file(MANIFEST).read_text(encoding="utf-8"))["tasks"]["hash"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RunFolderError(
            f"{folder.file(MANIFEST)} cannot be read ({type(error).__name__}): the run ended before it had begun, or its "
            "folder is damaged; start again in a new folder"
        ) from error
    if before != tasks.content_hash:
        raise CheckpointError(
            f"the tasks of {tasks.name} are not those that the run in {folder.path} was started with (content hash "
            f"{tasks.content_hash[:12]}, was {before[:12]}); give them back, or start a new run"
        )


def _newest(run: Path) -> tuple[RunState | None, Path | None]:
    """The newest whole checkpoint; none for a run that was stopped before its first one, which starts over."""
    whole, skipped = find_checkpoints(run / CHECKPOINTS)
    for item in skipped:
        print(f"skipping {item.path.name}: {item.why}", flush=True)
    if whole:
        return whole[-1]
    if skipped:
        raise RunFolderError(f"{run} holds no whole checkpoint to go on from; start again in a new folder")
    return None, None


def _policy(config: TrainConfig, checkpoint: Path | None) -> LoadedPolicy:
    path = checkpoint / "actor" if checkpoint else config.model.path
    if path is None and config.engine.kind == "scripted":
        return tiny_policy(config.seed)
    if path is None:
        raise ConfigError("no model was given: --model takes the folder of a transformers checkpoint")
    return load_policy(path)


def _critic(config: TrainConfig, model: Any, checkpoint: Path | None) -> tuple[Critic | None, str]:
    if not config.loss.has_critic:
        return None, f"none, loss.advantage is {config.loss.advantage}"
    if checkpoint:
        return load_critic(checkpoint / "critic", like=model)[0], f"checkpoint {checkpoint.name}"
    if config.critic.init in (None, "cold"):
        return critic_from_model(model), "cold: the policy's backbone with a new value head, V = 0 everywhere"
    folder = Path(str(config.critic.init))
    critic, provenance = load_critic(folder, like=model)
    return critic, f"{folder}, explained variance {provenance.get('explained_variance')}"


def _runtime(
    config: TrainConfig,
    ledger: Ledger,
    environments: Environments,
    engine: Engine,
    pool: EnvPool,
    state: RunState,
    clock: SystemClock,
    events: EventLog,
    turns: ScriptedTurns | None,
    serving: Serving | None,
) -> Runtime:
    sampling = training_sampling(config.rollout, engine)
    budget = ErrorBudget(share=config.rollout.failure_share, window=max(32, 8 * config.batch_size))
    judging = environments.judging

    async def run_episode(row: LedgerRow, task: Task, on_version: Any) -> Trajectory:
        episode = Episode(
            uid=row_uid(row.number),
            task=task,
            env_id=config.env.name,
            attempt=row.attempt,
            run_seed=config.seed,
            group_id=None if row.group is None else f"g{row.group}",
        )
        if judging is not None:
            judging.progress.note_trained(runtime.trained_rows)
        if serving is not None:
            on_answered = partial(runtime.begin_scoring, row.number)
            async with recorded(events, engine, row.number) as done:
                made = await serving.desk.episode(episode, on_version=on_version, on_answered=on_answered)
            budget.note(done(made).outcome)
            return made
        async with recorded(events, engine, row.number) as done, pool.lease() as env:
            if turns is not None and isinstance(engine, ToldEngine):
                engine.tell(episode.uid, turns.lines(env, task, row.attempt))
            inner: Any = env.unwrapped
            if getattr(inner, "grades_apart", False):
                heard = asyncio.get_running_loop().call_soon_threadsafe
                inner.on_grading = partial(heard, runtime.begin_scoring, row.number)
            made = await pool.run(env, engine, episode, sampling=sampling, clock=clock, on_version=on_version)
        budget.note(done(made).outcome)
        return made

    runtime = Runtime(
        ledger=ledger,
        order=PromptOrder(environments.tasks, config.seed),
        rule=Outstanding(
            batch_rows=config.batch_size, max_staleness=config.staleness.max_staleness, version=state.version
        ),
        engine_version=lambda: engine.version,
        run_episode=run_episode,
        clock=clock,
        options=RuntimeOptions(
            group_size=config.group_size,
            max_in_flight=config.rollout.max_in_flight,
            failure_retries=config.rollout.failure_retries,
            failures_in_a_row=config.rollout.failures_in_a_row,
            on_stale=config.staleness.on_stale,
            stale_grace_s=config.staleness.stale_grace_s,
            drop_truncated=config.loss.truncation == "drop",
            deadline_s=math.inf if serving else config.deadline_s,
            check=config.check,
        ),
        on_settled=partial(serving.settle, ledger) if serving else lambda number: None,
        survival=Survival.resumed(state.survival, ledger.counts().get(RowStatus.DROPPED, 0)),
    )
    return runtime


def manifest(run: Run) -> dict[str, Any]:
    """What the run was made with; what is in force is read off the networks themselves (trap 35)."""
    config, learner = run.parts.config, run.parts.learner
    both = {"actor": learner.bare_actor, "critic": learner.bare_critic}
    networks = {name: network for name, network in both.items() if network is not None}
    model: Any = learner.model
    packages = ("torch", "transformers", "accelerate", "gymnasium", "numpy")
    return {
        "sao_gym": __version__,
        "versions": {name: package_version(name) for name in packages},
        "model": config.model.path,
        "start_weight_hash": run.start_hash,
        "critic": run.critic_origin,
        "chat": type(run.chat).__name__,
        "environment": config.env.name,
        "tasks": {
            "name": run.tasks.name,
            "count": len(run.tasks),
            "hash": run.tasks.content_hash,
            **getattr(run.tasks, "facts", {}),
        },
        "contaminated": contamination_of(run.tasks),
        "seed": config.seed,
        "ranks": learner.world,
        "device": str(learner.accelerator.device),
        "precision": learner.accelerator.mixed_precision,
        "parameter_types": {
            name: sorted({str(parameter.dtype).removeprefix("torch.") for parameter in network.parameters()})
            for name, network in networks.items()
        },
        "attention": model.config._attn_implementation,
        "engine": {"kind": config.engine.kind, "context_length": run.parts.engine.context_length},
        "evaluation": {"weights": config.evaluation.weights, **run.heldout.given.facts()} if run.heldout else None,
    }
