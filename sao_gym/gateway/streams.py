"""A session's tree as token streams: every sampled token trained exactly once.

Each end of the tree becomes a stream. What two streams share is an action in the first that holds it and context in
the others; an answer to an auxiliary call is context wherever it is followed, and kept apart by itself. Streams stand
in the order of their first own answer.

Example:
    streams = streams_of(tree.nodes)
    assert sum(stream.n_action for stream in streams) == sum(len(n.generation.token_ids) for n in tree.nodes)
"""

from collections.abc import Iterable, Sequence

import numpy as np

from sao_gym.gateway.tree import Node
from sao_gym.stream import Ids, Segment, TokenStream


def streams_of(nodes: Sequence[Node]) -> tuple[TokenStream, ...]:
    """The streams to train on."""
    ends = sorted(_ends([node for node in nodes if not node.is_auxiliary]), key=lambda node: node.index)
    trained: set[int] = set()
    made: list[tuple[int, TokenStream]] = []
    for end in ends:
        path = end.path()
        own = {id(node) for node in path if not node.is_auxiliary and id(node) not in trained}
        own = {id(node) for node in path if id(node) in own and len(node.generation.token_ids)}
        if not own:
            continue
        trained |= own
        first = next(node.index for node in path if id(node) in own)
        made.append((first, _stream(path, own)))
    return tuple(stream for _, stream in sorted(made, key=lambda entry: entry[0]))


def auxiliary_streams_of(nodes: Iterable[Node]) -> tuple[TokenStream, ...]:
    """Auxiliary calls, one stream each: kept, never trained."""
    kept = [node for node in nodes if node.is_auxiliary]
    return tuple(_stream(node.path(), {id(node)}) for node in kept)


def _ends(nodes: Sequence[Node]) -> list[Node]:
    """The nodes that none of the others goes on from, with or without auxiliary ones between."""
    followed = {id(above) for node in nodes for above in _above(node)}
    return [node for node in nodes if id(node) not in followed]


def _above(node: Node) -> Iterable[Node]:
    """The nearest node above that is not auxiliary: what is above that is followed by it."""
    above = node.parent
    while above is not None and above.is_auxiliary:
        above = above.parent
    return () if above is None else (above,)


def _stream(path: Sequence[Node], own: set[int]) -> TokenStream:
    segments: list[Segment] = []
    waiting: list[Ids] = []
    for node in path:
        waiting.append(node.prompt_ids)
        if id(node) not in own:
            waiting.append(node.generation.token_ids)
            continue
        segments += [*_observed(waiting), action_of(node)]
        waiting = []
    return TokenStream(segments=(*segments, *_observed(waiting)))


def _observed(parts: Sequence[Ids]) -> list[Segment]:
    ids = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    return [Segment.observation(ids)] if len(ids) else []


def action_of(node: Node) -> Segment:
    """What was sampled for one call."""
    sampled = node.generation
    return Segment.action(
        sampled.token_ids,
        logprobs=sampled.logprobs,
        versions=sampled.versions,
        temperature=sampled.temperature,
        stop=sampled.stop,
        extras=sampled.extras,
    )
