"""Whatever happens in whatever order, a finished request is what the models of its versions say it is."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.engines.decoder import Decoder
from sao_gym.engines.forward import CachedModel
from sao_gym.engines.request import Request
from sao_gym.models import copy_model, tiny_qwen3
from sao_gym.protocols import Sampling
from sao_gym.stream import StopReason
from sao_gym.weights import ModuleWeights

VOCAB = 24
CONTEXT = 48
MODELS = [tiny_qwen3(VOCAB, 2, 16, heads=2, kv_heads=1, context_length=CONTEXT, seed=s) for s in range(4)]
SOURCES = [ModuleWeights(model) for model in MODELS]

sessions = st.sampled_from([None, "a", "b", "c"])
operations = st.one_of(
    st.tuples(st.just("add"), sessions, st.integers(1, 30), st.integers(1, 12)),
    st.tuples(st.just("continue"), sessions, st.integers(1, 9), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
    st.tuples(st.just("abort"), sessions),
    st.tuples(st.just("end"), sessions),
    st.tuples(st.just("publish")),
)


class Driver:
    """Applies operations to a decoder and remembers each session's history and every request."""

    def __init__(self, kv: Any) -> None:
        model = CachedModel(copy_model(MODELS[0]), CONTEXT)
        self.decoder = Decoder(model, max_slots=3, kv=kv, prefill_chunk=7, prefill_tokens=20, max_idle_tokens=60)
        self.requests: list[Request] = []
        self.dropped: set[int] = set()
        self.rng = np.random.default_rng(0)

    def ids(self, n: int) -> list[int]:
        return self.rng.integers(0, VOCAB, n).tolist()

    def add(self, session: str | None, n: int, limit: int) -> None:
        sampling = Sampling(max_tokens=limit, seed=len(self.requests), temperature=0.8)
        self.requests.append(self.decoder.add(self.ids(n), sampling, session))

    def next_turn(self, session: str | None, n: int, limit: int) -> None:
        before = [r for r in self.requests if r.session == session and r.stop is not None]
        if before and len(before[-1].ids) + n < CONTEXT:
            sampling = Sampling(max_tokens=limit, seed=len(self.requests), temperature=0.8)
            self.requests.append(self.decoder.add([*before[-1].ids, *self.ids(n)], sampling, session))

    def apply(self, operation: tuple[Any, ...]) -> None:
        kind, *arguments = operation
        match kind:
            case "add":
                self.add(*arguments)
            case "continue":
                self.next_turn(*arguments)
            case "step":
                for _ in range(arguments[0]):
                    self.decoder.step()
            case "drop":
                running = [r for r in self.requests if not r.is_finished and id(r) not in self.dropped]
                if running:
                    request = running[arguments[0] % len(running)]
                    self.dropped.add(id(request))
                    self.decoder.drop(request)
            case "abort" if arguments[0] is not None:
                self.decoder.abort(arguments[0])
            case "end" if arguments[0] is not None:
                self.decoder.end_session(arguments[0])
            case "publish" if self.decoder.version + 1 < len(MODELS):
                version = self.decoder.version + 1
                self.decoder.publish(SOURCES[version], version)

    def finish(self) -> list[Request]:
        for _ in range(2000):
            if not self.decoder.has_work:
                break
            self.decoder.step()
        assert not self.decoder.has_work
        return [r for r in self.requests if id(r) not in self.dropped]


def check(request: Request) -> None:
    generation = request.generation()
    n = len(generation.token_ids)
    assert n == len(generation.logprobs) == len(generation.versions)
    if generation.stop is StopReason.LENGTH:
        assert n == min(request.sampling.max_tokens, CONTEXT - request.prompt_length)
    else:
        assert generation.stop is StopReason.ABORT
    assert (np.diff(generation.versions) >= 0).all()
    for version in set(generation.versions.tolist()):
        at = generation.versions == version
        exact = score(MODELS[version], request.ids, 0.8)[request.prompt_length - 1 :]
        assert np.abs(exact[at] - generation.logprobs[at]).max() < 5e-5


@pytest.fixture(scope="module", autouse=True)
def quick() -> None:
    torch.set_num_threads(1)


def score(model: Any, ids: list[int], temperature: float) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1] / temperature
    result: np.ndarray = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    return result


@given(st.lists(operations, min_size=1, max_size=25))
@settings(max_examples=60, deadline=None)
def test_with_recomputed_keys_every_token_rescores_under_its_own_version(steps: list[tuple[Any, ...]]) -> None:
    driver = Driver("recompute")
    for operation in steps:
        driver.apply(operation)
    for request in driver.finish():
        check(request)


@given(st.lists(operations.filter(lambda operation: operation[0] != "publish"), min_size=1, max_size=25))
@settings(max_examples=40, deadline=None)
def test_without_publications_kept_keys_are_exact(steps: list[tuple[Any, ...]]) -> None:
    driver = Driver("in_place")
    for operation in steps:
        driver.apply(operation)
    for request in driver.finish():
        check(request)
    driver.decoder.end_session("a")
    assert "a" not in driver.decoder.sessions
