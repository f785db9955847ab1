"""Packed documents see only themselves, and what cannot be computed that way is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from sao_gym.errors import ModelError
from sao_gym.models import copy_model
from sao_gym.trainer.actor import Actor, Inputs, hidden_states
from sao_gym.trainer.attention import use_packed_attention
from sao_gym.trainer.batch import pack
from sao_gym.trainer.critic import critic_from_model, switch_off_dropout

KINDS = ["qwen3", "qwen3_moe", "llama", "sliding"]


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logits_equal_single_ones(kind, make_policy, make_batch):
    """Trap 28, actor: three episodes in one row against each alone in transformers' own attention."""
    model = make_policy(kind)
    single = copy_model(model).eval()
    single.set_attn_implementation("eager")
    use_packed_attention(model)
    batch = make_batch(3, turns=4)
    assert max(t.n_tokens for t in batch) > 12  # the window of 4 is really crossed
    packed = pack(batch)
    with torch.no_grad():
        states = hidden_states(model.get_decoder(), Inputs.of(packed, torch.device("cpu")))
        logits = model.get_output_embeddings()(states)
        alone = [single(torch.tensor(t.streams[0].token_ids)[None].long(), use_cache=False).logits[0] for t in batch]
    np.testing.assert_allclose(logits, torch.cat(alone), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_values_equal_single_ones(kind, make_policy, make_batch):
    """Trap 28, critic."""
    critic = critic_from_model(make_policy(kind))
    torch.nn.init.normal_(critic.value_head.weight)
    use_packed_attention(critic.backbone)
    batch = make_batch(3, turns=4)

    def values(rows: Any) -> torch.Tensor:
        inputs = Inputs.of(pack(rows), torch.device("cpu"))
        with torch.no_grad():
            return critic(inputs, inputs.state_index)

    together = values(batch)
    assert together.std() > 0.1
    np.testing.assert_allclose(together, torch.cat([values([row]) for row in batch]), atol=2e-5, rtol=1e-5)


def test_a_neighbour_changes_no_gradient(make_policy, make_batch):
    """Trap 28, backward: a document's log-probs send nothing into its neighbours' tokens."""
    model = make_policy()
    use_packed_attention(model)
    inputs = Inputs.of(pack(make_batch(2)), torch.device("cpu"))
    embedded = model.get_input_embeddings()(inputs.token_ids).detach().requires_grad_()
    states = model.get_decoder()(
        inputs_embeds=embedded,
        position_ids=inputs.position_ids,
        use_cache=False,
        cu_seq_lens_q=inputs.cu_seq_lens,
    ).last_hidden_state[0]
    first = int(inputs.cu_seq_lens[1])
    states[first:].square().sum().backward()
    assert (embedded.grad[0, :first] == 0).all()
    assert (embedded.grad[0, first:] != 0).any(dim=-1).all()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_dropout_is_off_in_train_mode(kind, make_policy, make_batch, logprobs_of):
    """Trap 30, every place where a checkpoint may put it."""
    quiet = make_policy(kind)
    loud = copy_model(quiet)
    loud.config.attention_dropout = 0.5
    for module in loud.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    for model in (quiet, loud):
        use_packed_attention(model)
        switch_off_dropout(model)
        model.train()
    assert all(getattr(module, "attention_dropout", 0.0) == 0.0 for module in loud.modules())
    batch = make_batch(3)
    assert torch.equal(logprobs_of(Actor(loud), batch)[0], logprobs_of(Actor(quiet), batch)[0])


def test_dropout_modules_and_plain_attributes_are_switched_off():
    """Trap 30: GPT-2 drops embeddings and residuals in modules, others keep a number and call the function."""
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=16, resid_pdrop=0.4))
    switch_off_dropout(model)
    model.train()
    assert all(module.p == 0 for module in model.modules() if isinstance(module, torch.nn.Dropout))
    ids = torch.arange(8)[None]
    assert torch.equal(model(ids).last_hidden_state, model(ids).last_hidden_state)


def hybrid() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    )
    with torch.device("meta"):
        return Qwen3NextForCausalLM(config)


def test_recurrent_mixers_are_refused():
    with pytest.raises(ModelError, match="linear_attention"):
        use_packed_attention(hybrid())


def test_a_mixer_that_no_configuration_names_is_refused(make_policy):
    model = make_policy()
    model.model.layers[1].mamba = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match="mamba"):
        use_packed_attention(model)


def test_layers_of_an_unknown_kind_are_refused(make_policy):
    model = make_policy()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ModelError, match="chunked_attention"):
        use_packed_attention(model)


def test_capped_scores_and_attention_sinks_are_refused(make_batch):
    """Left out without a word they would give other log-probs than the engine's."""
    from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM

    sizes = {
        "vocab_size": 48,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    gemma = Gemma2ForCausalLM(Gemma2Config(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=2))
    oss = GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=2, num_experts_per_tok=1))
    for model in (gemma, oss):
        use_packed_attention(model)
        with pytest.raises(ModelError, match=r"softcap|s_aux"):
            hidden_states(model.get_decoder(), Inputs.of(pack(make_batch(1)), torch.device("cpu")))
