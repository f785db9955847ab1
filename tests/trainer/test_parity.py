"""The parity report: what it measures, where it puts it, and what it advises."""

import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.clock import SystemClock
from sao_gym.commands.train import main
from sao_gym.engines.local import LocalEngine
from sao_gym.jsonl import read_jsonl
from sao_gym.loops import run_blocking
from sao_gym.models import copy_model
from sao_gym.trainer.events import PartFiles
from sao_gym.trainer.parity import PARITY, POSITION_EDGES, Parity, ParityLog, TokenPairs, advice, canary_of
from sao_gym.trainer.publish import Publisher, make_probe

LOGPROBS = st.lists(st.tuples(st.floats(-20, 0), st.floats(-20, 0), st.integers(0, 100_000)), max_size=40)


def pairs_of(rows: list[tuple[float, float, int]]) -> TokenPairs:
    table = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return TokenPairs(table[:, 0], table[:, 1], table[:, 2].astype(np.int64))


def test_figures_of_known_differences() -> None:
    found = Parity.of([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.1, -2.8, -4.0])
    assert (found.n, found.mean, found.max) == (4, pytest.approx(0.075), pytest.approx(0.2))
    assert found.p99 == pytest.approx(0.1 + 0.97 * 0.1)
    assert found.kl == pytest.approx((np.exp(-0.1) - 1 + 0.1 + np.exp(0.2) - 1 - 0.2) / 4)
    assert Parity.of([], []) == Parity(n=0)
    assert Parity.of([-1.0, np.nan], [-1.0, -1.0]).mean == np.inf


@given(LOGPROBS)
def test_buckets_are_the_whole(rows: list[tuple[float, float, int]]) -> None:
    pairs = pairs_of(rows)
    parts = list(pairs.by_position())
    assert sum(part.n for _, part in parts) == pairs.parity.n == len(rows)
    if rows:
        assert max(part.max or 0.0 for _, part in parts) == pairs.parity.max
        assert sum(part.n * (part.kl or 0.0) for _, part in parts) == pytest.approx(
            len(rows) * (pairs.parity.kl or 0.0)
        )
        assert (pairs.parity.kl or 0.0) >= 0
    for edge, part in parts:
        above = [*POSITION_EDGES, 1 << 60][POSITION_EDGES.index(edge) + 1]
        assert part.n == sum(edge <= position < above for *_, position in rows)


def test_kl_is_that_of_two_distributions() -> None:
    """The mean over all outcomes, weighted as the engine samples them, is the divergence itself."""
    engine, learner = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    sampled = np.repeat(np.arange(3), [5, 3, 2])
    found = Parity.of(np.log(engine)[sampled], np.log(learner)[sampled])
    assert found.kl == pytest.approx(float(engine @ np.log(engine / learner)))


def test_the_canary_is_kept(make_batch: Any, tmp_path: Any) -> None:
    first = canary_of(tmp_path, make_batch(3, seed=1), 16)
    longest = max((s for t in make_batch(3, seed=1) for s in t.streams), key=len)
    assert first.tolist() == longest.token_ids[:16].tolist()
    assert canary_of(tmp_path, make_batch(3, seed=2), 16).tolist() == first.tolist()


class ShiftedEngine(LocalEngine):
    """Computes other log-probs from the 16th token on."""

    async def score(self, token_ids: Any, temperature: float = 1.0) -> Any:
        scored = np.array(await super().score(token_ids, temperature))
        scored[16:] -= 0.01
        return scored


@pytest.mark.parametrize(("kind", "shift"), [(LocalEngine, 0.0), (ShiftedEngine, 0.01)])
def test_a_difference_is_seen_where_it_is(
    kind: type[LocalEngine],
    shift: float,
    make_policy: Any,
    make_batch: Any,
    make_config: Any,
    make_learner: Any,
    plan_of: Any,
) -> None:
    model = make_policy("qwen3")
    engine = kind(copy_model(model).eval(), context_length=128)
    learner = make_learner(make_config(actor={"lr": 1e-2}), model)
    learner.step(plan_of(make_batch(3), learner.config))
    ids = make_batch(1, turns=12, seed=7)[0].streams[0].token_ids
    assert len(ids) > 24
    publisher = Publisher(engine, SystemClock(), lambda: None, deadline_s=60.0, tolerance=0.1)
    probe = make_probe(learner.bare_actor, ids)
    publisher.start(learner.weights(), 1, probe, make_probe(learner.bare_actor, ids, most=100))
    report = publisher.finish()
    run_blocking(engine.close())
    assert report is not None
    assert report.canary is not None
    buckets = dict(report.canary.by_position())
    assert buckets[0].max == pytest.approx(0.0, abs=1e-5)
    assert buckets[16].mean == pytest.approx(shift, abs=1e-5)
    assert report.canary.parity.n == min(len(ids), 100) - 1
    log = ParityLog()
    log.add(3, 1, "canary", report.canary)
    table = log.take().to_pylist()
    assert [(row["step"], row["version"], row["position"]) for row in table][:2] == [(3, 1, 0), (3, 1, 16)]
    assert log.take().num_rows == 0


def test_tokens_of_the_present_version_agree_before_the_first_update(
    make_policy: Any,
    make_batch: Any,
    make_config: Any,
    make_learner: Any,
    plan_of: Any,
    logprobs_of: Any,
    recorded_at: Any,
) -> None:
    """Log-probs recorded at this very policy: what the first update reads is the same, and older tokens do not count."""
    model = make_policy("qwen3")
    learner = make_learner(make_config(actor={"lr": 1e-2}), model)
    logprobs, packed = logprobs_of(learner.bare_actor, make_batch(4))
    versions = np.where(packed.row < 2, 1, 2)
    batch = recorded_at(make_batch(4), logprobs, versions)
    own = learner.step(plan_of(batch, learner.config, version=2)).lag_0
    assert own.parity.n == int((versions == 2).sum())
    assert own.parity.max is not None
    assert own.parity.max < 1e-5
    assert own.positions.tolist() == [int(i) for i in (packed.position_ids[packed.state_index] + 1)[versions == 2]]
    later = learner.step(plan_of(batch, learner.config, batch=1, actor_batches=1, version=3)).lag_0
    assert later.parity == Parity(n=0)


def test_advice_names_what_to_set() -> None:
    found = Parity.of([-1.0], [-1.1])
    servers = advice(found, engine="sglang", precision="bf16")
    assert "--dtype bfloat16" in servers
    assert "--enable-deterministic-inference" in servers
    assert "--rl-on-policy-target" in servers
    assert "--dtype float32" in advice(found, engine="sglang", precision="no")
    assert "learner.precision = no" in advice(found, engine="local", precision="bf16")


def test_a_run_writes_parity_by_version_and_says_once_what_to_do(
    crash: ModuleType,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = LocalEngine.score

    async def shifted(self: LocalEngine, token_ids: Any, temperature: float = 1.0) -> Any:
        return np.minimum(await plain(self, token_ids, temperature) + 0.05, 0.0)

    run = tmp_path / "run"
    words = [*crash.words(tiny_model, 0, is_lock_step=True), "--steps", "6", "--out", str(run)]
    monkeypatch.setattr(LocalEngine, "score", shifted)
    with caplog.at_level(logging.WARNING):
        assert main([*words, "--engine.probe-tolerance", "0.1", "--engine.parity-warning", "0.01"]) == 0
    assert len([record for record in caplog.records if "differ by" in record.message]) == 1
    rows = PartFiles(run / PARITY).read()
    own = [row for row in rows if row["source"] == "batch"]
    assert own
    assert max(row["max"] for row in own) < 1e-5, "in lock step all tokens are the learner's own version's"
    canary = [row for row in rows if row["source"] == "canary"]
    assert {row["mean"] > 0.01 for row in canary} == {True}
    trained = [record for _, record in read_jsonl(run / "metrics.jsonl") if record.get("actor_updates")]
    assert {row["version"] for row in own} == {record["policy_version"] - 1 for record in trained}
    assert all(row["version"] == row["step"] - 2 for row in canary), (
        "known one step later; the first trained the critic"
    )
