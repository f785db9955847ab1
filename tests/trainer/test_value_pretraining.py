"""Value pretraining: Monte-Carlo targets, nothing frozen, a split by trajectory, and the artifact that it leaves."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sao_gym.errors import CheckpointError, ConfigError
from sao_gym.models import tiny_qwen3
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.trainer.actor import Inputs
from sao_gym.trainer.batch import pack
from sao_gym.trainer.critic import critic_from_model, load_critic, save_critic
from sao_gym.trainer.value_pretraining import (
    ValuePretrainingConfig,
    heldout_explained_variance,
    monte_carlo_returns,
    pretrain_values,
    split_rows,
)

VOCABULARY = 24


def policy(hidden=32, seed=0):
    return tiny_qwen3(VOCABULARY, layers=1, hidden=hidden, heads=2, kv_heads=1, seed=seed)


def episode(rng, index, reward=None):
    """Two turns; whether the prompt's tokens are low ones decides what the episode earns."""
    half = VOCABULARY // 2
    prompt = rng.integers(0, half, 4) + half * int(rng.integers(2))
    segments = [Segment.observation(prompt)]
    for _ in range(2):
        n = int(rng.integers(1, 4))
        zeros = np.zeros(n)
        action = rng.integers(0, VOCABULARY, n)
        segments.append(Segment.action(action, logprobs=zeros, versions=zeros, temperature=1.0, stop=StopReason.STOP))
        segments.append(Segment.observation(rng.integers(0, VOCABULARY, 2)))
    value = float(prompt[0] < half) if reward is None else reward
    trajectory = Trajectory(
        uid=f"e{index}",
        task_id="t",
        env_id="test",
        attempt=index,
        streams=(TokenStream(segments=tuple(segments)),),
        outcome=Outcome.terminated(),
    )
    return trajectory.scored(Score(value=value, passed=value > 0))


def episodes(n, seed=0, reward=None):
    rng = np.random.default_rng(seed)
    return [episode(rng, index, reward) for index in range(n)]


FAST = ValuePretrainingConfig(lr=3e-3, batch_size=32, max_epochs=12, lr_warmup_steps=0)


def test_targets_are_what_the_episode_earned_at_every_token():
    rows = episodes(5)
    packed = pack(rows)
    expected = np.concatenate([np.full(row.n_action, row.score.value) for row in rows])
    np.testing.assert_array_equal(monte_carlo_returns(packed), expected)


def test_split_is_by_trajectory_and_whole():
    fit, held = split_rows(50, 0.2, seed=1)
    assert len(held) == 10
    assert sorted(fit + held) == list(range(50))
    assert split_rows(50, 0.2, seed=1) == (fit, held)
    assert split_rows(50, 0.2, seed=2)[1] != held
    assert [len(part) for part in split_rows(2, 0.01, seed=0)] == [1, 1]
    with pytest.raises(ConfigError, match="at least 2"):
        split_rows(1, 0.2, seed=0)


def test_explained_variance_rises_on_episodes_it_never_saw():
    critic = critic_from_model(policy())
    rows = episodes(160)
    fitted = pretrain_values(critic, rows, FAST, seed=0)
    curve = fitted.explained_variance
    assert curve[0] == pytest.approx(0.0, abs=1e-9)  # the head is zero: V = 0
    assert fitted.best > 0
    assert curve[fitted.best] > 0.6
    assert (fitted.trained, fitted.heldout) == (128, 32)
    # The critic has the weights of the best epoch, not of the last.
    unseen = [rows[index] for index in split_rows(len(rows), FAST.heldout_share, seed=0)[1]]
    assert heldout_explained_variance(critic, unseen, FAST) == pytest.approx(curve[fitted.best], abs=1e-9)


def test_nothing_is_frozen_and_one_seed_gives_one_critic():
    starts = critic_from_model(policy()).state_dict()
    config = ValuePretrainingConfig(lr=1e-3, batch_size=16, max_epochs=2, min_gain=-10.0)
    made = []
    for _ in range(2):
        critic = critic_from_model(policy())
        critic.requires_grad_(False)
        pretrain_values(critic, episodes(32), config, seed=0)
        made.append(critic.state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in starts)
    seen = {int(i) for row in episodes(32) for i in row.streams[0].token_ids}
    moved = [name for name in starts if not torch.equal(made[0][name], starts[name])]
    assert len(seen) == VOCABULARY
    assert set(moved) == set(starts)


def test_stops_when_nothing_is_gained():
    """Rewards without a pattern: the fit ends after `patience` epochs and keeps the start, V = 0."""
    rows = [row.scored(Score(value=float(i % 2), passed=True)) for i, row in enumerate(episodes(40))]
    config = ValuePretrainingConfig(lr=1e-7, max_epochs=9, patience=2)
    critic = critic_from_model(policy())
    fitted = pretrain_values(critic, rows, config, seed=0)
    assert fitted.best == 0
    assert len(fitted.explained_variance) == 3
    assert not critic.value_head.weight.any()


def test_equal_rewards_have_no_explained_variance():
    fitted = pretrain_values(critic_from_model(policy()), episodes(8, reward=1.0), FAST, seed=0)
    assert set(fitted.explained_variance) == {None}


def saved(folder, hidden=32):
    model = policy(hidden)
    critic = critic_from_model(model)
    with torch.no_grad():
        critic.value_head.weight.fill_(0.5)
    save_critic(critic, folder, {"explained_variance": 0.25})
    return model, critic


def test_artifact_comes_back_with_its_head(tmp_path):
    """Case CK-04 (b)."""
    model, critic = saved(tmp_path)
    loaded, provenance = load_critic(tmp_path, like=model)
    packed = pack(episodes(3))
    inputs = Inputs.of(packed, torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(loaded(inputs, inputs.state_index), critic(inputs, inputs.state_index))
    assert provenance == {"explained_variance": 0.25}


def test_a_policy_checkpoint_is_no_critic(tmp_path):
    """Case CK-04 (a): refused unless the word cold is given in its place."""
    policy().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="--critic-init cold"):
        load_critic(tmp_path, like=policy())


def test_another_width_is_named(tmp_path):
    """Case CK-04 (c)."""
    saved(tmp_path, hidden=64)
    with pytest.raises(CheckpointError, match="hidden_size = 64, the policy has 32"):
        load_critic(tmp_path, like=policy())


@pytest.mark.parametrize("name", ["value_head.weight", "value_head.bias"])
def test_a_missing_head_is_named(tmp_path, name):
    """Case CK-04 (d): never made anew in silence."""
    model, _ = saved(tmp_path)
    path = tmp_path / "critic.safetensors"
    state = load_file(path)
    del state[name]
    save_file(state, path)
    with pytest.raises(CheckpointError, match=name):
        load_critic(tmp_path, like=model)
    assert json.loads((tmp_path / "critic.json").read_text()) == {"explained_variance": 0.25}
