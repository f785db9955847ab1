r"""An episode for people: its segments one after the other, each with author, size, versions and text.

Invariant: every id of the trajectory is shown, in its order and once; nothing here is ever turned back into ids.

Example:
    >>> print(show_episode(trajectory, tokenizer))  # doctest: +SKIP
    episode r17 · task a1b2 · terminated · score 1: right · 41 action tokens of 63
      observation · 14 tokens
        | <|user|>a=47+38; a*2=?<|end|><|assistant|>
      action 0 · 27 tokens · version 3 · stop
        | <tool_call>{"name": "python", "arguments": {"code": "print((47+38)*2)"}}</tool_call><|end|>
"""

import numpy as np

from sao_gym.stream import Ids, Segment, Trajectory
from sao_gym.text_codec import TextCodec


def show_episode(trajectory: Trajectory, tokenizer: object) -> str:
    """The episode as text: one line about it, then one block per segment. `tokenizer` is a fast one, or a `TextCodec`.

    Control tokens are spelled out; an id outside the vocabulary has no text, but counts. Raises ModelError for a
    tokenizer that is not fast.
    """
    codec = TextCodec.of(tokenizer)
    blocks = [headline(trajectory)]
    action = 0
    for number, stream in enumerate(trajectory.streams):
        if len(trajectory.streams) > 1:
            blocks.append(f"  stream {number}")
        for segment in stream.segments:
            name = f"action {action}" if segment.is_action else "observation"
            action += segment.is_action and len(segment) > 0
            blocks.append(_block(segment, name, codec))
    return "\n".join(blocks)


def headline(trajectory: Trajectory) -> str:
    """One line: which episode, how it ended, what it scored, how long it was."""
    outcome = trajectory.outcome.status.value
    if trajectory.outcome.reason:
        outcome += f" ({trajectory.outcome.reason})"
    score = "not scored"
    if trajectory.score is not None:
        score = f"score {trajectory.score.value:g}"
        score += f": {trajectory.score.detail}" if trajectory.score.detail else ""
    size = f"{trajectory.n_action} action tokens of {trajectory.n_tokens}"
    return f"episode {trajectory.uid} · task {trajectory.task_id} · {outcome} · {score} · {size}"


def _block(segment: Segment, name: str, codec: TextCodec) -> str:
    facts = [name, f"{len(segment)} token{'' if len(segment) == 1 else 's'}"]
    if segment.versions is not None and len(segment.versions):
        facts.append(version_range(segment.versions))
    if segment.stop is not None:
        facts.append(segment.stop.value)
    lines = codec.decode(segment.token_ids).split("\n")
    return "\n".join([f"  {' · '.join(facts)}", *(f"    | {line}" for line in lines)])


def version_range(versions: Ids) -> str:
    """`version 3`, or `versions 3 to 5` where a publication came in between. `versions` [n], n > 0."""
    first, last = int(np.min(versions)), int(np.max(versions))
    return f"version {first}" if first == last else f"versions {first} to {last}"
