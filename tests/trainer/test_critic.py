"""The critic: what of it is trained, and that a saved one comes back whole or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sao_gym.errors import CheckpointError, ConfigError
from sao_gym.trainer.actor import Inputs
from sao_gym.trainer.attention import use_packed_attention
from sao_gym.trainer.batch import pack
from sao_gym.trainer.critic import (
    PROVENANCE_FILE,
    WEIGHTS_FILE,
    ModuleKind,
    critic_from_model,
    freeze,
    load_critic,
    module_kind,
    save_critic,
)

CPU = torch.device("cpu")


class Wrapped(nn.Module):
    """A backbone with a value head, on the meta device where only names matter."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(4, 1)


def on_meta(config: Any) -> nn.Module:
    from transformers import AutoModel

    with torch.device("meta"):
        return Wrapped(AutoModel.from_config(config))


def hybrid_config() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_experts=2,
        layer_types=["linear_attention", "full_attention"],
    )


def kinds_of(names: Any) -> set[str]:
    return {module_kind(name).value for name in names}


def test_mlp_only_on_qwen3(make_policy):
    """Trap 22 and docs/paper.md row 13: projections and head train; gate_proj is a projection and no router."""
    table = freeze(critic_from_model(make_policy()), "mlp_only")
    assert len(table.trained) == 2 * 3 + 2
    assert {name.split(".")[-2] for name in table.trained} == {"gate_proj", "up_proj", "down_proj", "value_head"}
    assert kinds_of(table.frozen) == {"attention", "norm", "embedding"}
    assert any("q_norm" in name for name in table.frozen)


def test_mlp_only_on_qwen3_moe(make_policy):
    """Experts train, the router does not."""
    table = freeze(critic_from_model(make_policy("qwen3_moe")), "mlp_only")
    assert sum(".experts." in name for name in table.trained) == 2 * 2  # gate_up_proj and down_proj, stacked
    assert kinds_of(table.trained) == {"mlp", "head"}
    assert [name for name in table.frozen if module_kind(name) is ModuleKind.ROUTER] == [
        f"backbone.layers.{layer}.mlp.gate.weight" for layer in range(2)
    ]


def test_mlp_only_on_a_hybrid_with_shared_experts():
    """Linear attention stays frozen in every part; shared experts train, their gate does not."""
    table = freeze(on_meta(hybrid_config()), "mlp_only")
    mixer = [name for name in (*table.trained, *table.frozen) if ".linear_attn." in name]
    assert any("A_log" in name for name in mixer)
    assert any("conv1d" in name for name in mixer)
    assert set(mixer) <= set(table.frozen)
    shared = [name for name in table.trained if ".shared_expert." in name]
    assert {name.split(".")[-2] for name in shared} == {"gate_proj", "up_proj", "down_proj"}
    assert sum("shared_expert_gate" in name for name in table.frozen) == 2
    assert sum(name.endswith("mlp.gate.weight") for name in table.frozen) == 2
    assert kinds_of(table.trained) == {"mlp", "head"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.gate_proj.weight", "mlp"),
        ("model.layers.0.mlp.gate.weight", "router"),
        ("model.layers.0.feed_forward.router.weight", "router"),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", "mlp"),
        ("model.layers.0.mlp.shared_expert_gate.weight", "router"),
        ("model.layers.0.block_sparse_moe.experts.3.w1.weight", "mlp"),
        ("model.layers.0.mamba.in_proj.weight", "attention"),
        ("model.layers.0.conv.in_proj.weight", "attention"),
        ("model.layers.0.linear_attn.dt_bias", "attention"),
        ("model.layers.0.self_attn.sinks", "attention"),
        ("model.layers.0.post_attention_layernorm.weight", "norm"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("transformer.h.0.ln_1.weight", "norm"),
        ("transformer.h.0.mlp.c_fc.weight", "mlp"),
        ("model.norm.weight", "norm"),
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "embedding"),
        ("value_head.weight", "head"),
        ("module.model.layers.0.mlp.down_proj.weight", "mlp"),
    ],
)
def test_kinds_by_name(name, kind):
    assert module_kind(name).value == kind


def test_other_sets(make_policy):
    critic = critic_from_model(make_policy("qwen3_moe"))
    assert freeze(critic, "full").frozen == ()
    table = freeze(critic, "all_but_attention")
    assert kinds_of(table.frozen) == {"attention"}
    table = freeze(critic, (r"layers\.1\.mlp\.experts",))
    assert kinds_of(table.trained) == {"mlp", "head"}
    assert all("layers.1." in name or "value_head" in name for name in table.trained)
    # freezing again thaws what the new choice trains
    assert all(p.requires_grad == (name in table.trained) for name, p in critic.named_parameters())


def test_the_table_counts_parameters(make_policy):
    critic = critic_from_model(make_policy())
    table = freeze(critic, "mlp_only")
    total = sum(table.trained_counts.values()) + sum(table.frozen_counts.values())
    assert total == sum(p.numel() for p in critic.parameters())
    assert table.trained_counts == {"mlp": 2 * 3 * 32 * 96, "head": 33}
    printed = str(table)
    assert "18,432" in printed
    assert "router" not in printed


def test_a_choice_that_matches_nothing_is_an_error(make_policy):
    """Trap 22: no match would leave the head alone and say nothing."""
    critic = critic_from_model(make_policy())
    with pytest.raises(ConfigError, match="matches no parameter"):
        freeze(critic, ("block_sparse_moe",))
    with pytest.raises(ConfigError, match="neither mlp_only"):
        freeze(critic, "mlp(only")


def test_a_new_critic_says_0_everywhere_and_owns_its_weights(make_policy, make_batch):
    """docs/paper.md row 15; the policy's own weights are copied, not shared."""
    policy = make_policy()
    critic = critic_from_model(policy)
    use_packed_attention(critic.backbone)
    inputs = Inputs.of(pack(make_batch()), CPU)
    values = critic(inputs, inputs.state_index)
    assert values.dtype == torch.float32
    assert (values == 0).all()
    mine = dict(critic.backbone.named_parameters())
    for name, theirs in policy.get_decoder().named_parameters():
        assert torch.equal(mine[name], theirs)
        assert mine[name].data_ptr() != theirs.data_ptr()


def test_values_are_float32_under_bf16(make_policy, make_batch):
    critic = critic_from_model(make_policy())
    use_packed_attention(critic.backbone)
    nn.init.ones_(critic.value_head.weight)
    inputs = Inputs.of(pack(make_batch()), CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = critic(inputs, inputs.state_index)
    assert values.dtype == torch.float32
    assert (values != values.bfloat16()).any()  # not rounded to bf16 on the way


def test_saved_and_loaded_bitwise(make_policy, make_batch, tmp_path):
    """Case CK-04 (b): the head comes back too, with where it came from."""
    policy = make_policy("qwen3_moe")
    critic = critic_from_model(policy)
    nn.init.normal_(critic.value_head.weight)
    nn.init.normal_(critic.value_head.bias)
    save_critic(critic, tmp_path, {"kind": "pretrained", "explained_variance": 0.5})
    again, provenance = load_critic(tmp_path, like=policy)
    assert provenance == {"kind": "pretrained", "explained_variance": 0.5}
    for name, value in critic.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_an_actor_checkpoint_is_no_critic(make_policy, tmp_path):
    """Case CK-04 (a): allowed only as said `cold`."""
    make_policy().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"no critic artifact.*--critic-init cold"):
        load_critic(tmp_path)


def test_a_critic_of_another_size_names_both_sizes(make_policy, tmp_path):
    """Case CK-04 (c)."""
    save_critic(critic_from_model(make_policy()), tmp_path, {})
    with pytest.raises(CheckpointError, match="hidden_size = 32, the policy has 64"):
        load_critic(tmp_path, like=_policy_of(64))


def _policy_of(hidden: int) -> Any:
    from sao_gym.models import tiny_qwen3

    return tiny_qwen3(48, 2, hidden)


def test_a_missing_head_is_named(make_policy, tmp_path):
    """Case CK-04 (d): a head made anew in silence turns the first updates into noise."""
    save_critic(critic_from_model(make_policy()), tmp_path, {})
    state = load_file(tmp_path / WEIGHTS_FILE)
    del state["value_head.weight"]
    save_file(state, tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"lacks value_head.weight"):
        load_critic(tmp_path)


def test_a_tensor_of_another_shape_is_named(make_policy, tmp_path):
    save_critic(critic_from_model(make_policy()), tmp_path, {})
    state = load_file(tmp_path / WEIGHTS_FILE)
    state["value_head.weight"] = torch.zeros(1, 16)
    save_file(state, tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"value_head.weight of shape \(1, 16\)"):
        load_critic(tmp_path)


def test_a_tensor_that_fits_nowhere_is_named(make_policy, tmp_path):
    save_critic(critic_from_model(make_policy()), tmp_path, {})
    state = load_file(tmp_path / WEIGHTS_FILE)
    state["backbone.layers.7.mlp.up_proj.weight"] = torch.zeros(1)
    save_file(state, tmp_path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match=r"layers.7.mlp.up_proj"):
        load_critic(tmp_path)


@pytest.mark.parametrize("file", [WEIGHTS_FILE, PROVENANCE_FILE])
def test_a_damaged_artifact_is_one_sentence(file, make_policy, tmp_path):
    save_critic(critic_from_model(make_policy()), tmp_path, {})
    (tmp_path / file).write_bytes(b"\x00garbage")
    with pytest.raises(CheckpointError, match="no critic artifact"):
        load_critic(tmp_path)


def test_provenance_is_json(make_policy, tmp_path):
    save_critic(critic_from_model(make_policy()), tmp_path, {"kind": "checkpoint"})
    assert json.loads((tmp_path / PROVENANCE_FILE).read_text()) == {"kind": "checkpoint"}


def test_an_empty_micro_batch_keeps_the_head_in_the_graph(make_policy):
    """Trap 11."""
    critic = critic_from_model(make_policy())
    freeze(critic, "mlp_only")
    use_packed_attention(critic.backbone)
    inputs = Inputs.of(pack([]), CPU)
    values = critic(inputs, inputs.state_index)
    assert values.shape == (0,)
    values.sum().backward()
    for name, parameter in critic.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.grad is None or (parameter.grad == 0).all(), name


def test_a_critic_folder_that_is_none_is_not_looked_for_elsewhere(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no critic folder .*nowhere; give one that"):
        load_critic(tmp_path / "nowhere")
