"""What servers are sent: a checkpoint's names, the checksums that will come back, and folders of shards."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from sglang_standin import fused_checksums

from sao_gym.engines.sglang_cargo import Cargo, buckets
from sao_gym.engines.sglang_disk import DiskTransport
from sao_gym.engines.sglang_names import CheckpointNames, checksums, first_difference
from sao_gym.engines.sglang_server import Server
from sao_gym.models import tiny_qwen3, tiny_qwen3_moe
from sao_gym.weights import ModuleWeights


def tied() -> Any:
    return tiny_qwen3(40, 2, 32, heads=2, kv_heads=1)


def untied() -> Any:
    return tiny_qwen3(40, 1, 32, heads=2, kv_heads=1, tie_embeddings=False)


def experts() -> Any:
    return tiny_qwen3_moe(40, 1, 32, heads=2, kv_heads=1, experts=4)


@pytest.mark.parametrize("make", [tied, untied, experts])
def test_names_and_tensors_are_those_of_a_checkpoint(make: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    named = dict(CheckpointNames(model).named(ModuleWeights(model)))
    assert named.keys() == written.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in written.items())


@pytest.mark.parametrize("make", [tied, untied])
def test_trap_14_every_parameter_that_changed_is_noticed(make: Any) -> None:
    model = make()
    names = CheckpointNames(model)
    held = fused_checksums(model)
    assert first_difference(checksums(names.named(ModuleWeights(model))), held) is None
    for name, _ in model.named_parameters():
        moved = copy.deepcopy(model)
        with torch.no_grad():
            dict(moved.named_parameters())[name].view(-1)[-1] += 1e-6
        found = first_difference(checksums(names.named(ModuleWeights(moved))), held)
        assert found is not None
        assert found.split(".")[:3] == name.split(".")[:3]


def test_experts_are_fused_in_their_order() -> None:
    model = experts()
    sent = dict(CheckpointNames(model).named(ModuleWeights(model)))
    whole = {f"model.layers.0.mlp.experts.{n}": p for n, p in model.model.layers[0].mlp.experts.named_parameters()}
    (gate_up,) = [p for n, p in whole.items() if n.endswith("gate_up_proj")]
    as_held = checksums([("x.w13_weight", gate_up)])["x.w13_weight"]
    assert checksums(sent.items())["model.layers.0.mlp.experts.w13_weight"] == as_held


def test_a_parameter_on_one_side_alone_is_a_difference() -> None:
    assert first_difference({"a": "1"}, {"a": "1", "b": "2"}) == "b"
    assert first_difference({"a": "1", "b": "2"}, {"a": "1"}) == "b"
    assert first_difference({"a": "1"}, {"a": "1", "lm_head.weight": "2"}) is None


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30), limit=st.integers(1, 400))
def test_buckets_hold_everything_once_in_order(sizes: list[int], limit: int) -> None:
    named = [(str(index), torch.zeros(size)) for index, size in enumerate(sizes)]
    made = list(buckets(named, limit))
    assert [name for bucket in made for name, _ in bucket] == [name for name, _ in named]
    assert all(len(bucket) == 1 or sum(t.nbytes for _, t in bucket) <= limit for bucket in made)
    assert all(made)


def cargo(version: int, first: float, second: float) -> Cargo:
    named = [("a", torch.full((100,), first)), ("b", torch.full((100,), second))]
    return Cargo(version=version, label=f"run-{version}", weight_hash="", named=named)


class Told(Server):
    """Notes which folder it was given."""

    def __init__(self) -> None:
        super().__init__("http://nowhere", None)  # type: ignore[arg-type]
        self.folders: list[Path] = []

    async def control(self, path: str, body: Any, *, timeout_s: float = 0.0) -> None:
        self.folders.append(Path(body["model_path"]))


async def test_a_folder_is_whole_and_a_server_is_given_what_changed(tmp_path: Path) -> None:
    transport = DiskTransport(tmp_path, timeout_s=1.0, shard_bytes=400)
    server, late = Told(), Told()
    for version, loads in enumerate([cargo(0, 1.0, 1.0), cargo(1, 1.0, 2.0), cargo(2, 1.0, 2.0), cargo(3, 3.0, 2.0)]):
        await transport.pack(loads)
        await transport.deliver(loads, [server, late])
        server.label = loads.label
        await transport.unpack(loads)
        whole = {name for file in (tmp_path / loads.label).glob("*.safetensors") for name in load_file(file)}
        assert whole == {"a", "b"}, version
    given_to = [[str(folder.relative_to(tmp_path)) for folder in one.folders] for one in (server, late)]
    assert given_to[0] == ["run-0", "run-1/changed", "run-2", "run-3/changed"]  # nothing changed: all is sent
    assert given_to[1] == ["run-0", "run-1", "run-2", "run-3"]
    assert [*load_file(next((tmp_path / "run-3" / "changed").iterdir()))] == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-2", "run-3"]
    await transport.close()
    assert not list(tmp_path.iterdir())
