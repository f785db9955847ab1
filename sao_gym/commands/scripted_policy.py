"""What a scripted run says in each episode: lines of a completions file, or what the environment itself would do.

Example:
    script = ScriptedTurns("turns.jsonl", chat, tokenizer)
    engine.tell(uid, script.lines(env, task, attempt=0))
"""

from typing import Any

import numpy as np

from sao_gym.completions import Script, check_script, read_script
from sao_gym.errors import ConfigError
from sao_gym.models import LoadedPolicy, tiny_qwen3
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.protocols import Chat, Task, TaskSet
from sao_gym.stream import Ids

TINY_CONTEXT = 1 << 15


class ScriptedTurns:
    """Turns of an episode as ids. Raises TaskFileError for a file that does not fit the tasks."""

    def __init__(self, path: str | None, chat: Chat, tokenizer: Any, tasks: TaskSet) -> None:
        self._chat, self._tokenizer = chat, tokenizer
        self._script: Script | None = read_script(path) if path is not None else None
        if self._script is not None and path is not None and self._script.of_task:
            check_script(self._script, [tasks[index] for index in range(len(tasks))], path)

    def lines(self, env: Any, task: Task, attempt: int) -> list[Ids]:
        """The turns of one episode. Raises ConfigError where neither a file nor the environment has any."""
        if self._script is not None:
            return [self._ids(text) for text in self._script.lines(task.id, attempt)]
        demonstrate = getattr(env.unwrapped, "demonstrate", None)
        if demonstrate is None:
            raise ConfigError(
                f"{type(env.unwrapped).__name__} demonstrates nothing: give --engine.completions FILE, one JSON text a turn"
            )
        return [self._chat.write(message) for message in demonstrate(task)]

    def _ids(self, text: str) -> Ids:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array([*ids, self._chat.stop_token_ids[0]], dtype=np.int32)


def tiny_policy(seed: int) -> LoadedPolicy:
    """A policy from nothing, for a scripted run without a checkpoint: it reads bytes and knows nothing."""
    from pathlib import Path

    tokenizer = byte_tokenizer()
    model = tiny_qwen3(len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=TINY_CONTEXT, seed=seed)
    return LoadedPolicy(model=model, tokenizer=tokenizer, path=Path())
