"""What one line of metrics says of a batch."""

from collections import Counter
from dataclasses import fields, replace

import numpy as np
import pytest

from sao_gym.stream import Outcome, Score, Trajectory
from sao_gym.trainer.losses import TokenAccount
from sao_gym.trainer.metrics import batch_metrics, loss_metrics, reward_mass_error, token_account_gap
from sao_gym.trainer.runtime import Batch, Losses
from sao_gym.trainer.statistics import StepStatistics


def test_reward_is_neither_lost_nor_doubled(make_batch):
    """Trap 2 and docs/paper.md row 5: the mass placed is the score, per stream with `local`."""
    rows = make_batch(4, streams=3)
    assert reward_mass_error(rows, "chain") == reward_mass_error(rows, "local") == 0.0
    n = rows[0].n_turns
    shares = tuple(0.25 if turn % 2 else 0.0 for turn in range(n))
    shared = rows[0].scored(Score(value=sum(shares), passed=True, per_action=shares))
    assert reward_mass_error([shared], "chain") == pytest.approx(0.0, abs=1e-7)


class Leaky(Trajectory):
    """A record that loses what it should place."""

    def rewards(self, credit="chain"):
        return tuple(np.zeros_like(placed) for placed in super().rewards(credit))


def test_lost_reward_is_seen(make_batch):
    row = make_batch(1, reward=1.0)[0]
    leaky = Leaky(**{field.name: getattr(row, field.name) for field in fields(Trajectory)})
    assert reward_mass_error([row, leaky], "chain") == 1.0


@pytest.fixture
def batch_of():
    def make(rows, version):
        return Batch(
            numbers=(),
            trajectories=tuple(rows),
            version=version,
            raises_version=True,
            ready_s=(1.0, 3.0),
            wait_s=2.0,
        )

    return make


def test_the_figures_of_a_batch(make_batch, batch_of, recorded_at):
    rows = make_batch(3, reward=1.0)
    rows = [rows[0], replace(rows[1], task_id="t0", outcome=Outcome.truncated("turns")), make_batch(1, reward=0.0)[0]]
    n = [row.n_action for row in rows]
    versions = [3] * n[0] + [7] * n[1] + [8] * n[2]
    rows = recorded_at(rows, [-1.0] * sum(n), versions)
    found = batch_metrics(batch_of(rows, 8), credit="chain", max_staleness=4)
    assert found["reward_mean"] == found["success_mean"] == pytest.approx(2 / 3)
    assert (found["rows"], found["prompts"]) == (3, 1)
    assert found["tokens_action"] == sum(n)
    assert found["tokens_total"] == sum(row.n_tokens for row in rows)
    assert found["tokens_action_max"] == max(n)
    assert found["truncated_share"] == pytest.approx(1 / 3)
    assert found["staleness_max"] == 1  # the token of age 5 is masked, so it is not among the trained
    assert found["staleness_mean"] == pytest.approx(n[1] / (n[1] + n[2]))
    assert found["staleness_histogram"] == [n[2], n[1], 0, 0, 0, n[0]]
    assert (found["first_version_min"], found["last_version_max"]) == (3, 8)
    assert (found["time_ready_s"], found["time_wait_s"]) == (2.0, 2.0)
    assert found["reward_mass_error"] == 0.0


def test_the_token_account_closes_or_says_by_how_much(make_batch, batch_of):
    rows = make_batch(2)
    n = sum(row.n_action for row in rows)
    whole = StepStatistics(account=TokenAccount(kept=n - 3, rejected_low=1, rejected_high=1, stale_masked=1))
    assert token_account_gap(batch_of(rows, 0), whole) == 0
    assert token_account_gap(batch_of(rows, 0), StepStatistics(account=TokenAccount(kept=n - 2))) == 2


def test_losses_by_reason():
    found = loss_metrics(Losses(rows=Counter(sandbox=2), tokens=Counter(sandbox=30)))
    nobody: dict[str, dict[str, list[int]]] = {"tokens": {}, "turns": {}, "env": {}}
    assert found == {"dropped_rows": {"sandbox": 2}, "dropped_tokens": {"sandbox": 30}, "survival": nobody}
