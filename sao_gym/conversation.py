"""An episode that was recorded as messages, because its policy told no token ids: into `Trajectory.info` and back.

Invariant: a message comes back as it was, calls that could not be read included, and nothing is invented: such a
trajectory has no streams, so no ids, no log-probs and no versions, and `require_token_records` keeps it out of training.

Example:
    >>> said = (Message.user("2+2?"), Message.assistant("4"))
    >>> [message_from_record(record) for record in map(message_to_record, said)] == list(said)
    True
"""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from sao_gym.errors import TaskFileError
from sao_gym.messages import CallProblem, Message, ToolCall
from sao_gym.stream import Trajectory

MESSAGES = "messages"


def message_to_record(message: Message) -> dict[str, Any]:
    """The message as JSON values; fields that say nothing are left out."""
    record = _said(message)
    if message.tool_calls:
        record["tool_calls"] = [_said(call) for call in message.tool_calls]
    return record


def message_from_record(record: Mapping[str, Any]) -> Message:
    """The message that `message_to_record` wrote."""
    calls = tuple(_call(call) for call in record.get("tool_calls", ()))
    return Message(**{**record, "tool_calls": calls})


def conversation_of(trajectory: Trajectory) -> tuple[Message, ...] | None:
    """The whole conversation of an episode that was recorded as messages, None for one that has token streams."""
    records = trajectory.info.get(MESSAGES)
    if records is None or trajectory.streams:
        return None
    return tuple(message_from_record(record) for record in records)


def turns_of(trajectory: Trajectory) -> int:
    """Number of actions, however the episode was recorded."""
    said = conversation_of(trajectory)
    return trajectory.n_turns if said is None else sum(message.role == "assistant" for message in said)


def require_token_records(trajectories: Iterable[Trajectory], source: object) -> None:
    """Raise TaskFileError if one of `trajectories`, which `source` holds, was recorded as messages."""
    found = next((t for t in trajectories if conversation_of(t) is not None), None)
    if found is not None:
        raise TaskFileError(
            f"{source} holds episode {found.uid} of a policy behind an API: messages without token ids and log-probs, "
            "which nothing can be trained on; give trajectories that an engine of our own sampled"
        )


def _said(part: Message | ToolCall) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        default = {} if field.default is MISSING and field.default_factory is not MISSING else field.default
        if value != default and field.name != "tool_calls":
            record[field.name] = dict(value) if isinstance(value, Mapping) else value
    return record


def _call(record: Mapping[str, Any]) -> ToolCall:
    problem = record.get("problem")
    return ToolCall(**{**record, "problem": None if problem is None else CallProblem(problem)})
