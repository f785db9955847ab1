"""The order of prompts: decided by the seed alone (trap 36), epoch by epoch, without end where the set has none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.errors import CheckpointError, TaskFileError
from sao_gym.ledger import Ledger
from sao_gym.protocols import Task
from sao_gym.tasks.arithmetic import arithmetic_tasks
from sao_gym.tasks.base import ListTaskSet
from sao_gym.trainer.prompts import PromptOrder


def tasks(count: int) -> ListTaskSet:
    return ListTaskSet("made up", [Task(id=f"t{i}", prompt="?") for i in range(count)])


@given(count=st.integers(1, 12), seed=st.integers(0, 2**31), start=st.integers(0, 60))
def test_trap_36_a_resumed_run_goes_on_with_the_order_of_the_unbroken_one(count: int, seed: int, start: int) -> None:
    unbroken = PromptOrder(tasks(count), seed)
    whole = [(task.id, attempt) for task, attempt in map(unbroken.__getitem__, range(60))]
    resumed = PromptOrder(tasks(count), seed)
    assert [(resumed[n][0].id, resumed[n][1]) for n in range(start, 60)] == whole[start:]
    assert len(set(whole)) == 60, "no attempt of a task twice"


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    order = PromptOrder(tasks(20), seed=3)
    epochs = [[order[20 * epoch + place][0].id for place in range(20)] for epoch in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0], "trap 36: not the first epoch's order again"
    assert [order[20 * epoch][1] for epoch in range(3)] == [0, 1, 2]
    other = PromptOrder(tasks(20), seed=4)
    assert [other[place][0].id for place in range(20)] != epochs[0]


def test_a_set_without_end() -> None:
    order = PromptOrder(arithmetic_tasks("train", pool=None, seed=5), seed=0)
    first = [order[n] for n in range(50)]
    assert len({task.id for task, _ in first}) == 50
    assert {attempt for _, attempt in first} == {0}
    far, attempt = order[1_000_000_007]
    assert attempt == 0
    assert order.find(far.id) == far, "found by its id, without walking there"


def test_a_task_that_is_gone_is_named() -> None:
    order = PromptOrder(tasks(3), seed=0)
    assert order.find("t2").id == "t2"
    with pytest.raises(
        CheckpointError, match=r"a row of task 't9', which made up does not hold; resume with the tasks"
    ):
        order.find("t9")


class Plain:
    """A task set that cannot look tasks up by id."""

    name, content_hash = "plain", ""

    def __init__(self, count: int) -> None:
        self._tasks = [Task(id=f"p{i}", prompt="?") for i in range(count)]

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index: int) -> Task:
        return self._tasks[index]


def test_sets_that_only_count() -> None:
    order = PromptOrder(Plain(4), seed=0)
    assert order.find("p3").id == "p3"
    with pytest.raises(CheckpointError):
        order.find("p4")
    with pytest.raises(TaskFileError, match="task set plain holds no tasks; give at least one"):
        PromptOrder(Plain(0), seed=0)


def test_the_ledgers_length_is_the_next_place_in_the_order() -> None:
    order, ledger = PromptOrder(tasks(5), seed=1), Ledger(":memory:")
    for n in range(13):
        task, attempt = order[n]
        assert ledger.enqueue(task.id, attempt).number == len(ledger) == n + 1
    ledger.close()
