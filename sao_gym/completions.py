r"""Completions from a file, said by the scripted engine: an environment debugged without a model.

Each line of the JSON lines file is a text, the next turn of every episode, or an object
`{"task_id": ID, "turns": [TEXT, ...]}` (with `"attempt": N` for one sample alone), which speaks in its place. Control
tokens such as `<tool_call>` are written as they are spelled; the end of the turn is added.

Example:
    "<tool_call>{\"name\": \"python\", \"arguments\": {\"code\": \"print(6*7)\"}}</tool_call>"
    "\\boxed{42}"
    {"task_id": "t7", "turns": ["\\boxed{41}"]}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.errors import TaskFileError
from sao_gym.jsonl import read_jsonl
from sao_gym.protocols import Task

Key = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class Script:
    """What is said: `turns` by every episode, or by one task (one attempt of it) what stands under its key."""

    turns: tuple[str, ...] = ()
    of_task: Mapping[Key, tuple[str, ...]] = field(default_factory=dict)

    def lines(self, task_id: str, attempt: int) -> tuple[str, ...]:
        """The turns of one episode, most particular first."""
        for key in ((task_id, attempt), (task_id, None)):
            if key in self.of_task:
                return self.of_task[key]
        return self.turns


def read_script(path: str | Path) -> Script:
    """Read a completions file. Raises TaskFileError with file and line."""
    turns: list[str] = []
    of_task: dict[Key, tuple[str, ...]] = {}
    for number, value in read_jsonl(path):
        if isinstance(value, str):
            turns.append(value)
        else:
            key, lines = _entry(value, f"{path}, line {number}")
            if key in of_task:
                raise TaskFileError(f"{path}, line {number}: task {key[0]!r} was given turns already")
            of_task[key] = lines
    if not turns and not of_task:
        raise TaskFileError(f"{path} holds no completions; write one JSON text per line, one line per turn")
    return Script(tuple(turns), of_task)


def _entry(value: Any, place: str) -> tuple[Key, tuple[str, ...]]:
    wanted = 'a text, or {"task_id": ID, "turns": [TEXT, ...]}'
    if not isinstance(value, dict):
        raise TaskFileError(f"{place}: expected {wanted}, got {type(value).__name__}")
    unknown = [key for key in value if key not in ("task_id", "attempt", "turns")]
    turns, attempt = value.get("turns"), value.get("attempt")
    is_whole = isinstance(value.get("task_id"), str) and isinstance(turns, list) and not unknown
    if not is_whole or not all(isinstance(turn, str) for turn in turns or ()):
        raise TaskFileError(f"{place}: expected {wanted}, got an object with {', '.join(map(str, value)) or 'nothing'}")
    if attempt is not None and (isinstance(attempt, bool) or not isinstance(attempt, int)):
        raise TaskFileError(f"{place}: attempt must be a whole number, got {attempt!r}")
    return (value["task_id"], attempt), tuple(turns or ())


def check_script(script: Script, tasks: Sequence[Task], path: str | Path) -> None:
    """Raise TaskFileError if the script names a task that is not there, or leaves one without words."""
    known = {task.id for task in tasks}
    for task_id, _ in script.of_task:
        if task_id not in known:
            raise TaskFileError(f"{path} has turns for task {task_id!r}, which is not among the {len(known)} tasks")
    named = {task_id for task_id, _ in script.of_task}
    if not script.turns and known - named:
        raise TaskFileError(
            f"{path} has no turns for task {sorted(known - named)[0]!r}; add some, or plain lines for all"
        )


def scripted_engine(episodes: Mapping[str, Sequence[str]], tokenizer: Any, stop_id: int) -> ScriptedEngine:
    """An engine that says, in the session of each name, its texts one by one, each ended by `stop_id`."""
    ids: dict[str, list[int]] = {}

    def said(text: str) -> list[int]:
        if text not in ids:
            ids[text] = [*tokenizer.encode(text, add_special_tokens=False), stop_id]
        return ids[text]

    return ScriptedEngine.from_sessions({name: [said(text) for text in texts] for name, texts in episodes.items()})
