"""From rows to a plan: the cut, the shares of the ranks and the global denominators."""

import pytest

from sao_gym.stream import Outcome


def test_denominators_are_those_of_the_whole_batch(make_batch, make_config, plan_of):
    """Trap 11 and docs/paper.md row 4: every part knows the batch's count, not its own."""
    batch = make_batch(7)
    config = make_config(learner={"micro_batch_tokens": 30})
    plan = plan_of(batch, config, ranks=2)
    parts = [part for rank in plan.micro_batches for part in rank]
    tokens = sum(t.n_action for t in batch)
    assert len(parts) >= 4
    assert {part.n_action_global for part in parts} == {tokens}
    assert sum(part.n_action for part in parts) == tokens
    assert plan.n_rows == sum(part.n_rows for part in parts) == 7


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_rank_gets_as_many_parts(ranks, make_batch, make_config, plan_of):
    """Trap 11: same collectives on each, empty parts at the end where rows run out."""
    batch = make_batch(4)
    plan = plan_of(batch, make_config(learner={"micro_batch_tokens": 1}), ranks=ranks)
    assert len(plan.micro_batches) == ranks
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    for rank in plan.micro_batches:
        filled = [part.n_rows > 0 for part in rank]
        assert filled == sorted(filled, reverse=True)
    assert sum(part.n_rows for rank in plan.micro_batches for part in rank) == 4


def test_what_the_configuration_asks_reaches_the_parts(make_batch, make_config, plan_of):
    """Trap 23: credit and truncation are in force in the plan."""
    batch = make_batch(2, streams=2, reward=1.0, outcome=Outcome.truncated("wall_clock"))
    (chain,) = plan_of(batch, make_config()).micro_batches[0]
    assert chain.rewards.sum() == 2.0
    assert (chain.bootstrap_index == -1).all()
    config = make_config(loss={"credit": "local", "truncation": "bootstrap"})
    (local,) = plan_of(batch, config).micro_batches[0]
    assert local.rewards.sum() == 4.0
    assert local.bootstrap_index.tolist() == [local.doc_starts[2] - 1, local.doc_starts[4] - 1]


def test_counters_are_passed_on(make_batch, make_config, plan_of):
    plan = plan_of(make_batch(1), make_config(), batch=7, actor_batches=3, version=3, trains_actor=False)
    assert (plan.batch, plan.actor_batches, plan.version, plan.trains_actor) == (7, 3, 3, False)
