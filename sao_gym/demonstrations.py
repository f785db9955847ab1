r"""Conversations as trajectories: what somebody else said in the policy's place, ready for imitation.

Invariant: assistant turns become action segments that end with the stop token, all else observations; the ids are
those that `TokenEnv` would have recorded had the policy sampled these turns. No id is ever compared with the
padding's (a tokenizer may use one id for both).

Example:
    >>> messages = [Message.user("2+2?"), Message.assistant("4")]
    >>> demonstration = tokenized(messages, chat, uid="demo-0")  # doctest: +SKIP
    >>> chat.decode_action(demonstration.streams[0].actions[0].token_ids)  # doctest: +SKIP
    '4<|end|>'
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sao_gym.errors import ConfigError, ModelError, RegistryError, TaskFileError
from sao_gym.jsonl import read_jsonl
from sao_gym.messages import Message, ToolSpec
from sao_gym.openai_format import message_from_openai, tool_from_openai
from sao_gym.protocols import Chat, Task, TaskSet
from sao_gym.registry import resolve, spec
from sao_gym.stream import Ids, Outcome, Segment, StopReason, TokenStream, Trajectory

Demonstrate = Callable[[Task, np.random.Generator, str], list[Message]]
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)


def tokenized(
    messages: Sequence[Message],
    chat: Chat,
    tools: Sequence[ToolSpec] = (),
    *,
    uid: str,
    task_id: str = "",
    env_id: str = "",
) -> Trajectory:
    """One conversation as a trajectory; messages after the last assistant turn are left out.

    Log-probs are recorded as 0, at temperature 1 and version 0: nobody sampled these tokens. Raises ConfigError if
    there is no assistant turn, or if it comes first.
    """
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not turns or turns[0] == 0:
        raise ConfigError(f"conversation {uid} needs an assistant turn that answers something")
    segments = [Segment.observation(chat.prompt(messages[: turns[0]], tools))]
    for index, following in zip(turns, [*turns[1:], None], strict=True):
        ids = chat.write(messages[index])
        segments.append(_action(ids))
        if following is not None:
            segments.append(Segment.observation(chat.bridge(messages[index + 1 : following], last_id=int(ids[-1]))))
    return Trajectory(
        uid=uid,
        task_id=task_id or uid,
        env_id=env_id,
        attempt=0,
        streams=(TokenStream(segments=tuple(segments)),),
        outcome=Outcome.terminated(),
    )


def _action(ids: Ids) -> Segment:
    zeros = np.zeros(len(ids))
    return Segment.action(ids, logprobs=zeros, versions=zeros, temperature=1.0, stop=StopReason.STOP)


def demonstrator(env_name: str) -> Demonstrate:
    """The environment's own teacher: `demonstrate(task, rng, quality)` beside its task set. Raises ConfigError."""
    tasks = spec(env_name).tasks
    if isinstance(tasks, str):
        try:
            found: Demonstrate = resolve(f"{tasks.rpartition(':')[0]}:demonstrate")
            return found
        except RegistryError:
            pass
    raise ConfigError(f"environment {env_name!r} has no demonstrations of its own; give some with --data FILE")


def conversations(
    demonstrate: Demonstrate, tasks: TaskSet, *, count: int, wrong_share: float, seed: int
) -> list[tuple[Task, list[Message]]]:
    """`count` demonstrations over `tasks` in turn; every task's own number, and `seed`, decide how it is spoiled.

    Exactly round(count * wrong_share) of them are wrong on purpose, spread by the seed.
    """
    is_wrong = np.arange(count) < round(count * wrong_share)
    np.random.default_rng([seed, 1]).shuffle(is_wrong)
    made = []
    for index in range(count):
        task = tasks[index % len(tasks)]
        rng = np.random.default_rng([seed, 2, index])
        made.append((task, demonstrate(task, rng, "wrong" if is_wrong[index] else "right")))
    return made


def read_conversations(path: Path, chat: Chat) -> list[Trajectory]:
    """Trajectories of a JSON lines file of `{"messages": [...], "tools": [...]}` in OpenAI's form.

    Reasoning that an assistant's content opens with, between <think> and </think>, counts as `reasoning_content`. Raises TaskFileError with file and line.
    """
    found = []
    for number, record in read_jsonl(path):
        if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
            raise TaskFileError(f"{path}, line {number}: expected an object with a list under messages")
        try:
            messages = [_told_apart(message_from_openai(message)) for message in record["messages"]]
            tools = [tool_from_openai(tool) for tool in _tools(record.get("tools"))]
            found.append(tokenized(messages, chat, tools, uid=f"line-{number}"))
        except (ConfigError, ModelError) as error:
            raise TaskFileError(f"{path}, line {number}: {error}") from error
    if not found:
        raise TaskFileError(f"{path} holds no conversations; it needs at least one line")
    return found


def _told_apart(message: Message) -> Message:
    """An assistant message with the reasoning that its content opens with where reasoning belongs.

    Inside content the markers are text (trap 20): a policy would learn to spell them by ordinary ids.
    """
    if message.role != "assistant":
        return message
    thought = _THOUGHT.fullmatch(message.content) if message.reasoning is None else None
    if thought:
        message = replace(message, reasoning=thought[1].strip(), content=thought[2])
    if not (message.content or message.tool_calls or message.reasoning):
        raise ConfigError("an assistant turn says nothing: no content, no reasoning_content, no tool_calls")
    return message


def _tools(given: Any) -> list[Any]:
    """Offered tools: a list, also as the JSON text that data sets keep it in."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"tools is text that holds no JSON list: {error}") from error
    if given is not None and not isinstance(given, list):
        raise ConfigError(f"tools must be a list, got {type(given).__name__}")
    return given or []


def content_hash(trajectories: Iterable[Trajectory]) -> str:
    """SHA-256 over ids and authors of every trajectory, in order."""
    digest = hashlib.sha256()
    for trajectory in trajectories:
        for stream in trajectory.streams:
            digest.update(stream.token_ids.tobytes() + stream.action_mask.tobytes() + b"|")
        digest.update(b"\n")
    return digest.hexdigest()
