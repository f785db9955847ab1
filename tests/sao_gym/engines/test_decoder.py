"""Batched decoding against plain forward passes: log-probs, finish reasons, sessions, determinism."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sao_gym.engines.decoder import Decoder
from sao_gym.engines.forward import CachedModel
from sao_gym.errors import EngineError, ModelError
from sao_gym.models import copy_model, stop_ids, tiny_qwen3
from sao_gym.protocols import Generation, Sampling
from sao_gym.stream import StopReason
from sao_gym.trainer.attention import use_packed_attention

VOCAB = 40
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, size=n).tolist() for n in (1, 2, 3, 7, 12, 13, 30, 31, 60)]


def decoder_of(model: Any, **options: Any) -> Decoder:
    return Decoder(CachedModel(model, options.pop("context_length", 256)), **options)


def same(a: Generation, b: Generation, tolerance: float = 0.0) -> bool:
    return (
        a.token_ids.tolist() == b.token_ids.tolist()
        and a.stop is b.stop
        and bool(np.abs(a.logprobs - b.logprobs).max() <= tolerance)
    )


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama", "mistral", "mixed_sliding"])
def test_logprobs_equal_a_plain_forward_at_lag_0(kind: str, make_model: Any, plain_logprobs: Any, drain: Any) -> None:
    """Trap 8: at T = 0.7 engine and learner agree, and would not if either ignored the temperature."""
    model = make_model(kind)
    decoder = decoder_of(model, max_slots=4, prefill_chunk=16)
    requests = [
        decoder.add(prompt, Sampling(max_tokens=20 + 3 * i, temperature=0.7, seed=i))
        for i, prompt in enumerate(PROMPTS)
    ]
    for request, generation in zip(requests, drain(decoder, requests), strict=True):
        n = len(generation.token_ids)
        assert np.abs(plain_logprobs(model, request.ids, 0.7)[-n:] - generation.logprobs).max() < 2e-5
        assert np.abs(plain_logprobs(model, request.ids, 1.0)[-n:] - generation.logprobs).max() > 1e-3


def test_scores_equal_a_plain_forward(make_model: Any, plain_logprobs: Any) -> None:
    model = make_model()
    decoder = decoder_of(model, prefill_chunk=16)
    for ids in PROMPTS:
        scores = decoder.score(ids, 0.7)
        assert scores[0] == 0
        np.testing.assert_allclose(scores[1:], plain_logprobs(model, ids, 0.7) if len(ids) > 1 else [], atol=2e-5)


def test_results_do_not_depend_on_company(make_model: Any, drain: Any) -> None:
    model = make_model()
    together = decoder_of(model, max_slots=9)
    requests = [together.add(p, Sampling(max_tokens=25, seed=i)) for i, p in enumerate(PROMPTS)]
    for i, generation in enumerate(drain(together, requests)):
        alone = decoder_of(model)
        assert same(generation, drain(alone, [alone.add(PROMPTS[i], Sampling(max_tokens=25, seed=i))])[0], 2e-5)


def test_deterministic_results_are_bitwise_the_same_in_any_company(make_model: Any, drain: Any) -> None:
    model = make_model("qwen3_moe")
    samplings = [Sampling(max_tokens=15, seed=i, temperature=0.9) for i in range(len(PROMPTS))]
    alone = []
    for prompt, sampling in zip(PROMPTS, samplings, strict=True):
        decoder = decoder_of(model, deterministic=True, prefill_chunk=16)
        alone += drain(decoder, [decoder.add(prompt, sampling, "s")])
    crowded = decoder_of(model, deterministic=True, max_slots=3, prefill_chunk=16)
    # sessions whose prefix another mode would reuse, and the reverse order of arrival
    drain(
        crowded,
        [
            crowded.add(prompt[: len(prompt) // 2 or 1], Sampling(max_tokens=3), f"s{i}")
            for i, prompt in enumerate(PROMPTS)
        ],
    )
    requests = [crowded.add(PROMPTS[i], samplings[i], f"s{i}") for i in reversed(range(len(PROMPTS)))]
    for expected, got in zip(alone[::-1], drain(crowded, requests), strict=True):
        assert same(expected, got)
    assert crowded.counts.reused == 0


def test_turns_of_a_session_reuse_their_prefix_exactly(make_model: Any, plain_logprobs: Any, drain: Any) -> None:
    model = make_model("mixed_sliding")
    decoder = decoder_of(model, max_slots=2)
    ids = [1, 2, 3, 4, 5]
    for turn in range(3):
        fed, reused = decoder.counts.fed, decoder.counts.reused
        request = decoder.add(ids, Sampling(max_tokens=9, seed=turn), "episode")
        generation = drain(decoder, [request])[0]
        assert np.abs(plain_logprobs(model, request.ids)[-9:] - generation.logprobs).max() < 2e-5
        # the last sampled token was never fed; the observation is 6 tokens
        assert decoder.counts.reused - reused == (0 if turn == 0 else len(ids) - 7)
        assert decoder.counts.fed - fed == (5 if turn == 0 else 7) + 8
        ids = [*request.ids, 7, 8, 9, 10, 11, 12]


def test_an_edited_history_reuses_the_common_part_only(make_model: Any, plain_logprobs: Any, drain: Any) -> None:
    model = make_model()
    decoder = decoder_of(model)
    drain(decoder, [decoder.add(list(range(20)), Sampling(max_tokens=4), "s")])
    edited = [*range(12), 30, 31, 32]
    request = decoder.add(edited, Sampling(max_tokens=6), "s")
    generation = drain(decoder, [request])[0]
    assert decoder.counts.reused == 12
    assert np.abs(plain_logprobs(model, request.ids)[-6:] - generation.logprobs).max() < 2e-5
    shorter = decoder.add(edited[:5], Sampling(max_tokens=6), "s")
    drain(decoder, [shorter])
    assert decoder.counts.reused == 12 + 4  # at least the last prompt token is fed again


def test_sessions_share_nothing_and_the_oldest_goes_first(make_model: Any, drain: Any) -> None:
    decoder = decoder_of(make_model(), max_idle_tokens=30)
    for name in ("a", "b", "c"):
        drain(decoder, [decoder.add(list(range(10)), Sampling(max_tokens=4), name)])
    assert decoder.counts.reused == 0
    assert decoder.sessions == ("b", "c")  # 13 tokens each, room for 30
    decoder.end_session("b")
    assert decoder.sessions == ("c",)


@pytest.mark.parametrize("n_before_stop", [0, 4])
def test_each_finish_reason_keeps_ids_logprobs_and_versions_in_number(
    n_before_stop: int, make_chain: Any, drain: Any
) -> None:
    """Trap 7, first part: stop, length, abort."""
    model = make_chain({1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 1})
    start = 6 - n_before_stop  # the chain reaches 7 - 1 = 6 after n tokens
    decoder = decoder_of(model, context_length=64)
    stop_token = start % 6 + 1 if n_before_stop == 0 else 6
    stopped = decoder.add([start], Sampling(max_tokens=20, stop_token_ids=(stop_token,)))
    cut = decoder.add([start], Sampling(max_tokens=3))
    aborted = decoder.add([start], Sampling(max_tokens=50), "gone")
    for _ in range(7):
        decoder.step()
    assert decoder.abort("gone") == [aborted]
    for request, reason in (
        (stopped, StopReason.STOP),
        (cut, StopReason.LENGTH),
        (aborted, StopReason.ABORT),
    ):
        generation = request.generation()
        assert generation.stop is reason
        assert len(generation.token_ids) == len(generation.logprobs) == len(generation.versions)
        assert (generation.logprobs > -0.2).all()  # each forced token scored as itself
    assert stopped.generation().token_ids[-1] == stop_token
    assert len(cut.generation().token_ids) == 3
    assert len(aborted.generation().token_ids) == 7
    assert not decoder.has_work


def test_aborting_a_request_that_still_waits_returns_nothing_sampled(make_model: Any) -> None:
    decoder = decoder_of(make_model(), max_slots=1)
    decoder.add([1], Sampling(max_tokens=5))
    decoder.step()
    waiting = decoder.add([1], Sampling(max_tokens=5), "w")
    decoder.abort("w")
    assert (waiting.generation().stop, len(waiting.generation().token_ids)) == (StopReason.ABORT, 0)


@pytest.mark.parametrize("eos", [3, [7, 3], None])
def test_all_declared_ids_stop_and_stop_wins_over_length(eos: Any, make_chain: Any, drain: Any) -> None:
    """Case EG-02."""
    chat = type("C", (), {"stop_token_ids": (7,)})()
    tokenizer = type("T", (), {"eos_token_id": 3})()
    declared = stop_ids(tokenizer, type("G", (), {"eos_token_id": eos})(), chat)
    assert declared == (7, 3)
    model = make_chain({10: 11, 11: 12, 12: 13, 13: 14, 14: 7, 7: 9, 9: 9, 1: 2, 2: 3, 3: 9})
    decoder = decoder_of(model, context_length=64)
    requests = [
        decoder.add([10], Sampling(max_tokens=20, stop_token_ids=declared)),
        decoder.add([1], Sampling(max_tokens=20, stop_token_ids=declared)),
        decoder.add([10], Sampling(max_tokens=5, stop_token_ids=declared)),
    ]
    generations = drain(decoder, requests)
    assert [g.token_ids.tolist() for g in generations] == [[11, 12, 13, 14, 7], [2, 3], [11, 12, 13, 14, 7]]
    assert {g.stop for g in generations} == {StopReason.STOP}
    assert all(len(g.logprobs) == len(g.token_ids) for g in generations)


def test_the_context_length_ends_a_request(make_model: Any, drain: Any) -> None:
    decoder = decoder_of(make_model(), context_length=20)
    generation = drain(decoder, [decoder.add([1] * 17, Sampling(max_tokens=50))])[0]
    assert (len(generation.token_ids), generation.stop) == (3, StopReason.LENGTH)


def test_a_checkpoints_generation_config_changes_nothing(make_model: Any, drain: Any) -> None:
    """Trap 34."""
    results = []
    for penalised in (False, True):
        model = make_model()
        if penalised:
            config = model.generation_config
            config.repetition_penalty, config.top_p, config.top_k = 5.0, 0.1, 1
            config.temperature, config.do_sample, config.max_length = 0.1, True, 4
            config.eos_token_id = list(range(VOCAB))
        decoder = decoder_of(model)
        results += drain(decoder, [decoder.add([1, 2, 3], Sampling(max_tokens=30, seed=9))])
    assert same(results[0], results[1])
    assert len(results[0].token_ids) == 30


def test_dropout_is_off(plain_logprobs: Any, drain: Any) -> None:
    """Trap 30, the engine's side."""
    model = tiny_qwen3(VOCAB, 2, 32, context_length=256, attention_dropout=0.5).train()
    decoder = decoder_of(model)
    request = decoder.add([1, 2, 3], Sampling(max_tokens=10))
    generation = drain(decoder, [request])[0]
    assert np.abs(plain_logprobs(model.eval(), request.ids)[-10:] - generation.logprobs).max() < 2e-5


def test_dropping_a_request_frees_its_row_and_leaves_the_others_alone(make_model: Any, drain: Any) -> None:
    model = make_model()
    reference = decoder_of(model)
    expected = drain(reference, [reference.add(p, Sampling(max_tokens=20, seed=i)) for i, p in enumerate(PROMPTS[:4])])
    decoder = decoder_of(model, max_slots=4)
    requests = [decoder.add(p, Sampling(max_tokens=20, seed=i), str(i)) for i, p in enumerate(PROMPTS[:4])]
    for _ in range(8):
        decoder.step()
    decoder.drop(requests[0])
    decoder.drop(requests[2])
    assert len(decoder.active) == 2
    while decoder.has_work:
        decoder.step()
    assert same(requests[1].generation(), expected[1], 2e-5)
    assert same(requests[3].generation(), expected[3], 2e-5)
    assert decoder.sessions == ("1", "3")


def test_logits_that_are_not_finite_fail_the_request(make_model: Any) -> None:
    model = make_model()
    decoder = decoder_of(model)
    model.lm_head.weight.data.fill_(float("nan"))
    request = decoder.add([1, 2], Sampling(max_tokens=5))
    decoder.step()
    with pytest.raises(EngineError, match="not finite under version 0"):
        request.generation()
    assert not decoder.has_work


def test_memory_grows_with_use(make_model: Any, drain: Any) -> None:
    decoder = decoder_of(make_model(), max_slots=32)
    drain(decoder, [decoder.add([1, 2], Sampling(max_tokens=3))])
    small = decoder._store.size_bytes
    drain(decoder, [decoder.add([1] * 200, Sampling(max_tokens=3)) for _ in range(16)])
    assert small * 8 == decoder._store.size_bytes  # 4 x 128 became 16 x 256


def test_models_whose_state_is_not_keys_and_values_are_refused() -> None:
    from transformers import MambaConfig, MambaForCausalLM, T5Config, T5ForConditionalGeneration

    mamba = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=16, state_size=4, num_hidden_layers=1))
    with pytest.raises(ModelError, match=r"recurrent|linear|mamba"):
        CachedModel(mamba, 64)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ModelError, match="encoder-decoder"):
        CachedModel(t5, 64)


def test_a_model_that_ignores_its_cache_is_refused(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    from sao_gym.engines.slots import SlotWindow

    monkeypatch.setattr(SlotWindow, "_write", lambda self, stored, new: new.expand(-1, -1, self._length, -1))
    with pytest.raises(ModelError, match="other logits"):
        CachedModel(model, 64)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "mixed_sliding"])
def test_engine_and_learner_agree_at_lag_0(kind: str, make_model: Any, drain: Any) -> None:
    """Trap 8 with the learner's own attention over packed documents, in train mode (trap 30)."""
    learner = make_model(kind)
    use_packed_attention(learner)
    learner.train()
    decoder = decoder_of(copy_model(learner), max_slots=4)
    requests = [decoder.add(p, Sampling(max_tokens=40, temperature=0.7, seed=i)) for i, p in enumerate(PROMPTS)]
    generations = drain(decoder, requests)
    lengths = [len(request.ids) for request in requests]
    with torch.no_grad():
        logits = learner(
            input_ids=torch.tensor([[t for request in requests for t in request.ids]]),
            position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
            cu_seq_lens_q=torch.tensor([0, *np.cumsum(lengths)]),
            use_cache=False,
        ).logits[0]
    for request, generation, end in zip(requests, generations, np.cumsum(lengths), strict=True):
        n = len(generation.token_ids)
        logprobs = torch.log_softmax(logits[end - n - 1 : end - 1] / 0.7, dim=-1)
        exact = logprobs.gather(1, torch.tensor(request.ids[-n:])[:, None])[:, 0].numpy()
        assert np.abs(exact - generation.logprobs).max() < 1e-4
