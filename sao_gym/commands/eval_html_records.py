"""What an evaluation's page shows, as records: the figures as they were summed up, and each episode with what was said.

Invariant: figures come from the `Summary` alone, so that page, console and results.json cannot differ.

Example:
    >>> shorten("0123456789", 4)
    Excerpt(head='01', tail='89', left_out=6)
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sao_gym.conversation import conversation_of
from sao_gym.evaluation_results import EpisodeResult
from sao_gym.evaluation_summary import Evaluation, Summary
from sao_gym.messages import Message
from sao_gym.stream import Segment, Trajectory
from sao_gym.text_codec import TextCodec
from sao_gym.transcript import version_range

MOST_CHARS = 40_000
"""Of one segment; a longer text loses its middle."""


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text, whole in `head`, or its two ends with `left_out` characters missing between them."""

    head: str
    tail: str = ""
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.head) + len(self.tail)


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentView:
    """A run of text with one author; `facts` are short words about it, such as its size."""

    is_action: bool
    title: str
    text: Excerpt
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeView:
    """One sample of a task, and what was said in it; without segments, nothing of it was kept."""

    result: EpisodeResult
    segments: tuple[SegmentView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkView:
    """One benchmark: its figures, its episodes in order, and `notes` that a reader must not miss."""

    name: str
    summary: Summary
    samples: int
    seconds: float
    episodes: tuple[EpisodeView, ...]
    notes: tuple[str, ...] = ()

    def by_task(self) -> dict[str, list[EpisodeView]]:
        """Episodes of each task, in order."""
        found: dict[str, list[EpisodeView]] = {}
        for episode in self.episodes:
            found.setdefault(episode.result.task_id, []).append(episode)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HtmlReport:
    """A page: `facts` are names and values of the manifest, `notes` sentences about the whole evaluation."""

    title: str
    benchmarks: tuple[BenchmarkView, ...]
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def shorten(text: str, most: int) -> Excerpt:
    """`text` whole if it has at most `most` characters, else its two ends."""
    if len(text) <= most:
        return Excerpt(text)
    return Excerpt(text[: most - most // 2], text[len(text) - most // 2 :], len(text) - most)


def flat_facts(manifest: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, value) of every leaf of a manifest; what is empty or None is left out."""
    for key, value in manifest.items():
        if isinstance(value, Mapping):
            yield from flat_facts(value, f"{prefix}{key}.")
        elif value is not None and value != "" and value != []:
            yield (
                f"{prefix}{key}",
                value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str),
            )


def benchmark_view(
    name: str, evaluation: Evaluation, segments: Mapping[str, tuple[SegmentView, ...]], notes: Sequence[str] = ()
) -> BenchmarkView:
    """An evaluation as its page shows it; `segments` are by uid, and may lack some."""
    return BenchmarkView(
        name=name,
        summary=evaluation.summary,
        samples=evaluation.samples,
        seconds=evaluation.seconds,
        episodes=tuple(EpisodeView(result=one, segments=segments.get(one.uid, ())) for one in evaluation.results),
        notes=tuple(notes),
    )


def segments_of(trajectory: Trajectory, tokenizer: object, most: int = MOST_CHARS) -> tuple[SegmentView, ...]:
    """What was said in an episode, in order, each text bounded to `most` characters.

    `tokenizer` is a fast one or a `TextCodec`; an episode that was recorded as messages needs none, and takes None.
    """
    said = conversation_of(trajectory)
    if said is not None:
        return tuple(_of_message(message, most) for message in said)
    codec = TextCodec.of(tokenizer) if trajectory.streams else None
    views: list[SegmentView] = []
    for number, stream in enumerate(trajectory.streams):
        where = f"stream {number} · " if len(trajectory.streams) > 1 else ""
        for segment in stream.segments:
            index = sum(view.is_action for view in views)
            title = where + (f"action {index}" if segment.is_action else "observation")
            text = codec.decode(segment.token_ids) if codec else ""
            views.append(
                SegmentView(
                    is_action=segment.is_action, title=title, text=shorten(text, most), facts=tuple(_facts(segment))
                )
            )
    return tuple(views)


def _facts(segment: Segment) -> Iterator[str]:
    yield f"{len(segment):,} token{'' if len(segment) == 1 else 's'}"
    if segment.versions is not None and len(segment.versions):
        yield version_range(segment.versions)
    if segment.stop is not None:
        yield segment.stop.value


def _of_message(message: Message, most: int) -> SegmentView:
    parts = [f"[reasoning]\n{message.reasoning}\n[end of reasoning]"] if message.reasoning else []
    parts += [message.content] if message.content else []
    parts += [
        call.raw or f"{call.name}({json.dumps(dict(call.arguments), ensure_ascii=False, default=str)})"
        for call in message.tool_calls
    ]
    n_calls = len(message.tool_calls)
    facts = [f"{n_calls} call{'' if n_calls == 1 else 's'}"] if n_calls else []
    facts += ["cut by a length limit"] if message.is_truncated else []
    return SegmentView(
        is_action=message.role == "assistant",
        title=f"{message.role} {message.name}" if message.name else message.role,
        text=shorten("\n".join(parts), most),
        facts=tuple(facts),
    )
