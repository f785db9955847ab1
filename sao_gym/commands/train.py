"""`sao_gym.train`: asynchronous SAO on an environment, from a checkpoint folder to a better one.

Example:
    python -m sao_gym.train --preset quickstart --model start --out runs/first
    python -m sao_gym.train --resume runs/first
"""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from sao_gym.commands.base import Options, run_command, take_options
from sao_gym.commands.preflight import environment_options, require_ready, training_checks
from sao_gym.commands.presets import TRAIN_PRESETS
from sao_gym.config import InertRule, Resolved, changes, dump, find_preset, help_text, preset_names, resolve
from sao_gym.errors import ConfigError, RunFolderError
from sao_gym.preflight import table
from sao_gym.registry import make, spec
from sao_gym.runfolder import CONFIG, RunFolder, default_path, new_folder
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.config_rules import LEARN_ONLY_RULES, ROLLOUT_ONLY_RULES, TRAIN_RULES

FIXED = ("seed", "env.", "group_size")
"""Settings that decide which prompt the n-th row of a run is."""
OWN_OPTIONS = (
    ("--preset NAME", "a preset, or the path of a .toml file (default: the one named as the environment, if any)"),
    ("--config FILE", "settings from a .toml file, after the preset (may be repeated)"),
    ("--out DIR", "new folder of the run (default: runs/<preset or environment>-<UTC time>)"),
    ("--resume RUN", "go on with the run in this folder, from its newest whole checkpoint"),
    ("--allow-change", "with --resume: accept settings that differ from the run's own"),
    ("--rollout-only", "sample --steps batches with the fixed policy, train nothing"),
    ("--learn-only DIR", "train on the trajectories of DIR, sample nothing"),
    ("--replay RUN", "learn again from the batches of RUN and compare the weights after every step"),
    ("--dry-run", "show the configuration and what must be there for it, found or missing; start nothing"),
)


@run_command
def main(argv: list[str]) -> int | None:
    """Entry point of `python -m sao_gym.train`."""
    options = take_options(
        argv,
        values=("preset", "config", "out", "resume", "learn-only", "replay"),
        switches=("help", "allow-change", "rollout-only", "dry-run"),
    )
    if options.has("help"):
        print(help_text(TrainConfig, "python -m sao_gym.train", preset_names(TRAIN_PRESETS), OWN_OPTIONS))
        return None
    if (recorded := options.value("replay")) is not None:
        return _replay(Path(recorded), argv)
    _refuse_combinations(options)
    resume = options.value("resume")
    if resume is not None:
        _resume(Path(resume), options)
        return None
    preset = options.value("preset") or _preset_of_env(options)
    resolved = _resolved(preset, options.all("config"), options.rest, _rules(options))
    if options.has("dry-run"):
        print(dump(resolved), end="")
        print("\n# what must be there", *table(training_checks(resolved.config)).splitlines(), sep="\n# ")
        return None
    spec(resolved.config.env.name)  # an unknown name is heard before what else is missing
    _require_critic(resolved.config, options)
    _refuse_scripted(resolved.config, options)
    _refuse_rollouts(resolved.config, options)
    if _is_first_rank():
        require_ready(resolved.config)
    name = Path(preset or resolved.config.env.name).stem
    path = Path(options.value("out") or default_path(name, datetime.now(UTC)))
    if (start := _start_policy(resolved.config, path)) is not None:
        words = (*options.rest, "--model", str(start))
        resolved = _resolved(preset, options.all("config"), words, _rules(options))
    _start(resolved, path, options)
    return None


def _start_policy(config: TrainConfig, run: Path) -> Path | None:
    """A tiny policy by imitation, beside the run's folder, where `model.start` says how and no model was given."""
    if config.model.path is not None or config.model.start is None or config.engine.kind == "scripted":
        return None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "model.start makes a policy in one process; make it first (sao_gym.sft) and give it as --model"
        )
    if run.exists() and any(run.iterdir()):
        raise RunFolderError(f"{run} is not empty: give a new folder with --out")
    from sao_gym.commands.sft import main as sft

    make(config.env.name, **environment_options(config)).close()  # what it lacks is heard before minutes of imitation
    start = run.with_name(f"{run.name}-start")
    print(f"-- no --model was given: imitation first (sao_gym.sft --preset {config.model.start})", flush=True)
    if sft(["--preset", config.model.start, "--out", str(start), "--seed", str(config.seed)]):
        raise ConfigError(f"the imitation that model.start = {config.model.start} asks for failed: see above")
    return start


def _replay(run: Path, argv: Sequence[str]) -> int:
    """Exit code 1 where the weights differ."""
    from sao_gym.commands import training

    if len(argv) > 2:
        raise ConfigError("--replay uses the run's own configuration: give nothing beside it")
    if not (run / CONFIG).is_file():
        raise RunFolderError(f"{run} holds no run (no {CONFIG}): --replay takes the folder of an earlier run")
    config = _resolved(str(run / CONFIG), (), ()).config
    if not _is_first_rank():
        training.serve(config, None)
        return 0
    return 0 if training.replay(config, run) else 1


def _refuse_combinations(options: Options) -> None:
    if options.has("rollout-only") and options.value("learn-only"):
        raise ConfigError("--rollout-only and --learn-only exclude each other; give one of them")
    if options.has("allow-change") and options.value("resume") is None:
        raise ConfigError("--allow-change goes with --resume")
    if options.value("resume") and (options.value("out") or options.has("rollout-only") or options.value("learn-only")):
        raise ConfigError("--resume goes on in the run's own folder: leave --out, --rollout-only and --learn-only out")


def _preset_of_env(options: Options) -> str | None:
    """An environment's own preset, where there is one of its name and no other was asked for."""
    name = _resolved(None, options.all("config"), options.rest).config.env.name
    return name if name in preset_names(TRAIN_PRESETS) else None


def _rules(options: Options) -> tuple[InertRule, ...]:
    """Which settings nothing reads in the way to run that was asked for."""
    rules = TRAIN_RULES
    if options.has("rollout-only"):
        rules += ROLLOUT_ONLY_RULES
    if options.value("learn-only"):
        rules += LEARN_ONLY_RULES
    return rules


def _resolved(
    preset: str | None, files: Sequence[str], words: Sequence[str], rules: Sequence[InertRule] = TRAIN_RULES
) -> Resolved[TrainConfig]:
    return resolve(
        TrainConfig,
        preset=find_preset(TRAIN_PRESETS, preset) if preset else None,
        files=[Path(file) for file in files],
        overrides=words,
        rules=rules,
    )


def _require_critic(config: TrainConfig, options: Options) -> None:
    if config.loss.has_critic and config.critic.init is None and not options.has("rollout-only"):
        raise ConfigError(
            "the critic's start was not said: give --critic-init FOLDER (made by sao_gym.pretrain_critic), or "
            "--critic-init cold to start its head from zero"
        )


def _refuse_scripted(config: TrainConfig, options: Options) -> None:
    if config.engine.kind == "scripted" and (options.has("rollout-only") or config.evaluation.is_asked_for):
        raise ConfigError(
            "a scripted engine speaks in training alone: leave out --rollout-only and evaluation, or take --engine local"
        )
    scaffold = config.env.options.get("scaffold", "shell")
    if config.engine.kind == "scripted" and config.engine.completions is None and scaffold != "shell":
        raise ConfigError(
            f"a scripted engine shows what the environment's own tools do, and scaffold is {scaffold!r}: give "
            "--env.options '{scaffold = \"shell\", ...}' with the other options, or --engine.completions FILE"
        )


def _refuse_rollouts(config: TrainConfig, options: Options) -> None:
    if config.serves_applications and options.has("rollout-only"):
        raise ConfigError("--rollout-only has nothing to ask: an application brings that; leave it out")


def _is_first_rank() -> bool:
    """Whether this process owns the run; under `accelerate launch` the others only learn."""
    return int(os.environ.get("RANK", "0")) == 0


def _start(resolved: Resolved[TrainConfig], path: Path, options: Options) -> None:
    from sao_gym.commands import composition, training  # torch: slow, and not needed to refuse bad input
    from sao_gym.commands.serving import FILES
    from sao_gym.ledger import LEDGER_FILE
    from sao_gym.trainer.loop import require_batch

    if not _is_first_rank():
        training.serve(resolved.config, None)
        return
    source = options.value("learn-only")
    if source is not None:
        require_batch(Path(source), resolved.config.batch_size)
    is_training = not options.has("rollout-only") and source is None
    with (
        new_folder(path, drafts=(LEDGER_FILE, *FILES)) as folder,
        composition.opened(resolved.config, folder, is_training=is_training) as run,
    ):
        folder.write_config(dump(resolved))
        folder.write_manifest(composition.manifest(run))
        if options.has("rollout-only"):
            training.rollout_only(run)
        elif source is not None:
            training.learn_only(run, Path(source))
        else:
            training.train(run)


def _resume(path: Path, options: Options) -> None:
    from sao_gym.commands import composition, training

    if not _is_first_rank():
        training.serve(_resolved(str(path / CONFIG), options.all("config"), options.rest).config, path)
        return
    with RunFolder.open_for_resume(path) as folder:
        before = _resolved(str(path / CONFIG), (), ())
        after = _resolved(str(path / CONFIG), options.all("config"), options.rest)
        different = changes(before.config, after.config)
        if fixed := [change for change in different if change.key.startswith(FIXED)]:
            raise ConfigError(
                f"the run's ledger depends on {fixed[0].key} ({fixed[0]}): it cannot change; start a new run with --out"
            )
        if different and not options.has("allow-change"):
            listed = "; ".join(str(change) for change in different)
            raise ConfigError(
                f"the run was started with other settings ({listed}): leave them out, or add --allow-change"
            )
        with composition.opened(after.config, folder, resume=True) as run:
            if different:
                folder.write_config(dump(after))
            training.train(run)
