"""Arithmetic tasks: seeded, disjoint, endless or pooled."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.envs.arithmetic import grade_integer
from sao_gym.errors import ConfigError
from sao_gym.protocols import Task
from sao_gym.tasks.arithmetic import ENDLESS, arithmetic_tasks, demonstrate, evaluate, split_of


def prompts(**kwargs: Any) -> list[str]:
    tasks = arithmetic_tasks(**kwargs)
    return [tasks[i].prompt for i in range(min(len(tasks), 300))]


def test_the_same_parameters_give_the_same_tasks() -> None:
    assert prompts() == prompts()
    assert arithmetic_tasks().content_hash == arithmetic_tasks().content_hash
    assert prompts() != prompts(seed=1)
    assert arithmetic_tasks().content_hash != arithmetic_tasks(seed=1).content_hash


@pytest.mark.parametrize("pool", [64, None])
def test_splits_are_disjoint_by_construction(pool: int | None) -> None:
    for seed in range(3):
        train, heldout = prompts(seed=seed, pool=pool), prompts(split="heldout", seed=seed, pool=pool)
        assert {split_of(text) for text in train} == {"train"}
        assert {split_of(text) for text in heldout} == {"heldout"}


def test_a_pool_holds_different_problems() -> None:
    tasks = arithmetic_tasks(pool=512)
    assert len(tasks) == 512
    assert len({tasks[i].prompt for i in range(512)}) == len({tasks[i].id for i in range(512)}) == 512


@settings(max_examples=50, deadline=None)
@given(st.integers(0, ENDLESS - 1), st.integers(1, 5), st.integers(1, 3))
def test_an_endless_set_finds_its_tasks_again(index: int, steps: int, digits: int) -> None:
    tasks: Any = arithmetic_tasks(pool=None, steps=steps, digits=digits)
    task = tasks[index]
    assert tasks.by_id(task.id) == task
    names: dict[str, int] = {}
    *named, last = task.prompt.removesuffix("=?").split("; ")
    for text in named:
        exec(text, {}, names)
    assert str(eval(last, {}, names)) == task.answer


@pytest.mark.parametrize("quality", ["right", "wrong"])
def test_demonstrations_end_as_they_should(quality: Any) -> None:
    tasks = arithmetic_tasks(pool=200)
    kinds = set()
    for i in range(200):
        messages = demonstrate(tasks[i], np.random.default_rng(i), quality)
        assert messages == demonstrate(tasks[i], np.random.default_rng(i), quality)
        assert messages[0].content == tasks[i].prompt
        assert grade_integer(tasks[i].answer, messages[-1].content).passed is (quality == "right")
        kinds.add(len(messages))
    assert kinds == ({6} if quality == "right" else {2, 6})


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"split": "test"}, "split"),
        ({"steps": 0}, "steps"),
        ({"digits": 7}, "digits"),
        ({"pool": 0}, "at least 1"),
        ({"pool": 5000, "steps": 1, "digits": 1}, "too few problems"),
    ],
)
def test_values_out_of_range_are_refused(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        arithmetic_tasks(**kwargs)


def test_foreign_tasks_have_no_demonstrations_and_foreign_steps_no_value() -> None:
    with pytest.raises(ConfigError, match="expressions"):
        demonstrate(Task(id="t", prompt="p", answer="1"), np.random.default_rng(0))
    with pytest.raises(ConfigError, match="'a12'"):
        evaluate(["a12"])
