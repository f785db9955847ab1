"""The weight hash and the snapshot that travels."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sao_gym.models import tiny_qwen3
from sao_gym.weights import ModuleWeights, module_tensors, weight_hash

TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.zeros(3),
    "n": torch.tensor(5),
    "empty": torch.zeros(0),
    "half": torch.ones(2, dtype=torch.bfloat16),
}


@given(st.permutations(sorted(TENSORS)))
@settings(max_examples=30, deadline=None)
def test_the_order_of_the_tensors_does_not_count(order: list[str]) -> None:
    assert weight_hash((name, TENSORS[name]) for name in order) == weight_hash(TENSORS.items())


@pytest.mark.parametrize(
    "change",
    [
        {"a": TENSORS["a"] + torch.tensor([[0, 0, 0], [0, 0, 1e-6]])},
        {"a": TENSORS["a"].reshape(3, 2)},
        {"a": TENSORS["a"].t()},
        {"a": TENSORS["a"].double()},
        {"b": -TENSORS["b"]},  # -0.0 has other bytes than 0.0
        {"n": torch.tensor(6)},
        {"half": torch.ones(2, dtype=torch.float16)},
        {"extra": torch.zeros(1)},
    ],
)
def test_any_change_counts(change: dict[str, torch.Tensor]) -> None:
    assert weight_hash({**TENSORS, **change}.items()) != weight_hash(TENSORS.items())


def test_names_count_and_layout_does_not() -> None:
    swapped = {"a": TENSORS["b"], "b": TENSORS["a"]}
    assert weight_hash(swapped.items()) != weight_hash([("a", TENSORS["a"]), ("b", TENSORS["b"])])
    strided = TENSORS["a"].t().contiguous().t()
    assert not strided.is_contiguous()
    assert weight_hash([("a", strided)]) == weight_hash([("a", TENSORS["a"])])


def test_a_shared_tensor_counts_once_and_equal_ones_twice() -> None:
    shared = torch.ones(4)
    assert weight_hash([("x", shared), ("y", shared)]) == weight_hash([("x", shared)])
    assert weight_hash([("x", shared), ("y", shared.clone())]) != weight_hash([("x", shared)])
    assert weight_hash([("x", shared), ("y", shared[:2])]) != weight_hash([("x", shared)])


def test_a_snapshot_stays_while_training_goes_on() -> None:
    model = tiny_qwen3(20, 1, 16, heads=2, kv_heads=1)
    source = ModuleWeights(model)
    before = weight_hash(module_tensors(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert source.weight_hash == before == weight_hash(source.tensors())
    assert ModuleWeights(model).weight_hash != before


def test_a_tied_model_names_its_embedding_once() -> None:
    """Trap 33."""
    tied, untied = (tiny_qwen3(20, 1, 16, heads=2, kv_heads=1, tie_embeddings=t) for t in (True, False))
    assert set(ModuleWeights(untied).names) - set(ModuleWeights(tied).names) == {"lm_head.weight"}
    assert weight_hash(tied.state_dict().items()) == ModuleWeights(tied).weight_hash


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("kept", torch.tensor([1, 2]))
        self.register_buffer("scale", torch.tensor([0.1]))
        self.register_buffer("derived", torch.zeros(2), persistent=False)


def test_persistent_buffers_travel_and_derived_ones_do_not() -> None:
    source = ModuleWeights(nn.Sequential(WithBuffers()), torch.bfloat16)
    assert source.names == ("0.weight", "0.kept", "0.scale")
    types: dict[str, Any] = {name: tensor.dtype for name, tensor in source.tensors()}
    assert types == {"0.weight": torch.bfloat16, "0.kept": torch.int64, "0.scale": torch.bfloat16}


def test_the_hash_of_a_cast_is_that_of_the_engine_it_is_for() -> None:
    model = tiny_qwen3(20, 1, 16, heads=2, kv_heads=1)
    source = ModuleWeights(model, torch.bfloat16)
    assert source.weight_hash == weight_hash(module_tensors(model.to(torch.bfloat16)))
