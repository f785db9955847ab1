"""The ways to run a training that was put together: train, sample only, learn only, replay. And what other ranks do."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sao_gym.clock import SystemClock
from sao_gym.collect import Success, collect, numbered
from sao_gym.commands.composition import Run, load_trainee
from sao_gym.commands.curves import draw_curves
from sao_gym.commands.policy import training_sampling
from sao_gym.commands.progress import TrainingProgress
from sao_gym.commands.serving import key_place
from sao_gym.commands.tracking import chosen, opened_tracking
from sao_gym.errors import CheckpointError, ConfigError
from sao_gym.loops import run_blocking
from sao_gym.parquet import write_trajectories
from sao_gym.recovery import read_batches, recoveries, spoken
from sao_gym.trainer.checkpoint import RunState, save_checkpoint
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.files import CHECKPOINTS, TRAJECTORIES, step_file
from sao_gym.trainer.loop import Training, recorded_batches
from sao_gym.trainer.plan import make_plan
from sao_gym.trainer.replay import RecordedRun, replayed


def say(text: str) -> None:
    """A line for people."""
    print(text, flush=True)


def train(run: Run) -> None:
    """Train to the end of `config.steps`, evaluating and drawing as the configuration asks."""
    config, folder = run.parts.config, run.parts.folder
    tracker, about_trackers = chosen(config.trackers)
    _announce(run)
    say(about_trackers)
    heldout = run.heldout
    evaluator = heldout.evaluator(run.parts.events) if heldout else None
    if heldout and config.evaluation.at_ends and run.state.step == 0:
        heldout.both(run.state)
    with (
        opened_tracking(tracker, folder.path) as tracking,
        TrainingProgress(config.steps, run.state.step) as progress,
    ):

        def on_step(record: dict[str, Any]) -> None:
            progress.step(record)
            tracking.step(record)

        training = Training(
            run.parts, run.state, on_step=on_step, on_histograms=tracking.histograms, evaluator=evaluator
        )
        with stopped_by_sigterm(training):
            state = training.run()
    if training.is_stopping:
        say(f"stopped after {state.step} batches, as SIGTERM asked; go on with --resume {folder.path}")
    elif heldout and config.evaluation.at_ends:
        heldout.both(state)
    records = folder.read_metrics()
    draw_curves(records, folder.file("curves.png"))
    for found in recoveries(read_batches(records)):
        say(f"recovery: {spoken(found)}")
    if (judge := run.parts.counting.get("judge")) is not None:
        say("judge: " + ", ".join(f"{name} {count:g}" for name, count in judge.counters().items()))
    say(f"policy version {state.version} after {state.step} batches, weights {state.weight_hash}")
    say(f"run folder: {folder.path}   curves: {folder.file('curves.png')}")


@contextmanager
def stopped_by_sigterm(training: Training) -> Iterator[None]:
    """Within it, the first SIGTERM lets the step in progress end and a checkpoint be written; the second quits at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread hears signals
        return
    before = signal.getsignal(signal.SIGTERM)

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # Not by print: the signal may have come while the same stream is being written.
        os.write(2, b"sao-gym: SIGTERM: the step in progress ends, then a checkpoint; once more quits at once\n")
        training.request_stop()

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def rollout_only(run: Run) -> None:
    """Sample `steps` batches with the policy as it is and keep them."""
    config, parts = run.parts.config, run.parts
    sampling = training_sampling(config.rollout, parts.engine)
    episodes = numbered(
        run.tasks, config.steps * config.batch_size, env_id=config.env.name, seed=config.seed, name="rollout"
    )
    (parts.folder.path / TRAJECTORIES).mkdir(exist_ok=True)
    for step in range(config.steps):
        rows = episodes[step * config.batch_size : (step + 1) * config.batch_size]
        gathered = collect(
            run.pool,
            parts.engine,
            rows,
            sampling=sampling,
            clock=parts.clock,
            max_in_flight=config.rollout.max_in_flight,
        )
        trajectories = run_blocking(gathered)
        write_trajectories(step_file(parts.folder.path, step + 1), trajectories)
        success = Success.of(trajectories)
        parts.folder.append_metrics({"step": step + 1, "success_mean": success.rate, "errors": success.errors})
        say(f"step {step + 1}/{config.steps}: success {success.rate:.3f}, {success.tokens:.0f} tokens an episode")
    say(f"trajectories: {parts.folder.path / TRAJECTORIES}")


def learn_only(run: Run, source: Path) -> None:
    """Train on recorded trajectories, batch after batch in their order; nothing is sampled."""
    parts, config, state = run.parts, run.parts.config, run.state
    for rows in recorded_batches(source, config.batch_size, config.steps):
        trains_actor = state.step >= config.critic_only_steps
        newest = max(row.last_version or 0 for row in rows)
        plan = make_plan(
            rows,
            config,
            batch=state.step,
            actor_batches=state.version,
            version=newest,
            trains_actor=trains_actor,
            ranks=parts.learner.world,
        )
        stats = parts.learner.step(plan)
        weights = parts.learner.weights().weight_hash
        state = RunState(step=state.step + 1, version=state.version + int(trains_actor), weight_hash=weights)
        record = {"step": state.step, "policy_version": state.version, **stats.metrics(), "weight_hash": weights}
        parts.folder.append_metrics(record)
        say(f"step {state.step}: value loss {record['value_loss']}, policy loss {record['policy_loss']}")
    save_checkpoint(parts.folder.path / CHECKPOINTS, parts.learner, parts.tokenizer, state)
    say(f"run folder: {parts.folder.path}")


def replay(config: TrainConfig, run: Path) -> bool:
    """Feed a fresh learner from the batches that `run` recorded; whether its weights are the run's after every step.

    Raises RunFolderError for a folder without them, CheckpointError if the run began with other weights.
    """
    recorded = RecordedRun.read(run)
    trainee = load_trainee(config, None, SystemClock())
    try:
        if trainee.learner.world != recorded.ranks:
            raise ConfigError(
                f"the run learnt on {recorded.ranks} ranks, this is {trainee.learner.world}: sums differ in their last "
                f"bits; replay with accelerate launch --num_processes {recorded.ranks}"
            )
        if trainee.state.weight_hash != recorded.start_hash:
            raise CheckpointError(
                f"the run began with the weights {recorded.start_hash}, {config.model.path} now holds "
                f"{trainee.state.weight_hash}: give those back"
            )
        for step in replayed(trainee.learner, config, recorded):
            if not step.is_same:
                say(f"step {step.number} differs: the run's weights are {step.recorded}, the replay's {step.found}")
                return False
    finally:
        trainee.learner.stop()
    say(f"{len(recorded.steps)} steps replayed, the weights are the same after each: {recorded.steps[-1].weight_hash}")
    return True


def _announce(run: Run) -> None:
    config = run.parts.config
    if run.parts.learner.freeze_table:
        say(str(run.parts.learner.freeze_table))
    say(f"critic: {run.critic_origin}")
    say(
        f"{config.env.name}: {len(run.tasks)} prompts, batches of {config.batch_size}, staleness at most "
        f"{config.staleness.max_staleness} ({config.staleness.on_stale}), from step {run.state.step} to {config.steps}"
    )
    if run.heldout:
        say(f"evaluation: {run.heldout.given.describe()}")
    if run.serving:
        say(f"serving applications at {run.serving.address.url}/v1; their key: {key_place(config, run.parts.folder)}")


def serve(config: TrainConfig, resumed: Path | None) -> None:
    """What ranks above 0 do: hold the networks and take part in every step until the first one is done."""
    load_trainee(config, resumed, SystemClock()).learner.serve()
