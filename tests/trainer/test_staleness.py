"""The rule itself: golden case 17, and its two promises under random events (trap 12)."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from sao_gym.trainer.staleness import Outstanding, OutstandingRow, RowState, is_bounded

GOLDEN = Path(__file__).parents[1] / "golden" / "golden.json"


def golden_case(case_id: str) -> dict:
    return next(c for c in json.loads(GOLDEN.read_text())["cases"] if c["id"] == case_id)


def test_golden_17_event_by_event() -> None:
    case = golden_case("17_staleness_rule")
    rule = Outstanding(batch_rows=case["config"]["batch"], max_staleness=case["config"]["max_staleness"])
    engine, admitted = 0, 0
    for expected in case["expected"]["events"]:
        match expected["event"]:
            case "admit":
                allowed = rule.can_admit(engine)
                assert allowed == expected["allowed"], expected
                assert (engine, rule.version) == (expected["engine_version"], expected["learner_version"])
                if allowed:
                    admitted += 1
                    assert admitted == expected["row"]
                    rule.admit(admitted)
                    rule.set_first_version(admitted, engine)
            case "finish":
                row = next(r for r in rule.rows() if r.number == expected["row"])
                assert row.first_version is not None
                rule.set_ready(row.number, row.first_version)
            case "publish":
                engine = rule.version
                assert engine == expected["engine_version"]
            case "step":
                rows = rule.oldest_ready()
                allowed = bool(rows) and rule.can_step(rows, engine)
                assert allowed == expected["allowed"], expected
                if allowed:
                    assert rows == expected["rows"]
                    firsts = [r.first_version for r in rule.rows() if r.number in rows]
                    assert max(rule.version - f for f in firsts if f is not None) == expected["staleness_max"]
                    rule.start_step(rows, raises_version=True)
                    rule.finish_step()
                assert rule.version == expected["learner_version_after"]


@pytest.mark.parametrize("seed", range(40))
def test_random_events_keep_the_bound_and_never_lock(seed: int) -> None:
    rng = random.Random(seed)
    m, batch = rng.randint(0, 4), rng.randint(1, 4)
    rule = Outstanding(batch_rows=batch, max_staleness=m)
    engine, number, trained = 0, 0, 0
    for _ in range(600):
        running = rule.rows(RowState.RUNNING)
        action = rng.choice(["admit", "ask", "finish", "step", "publish", "finish_step", "lose"])
        if action == "admit" and rule.can_admit(engine):
            number += 1
            rule.admit(number)
        elif action == "ask" and running:
            row = rng.choice(running)
            if row.first_version is None:
                rule.set_first_version(row.number, engine)
        elif action == "finish" and running:
            row = rng.choice(running)
            rule.set_ready(row.number, row.first_version if row.first_version is not None else engine)
        elif action == "lose" and running and rng.random() < 0.2:
            rule.remove(rng.choice(running).number)
        elif action == "step" and not rule.rows(RowState.TRAINING):
            rows = rule.oldest_ready()
            if rows and rule.can_step(rows, engine):
                assert all(rule.version - (r.first_version or 0) <= m for r in rule.rows() if r.number in rows)
                rule.start_step(rows, raises_version=rng.random() < 0.9)
        elif action == "finish_step" and rule.rows(RowState.TRAINING):
            rule.finish_step()
            trained += 1
        elif action == "publish":
            engine = rng.randint(engine, rule.version)
        assert rule.is_bounded(engine, at_version=rule.version)
    # From wherever the random walk stopped, an orderly world always goes on: no deadlock.
    for _ in range(3):
        rule.finish_step()
        for row in rule.rows(RowState.RUNNING):
            rule.set_ready(row.number, row.first_version if row.first_version is not None else engine)
        while len(rule.rows(RowState.READY)) < batch:
            engine = rule.version
            assert rule.can_admit(engine)
            number += 1
            rule.admit(number)
            rule.set_ready(number, engine)
        rows = rule.oldest_ready()
        assert rule.can_step(rows, engine)
        rule.start_step(rows, raises_version=True)


@pytest.mark.parametrize("seed", range(40))
def test_random_events_on_groups_keep_the_bound_and_never_lock(seed: int) -> None:
    """Groups are admitted, trained, let past and dropped whole; a lost row is run again in its group."""
    rng = random.Random(seed)
    m, size = rng.randint(0, 4), rng.randint(2, 4)
    batch = size * rng.randint(1, 3)
    rule = Outstanding(batch_rows=batch, max_staleness=m)
    engine, number = 0, 0

    def admit() -> None:
        nonlocal number
        first = number + 1
        for number in range(first, first + size):
            rule.admit(number, first)

    def finish(row: OutstandingRow) -> None:
        rule.set_ready(row.number, engine if row.first_version is None else row.first_version)

    for _ in range(800):
        running = rule.rows(RowState.RUNNING)
        action = rng.choice(
            ["admit", "ask", "ask", "finish", "finish", "step", "publish", "finish_step", "lose", "drop"]
        )
        if action == "admit" and rule.can_admit(engine, size):
            admit()
        elif action == "ask" and running:
            row = rng.choice(running)
            if row.first_version is None:
                rule.set_first_version(row.number, engine)
        elif action == "finish" and running:
            finish(rng.choice(running))
        elif action == "lose" and running and rng.random() < 0.3:
            rule.restart(rng.choice(running).number)
        elif action == "drop" and running and rng.random() < 0.1:
            key = rng.choice(running).group_key
            for row in rule.rows():
                if row.group_key == key:
                    rule.remove(row.number)
        elif action == "step" and not rule.rows(RowState.TRAINING):
            numbers = rule.oldest_ready()
            if numbers and rule.can_step(numbers, engine):
                chosen = [row for row in rule.rows() if row.number in numbers]
                assert all(rule.version - (row.first_version or 0) <= m for row in chosen)
                assert set(Counter(row.group_key for row in chosen).values()) == {size}
                rule.start_step(numbers, raises_version=rng.random() < 0.9)
        elif action == "finish_step" and rule.rows(RowState.TRAINING):
            rule.finish_step()
        elif action == "publish":
            engine = rng.randint(engine, rule.version)
        assert rule.is_bounded(engine, at_version=rule.version)
    for _ in range(3):  # from wherever it stopped, an orderly world goes on
        rule.finish_step()
        for row in rule.rows(RowState.RUNNING):
            finish(row)
        while len(rule.rows(RowState.READY)) < batch:
            engine = rule.version
            assert rule.can_admit(engine, size)
            admit()
            for row in rule.rows(RowState.RUNNING):
                finish(row)
        numbers = rule.oldest_ready()
        assert rule.can_step(numbers, engine)
        rule.start_step(numbers, raises_version=True)


def test_a_group_is_as_old_as_its_oldest_row_and_let_past_as_one() -> None:
    rule = Outstanding(batch_rows=2, max_staleness=1, version=1)
    for number in (1, 2):
        rule.admit(number, 1)
    rule.set_first_version(1, 0)
    rule.set_first_version(2, 1)
    rule.set_ready(1, 0)
    for number in (3, 4):
        rule.admit(number, 3)
        rule.set_ready(number, 1)
    assert rule.oldest_ready() == [3, 4], "a group of which a row still runs is not complete"
    assert not rule.can_step([3, 4], 1), "both rows of the other group would be two versions old"
    assert rule.blocking([3, 4]) == [2], "its young row is what is waited for"
    rule.let_past(2)
    assert [row.is_let_past for row in rule.rows()] == [True, True, False, False]
    assert rule.can_step([3, 4], 1)
    assert rule.blocking([3, 4]) == []


def test_rows_in_training_count_as_outstanding() -> None:
    rule = Outstanding(batch_rows=2, max_staleness=0)
    for number in (1, 2):
        rule.admit(number)
        rule.set_ready(number, 0)
    rule.start_step([1, 2], raises_version=True)
    assert not rule.can_admit(0), "a row admitted now would be trained one version too old"
    rule.finish_step()
    assert not rule.can_admit(0), "the engine still serves version 0"
    assert rule.can_admit(1)


def test_a_row_that_never_asked_ages_with_the_engine() -> None:
    assert not is_bounded([0], version=3, batch_rows=1, max_staleness=2)
    rule = Outstanding(batch_rows=1, max_staleness=0)
    rule.admit(1)
    rule.version = 5
    assert rule.is_bounded(5, at_version=5)
    rule.set_first_version(1, 4)
    assert not rule.is_bounded(5, at_version=5)
    rule.let_past(1)
    assert rule.is_bounded(5, at_version=5)
