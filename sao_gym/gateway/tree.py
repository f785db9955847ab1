"""One session's calls as a tree: which earlier call a request continues.

A node is one call. Invariants: a node's ids stand as they were rendered and sampled; a child's path begins with its
parent's, id by id; of a node's messages only their keys are kept. A request continues the deepest node whose messages
are a prefix of its own and whose answer comes next: the same (normalised), else with a call id that was minted for it,
else, where that is configured, whatever stands in its place.

Example:
    tree = Tree(by_position=False)
    match = tree.match(tuple(map(hear, records)), tools_key(tools))
    print(match.node, match.start, match.echo)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sao_gym.gateway.echo import EchoKind, Heard, hear
from sao_gym.gateway.reasons import Reason
from sao_gym.gateway.shown import Shown
from sao_gym.protocols import Generation
from sao_gym.stream import Ids

Keys = tuple[bytes, ...]
_BY_QUALITY = {EchoKind.POSITION: 0, EchoKind.CALL_ID: 1, EchoKind.EXACT: 2, None: 3}


@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """One call. `heard` and `prompt_ids` are what is new after `parent`; `asked` is the sampling that the agent asked for.

    A raw completion has no messages and hangs on others by what it begins with; `text` is its prompt and answer.
    `n_messages` and `n_tokens` count along the path, the answer left out of the first and in the second.
    """

    index: int
    parent: "Node | None"
    heard: tuple[Heard, ...]
    tools: bytes
    prompt_ids: Ids
    generation: Generation
    shown: Shown
    reason: Reason
    echo: EchoKind | None
    is_auxiliary: bool
    asked: Mapping[str, Any]
    text: str | None = None
    is_raw: bool = False
    is_cut: bool = False
    is_followed: bool = False
    is_delivered: bool = False
    n_messages: int = field(init=False)
    n_tokens: int = field(init=False)
    reply: Heard = field(init=False)
    branches: "Branches" = field(init=False)

    def __post_init__(self) -> None:
        before = self.parent
        self.n_messages = len(self.heard) + (before.n_messages + 1 if before else 0)
        self.n_tokens = self.n_prompt + len(self.generation.token_ids)
        self.reply = hear(self.shown.record())
        self.branches = Branches()

    @property
    def n_prompt(self) -> int:
        """Tokens before the answer."""
        return len(self.prompt_ids) + (self.parent.n_tokens if self.parent else 0)

    def path(self) -> list["Node"]:
        """From the root to this node."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def token_ids(self) -> Ids:
        """All ids of the path, the answer included."""
        parts = [ids for node in self.path() for ids in (node.prompt_ids, node.generation.token_ids)]
        return np.concatenate(parts).astype(np.int32, copy=False)


class Branches:
    """Nodes that follow one node (or none), by the keys of the messages that they added."""

    def __init__(self) -> None:
        self.groups: dict[Keys, list[Node]] = {}
        self._lengths: set[int] = set()

    def add(self, node: Node) -> None:
        """Take note of a node."""
        keys = tuple(heard.key for heard in node.heard)
        self.groups.setdefault(keys, []).append(node)
        self._lengths.add(len(keys))

    def nodes(self) -> Iterator[Node]:
        """All of them."""
        return (node for group in self.groups.values() for node in group)

    def at(self, keys: Sequence[bytes], start: int) -> Iterator[tuple[int, list[Node]]]:
        """(position after its messages, nodes) of each group whose messages stand at `start`."""
        for length in self._lengths:
            group = self.groups.get(tuple(keys[start : start + length]))
            if group and start + length <= len(keys):
                yield start + length, group


@dataclass(frozen=True, slots=True)
class Match:
    """The node that a request continues, the position of its first new message, and how the answer was recognised."""

    node: Node | None = None
    start: int = 0
    echo: EchoKind | None = None

    @property
    def rank(self) -> tuple[int, int, int]:
        """Deeper is better, then a better echo, then a later call."""
        return self.start, _BY_QUALITY[self.echo], self.node.index if self.node else -1


class Tree:
    """The calls of one session. Calls with different tools never continue each other: the prompts differ."""

    def __init__(self, *, by_position: bool = False) -> None:
        self.nodes: list[Node] = []
        self.roots: dict[bytes, Branches] = {}
        self._by_call_id: dict[str, Node] = {}
        self._by_reply: dict[bytes, list[Node]] = {}
        self._raw: list[Node] = []
        self._by_position = by_position

    def add(self, node: Node) -> None:
        """Insert a call that was answered."""
        self.nodes.append(node)
        if node.parent is not None:
            node.parent.is_followed = True
        if node.is_raw:
            self._raw.append(node)
            return
        self.branches_after(node.parent, node.tools).add(node)
        self._by_reply.setdefault(node.reply.key, []).append(node)
        self._by_call_id.update((call.id, node) for call in node.shown.calls)

    def branches_after(self, node: Node | None, tools: bytes) -> Branches:
        """What follows `node`; for None the roots with these tools."""
        return self.roots.setdefault(tools, Branches()) if node is None else node.branches

    def answers(self, said: Heard) -> list[Node]:
        """The nodes whose answer `said` may be, wherever it stands: by its call ids, else by what it says."""
        named = [self._by_call_id[name] for name in said.call_ids if name in self._by_call_id]
        return named or self._by_reply.get(said.key, [])

    def longest_text(self, text: str) -> Node | None:
        """The raw completion with the longest text that `text` begins with."""
        found = [node for node in self._raw if node.text and text.startswith(node.text)]
        return max(found, key=lambda node: len(node.text or ""), default=None)

    def longest_ids(self, ids: Ids) -> Node | None:
        """The raw completion with the longest row of ids that `ids` begins with."""
        found = [n for n in self._raw if n.n_tokens <= len(ids) and np.array_equal(n.token_ids(), ids[: n.n_tokens])]
        return max(found, key=lambda node: node.n_tokens, default=None)

    def match(self, heard: Sequence[Heard], tools: bytes) -> Match:
        """The deepest node that a request continues."""
        best, keys = Match(), [message.key for message in heard]
        open_ends: list[tuple[Branches, int]] = [(self.roots.get(tools, Branches()), 0)]
        while open_ends:
            branches, start = open_ends.pop()
            for position, group in branches.at(keys, start):
                if position == len(heard) or not heard[position].is_assistant:
                    continue
                for node, echo in self._echoed(group, heard[position]):
                    open_ends.append((node.branches, position + 1))
                    best = max(best, Match(node, position + 1, echo), key=lambda match: match.rank)
        return best

    def _echoed(self, group: Sequence[Node], said: Heard) -> Iterator[tuple[Node, EchoKind]]:
        """The nodes that `said` may be the answer of, by the best kind of echo that any of them has."""
        same = [node for node in group if node.reply.key == said.key]
        named = [node for node in same if node.reply.call_ids == said.call_ids]
        if same:
            yield from ((node, EchoKind.EXACT) for node in named or same)
            return
        called = [node for node in group if said.call_ids and node.reply.call_ids == said.call_ids]
        if called:
            yield from ((node, EchoKind.CALL_ID) for node in called)
        elif self._by_position:
            yield group[-1], EchoKind.POSITION
