"""Arms without a critic, several updates per batch, and clipped losses with a reference of their own."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from sao_gym.clock import SystemClock
from sao_gym.commands.presets import TRAIN_PRESETS
from sao_gym.config import Origin, resolve
from sao_gym.errors import ConfigError, InvariantError
from sao_gym.models import copy_model, load_policy
from sao_gym.stream import Score
from sao_gym.tokenizer import train_tokenizer
from sao_gym.trainer.baselines import RowAdvantages
from sao_gym.trainer.checkpoint import RunState, load_optimizers, save_checkpoint
from sao_gym.trainer.config import LossConfig, TrainConfig
from sao_gym.trainer.config_rules import TRAIN_RULES
from sao_gym.trainer.critic import critic_from_model
from sao_gym.trainer.learner import Learner

ARMS = ("grpo", "grpo_dis", "running_mean", "running_mean_global", "rloo", "global_loo", "ppo", "vapo")
CLIPPED = {"advantage": "global_leave_one_out", "policy": "ppo", "eps_low": 0.2, "eps_high": 0.28}
TOKENIZER = train_tokenizer(["a b c"], vocab_size=300)


def without_critic(config: TrainConfig, model: Any) -> Learner:
    return Learner(config, model, None, Accelerator(cpu=True), SystemClock())


def scored(batch: Any, *values: float) -> Any:
    return [replace(t, score=Score(value=v, passed=v > 0)) for t, v in zip(batch, values, strict=True)]


# -- advantages of rows


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ({"advantage": "group"}, [1.0, -1.0, 0.0, 0.0]),
        ({"advantage": "group", "group_std": "sample"}, [0.5**0.5, -(0.5**0.5), 0.0, 0.0]),
        ({"advantage": "group", "group_std": "none"}, [0.5, -0.5, 0.0, 0.0]),
        ({"advantage": "leave_one_out"}, [1.0, -1.0, 0.0, 0.0]),
        ({"advantage": "global_leave_one_out"}, [1 / 3, -1.0, 1 / 3, 1 / 3]),
        ({"advantage": "running_mean_prompt"}, [1.0, -1.0, 1.0, 0.0]),
        ({"advantage": "running_mean_global"}, [1.0, -1.0, 0.5, 1 / 3]),
        ({"advantage": "running_mean_global", "window": 1}, [1.0, -1.0, 1.0, 0.0]),
    ],
    ids=str,
)
def test_each_arm_on_two_prompts_of_two_rows(loss, expected):
    found = RowAdvantages(LossConfig(**loss)).of_batch([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"], list("xxyy"))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_windows_are_8_per_prompt_and_128_over_all():
    for kind, size in (("running_mean_prompt", 8), ("running_mean_global", 128)):
        rows = RowAdvantages(LossConfig(advantage=kind))
        rows.of_batch([1.0] + [0.0] * (size - 1), ["a"] * size, ["g"] * size)
        assert rows.of_batch([0.0], ["a"], ["g"]).tolist() == [-1 / size], "the first reward is still in"
        assert rows.of_batch([0.0], ["a"], ["g"]).tolist() == [0.0], "and now out"


@pytest.mark.parametrize("kind", ["group", "leave_one_out"])
def test_single_rows_cannot_be_compared_within_groups(kind):
    with pytest.raises(ConfigError, match="compares rows of one prompt, and this batch holds one of each"):
        RowAdvantages(LossConfig(advantage=kind)).of_batch([1.0, 0.0], ["a", "b"], ["a", "b"])


# -- the learner without a critic


def test_a_step_without_a_critic_written_out(make_policy, make_batch, make_config, plan_of, logprobs_of):
    """Each token of a row has the row's advantage; there is no value, no critic and no metric of one."""
    config = make_config(loss={"advantage": "global_leave_one_out"}, learner={"micro_batch_tokens": 40})
    batch = scored(make_batch(4, streams=2), 1.0, 0.0, 1.0, 0.0)
    learner = without_critic(config, make_policy(seed=2))
    logprobs, packed = logprobs_of(learner.bare_actor, batch)
    advantages = np.array([2 / 3, -2 / 3, 2 / 3, -2 / 3])[packed.row]
    rho = np.exp(logprobs.numpy() - packed.behavior_logprobs)
    weight = np.where((rho > 0.7) & (rho < 6.0), rho, 0.0)
    expected = -(weight * advantages * logprobs.numpy()).mean()
    plan = plan_of(batch, config)
    assert len(plan.micro_batches[0]) > 1
    metrics = learner.step(plan).metrics()
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["advantage_mean"] == pytest.approx(advantages.mean(), rel=1e-6)
    assert metrics["actor_updates"] == 1
    nulls = {"value_loss", "ev_pre", "ev_post", "critic_updates", "time_critic_s"}
    nulls |= {key for key in metrics if key.startswith("critic_grad")}
    assert {key for key in nulls if metrics[key] is not None} == set()
    assert learner.bare_critic is None
    assert learner.critic_optimizer is None


def test_a_critic_is_there_exactly_where_the_advantages_ask_for_one(make_policy, make_config, make_learner):
    policy = make_policy()
    with pytest.raises(InvariantError, match="do not go together"):
        make_learner(make_config(loss={"advantage": "running_mean_prompt"}), policy, critic_from_model(policy))
    with pytest.raises(InvariantError, match="do not go together"):
        without_critic(make_config(), make_policy())


def test_groups_of_a_batch_are_those_of_its_rows(make_batch, make_config, plan_of):
    batch = [replace(t, group_id="g1" if i < 2 else None) for i, t in enumerate(make_batch(3))]
    plan = plan_of(batch, make_config(actor={"updates_per_batch": 2}))
    assert plan.groups == ("g1", "g1", "t2")
    assert plan.tasks == ("t0", "t1", "t2")
    assert plan.rewards == tuple(t.score.value for t in batch)


# -- several updates, and the reference


def test_two_updates_are_two_steps_on_the_halves(make_policy, make_batch, make_config, plan_of):
    """With rewards as advantages: the loss of an update is the mean over its own rows, its learning rate the batch's."""
    loss = {"advantage": "running_mean_prompt"}
    both = make_config(loss=loss, actor={"updates_per_batch": 2})
    one = make_config(loss=loss)
    batch, model = make_batch(6), make_policy(seed=2)
    whole, halves = without_critic(both, copy_model(model)), without_critic(one, copy_model(model))
    metrics = whole.step(plan_of(batch, both)).metrics()
    for half in (batch[:3], batch[3:]):
        halves.step(plan_of(half, one))
    assert metrics["actor_updates"] == 2
    assert len(metrics["rejected_share_by_update"]) == 2
    assert whole.weights().weight_hash == halves.weights().weight_hash


@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "seq_mean_token_sum"])
def test_the_share_of_an_update_is_counted_in_rows_too(aggregation, make_policy, make_batch, make_config, plan_of):
    loss = {"advantage": "running_mean_prompt", "aggregation": aggregation}
    both, one = make_config(loss=loss, actor={"updates_per_batch": 2}), make_config(loss=loss)
    batch, model = make_batch(4), make_policy(seed=2)
    whole, halves = without_critic(both, copy_model(model)), without_critic(one, copy_model(model))
    whole.step(plan_of(batch, both))
    for half in (batch[:2], batch[2:]):
        halves.step(plan_of(half, one))
    for name, value in whole.model.state_dict().items():
        np.testing.assert_allclose(halves.model.state_dict()[name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("reference", ["proximal", "synced"])
def test_the_clip_acts_after_the_first_of_several_updates(reference, make_policy, make_batch, make_config, plan_of):
    """With one update and the policy itself as reference the ratio is 1 and the clip is dead."""
    loss = {**CLIPPED, "ratio_reference": reference}
    batch, model = make_batch(8), make_policy(seed=2)
    shares = {}
    for updates in (4, 1):
        config = make_config(loss=loss, actor={"updates_per_batch": updates, "lr": 2e-2})
        metrics = without_critic(config, copy_model(model)).step(plan_of(batch, config)).metrics()
        shares[updates] = metrics["rejected_share_by_update"]
    assert shares[1] == [0.0], "one update: identically 0"
    assert shares[4][0] == 0.0, "the first update still has the ratio 1"
    assert max(shares[4][1:]) > 0.0
    assert metrics["ratio_p50"] == metrics["ratio_p99"] == 1.0


def test_the_reference_is_what_the_weights_said_before_the_batch(make_policy, make_batch, make_config, plan_of):
    batch, model = make_batch(8), make_policy(seed=2)
    hashes = {}
    for reference in ("rollout", "proximal", "synced"):
        config = make_config(loss={**CLIPPED, "ratio_reference": reference}, actor={"updates_per_batch": 2})
        learner = without_critic(config, copy_model(model))
        learner.step(plan_of(batch, config))
        hashes[reference] = learner.weights().weight_hash
    assert hashes["proximal"] == hashes["synced"] != hashes["rollout"]


def test_one_update_is_what_it_was(make_batch, make_config, make_learner, plan_of):
    """The critic's arm: a plan of one share holds every row, and its loss is scaled by exactly 1."""
    config = make_config(learner={"micro_batch_tokens": 40})
    plan = plan_of(make_batch(6), config)
    (share,) = plan.updates
    assert share.n_rows == plan.n_rows == 6
    assert share.n_action == plan.micro_batches[0][0].n_action_global
    assert share.micro_batches == len(plan.micro_batches[0]) == len(plan.rows[0])
    learner = make_learner(config)
    assert learner._denominator(plan) / learner._denominator(share) == 1.0


def test_one_lambda_for_all_rows(make_policy, make_batch, make_config, make_learner, plan_of, logprobs_of):
    """V = 0: A = R lambda^(tokens that follow)."""
    config = make_config(loss={"fixed_lambda": 0.5})
    batch = scored(make_batch(1), 1.0)
    learner = make_learner(config, make_policy(seed=2))
    metrics = learner.step(plan_of(batch, config)).metrics()
    n = batch[0].n_action
    assert metrics["advantage_mean"] == pytest.approx(sum(0.5**k for k in range(n)) / n)


# -- checkpoints


def test_running_means_live_on_in_a_checkpoint(tmp_path: Path, make_policy, make_batch, make_config, plan_of):
    config = make_config(loss={"advantage": "running_mean_global"})
    learner = without_critic(config, make_policy(seed=2))
    learner.step(plan_of(scored(make_batch(4), 1.0, 0.0, 1.0, 1.0), config))
    path = save_checkpoint(tmp_path, learner, TOKENIZER, RunState(step=1, version=1, weight_hash="h"))
    assert not (path / "critic").exists()
    again = without_critic(config, load_policy(path / "actor").model)
    load_optimizers(path, again)
    assert again.row_advantages.state() == {"": [1.0, 0.0, 1.0, 1.0]}
    batch = scored(make_batch(2, seed=5), 1.0, 0.0)
    lines = [one.step(plan_of(batch, config)).metrics() for one in (learner, again)]
    assert lines[0]["advantage_mean"] == lines[1]["advantage_mean"]
    assert learner.weights().weight_hash == again.weights().weight_hash


# -- settings


@pytest.mark.parametrize("name", ARMS)
def test_an_arms_preset_goes_with_any_environment(name):
    given = resolve(TrainConfig, preset=TRAIN_PRESETS / f"{name}.toml", rules=TRAIN_RULES)
    chosen = {key for key, origin in given.origins.items() if origin is Origin.PRESET}
    assert {key.split(".")[0] for key in chosen} <= {"batch_size", "group_size", "loss", "actor"}
    assert chosen & set(given.inert) == set()
    config = given.config
    assert config.batch_size == 128
    assert config.loss.has_critic == (name in ("ppo", "vapo"))
    assert config.critic_only_steps == (10 if config.loss.has_critic else 0)
    is_clipped = config.loss.policy == "ppo"
    assert is_clipped == (name in ("grpo", "ppo", "vapo"))
    assert (config.actor.updates_per_batch, config.loss.ratio_reference) == (
        (4, "proximal") if is_clipped else (1, "rollout")
    )


def test_grpo_is_16_prompts_of_8_with_clip_higher():
    config = resolve(TrainConfig, preset=TRAIN_PRESETS / "grpo.toml").config
    assert (config.batch_size // config.group_size, config.group_size) == (16, 8)
    assert (config.loss.eps_low, config.loss.eps_high) == (0.2, 0.28)


def test_the_learner_takes_its_weights_from_float32_alone(make_config, make_policy):
    config = make_config(loss={"advantage": "running_mean_prompt"})
    with pytest.raises(InvariantError, match="master weights are float32"):
        without_critic(config, make_policy().to(torch.bfloat16))
