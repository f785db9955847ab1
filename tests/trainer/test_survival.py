"""Who was trained, by length, turns and environment."""

import pytest

from sao_gym.trainer.survival import Survival, SurvivalState, token_bucket


@pytest.mark.parametrize(
    ("n", "bucket"), [(1, "<=16"), (16, "<=16"), (17, "<=32"), (32, "<=32"), (33, "<=64"), (100_000, "<=131072")]
)
def test_buckets_are_powers_of_two(n, bucket):
    assert token_bucket(n) == bucket


def test_rows_are_counted_where_they_belong(make_batch):
    survival = Survival()
    for trajectory in make_batch(3, turns=2):
        survival.add(trajectory, is_trained=True)
    (long,) = make_batch(1, turns=12)
    survival.add(long, is_trained=False)
    survival.add(None, is_trained=False)
    table = survival.table()
    assert table["turns"] == {"2": [3, 0], "12": [0, 1], "unfinished": [0, 1]}
    assert list(table["turns"]) == ["2", "12", "unfinished"], "in the order of size"
    assert table["env"] == {"test": [3, 1]}, "what had not ended has no length, and its environment is not known here"
    assert table["tokens"]["<=16"] == [3, 0]
    assert table["tokens"][token_bucket(long.n_action)] == [0, 1]


def test_a_checkpoints_counts_go_on(make_batch):
    survival = Survival()
    for trajectory in make_batch(3, turns=2):
        survival.add(trajectory, is_trained=True)
    state = SurvivalState(table=survival.table(), dropped=1)
    again = Survival.resumed(state, dropped=1)
    assert again.table() == survival.table()
    again.add(make_batch(1, turns=2)[0], is_trained=False)
    assert again.table()["turns"] == {"2": [3, 1]}
    assert survival.table()["turns"] == {"2": [3, 0]}, "the counts are its own"


def test_rows_lost_after_the_checkpoint_stay_lost(make_batch):
    """The ledger knows how many, not how long they were."""
    again = Survival.resumed(SurvivalState(table={"turns": {"2": [3, 1]}}, dropped=1), dropped=3)
    assert again.table()["turns"] == {"2": [3, 1], "unfinished": [0, 2]}
