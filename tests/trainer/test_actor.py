"""The actor's log-probs: of the right token, from the right state, at the right temperature, equal to the engine's."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sao_gym.engines.local import LocalEngine
from sao_gym.errors import ModelError
from sao_gym.models import copy_model
from sao_gym.protocols import Sampling
from sao_gym.stream import Outcome, Score, Segment, TokenStream, Trajectory
from sao_gym.trainer import actor as actor_module
from sao_gym.trainer.actor import Actor, Inputs
from sao_gym.trainer.attention import use_packed_attention
from sao_gym.trainer.batch import micro_batches, pack
from sao_gym.trainer.critic import Critic, switch_off_dropout

POSITIONS = 64
VOCABULARY = 48
CPU = torch.device("cpu")


class PositionBackbone(nn.Module):
    """Hidden state = which position of its document a token has, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(hidden_size=POSITIONS)

    def forward(self, *, position_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=nn.functional.one_hot(position_ids, POSITIONS).float())


class PositionPolicy(nn.Module):
    """The log-prob of a token encodes the position it was predicted at."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.backbone = PositionBackbone()
        self.head = nn.Linear(POSITIONS, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(0)
        nn.init.normal_(self.head.weight, std=2.0, generator=generator)

    def get_decoder(self) -> nn.Module:
        return self.backbone

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def at_temperature(batch, temperature):
    """The same episodes as if they had been sampled at another temperature."""
    return [
        replace(
            t,
            streams=tuple(
                TokenStream(
                    segments=tuple(replace(s, temperature=temperature) if s.is_action else s for s in x.segments)
                )
                for x in t.streams
            ),
        )
        for t in batch
    ]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_each_log_prob_is_read_one_position_before_its_token(make_batch, temperature):
    """Trap 4: collate into micro-batches, pack, shift, unpack, compare with the table the toy policy is made of."""
    batch = at_temperature(make_batch(7, turns=3, streams=2), temperature)
    policy = PositionPolicy()
    table = torch.log_softmax(policy.head.weight.T / temperature, dim=-1).detach().numpy()  # [position, token]
    seen = 0
    for rows in micro_batches([t.n_tokens for t in batch], 60)[0]:
        packed = pack([batch[row] for row in rows])
        logprobs, _ = Actor(policy)(Inputs.of(packed, CPU))
        for local, row in enumerate(rows):
            for index, stream in enumerate(batch[row].streams):
                here = (packed.row == local) & (packed.stream == index)
                expected = [table[p - 1, stream.token_ids[p]] for p in stream.action_positions]
                np.testing.assert_allclose(logprobs.detach().numpy()[here], expected, atol=1e-5)
                seen += len(expected)
    assert seen == sum(t.n_action for t in batch)


def test_the_value_is_read_before_the_action_token(make_batch):
    """Trap 4: a critic that says the position it reads at is one behind the token."""
    critic = Critic(PositionBackbone())
    with torch.no_grad():
        critic.value_head.weight.copy_(torch.arange(POSITIONS).float()[None])
    batch = make_batch(4, turns=3, streams=2)
    packed = pack(batch)
    inputs = Inputs.of(packed, CPU)
    values = critic(inputs, inputs.state_index)
    expected = [p - 1 for t in batch for stream in t.streams for p in stream.action_positions]
    assert values.tolist() == expected


def test_entropy_and_gradient_at_the_temperature():
    policy = PositionPolicy()
    packed = pack([episode_of_ids([3, 4], [5])])
    logprobs, entropy = Actor(policy)(Inputs.of(packed, CPU))
    logprobs.sum().backward()
    probabilities = torch.softmax(policy.head.weight[:, 1], dim=0)
    assert entropy.tolist() == pytest.approx([-(probabilities * probabilities.log()).sum().item()])
    assert not entropy.requires_grad
    expected = -probabilities.detach()
    expected[5] += 1
    np.testing.assert_allclose(policy.head.weight.grad[:, 1], expected, atol=1e-6)
    assert (policy.head.weight.grad[:, [0, 2, 3]] == 0).all()  # observations and later states give no logits


def episode_of_ids(prompt, ids):
    action = Segment.action(ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), temperature=1.0, stop="stop")
    stream = TokenStream(segments=(Segment.observation(prompt), action))
    return Trajectory(uid="r", task_id="t", env_id="e", attempt=0, streams=(stream,), outcome=Outcome.terminated())


def test_the_head_in_chunks_gives_the_same_numbers(make_policy, make_batch, monkeypatch):
    policy = make_policy()
    use_packed_attention(policy)
    inputs = Inputs.of(pack(make_batch(5)), CPU)
    results = []
    for size in (4096, 3):
        monkeypatch.setattr(actor_module, "CHUNK_TOKENS", size)
        policy.zero_grad()
        logprobs, entropy = Actor(policy)(inputs)
        logprobs.square().sum().backward()
        results.append((logprobs.detach(), entropy, policy.get_input_embeddings().weight.grad.clone()))
    for whole, cut in zip(*results, strict=True):
        np.testing.assert_allclose(cut, whole, rtol=1e-4, atol=1e-6 * float(whole.abs().max()))  # sums cancel


def test_an_empty_micro_batch_keeps_every_parameter_in_the_graph(make_policy):
    """Trap 11: other ranks wait for the same gradients; here they are exact zeros."""
    policy = make_policy("qwen3_moe")
    use_packed_attention(policy)
    logprobs, entropy = Actor(policy)(Inputs.of(pack([]), CPU))
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad == 0).all(), name


async def sampled_episode(engine, rng, *, temperature):
    """A real episode of three turns with foreign tokens between them."""
    segments = [Segment.observation(rng.integers(0, VOCABULARY, 9))]
    for turn in range(3):
        stream = TokenStream(segments=tuple(segments))
        sampling = Sampling(max_tokens=12, temperature=temperature, seed=int(rng.integers(1 << 30)))
        answer = await engine.generate(stream.token_ids, sampling, "episode")
        segments.append(
            Segment.action(
                answer.token_ids,
                logprobs=answer.logprobs,
                versions=answer.versions,
                temperature=answer.temperature,
                stop=answer.stop,
            )
        )
        if turn < 2:
            segments.append(Segment.observation(rng.integers(0, VOCABULARY, 5)))
    made = Trajectory(
        uid="r",
        task_id="t",
        env_id="test",
        attempt=0,
        streams=(TokenStream(segments=tuple(segments)),),
        outcome=Outcome.terminated(),
    )
    return made.scored(Score(value=1.0, passed=True))


async def lag_zero_error(model, logprobs_of, *, temperature, record=None):
    """Largest difference between what the engine recorded and what the learner's actor computes in train mode."""
    engine = LocalEngine(copy_model(model).eval(), context_length=128)
    rng = np.random.default_rng(5)
    rows = [await sampled_episode(engine, rng, temperature=temperature) for _ in range(2)]
    await engine.close()
    use_packed_attention(model)
    switch_off_dropout(model)
    model.train()
    logprobs, packed = logprobs_of(Actor(model), rows)
    assert packed.behavior_logprobs.std() > 0.3  # far from an even distribution, where everything agrees
    return float(np.abs(logprobs.numpy() - packed.behavior_logprobs).max()), rows


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama"])
async def test_engine_and_learner_at_lag_0_differ_by_less_than_1e_4(kind, make_policy, logprobs_of, record_property):
    error, _ = await lag_zero_error(make_policy(kind), logprobs_of, temperature=1.0)
    record_property("largest difference in log-prob", error)
    assert error < 1e-4


async def test_both_ends_take_log_probs_at_the_temperature_of_sampling(make_policy, logprobs_of):
    """Trap 8: at T = 0.7 they agree; a learner that forgot the temperature is far off."""
    model = make_policy()
    error, rows = await lag_zero_error(model, logprobs_of, temperature=0.7)
    assert error < 1e-4
    forgotten, packed = logprobs_of(Actor(model), at_temperature(rows, 1.0))
    assert np.abs(forgotten.numpy() - packed.behavior_logprobs).max() > 0.05


async def test_a_checkpoint_with_dropout_has_the_engines_log_probs_in_train_mode(make_policy, logprobs_of):
    """Trap 30."""
    error, _ = await lag_zero_error(make_policy(attention_dropout=0.5), logprobs_of, temperature=0.7)
    assert error < 1e-4


async def test_windows_have_the_engines_log_probs(make_policy, logprobs_of):
    """Trap 28, against the engine."""
    error, _ = await lag_zero_error(make_policy("sliding"), logprobs_of, temperature=1.0)
    assert error < 1e-4


@pytest.mark.parametrize("field", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_a_model_that_changes_its_logits_after_the_head_is_refused(field, make_policy):
    policy = make_policy()
    setattr(policy.config, field, 30.0)
    with pytest.raises(ModelError, match=field):
        Actor(policy)
    setattr(policy.config, field, None)
    Actor(policy)
