r"""Multi-step arithmetic that is reliable only through a tool: tasks without end, and demonstrations of them.

A task is a chain of operations over variables, e.g. `a=47+38; b=a*16; b-29=?`. Invariants: the same parameters give
the same tasks on any machine; train and held-out tasks are disjoint by construction (a hash of the problem decides
its split); a demonstration holds exactly what the real tool prints.

Example:
    >>> tasks = arithmetic_tasks("train", pool=4, seed=0)
    >>> [message.role for message in demonstrate(tasks[0], np.random.default_rng(0))]
    ['user', 'assistant', 'tool', 'assistant', 'tool', 'assistant']
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from sao_gym.errors import ConfigError
from sao_gym.messages import Message, ToolCall
from sao_gym.protocols import Task, TaskSet
from sao_gym.tasks.base import ListTaskSet

Split = Literal["train", "heldout"]
Quality = Literal["right", "wrong"]
HELDOUT_SHARE = 8
"""One problem in this many is held out."""
ENDLESS = 1 << 31
"""Length that an endless set gives itself."""
GIVE_UP_AFTER = 2000
"""Draws in a row that bring no new problem before a pool counts as too large."""
_NAMES = "abcdefgh"


@lru_cache(maxsize=16)  # a task set never changes, and every environment of a run asks for the same one
def arithmetic_tasks(
    split: Split = "train", pool: int | None = 512, seed: int = 0, steps: int = 3, digits: int = 2
) -> TaskSet:
    """`pool` different problems of `steps` operations on `digits`-digit numbers; None is a set without end.

    Raises ConfigError on values out of range, or if there are not that many problems.
    """
    endless = EndlessArithmetic(split=split, seed=seed, steps=steps, digits=digits)
    if pool is None:
        return endless
    if pool < 1:
        raise ConfigError(f"an arithmetic pool needs at least 1 task, got {pool}; or none for a set without end")
    found: dict[str, Task] = {}
    index = misses = 0
    while misses < GIVE_UP_AFTER:
        task = endless[index]
        misses = misses + 1 if task.prompt in found else 0
        found.setdefault(task.prompt, task)
        if len(found) == pool:
            return ListTaskSet(endless.name, found.values())
        index += 1
    raise ConfigError(
        f"there are too few problems with steps={steps} and digits={digits} for a pool of {pool}; lower pool"
    )


class EndlessArithmetic:
    """A task for each index below `ENDLESS`, made when asked for. Far apart, two may pose the same problem."""

    def __init__(self, *, split: Split, seed: int, steps: int, digits: int) -> None:
        if split not in ("train", "heldout"):
            raise ConfigError(f"split must be 'train' or 'heldout', got {split!r}")
        if not 1 <= steps <= len(_NAMES) or not 1 <= digits <= 6:
            raise ConfigError(
                f"arithmetic needs steps from 1 to {len(_NAMES)} and digits from 1 to 6, got {steps} and {digits}"
            )
        self.split, self.seed, self.steps, self.digits = split, seed, steps, digits

    @property
    def name(self) -> str:
        """Name of the set and its split."""
        return f"arithmetic-{self.split}"

    @property
    def content_hash(self) -> str:
        """SHA-256 of the parameters: they decide every task."""
        text = f"arithmetic-1 {self.split} {self.seed} {self.steps} {self.digits}"
        return hashlib.sha256(text.encode()).hexdigest()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < ENDLESS:
            raise IndexError(index)
        rng = np.random.default_rng([self.seed, self.split == "heldout", self.steps, self.digits, index])
        while True:
            expressions = _draw(rng, self.steps, self.digits)
            prompt = problem_text(expressions)
            if split_of(prompt) == self.split:
                return Task(
                    id=f"{self.name}-{self.steps}x{self.digits}-{self.seed}-{index}",
                    prompt=prompt,
                    answer=str(evaluate(expressions)[-1]),
                    info={"expressions": list(expressions)},
                )

    def by_id(self, task_id: str) -> Task:
        """The task with this id. Raises ConfigError if it is not one of this set."""
        number = task_id.rpartition("-")[2]
        if number.isdecimal() and int(number) < ENDLESS and (task := self[int(number)]).id == task_id:
            return task
        raise ConfigError(f"task set {self.name!r} holds no task with the id {task_id!r}")


def split_of(problem: str) -> Split:
    """The one split that a problem belongs to."""
    digest = hashlib.blake2b(problem.encode(), digest_size=8).digest()
    return "heldout" if int.from_bytes(digest, "big") % HELDOUT_SHARE == 0 else "train"


def problem_text(expressions: Sequence[str]) -> str:
    """The prompt: every step but the last is given a name, the last is asked for."""
    named = [f"{name}={text}; " for name, text in zip(_NAMES, expressions[:-1], strict=False)]
    return "".join(named) + f"{expressions[-1]}=?"


def evaluate(expressions: Sequence[str]) -> list[int]:
    """Value of each step, in order. Raises ConfigError on anything but `x+y`, `x-y`, `x*y`."""
    values: dict[str, int] = {}
    for name, text in zip(_NAMES, expressions, strict=False):
        match = re.fullmatch(r"([a-h]|\d+)([-+*])([a-h]|\d+)", text)
        if match is None:
            raise ConfigError(f"an arithmetic step must look like 'a+12', got {text!r}")
        x, y = (values[side] if side in values else int(side) for side in (match[1], match[3]))
        values[name] = {"+": x + y, "-": x - y, "*": x * y}[match[2]]
    return list(values.values())


def demonstrate(task: Task, rng: np.random.Generator, quality: Quality = "right") -> list[Message]:
    r"""One episode of `task` as messages, from the prompt to the final `\boxed{}`; the same `rng` state gives the same.

    "wrong" is one of: a wrong operator in the code, an operand copied wrongly, a guess without the tool, an answer
    that is not what the tool said. Its final answer always differs from the task's.
    """
    expressions = _expressions(task.info)
    if quality == "right":
        return _episode(task.prompt, expressions)
    kind = rng.choice(["operator", "operand", "guess", "ignored"])
    wrong = int(task.answer) + int(rng.choice([-1, 1])) * int(rng.integers(1, 90))
    if kind == "guess":
        return [Message.user(task.prompt), Message.assistant(_boxed(wrong))]
    if kind == "ignored":
        return [*_episode(task.prompt, expressions)[:-1], Message.assistant(_boxed(wrong))]
    for _ in range(100):
        spoiled = _spoil(expressions, rng, kind)
        if evaluate(spoiled)[-1] != int(task.answer):
            return _episode(task.prompt, spoiled)
    return [Message.user(task.prompt), Message.assistant(_boxed(wrong))]


def _draw(rng: np.random.Generator, steps: int, digits: int) -> tuple[str, ...]:
    """Random steps with at most one multiplication, so that answers stay short."""
    low, high = (1 if digits == 1 else 10 ** (digits - 1)), 10**digits
    operators = rng.choice(["+", "-"], size=steps).tolist()
    if rng.random() < 0.5:
        operators[int(rng.integers(steps))] = "*"
    first = [str(rng.integers(low, high)), *_NAMES[: steps - 1]]
    return tuple(f"{x}{op}{rng.integers(low, high)}" for x, op in zip(first, operators, strict=True))


def _expressions(info: Mapping[str, object]) -> tuple[str, ...]:
    expressions = info.get("expressions")
    if not isinstance(expressions, (list, tuple)) or not expressions:
        raise ConfigError("demonstrations need an arithmetic task: info['expressions'] is missing")
    return tuple(str(text) for text in expressions)


def _spoil(expressions: Sequence[str], rng: np.random.Generator, kind: str) -> tuple[str, ...]:
    """`expressions` with one operator or one operand replaced."""
    spoiled = list(expressions)
    index = int(rng.integers(len(spoiled)))
    x, operator, y = re.split(r"([-+*])", spoiled[index])
    if kind == "operator":
        operator = str(rng.choice([other for other in "+-*" if other != operator]))
    else:
        place = int(rng.integers(len(y)))
        y = y[:place] + str(rng.integers(1, 10)) + y[place + 1 :]
    spoiled[index] = f"{x}{operator}{y}"
    return tuple(spoiled)


def _episode(prompt: str, expressions: Sequence[str]) -> list[Message]:
    """Each named step in a cell of its own; the last cell also computes what is asked for."""
    values = evaluate(expressions)
    messages = [Message.user(prompt)]
    for index, text in enumerate(expressions[:-1] or expressions):
        name = _NAMES[index]
        is_last = index >= len(expressions) - 2
        shown = expressions[-1] if is_last and len(expressions) > 1 else name
        call = ToolCall(id="call_0", name="python", arguments={"code": f"{name}={text};print({shown})"})
        messages += [
            Message.assistant(tool_calls=(call,)),
            Message.tool(str(values[-1] if is_last else values[index]), call=call),
        ]
    return [*messages, Message.assistant(_boxed(values[-1]))]


def _boxed(value: int) -> str:
    return f"\\boxed{{{value}}}"
