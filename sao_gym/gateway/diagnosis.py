"""The reason why a call begins a stream or a branch, found by comparing it with what stands nearest in the tree."""

from collections.abc import Sequence
from itertools import islice

from sao_gym.gateway.echo import Heard
from sao_gym.gateway.reasons import Reason
from sao_gym.gateway.tree import Branches, Match, Node, Tree

_LOOKED_AT = 64
"""Branches compared, newest first: a session of thousands of conversations must not slow down."""


def reason_of(tree: Tree, heard: Sequence[Heard], tools: bytes, match: Match, *, is_first: bool) -> Reason:
    """How a call that continues `match` hangs on the calls before it."""
    if is_first:
        return Reason.START
    if any(tree.match(heard, other).start > match.start for other in tree.roots if other != tools):
        return Reason.TOOLS_CHANGED
    branches = tree.branches_after(match.node, tools)
    if match.node is not None and not branches.groups:
        return Reason.CONTINUED
    near, common = _nearest(branches, heard[match.start :])
    rest = heard[match.start + common :]
    if near is not None and common == len(near.heard):
        if not rest:
            return Reason.REPEATED
        if rest[0].is_assistant:
            return Reason.ASSISTANT_EDITED
        if not any(_is_answer(message, near) for message in rest):
            return Reason.ASSISTANT_DROPPED
    if near is not None and _is_other_system(near, heard, match.start, common):
        return Reason.SYSTEM_CHANGED
    return _by_known_answers(tree, heard, match, has_common=common > 0)


def _nearest(branches: Branches, heard: Sequence[Heard]) -> tuple[Node | None, int]:
    """The branch with the longest run of the same first messages, and that length; the longest branch of equals."""
    best: tuple[Node | None, int] = (None, 0)
    for group in islice(reversed(branches.groups.values()), _LOOKED_AT):
        common = 0
        for ours, theirs in zip(heard, group[-1].heard, strict=False):
            if ours.key != theirs.key:
                break
            common += 1
        is_whole = common == len(group[-1].heard)
        if best[0] is None or (common, is_whole) > (best[1], best[1] == len(best[0].heard)):
            best = group[-1], common
    return best


def _is_other_system(near: Node, heard: Sequence[Heard], start: int, common: int) -> bool:
    """Whether a system message differs, and what follows it does not."""
    if start or common >= len(heard) or heard[common].role != "system":
        return False
    theirs = near.heard[common:]
    after = [message.key for message in theirs if message.role != "system"]
    ours = [message.key for message in heard[common:] if message.role != "system"]
    return bool(after) and ours[: len(after)] == after


def _is_answer(message: Heard, node: Node) -> bool:
    return message.key == node.reply.key or bool(message.call_ids and message.call_ids == node.reply.call_ids)


def _by_known_answers(tree: Tree, heard: Sequence[Heard], match: Match, *, has_common: bool) -> Reason:
    said = [(place, message) for place, message in enumerate(heard) if place >= match.start and message.is_assistant]
    for place, message in said:
        places = [node.n_messages for node in tree.answers(message)]
        if places:
            return Reason.HISTORY_CUT if place < min(places) else Reason.HISTORY_EDITED
    if said:
        return Reason.UNKNOWN if has_common or match.node is not None else Reason.NEW_CONVERSATION
    return Reason.NEW_CONVERSATION if match.node is None else Reason.FORKED
