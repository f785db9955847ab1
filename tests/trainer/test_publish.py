"""Publication: the engine computes what it was sent, or the run says that it does not."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from sao_gym.clock import SystemClock
from sao_gym.engines.local import LocalEngine
from sao_gym.errors import DeadlineError, EngineError, InvariantError
from sao_gym.loops import run_blocking
from sao_gym.models import copy_model
from sao_gym.trainer.critic import critic_from_model
from sao_gym.trainer.learner import Learner
from sao_gym.trainer.publish import PROBE_TOKENS, TRIES, Publisher, make_probe


class DeafEngine(LocalEngine):
    """The real engine, whose first publications fail on the way."""

    failures = 0

    async def publish(self, source: Any, version: int) -> None:
        if self.failures:
            self.failures -= 1
            raise EngineError("the connection broke")
        await super().publish(source, version)


class WrongEngine(LocalEngine):
    """Takes the weights, hash and all, and computes something else with them: here, at another temperature."""

    async def score(self, token_ids: Any, temperature: float = 1.0) -> Any:
        return await super().score(token_ids, temperature=1.1 * temperature)


class StuckEngine(LocalEngine):
    """Never answers."""

    async def publish(self, source: Any, version: int) -> None:
        await asyncio.sleep(3600)


@pytest.fixture
def make_engine():
    engines = []

    def make(model: Any, kind: type[LocalEngine] = LocalEngine) -> LocalEngine:
        engines.append(kind(copy_model(model).eval(), context_length=128))
        return engines[-1]

    yield make
    for engine in engines:
        run_blocking(engine.close())


@pytest.fixture
def bf16():
    """An accelerator that computes in bfloat16; its settings are shared, so they are forgotten before and after."""
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


@pytest.fixture
def setting(make_policy, make_batch, make_config, make_learner, plan_of, make_engine):
    """A learner one step ahead of its engine, and a probe."""

    def make(
        kind: type[LocalEngine] = LocalEngine, deadline_s: float = 60.0, architecture: str = "qwen3", **options: Any
    ) -> Any:
        model = make_policy(architecture, **options)
        engine = make_engine(model, kind)
        learner = make_learner(make_config(actor={"lr": 1e-2}), model)
        learner.step(plan_of(make_batch(3), learner.config))
        changes: list[int] = []
        publisher = Publisher(engine, SystemClock(), lambda: changes.append(engine.version), deadline_s=deadline_s)
        probe = make_probe(learner.bare_actor, make_batch(1, turns=12, seed=7)[0].streams[0].token_ids)
        return learner, engine, publisher, probe, changes

    return make


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama", "sliding"])
def test_a_publication_that_happened(kind, setting):
    learner, engine, publisher, probe, changes = setting(architecture=kind)
    assert len(probe.token_ids) > 20
    before = run_blocking(engine.score(probe.token_ids))
    assert np.abs(before - probe.logprobs).max() > 1e-2  # the engine still serves the old weights
    source = learner.weights()
    publisher.start(source, 1, probe)
    report = publisher.finish()
    assert (report.version, report.failures) == (1, 0)
    assert engine.version == 1
    assert changes == [1]
    assert report.probe_error < 1e-4
    assert report.seconds > 0
    assert report.weight_hash == source.weight_hash == run_blocking(engine.health()).weight_hash
    assert publisher.finish() is None


def test_training_on_does_not_change_what_travels(setting, make_batch, plan_of):
    """The weights are those at the start of the publication."""
    learner, engine, publisher, probe, _ = setting()
    publisher.start(learner.weights(), 1, probe)
    learner.step(plan_of(make_batch(3, seed=1), learner.config, batch=1, actor_batches=1, version=1))
    assert publisher.finish().probe_error < 1e-4
    assert run_blocking(engine.health()).weight_hash != learner.weights().weight_hash


def test_an_engine_that_computes_something_else_is_found(setting):
    """Trap 14: the hash agrees, the probe does not."""
    learner, _, publisher, probe, _ = setting(WrongEngine)
    publisher.start(learner.weights(), 1, probe)
    with pytest.raises(EngineError, match=r"disagree by .* on version 1"):
        publisher.finish()


def test_a_probe_of_other_weights_is_found(setting):
    """Trap 14: one perturbed weight of a layer is enough."""
    learner, _, publisher, probe, _ = setting()
    with torch.no_grad():
        learner.model.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    publisher.start(learner.weights(), 1, probe)
    with pytest.raises(EngineError, match="disagree"):
        publisher.finish()


def test_failures_are_tried_again_and_counted(setting):
    learner, engine, publisher, probe, changes = setting(DeafEngine)
    engine.failures = TRIES - 1
    publisher.start(learner.weights(), 1, probe)
    report = publisher.finish()
    assert report.failures == TRIES - 1 == 2
    assert engine.version == 1
    assert changes == [1]


def test_too_many_failures_end_the_run_with_the_engines_words(setting):
    learner, engine, publisher, probe, changes = setting(DeafEngine)
    engine.failures = TRIES
    publisher.start(learner.weights(), 1, probe)
    with pytest.raises(EngineError, match="the connection broke"):
        publisher.finish()
    assert engine.version == 0  # the old version goes on serving
    assert changes == []


def test_the_wait_has_a_deadline_that_names_it(setting):
    """Trap 24."""
    learner, engine, publisher, probe, _ = setting(StuckEngine, deadline_s=0.2)
    publisher.start(learner.weights(), 1, probe)
    with pytest.raises(DeadlineError, match=r"0\.2 s for the engine to take new weights"):
        publisher.finish()
    assert engine.version == 0


def test_one_at_a_time(setting):
    learner, _, publisher, probe, _ = setting()
    publisher.start(learner.weights(), 1, probe)
    with pytest.raises(InvariantError, match="one publication at a time"):
        publisher.start(learner.weights(), 2, probe)
    publisher.finish()
    publisher.start(learner.weights(), 2, probe)
    assert publisher.finish().version == 2


def test_tied_embeddings_arrive_at_both_ends(setting):
    """Trap 33: perturb, publish, compare both ends; untied ones arrive as two."""
    for tied in (True, False):
        learner, engine, publisher, _, _ = setting(tie_embeddings=tied)
        with torch.no_grad():
            learner.model.get_input_embeddings().weight[3] += 0.5
            if not tied:
                learner.model.get_output_embeddings().weight[4] -= 0.25
        probe = make_probe(learner.bare_actor, np.array([1, 3, 4, 5, 3, 4]))
        publisher.start(learner.weights(), 1, probe)
        assert publisher.finish().probe_error < 1e-4
        served = engine._decoder.model.model
        for end in ("get_input_embeddings", "get_output_embeddings"):
            assert torch.equal(getattr(served, end)().weight, getattr(learner.model, end)().weight)
        is_one = served.get_input_embeddings().weight is served.get_output_embeddings().weight
        assert is_one == tied


def test_a_learner_that_computes_in_bf16_publishes_to_a_float32_engine(
    bf16, make_policy, make_batch, make_config, plan_of, make_engine
):
    """The probe compares weights, not compute types: it is scored in float32 whatever the steps are computed in."""
    model = make_policy()
    engine = make_engine(model)
    config = make_config(actor={"lr": 1e-2}, learner={"precision": "bf16"})
    learner = Learner(config, model, critic_from_model(model), bf16, SystemClock())
    metrics = learner.step(plan_of(make_batch(3), config)).metrics()
    assert np.isfinite(metrics["policy_loss"])
    assert {p.dtype for p in (*model.parameters(), *learner.bare_critic.parameters())} == {torch.float32}
    ids = make_batch(1, turns=12, seed=7)[0].streams[0].token_ids
    probe = make_probe(learner.bare_actor, ids)
    publisher = Publisher(engine, SystemClock(), lambda: None, deadline_s=60.0)
    publisher.start(learner.weights(), 1, probe)
    assert publisher.finish().probe_error < 1e-4


def test_a_probe_is_short_and_keeps_the_learners_mode(setting):
    learner, *_ = setting()
    ids = np.arange(300) % 40
    probe = make_probe(learner.bare_actor, ids)
    assert len(probe.token_ids) == len(probe.logprobs) == PROBE_TOKENS
    assert probe.logprobs[0] == 0.0
    assert (probe.logprobs[1:] < 0).all()
    assert learner.bare_actor.training
    assert len(make_probe(learner.bare_actor, ids[:1]).logprobs) == 1
