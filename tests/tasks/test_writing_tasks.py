"""Our writing prompts: enough of them, none alike, splits apart; and what a tiny policy starts from."""

import re
from collections import Counter

import numpy as np
import pytest

from sao_gym.demonstrations import conversations, demonstrator
from sao_gym.drift import DEFAULT_PHASES
from sao_gym.errors import ConfigError
from sao_gym.registry import make_tasks
from sao_gym.tasks.overlap import find_overlaps
from sao_gym.tasks.writing import LENGTHS, demonstrate, read_forms, writing_tasks
from sao_gym.writing_styles import STYLES, system_prompt

TRAIN, HELDOUT = writing_tasks("train"), writing_tasks("heldout")


def test_there_are_enough_prompts_of_many_forms_and_lengths() -> None:
    assert (len(TRAIN), len(HELDOUT)) == (312, 72)
    for tasks in (TRAIN, HELDOUT):
        assert set(Counter(task.info["form"] for task in tasks).values()) == {len(tasks) // 24}
        assert {task.info["length"] for task in tasks} == {"short", "medium", "long", "any"}


def test_no_two_prompts_are_alike_and_the_splits_share_no_subject() -> None:
    every = [*TRAIN, *HELDOUT]
    for said in ("prompt", "id"):
        assert len({getattr(task, said) for task in every}) == len(every)
    subjects = [task.info["subject"] for task in every]
    assert len({re.sub(r"\W+", " ", subject.lower()) for subject in subjects}) == len(subjects)
    assert find_overlaps(list(HELDOUT), TRAIN) == ()


def test_every_prompt_is_whole_and_reads_as_a_sentence() -> None:
    for task in (*TRAIN, *HELDOUT):
        assert task.prompt[0].isupper()
        assert task.prompt[-1] in ".?"
        assert not re.search(r"[{}<>+~\[\]]|  |\.\.|\bNone\b", task.prompt), task.prompt
        asked = [words for name, words, said in LENGTHS if said and said in task.prompt]
        assert asked == ([task.info["words"]] if task.info["words"] else [])
    for form in read_forms():
        assert len(form.frames) == 2
        assert len(form.wishes) == 2
        assert all("{}" in frame for frame in form.frames)


def test_a_choice_of_forms_and_lengths() -> None:
    few = make_tasks("writing_style", split="heldout", forms=["poem", "letter"], length="short")
    assert {few[i].info["form"] for i in range(len(few))} == {"poem", "letter"}
    assert {few[i].info["length"] for i in range(len(few))} == {"short"}
    for given in ({"split": "test"}, {"forms": ["sonnet"]}, {"length": "huge"}):
        with pytest.raises(ConfigError):
            writing_tasks(**given)  # type: ignore[arg-type]


def test_demonstrations_are_in_the_wanted_style_or_in_another_candidate() -> None:
    from sao_gym.envs.judges.rule import RuleJudge

    judge, targets = RuleJudge(), {system_prompt(phase.candidates): set[str]() for phase in DEFAULT_PHASES}
    for phase in DEFAULT_PHASES:
        targets[system_prompt(phase.candidates)].add(phase.target)
    made = conversations(demonstrator("writing_style"), TRAIN, count=300, wrong_share=0.0, seed=1)
    for task, (system, user, answer) in made:
        assert user.content == task.prompt
        assert judge.read(task.prompt, answer.content, tuple(STYLES)).label in targets[system.content]
    rng = np.random.default_rng(0)
    labels = Counter(
        judge.read("", demonstrate(TRAIN[0], rng, "wrong")[-1].content, tuple(STYLES)).label for _ in range(300)
    )
    assert set(labels) == {"academic", "cute", "chuunibyou"}  # classical is a candidate only where it is wanted
