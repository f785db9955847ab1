"""Small models of several architectures, a model with forced logits, and the plain forward pass to compare with."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sao_gym.engines.decoder import Decoder
from sao_gym.engines.request import Request
from sao_gym.models import tiny_llama, tiny_qwen3, tiny_qwen3_moe
from sao_gym.protocols import Generation

VOCAB = 40

if str(Path(__file__).parent) not in sys.path:
    sys.path.append(str(Path(__file__).parent))  # helpers of the tests of SGLang: sglang_standin and others


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_llama() -> Any:
    """SmolLM2's architecture: a tied Llama with grouped heads."""
    return tiny_llama(VOCAB, seed=3)


def make_mistral() -> Any:
    """Every layer slides over 8 tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        sliding_window=8,
    )
    torch.manual_seed(4)
    return MistralForCausalLM(config).eval()


def make_mixed_sliding() -> Any:
    """One full layer and one that slides over 8 tokens."""
    return tiny_qwen3(
        VOCAB,
        2,
        32,
        context_length=256,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )


MODELS: Mapping[str, Callable[[], Any]] = {
    "qwen3": lambda: tiny_qwen3(VOCAB, 2, 32, context_length=256),
    "qwen3_moe": lambda: tiny_qwen3_moe(VOCAB, 2, 32, experts=4, context_length=256),
    "llama": make_llama,
    "mistral": make_mistral,
    "mixed_sliding": make_mixed_sliding,
}


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """A small random model by the name of its architecture."""
    return lambda kind="qwen3": MODELS[kind]()


@pytest.fixture
def make_chain() -> Callable[[Mapping[int, int]], Any]:
    """A real Qwen3 that says `successors[t]` after token t, whatever came before, with probability about 1."""

    def make(successors: Mapping[int, int]) -> Any:
        size = 16
        model = tiny_qwen3(size, 1, size, heads=2, kv_heads=1, context_length=64, tie_embeddings=False)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "layers" in name and "norm" not in name:
                    parameter.zero_()
            model.model.embed_tokens.weight.copy_(torch.eye(size))
            model.lm_head.weight.zero_()
            for token, following in successors.items():
                model.lm_head.weight[following, token] = 10.0
        return model

    return make


@pytest.fixture
def plain_logprobs() -> Callable[..., np.ndarray]:
    """Log-prob of each token after the first under one plain forward pass [n - 1]."""

    def score(model: Any, ids: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].float()
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        result: np.ndarray = logprobs.gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0].numpy()
        return result

    return score


@pytest.fixture
def drain() -> Callable[[Decoder, Sequence[Request]], list[Generation]]:
    """Step a decoder until it has nothing left to do."""

    def run(decoder: Decoder, requests: Sequence[Request]) -> list[Generation]:
        while decoder.has_work:
            decoder.step()
        return [request.generation() for request in requests]

    return run
