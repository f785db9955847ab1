"""Writing prompts of our own: 384 requests in 24 forms and three lengths, and demonstrations in the four styles.

A request is put together from hand-written parts (`writing_subjects.txt`): a way to ask for a form, a subject that fits
it, a length, sometimes a wish. Invariants: every subject is used once, so no two prompts are alike; train and held-out
prompts share no subject, no wish and no run of ten words; the same parts give the same prompts on any machine.

Example:
    >>> writing_tasks("train")[0].prompt
    'Write a letter to a neighbour who looked after the tomato plants for a month. Use at most 40 words.'
    >>> len(writing_tasks("train")), len(writing_tasks("heldout"))
    (312, 72)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Literal

import numpy as np

from sao_gym.drift import DEFAULT_PHASES
from sao_gym.errors import ConfigError
from sao_gym.messages import Message
from sao_gym.protocols import Task
from sao_gym.tasks._writing_samples import sample_text
from sao_gym.tasks.base import ListTaskSet
from sao_gym.writing_styles import system_prompt

Split = Literal["train", "heldout"]
SUBJECTS = "writing_subjects.txt"
LENGTHS = (
    ("short", 40, "Use at most 40 words."),
    ("medium", 120, "About 120 words will do."),
    ("long", 250, "Take some 250 words for it."),
    ("short", 30, "Two or three sentences are enough."),
    ("medium", 80, "One paragraph of about 80 words."),
    ("any", 0, ""),
)
"""(name, words asked for, how that is said). 0 words: the prompt asks for no length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form: ways to ask for it, wishes that may be added, subjects of each split."""

    name: str
    frames: list[str] = field(default_factory=list)
    wishes: list[str] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    heldout: list[str] = field(default_factory=list)


@lru_cache(maxsize=1)
def read_forms() -> tuple[Form, ...]:
    """The parts, form by form."""
    forms: list[Form] = []
    for line in files("sao_gym.tasks").joinpath(SUBJECTS).read_text(encoding="utf-8").splitlines():
        mark, text = line[:1], line[2:]
        if mark == "[":
            forms.append(Form(name=line.strip("[]")))
        elif mark and mark != "#":
            form = forms[-1]
            {">": form.frames, "+": form.wishes, "~": form.heldout}.get(mark, form.train).append(
                text if mark in ">+~" else line
            )
    return tuple(forms)


def writing_tasks(split: Split = "train", forms: Sequence[str] | None = None, length: str | None = None) -> ListTaskSet:
    """The prompts of a split, those of `forms` and of one length (short, medium, long, any) alone where asked for.

    Forms stand in turn, so that any stretch of the set is mixed. Raises ConfigError.
    """
    return _made(split, None if forms is None else tuple(forms), length)


@lru_cache(maxsize=16)  # every environment of a run asks for the same one
def _made(split: Split, forms: tuple[str, ...] | None, length: str | None) -> ListTaskSet:
    if split not in ("train", "heldout"):
        raise ConfigError(f"split must be 'train' or 'heldout', got {split!r}")
    known = [form.name for form in read_forms()]
    for name in forms or ():
        if name not in known:
            raise ConfigError(f"there are no writing prompts of the form {name!r}; forms: {', '.join(known)}")
    if length not in (None, *(name for name, _, _ in LENGTHS)):
        raise ConfigError(f"length must be short, medium, long or any, got {length!r}")
    chosen = [form for form in read_forms() if forms is None or form.name in forms]
    made = [
        _task(form, split, index)
        for index in range(max(len(form.train) for form in chosen))
        for form in chosen
        if index < len(_subjects(form, split))
    ]
    kept = [task for task in made if length is None or task.info["length"] == length]
    return ListTaskSet(f"writing-{split}", kept)


def _subjects(form: Form, split: Split) -> Sequence[str]:
    return form.train if split == "train" else form.heldout


def _task(form: Form, split: Split, index: int) -> Task:
    """The index-th prompt of a form: frame, length and wish go round at different paces."""
    shift = [each.name for each in read_forms()].index(form.name)
    subject = _subjects(form, split)[index]
    frame = form.frames[(index // 3) % len(form.frames)]
    length, words, said = LENGTHS[(index + shift) % len(LENGTHS)]
    wish = form.wishes[split == "heldout"] if index % 2 else ""
    return Task(
        id=f"writing-{split}-{form.name}-{index}",
        prompt=" ".join(part for part in (frame.format(subject), wish, said) if part),
        info={"form": form.name, "subject": subject, "length": length, "words": words},
    )


def demonstrate(task: Task, rng: np.random.Generator, quality: str = "right") -> list[Message]:
    """One answer of a few hand-made sentences, after the system prompt of a phase drawn at random.

    "right" is in the target style of that phase, "wrong" in another one of its candidates.
    """
    phase = DEFAULT_PHASES[int(rng.integers(len(DEFAULT_PHASES)))]
    others = [name for name in phase.candidates if name != phase.target]
    style = phase.target if quality == "right" else str(rng.choice(others))
    form = str(task.info.get("form", "text"))
    return [
        Message.system(system_prompt(phase.candidates)),
        Message.user(task.prompt),
        Message.assistant(sample_text(style, form, rng)),
    ]
