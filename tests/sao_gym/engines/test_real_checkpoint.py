"""SmolLM2-135M-Instruct, a real checkpoint in GGUF form, through loading, saving, sampling and publication."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sao_gym.engines.local import LocalEngine
from sao_gym.models import LoadedPolicy, load_policy
from sao_gym.protocols import Sampling
from sao_gym.stream import StopReason
from sao_gym.weights import ModuleWeights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def policy(smollm2_dir: Path) -> LoadedPolicy:
    return load_policy(smollm2_dir)


def test_the_expanded_checkpoint_saves_and_loads_again(policy: LoadedPolicy, tmp_path: Path) -> None:
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    again = load_policy(tmp_path)
    assert ModuleWeights(again.model).weight_hash == ModuleWeights(policy.model).weight_hash
    text = "The answer is 42."
    assert again.tokenizer.encode(text) == policy.tokenizer.encode(text)
    assert again.stop_token_ids() == policy.stop_token_ids() == (policy.tokenizer.eos_token_id,)


async def test_it_answers_and_its_logprobs_are_the_learners(policy: LoadedPolicy, plain_logprobs: Any) -> None:
    engine = LocalEngine(policy.model, context_length=512, threads=1)
    try:
        text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
        prompt = np.array(policy.tokenizer.encode(text), dtype=np.int32)
        greedy = Sampling(max_tokens=40, temperature=0.0, stop_token_ids=policy.stop_token_ids())
        answer = await engine.generate(prompt, greedy, "episode")
        assert "Paris" in policy.tokenizer.decode(answer.token_ids)
        assert answer.stop is StopReason.STOP
        more = np.concatenate([prompt, answer.token_ids, policy.tokenizer.encode("\n<|im_start|>user\nAnd of Italy?")])
        sampled = await engine.generate(more, Sampling(max_tokens=24, temperature=0.7, seed=1), "episode")
        assert engine.counts.reused == len(prompt) + len(answer.token_ids) - 1
        ids = [*more.tolist(), *sampled.token_ids.tolist()]
        n = len(sampled.token_ids)
        assert np.abs(plain_logprobs(policy.model, ids, 0.7)[-n:] - sampled.logprobs).max() < 1e-4
        np.testing.assert_allclose((await engine.score(np.array(ids), 0.7))[-n:], sampled.logprobs, atol=1e-4)
        source = ModuleWeights(policy.model)
        with torch.no_grad():
            policy.model.model.norm.weight.mul_(1.01)
        await engine.publish(source, 1)
        assert ModuleWeights(policy.model).weight_hash == source.weight_hash
    finally:
        await engine.close()
