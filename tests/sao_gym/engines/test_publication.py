"""New weights between two steps: versions, exactness with kept and recomputed keys and values, and verification."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sao_gym.engines.decoder import Decoder
from sao_gym.engines.forward import CachedModel
from sao_gym.engines.local import LocalEngine
from sao_gym.errors import EngineError
from sao_gym.models import copy_model, tiny_qwen3
from sao_gym.protocols import Sampling
from sao_gym.weights import ModuleWeights, module_tensors, weight_hash

VOCAB = 40
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def old_and_new(seed: int = 1) -> tuple[Any, Any]:
    return (
        tiny_qwen3(VOCAB, 2, 32, context_length=256),
        tiny_qwen3(VOCAB, 2, 32, context_length=256, seed=seed),
    )


def decoder_of(model: Any, **options: Any) -> Decoder:
    return Decoder(CachedModel(copy_model(model), 256), **options)


def own_hash(decoder: Decoder) -> str:
    return weight_hash(module_tensors(decoder.model.model))


class EditedSource:
    """A source that names `honest`'s hash and sends something else."""

    def __init__(self, honest: ModuleWeights, edit: Callable[[str, Tensor], Tensor | None]) -> None:
        self._honest, self._edit = honest, edit
        self.weight_hash = honest.weight_hash

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._honest.tensors():
            edited = self._edit(name, tensor)
            if edited is not None:
                yield name, edited


def replay_chain(old: Any, new: Any, ids: list[int], n_prompt: int, switch: int) -> np.ndarray:
    """Log-probs of ids[n_prompt:] when the first `switch` come from `old` and the rest from `new` on `old`'s keys."""
    from transformers import DynamicCache

    cache, result = DynamicCache(config=old.config), []
    fed = 0
    for position in range(n_prompt, len(ids)):
        model = old if position - n_prompt < switch else new
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[fed:position]]), cache=cache, use_cache=True).logits[0, -1]
        fed = position
        result.append(torch.log_softmax(logits, dim=-1)[ids[position]].item())
    return np.array(result)


@pytest.mark.parametrize("kv", ["in_place", "recompute"])
@pytest.mark.parametrize("switch", [1, 7])
def test_versions_change_at_exactly_the_token_where_the_weights_did(kv: Any, switch: int, plain_logprobs: Any) -> None:
    """Trap 9."""
    old, new = old_and_new()
    decoder = decoder_of(old, kv=kv, version=4)
    requests = [decoder.add(PROMPT[:n], Sampling(max_tokens=16, seed=n)) for n in (8, 5)]
    for _ in range(switch):
        decoder.step()
    decoder.publish(ModuleWeights(new), 6)
    while decoder.has_work:
        decoder.step()
    for request in requests:
        generation = request.generation()
        n = request.prompt_length
        assert generation.versions.tolist() == [4] * switch + [6] * (16 - switch)
        by_old, by_new = plain_logprobs(old, request.ids)[n - 1 :], plain_logprobs(new, request.ids)[n - 1 :]
        assert np.abs(generation.logprobs[:switch] - by_old[:switch]).max() < 2e-5
        gap_to_new = np.abs(generation.logprobs[switch:] - by_new[switch:]).max()
        if kv == "recompute":
            assert gap_to_new < 2e-5
        else:
            chain = replay_chain(old, new, request.ids, n, switch)
            assert np.abs(generation.logprobs - chain).max() < 2e-5
            assert gap_to_new > 1e-3  # no single model re-scores it


def test_recompute_also_forgets_idle_sessions(plain_logprobs: Any) -> None:
    old, new = old_and_new()
    for kv, kept in (("in_place", ("s",)), ("recompute", ())):
        decoder = decoder_of(old, kv=kv)  # type: ignore[arg-type]
        first = decoder.add(PROMPT, Sampling(max_tokens=6), "s")
        while decoder.has_work:
            decoder.step()
        decoder.publish(ModuleWeights(new), 1)
        assert decoder.sessions == kept
        second = decoder.add([*first.ids, 7, 8], Sampling(max_tokens=6), "s")
        other = decoder.add([*first.ids, 7, 8], Sampling(max_tokens=6), "t")
        while decoder.has_work:
            decoder.step()
        gaps = [np.abs(r.generation().logprobs - plain_logprobs(new, r.ids)[-6:]).max() for r in (second, other)]
        assert gaps[1] < 2e-5  # trap 14: a new session never sees keys of an older version
        assert bool(gaps[0] < 2e-5) is (kv == "recompute")


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama"])
def test_every_named_parameter_arrives_or_is_missed(kind: str, make_model: Any) -> None:
    """Trap 14: one element of each parameter in turn is changed, published, and left out."""
    learner = make_model(kind)
    decoder = decoder_of(learner)
    requests = [decoder.add(PROMPT, Sampling(max_tokens=200, seed=i)) for i in range(3)]
    version = 0
    for name, parameter in learner.named_parameters():
        before = own_hash(decoder)
        with torch.no_grad():
            parameter.view(-1)[-1] += 0.5
        honest = ModuleWeights(learner)
        stale = EditedSource(honest, lambda n, t, name=name: t - 0.5 * _last(t) if n == name else t)
        version += 1
        with pytest.raises(EngineError, match="the old ones serve on"):
            decoder.publish(stale, version)
        assert own_hash(decoder) == before
        assert decoder.publish(honest, version) == own_hash(decoder) == honest.weight_hash != before
        decoder.step()
    while decoder.has_work:
        decoder.step()
    for request in requests:
        assert len(request.generation().token_ids) == 200
        assert request.generation().versions.tolist()[: version + 1] == [*range(1, version + 1), version]


def _last(tensor: Tensor) -> Tensor:
    mask = torch.zeros_like(tensor)
    mask.view(-1)[-1] = 1
    return mask


def test_tied_embeddings_travel_once_and_arrive_at_both_ends() -> None:
    """Trap 33."""
    for tied in (True, False):
        learner = tiny_qwen3(VOCAB, 2, 32, context_length=256, tie_embeddings=tied)
        decoder = decoder_of(learner)
        with torch.no_grad():
            learner.model.embed_tokens.weight[7] += 1.0
        source = ModuleWeights(learner)
        assert ("lm_head.weight" in source.names) is not tied
        decoder.publish(source, 1)
        served = decoder.model.model
        assert torch.equal(served.model.embed_tokens.weight, learner.model.embed_tokens.weight)
        assert torch.equal(served.lm_head.weight, learner.lm_head.weight)
        assert (served.lm_head.weight is served.model.embed_tokens.weight) is tied
        ids = torch.tensor([PROMPT])
        with torch.no_grad():
            assert torch.equal(served(input_ids=ids).logits, learner(input_ids=ids).logits)


def test_a_source_that_does_not_fit_changes_nothing() -> None:
    old, new = old_and_new()
    decoder = decoder_of(old, version=2)
    before = own_hash(decoder)
    honest = ModuleWeights(new)
    wide = tiny_qwen3(VOCAB + 1, 2, 32)

    def broken(name: str, tensor: Tensor) -> Tensor:
        raise OSError("the line went dead")

    wrong: list[tuple[Any, str]] = [
        (EditedSource(honest, lambda n, t: None if "mlp.up" in n else t), "missing.*nothing was copied"),
        (ModuleWeights(wide), "holds torch.float32.*nothing was copied"),
        (ModuleWeights(new, torch.bfloat16), "torch.bfloat16.*nothing was copied"),
        (ModuleWeights(tiny_qwen3(VOCAB, 2, 32, tie_embeddings=False)), "unknown.*lm_head"),
    ]
    for source, message in wrong:
        with pytest.raises(EngineError, match=message):
            decoder.publish(source, 3)
        assert (own_hash(decoder), decoder.version) == (before, 2)
    for version in (2, 1):
        with pytest.raises(EngineError, match="already serves 2"):
            decoder.publish(honest, version)
    dead = EditedSource(honest, lambda n, t: t)
    dead._edit = broken
    dead.__class__ = type("Dead", (EditedSource,), {"names": honest.names})
    with pytest.raises(EngineError, match="the line went dead"):
        decoder.publish(dead, 3)
    assert own_hash(decoder) == before
    decoder.publish(honest, 3)
    assert own_hash(decoder) == honest.weight_hash


def test_an_engine_in_bfloat16_takes_a_float32_learners_weights(plain_logprobs: Any) -> None:
    _, learner = old_and_new()
    decoder = Decoder(CachedModel(copy_model(learner, torch.bfloat16), 256))
    with torch.no_grad():
        learner.model.norm.weight.mul_(1.5)
    decoder.publish(ModuleWeights(learner, torch.bfloat16), 1)
    request = decoder.add(PROMPT, Sampling(max_tokens=10))
    while decoder.has_work:
        decoder.step()
    gap = np.abs(request.generation().logprobs - plain_logprobs(learner, request.ids)[-10:]).max()
    assert 1e-6 < gap < 0.2


class SourceWithoutNames:
    weight_hash = "0"

    @property
    def names(self) -> tuple[str, ...]:
        raise RuntimeError("the other side has gone")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return iter(())


@pytest.mark.parametrize("kv", ["in_place", "recompute"])
async def test_a_source_that_fails_before_its_first_tensor_costs_no_engine(kv: Any) -> None:
    old, new = old_and_new()
    engine = LocalEngine(old, kv=kv, threads=1)
    try:
        with pytest.raises(EngineError, match=r"publication broke off \(the other side has gone\)"):
            await engine.publish(SourceWithoutNames(), 1)
        await engine.publish(ModuleWeights(new), 1)
        assert (await engine.health()).version == 1
    finally:
        await engine.close()


def test_weights_that_are_no_numbers_are_refused_and_the_old_serve_on() -> None:
    old, new = old_and_new()
    decoder = decoder_of(old)
    before = own_hash(decoder)
    with torch.no_grad():
        new.lm_head.weight[3, 3] = torch.nan
    with pytest.raises(EngineError, match=r"values that are not numbers; nothing was copied"):
        decoder.publish(ModuleWeights(new), 1)
    assert (own_hash(decoder), decoder.version) == (before, 0)
