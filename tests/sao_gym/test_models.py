"""Checkpoint folders, whole and damaged, and the tiny models."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from sao_gym.errors import ModelError
from sao_gym.models import copy_model, load_policy, stop_ids, tiny_qwen3, tiny_qwen3_moe
from sao_gym.weights import module_tensors, weight_hash


def save_checkpoint(folder: Path) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = tiny_qwen3(20, 1, 16, heads=2, kv_heads=1)
    model.generation_config.eos_token_id = [7, 3]
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(20)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3").save_pretrained(folder)
    return model


def test_a_saved_checkpoint_loads_with_its_weights_tokenizer_and_stop_ids(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path)
    policy = load_policy(tmp_path)
    assert weight_hash(module_tensors(policy.model)) == weight_hash(module_tensors(model))
    assert policy.tokenizer.convert_tokens_to_ids(["w4", "w5"]) == [4, 5]
    assert policy.stop_token_ids() == (3, 7)
    assert next(load_policy(tmp_path, dtype=torch.bfloat16).model.parameters()).dtype == torch.bfloat16


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no model folder at .*nowhere"):
        load_policy(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"neither config.json nor a GGUF file"):
        load_policy(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"cannot be read"):
        load_policy(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"2 GGUF files"):
        load_policy(tmp_path)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"the weights in .* cannot be read .*copy it again"):
        load_policy(tmp_path)


def test_weights_that_the_checkpoint_lacks_are_never_made_up(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_checkpoint(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    gone = next(name for name in tensors if "up_proj" in name)
    save_file({name: t for name, t in tensors.items() if name != gone}, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 weights .*up_proj"):
        load_policy(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["intermediate_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(
        ModelError, match=r"lacks 0 weights and has 3 of another shape \(first: model.layers.0.mlp.down_proj"
    ):
        load_policy(tmp_path)


@pytest.mark.parametrize("config", ["{", '{"model_type": "no_such_model"}'])
def test_a_config_that_says_nothing_is_refused(tmp_path: Path, config: str) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    with pytest.raises(ModelError):
        load_policy(tmp_path)


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny_qwen3(20, 1, 16, heads=2, kv_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"holds no tokenizer .*tokenizer.json"):
        load_policy(tmp_path)


@pytest.mark.parametrize(("eos", "expected"), [(3, (3,)), ([7, 3], (7, 3)), (None, ())])
def test_end_ids_as_int_list_or_null(eos: Any, expected: tuple[int, ...]) -> None:
    """Case EG-02."""
    config = type("Config", (), {"eos_token_id": eos})()
    assert stop_ids(generation_config=config) == expected
    assert stop_ids() == ()


def test_tiny_models_are_repeatable_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    first, again, other = (tiny_qwen3_moe(20, 1, 16, heads=2, kv_heads=1, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    hashes = [weight_hash(module_tensors(model)) for model in (first, again, other)]
    assert hashes[0] == hashes[1] != hashes[2]
    with pytest.raises(ModelError, match="do not divide"):
        tiny_qwen3(20, 1, 30, heads=4)


def test_the_quickstart_sizes() -> None:
    dense, moe = tiny_qwen3(64), tiny_qwen3_moe(64)
    assert 3e5 < sum(p.numel() for p in dense.parameters()) < 6e5
    assert 8e5 < sum(p.numel() for p in moe.parameters()) < 1e6


def test_a_copy_keeps_ties_and_shares_nothing() -> None:
    model = tiny_qwen3(20, 1, 16, heads=2, kv_heads=1)
    twin = copy_model(model, torch.bfloat16)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    assert model.lm_head.weight.dtype == torch.float32
    with torch.no_grad():
        copied = copy_model(model)
        copied.lm_head.weight.zero_()
    assert model.lm_head.weight.abs().sum() > 0


@pytest.mark.parametrize(
    ("declared", "ids"), [(np.int64(3), (3,)), (torch.tensor([3, 4]), (3, 4)), ((3,), (3,)), ([], ()), (None, ())]
)
def test_stop_ids_in_every_form(declared: Any, ids: tuple[int, ...]) -> None:
    assert stop_ids(SimpleNamespace(eos_token_id=declared)) == ids


@pytest.mark.parametrize("declared", [[None], "x", [[3]]])
def test_stop_ids_that_are_none(declared: Any) -> None:
    with pytest.raises(ModelError, match=r"eos_token_id is .* expected a token id, a list of them, or null"):
        stop_ids(SimpleNamespace(eos_token_id=declared))


def test_a_checkpoints_own_code_is_neither_run_nor_asked_about(tmp_path: Path) -> None:
    """Unsaid, transformers waits 15 s for a yes on the terminal."""
    save_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    classes = {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "custom_x", "auto_map": classes}))
    (tmp_path / "configuration_x.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with patch("builtins.input", side_effect=AssertionError("asked")), pytest.raises(ModelError, match=r"custom code"):
        load_policy(tmp_path)
    assert not (tmp_path / "ran").exists()
