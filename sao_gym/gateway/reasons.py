"""Why a call began a new stream, or a new branch, instead of going on where an earlier one ended.

Example:
    >>> Reason.HISTORY_EDITED.is_break, Reason.FORKED.is_break
    (True, False)
"""

from enum import StrEnum


class Reason(StrEnum):
    """How a call hangs on those before it."""

    START = "start"
    """The session's first call."""
    CONTINUED = "continued"
    """The first to go on from an answer."""
    FORKED = "forked"
    """A second way to go on from an answer: concurrent branches."""
    REPEATED = "repeated"
    """The same request once more, without a signal that it is a retry."""
    NEW_CONVERSATION = "new_conversation"
    """Nothing of what was said before: a sub-agent, or an agent that begins again from its own notes."""

    ASSISTANT_DROPPED = "assistant_dropped"
    """An answer was left out, and other messages follow in its place."""
    ASSISTANT_EDITED = "assistant_edited"
    """An answer came back as something that was not said."""
    HISTORY_EDITED = "history_edited"
    """An earlier message was changed, or one was put in."""
    HISTORY_CUT = "history_cut"
    """Earlier messages are gone, later answers are still there."""
    SYSTEM_CHANGED = "system_changed"
    """The system prompt is another one."""
    TOOLS_CHANGED = "tools_changed"
    """The conversation goes on, with other tools."""
    UNBRIDGEABLE = "unbridgeable"
    """The chat family cannot write the new messages after an answer."""
    UNKNOWN = "unknown"
    """None of these."""

    @property
    def is_break(self) -> bool:
        """Whether the agent did something to its history that no stream can follow."""
        return self not in _NO_BREAKS


_NO_BREAKS = frozenset({Reason.START, Reason.CONTINUED, Reason.FORKED, Reason.REPEATED, Reason.NEW_CONVERSATION})
