"""What a training run can be told: case CF-03 (keys that nothing would read), trap 23, and what is out of range."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from sao_gym.commands.presets import TRAIN_PRESETS
from sao_gym.commands.train import main
from sao_gym.config import Origin, Schema, dump, preset_names, resolve
from sao_gym.errors import ConfigError
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.config_rules import LEARN_ONLY_RULES, ROLLOUT_ONLY_RULES, TRAIN_RULES

LOCK_STEP = ("--staleness.max-staleness", "0")
GROUPS = ("--loss.advantage", "global_leave_one_out")
OWN = ("--loss.policy", "ppo", "--loss.ratio-reference", "proximal")
INERT = [
    (LOCK_STEP, "staleness.stale_grace_s", "5", "staleness.max_staleness is 0"),
    (LOCK_STEP, "staleness.on_stale", "drop", "staleness.max_staleness is 0"),
    (LOCK_STEP, "engine.kv", "recompute", "staleness.max_staleness is 0"),
    (("--staleness.on-stale", "wait"), "staleness.stale_grace_s", "5", "staleness.on_stale is wait"),
    (("--loss.policy", "ppo"), "loss.detach_ratio", "false", "loss.policy has a rule of its own"),
    (("--loss.policy", "cispo"), "loss.detach_ratio", "false", "loss.policy has a rule of its own"),
    (("--loss.policy", "trm"), "loss.eps_low", "0.5", "loss.policy is trm"),
    (("--loss.policy", "trm"), "loss.eps_high", "2", "loss.policy is trm"),
    (("--env.options.tasks", "a.jsonl"), "env.tasks", "b.jsonl", "env.options.tasks already gives the tasks"),
    (("--model.chat", "template"), "model.describe_tools", "false", "model.chat is not our own template"),
    (("--model.chat", "renderer"), "model.describe_tools", "false", "model.chat is not our own template"),
    (GROUPS, "critic.lr", "1e-4", "loss.advantage is not critic"),
    (GROUPS, "critic.init", "cold", "loss.advantage is not critic"),
    (GROUPS, "loss.alpha", "2", "loss.advantage is not critic"),
    (GROUPS, "loss.credit", "local", "loss.advantage is not critic"),
    (("--loss.fixed-lambda", "0.9"), "loss.alpha", "2", "loss.fixed_lambda is the same for all rows"),
    (OWN, "loss.eps_high", "0.3", "with one update per batch and the policy itself as reference"),
    (("--rollout-only",), "group_size", "2", "--rollout-only trains nothing"),
    ((), "evaluation.episodes", "64", "neither evaluation.every nor evaluation.at_ends"),
    ((), "evaluation.bench", "arithmetic", "neither evaluation.every nor evaluation.at_ends"),
    (("--evaluation.at-ends",), "evaluation.weights", "live", "evaluation.every asks for none during training"),
    (("--evaluation.every", "5"), "evaluation.data", "d", "evaluation.bench names nothing"),
    (("--evaluation.every", "5"), "evaluation.allow_overlap", "true", "neither evaluation.bench nor evaluation.tasks"),
    (("--steps", "10"), "actor.lr", "1e-4", "critic.only_steps takes all of the steps"),
    (("--steps", "10"), "actor.grad_clip", "2", "critic.only_steps takes all of the steps"),
    (("--steps", "3"), "loss.eps_high", "2", "critic.only_steps takes all of the steps"),
    (("--rollout-only",), "critic.lr", "1e-4", "--rollout-only trains nothing"),
    (("--rollout-only",), "loss.gamma", "0.9", "--rollout-only trains nothing"),
    (("--rollout-only",), "staleness.max_staleness", "1", "--rollout-only trains nothing"),
    (("--learn-only", "r"), "rollout.temperature", "0.9", "--learn-only samples nothing"),
    (("--learn-only", "r"), "engine.slots", "4", "--learn-only samples nothing"),
]


def flag(key: str) -> str:
    return "--" + key.replace("_", "-")


@pytest.mark.parametrize(("setup", "key", "value", "reason"), INERT)
def test_cf_03_a_key_that_nothing_would_read(
    setup: Sequence[str], key: str, value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*setup, flag(key), value, "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sao-gym: error: ")
    assert f"{key} would have no effect, because {reason}" in said
    assert main([*setup, "--dry-run"]) == 0, "a default of ours is no reason to refuse"
    shown = capsys.readouterr()
    assert shown.err == ""
    section, _, name = key.rpartition(".")
    lines = (shown.out.split(f"[{section}]\n")[1] if section else shown.out).split("\n\n")[0].splitlines()
    assert f"inert: {reason}" in next(line for line in lines if line.startswith(f"{name} = "))


@pytest.mark.parametrize(("setup", "key", "value", "reason"), INERT)
def test_cf_03_the_same_key_where_something_reads_it(setup: Sequence[str], key: str, value: str, reason: str) -> None:
    more = ("--evaluation.every", "5", "--evaluation.bench", "aime2025") if key.startswith("evaluation") else ()
    assert main([flag(key), value, *more, "--dry-run"]) == 0


def test_cf_03_training_samples_from_the_whole_distribution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rollout.top-p", "0.9", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "rollout.top_p = 0.9: training needs 1" in said
    assert "(from --rollout.top-p)" in said
    assert main(["--rollout.temperature", "0", "--dry-run"]) == 2
    assert "rollout.temperature = 0.0: training samples" in capsys.readouterr().err


def test_cf_03_a_presets_own_inert_values_are_marked_and_refuse_nothing(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("[staleness]\nmax_staleness = 0\nstale_grace_s = 5.0\n")
    resolved = resolve(TrainConfig, preset=preset, rules=TRAIN_RULES)
    assert resolved.origins["staleness.stale_grace_s"] is Origin.PRESET
    assert "staleness.stale_grace_s" in resolved.inert
    line = next(line for line in dump(resolved).splitlines() if line.startswith("stale_grace_s"))
    assert "preset; inert: staleness.max_staleness is 0" in line
    with pytest.raises(ConfigError, match=r"mine\.toml, key staleness\.stale_grace_s: .* would have no effect"):
        resolve(TrainConfig, files=[preset], rules=TRAIN_RULES)


def test_every_rule_names_a_setting_and_can_be_off() -> None:
    schema = Schema.of(TrainConfig)
    for rule in (*TRAIN_RULES, *ROLLOUT_ONLY_RULES, *LEARN_ONLY_RULES):
        assert rule.key in schema.settings or rule.key in schema.sections
    plain = resolve(TrainConfig, rules=TRAIN_RULES)
    asked = {key for key in schema.settings if key.startswith(("evaluation.", "engine.sglang.", "feedback."))} - {
        "evaluation.every",
        "evaluation.at_ends",
    }
    assert set(plain.inert) == {"loss.group_std", "loss.window", "engine.completions"} | asked
    assert set(plain.origins.values()) == {Origin.PAPER, Origin.OURS}


@pytest.mark.parametrize("name", preset_names(TRAIN_PRESETS))
def test_trap_23_a_dump_read_back_is_the_same_run(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if main(["--preset", name, "--dry-run"]) == 2:
        assert "there is no setting" in capsys.readouterr().err, "a preset of another command"
        return
    text = capsys.readouterr().out
    path = tmp_path / "config.toml"
    path.write_text(text)
    again = resolve(TrainConfig, preset=path, rules=TRAIN_RULES)
    assert again.config == resolve(TrainConfig, preset=TRAIN_PRESETS / f"{name}.toml", rules=TRAIN_RULES).config
    lines = [line for line in text.splitlines() if " = " in line]
    assert len(lines) == len(Schema.of(TrainConfig).settings)
    assert all(
        line.rpartition("# ")[2].split()[0].strip(";") in ("paper", "ours", "preset") or "inert" in line
        for line in lines
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--staleness.max-staleness", "-1"), "staleness.max_staleness = -1: give at least 0"),
        (("--staleness.max_stalenes", "1"), "Did you mean staleness.max_staleness or staleness.on_stale?"),
        (("--stale-grace-s", "1"), "Did you mean staleness.stale_grace_s?"),
        (("--group-size", "0"), "group_size = 0: give at least 1"),
        (("--group-size", "3"), "batch_size = 128 rows are no whole number of groups of group_size = 3"),
        (("--group-size", "128"), "rollout.max_in_flight = 64 is below group_size = 128"),
        (("--loss.advantage", "group"), "loss.advantage = group compares rows of one prompt: give a group_size of 2"),
        (("--loss.advantage", "leave_one_out"), "loss.advantage = leave_one_out compares rows"),
        (("--loss.window", "0", "--loss.advantage", "running_mean_global"), "loss.window = 0: give at least 1"),
        (("--loss.ratio-reference", "proximal"), "DIS divides by what the engine recorded"),
        (("--loss.fixed-lambda", "2"), "loss.fixed_lambda = 2.0: give a number from 0 to 1"),
        (("--actor.updates-per-batch", "3"), "batch_size = 128 rows cannot be cut into actor.updates_per_batch = 3"),
        ((*GROUPS, "--loss.truncation", "bootstrap"), "loss.truncation = bootstrap reads the critic's values"),
        (("--critic.updates", "0"), "critic.updates = 0: give at least 1"),
        (("--rollout.max-in-flight", "0"), "rollout.max_in_flight = 0: give at least 1"),
        (("--actor.grad-clip", "0"), "grad_clip = 0.0: give a number above 0, or null"),
        (("--staleness.on-stale", "ignore"), "staleness.on_stale"),
        (("--loss.alpha", "0"), "loss.alpha = 0.0: give a number above 0"),
        (("--checkpoint.every", "0"), "checkpoint.every = 0: give at least 1"),
        (("--steps", "-1"), "steps = -1: give at least 0"),
        (("--rollout.wall-clock-s", "0"), "rollout.wall_clock_s = 0.0: give a number above 0"),
        (("--rollout.max-tokens-per-episode", "0"), "rollout.max_tokens_per_episode = 0: give at least 1"),
        (("--rollout.failure-retries", "-1"), "rollout.failure_retries = -1: give at least 0"),
        (("--checkpoint.keep", "0"), "checkpoint.keep = 0: give at least 1"),
        (("--deadline-s", "0"), "deadline_s = 0.0: give a number above 0"),
    ],
)
def test_out_of_range(words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("--seed", "-1"),
        ("--actor.lr", "inf"),
        ("--actor.beta1", "1"),
        ("--critic.beta2", "-0.1"),
    ],
)
def test_numbers_that_torch_or_numpy_would_refuse_later(words: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"give "):
        resolve(TrainConfig, overrides=words)
