"""An evaluation as one HTML file: figures, distributions, problems, and every episode to be read.

Invariant: the file needs nothing beside itself and asks for nothing; what a model or a tool wrote is text in it, never
markup or script (html_markup.py makes all of it). It reads without script too, which only sorts a table.

Example:
    segments = {one.uid: segments_of(one, tokenizer) for one in trajectories}
    view = benchmark_view("aime2025", evaluation, segments)
    write_html(folder / "report.html", HtmlReport(title="step 1000", benchmarks=(view,), facts=tuple(flat_facts(manifest))))
"""

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sao_gym.commands.eval_html_figures import ENDINGS, ends, figures_table
from sao_gym.commands.eval_html_page import page
from sao_gym.commands.eval_html_records import (
    MOST_CHARS,
    BenchmarkView,
    EpisodeView,
    HtmlReport,
    SegmentView,
    benchmark_view,
    flat_facts,
    segments_of,
    shorten,
)
from sao_gym.commands.html_markup import Markup, join, tag
from sao_gym.commands.svg_histogram import histogram
from sao_gym.evaluation_results import Ending, EpisodeResult
from sao_gym.runfolder import write_whole

__all__ = ["HtmlReport", "benchmark_view", "flat_facts", "render_html", "segments_of", "write_html"]

BUDGET_CHARS = 60_000_000
LEAST_CHARS = 1_000
FEW_FACTS = 12
"""So many stand open at the top; more would push the figures away."""
MARKS = dict(zip(ENDINGS, "✓✗–…!?", strict=True))
COLUMNS = ("problem", *ENDINGS, "scored", "share", "tokens", "turns")


def write_html(path: Path, report: HtmlReport) -> None:
    """Write the page, whole or not at all."""
    write_whole(path, render_html(report))


def render_html(report: HtmlReport, *, budget_chars: int = BUDGET_CHARS) -> str:
    """The page. Where all segments together exceed `budget_chars`, the longest of them lose their middle, and it is said."""
    most = segment_limit(report, budget_chars)
    notes = [tag("p", note, class_="note") for note in report.notes]
    facts = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in report.facts]
    manifest = tag(
        "details",
        tag("summary", "what was run"),
        tag("div", tag("table", *facts, class_="figures")),
        open=len(facts) <= FEW_FACTS,
    )
    sections = [_section(view, index, most) for index, view in enumerate(report.benchmarks)]
    return page(
        report.title, tag("h1", report.title), *notes, _overview(report), manifest if facts else Markup(), *sections
    )


def segment_limit(report: HtmlReport, budget_chars: int) -> int:
    """Most characters that a segment shows: the largest bound up to `MOST_CHARS` with which all fit, or `LEAST_CHARS`."""
    lengths = sorted(
        len(segment.text) for view in report.benchmarks for episode in view.episodes for segment in episode.segments
    )
    room = budget_chars
    for index, length in enumerate(lengths):
        share = room // (len(lengths) - index)
        if length > share:
            return min(max(share, LEAST_CHARS), MOST_CHARS)
        room -= length
    return MOST_CHARS


def _overview(report: HtmlReport) -> Markup:
    """One line per benchmark, linked."""
    rows = []
    for index, view in enumerate(report.benchmarks):
        one = view.summary
        success = "unknown" if one.success is None else f"{one.success:.3f} {ends(one.interval)}"
        counts = f"{one.n_passed:,} of {one.n_scored:,} scored, {one.n_error:,} errors, {one.n_samples:,} samples"
        name = tag("th", tag("a", view.name, href=f"#b{index}"), scope="row")
        rows.append(tag("tr", name, tag("td", success), tag("td", counts)))
    return tag("table", *rows, class_="figures")


def _section(view: BenchmarkView, index: int, most: int) -> Markup:
    notes = [tag("p", note, class_="note") for note in view.notes]
    return tag(
        "section",
        tag("h2", view.name),
        *notes,
        figures_table(view),
        tag(
            "div",
            _plot(view, "tokens", lambda one: one.n_action),
            _plot(view, "turns", lambda one: one.turns),
            class_="plots",
        ),
        tag("h3", "problems"),
        tag("div", _problems(view, index), class_="scroll"),
        tag("h3", "episodes"),
        tag(
            "p",
            f"A text of more than {most:,} characters stands without its middle; the records hold all of it.",
            class_="soft",
        ),
        *(_problem(name, rows, f"b{index}p{i}", most) for i, (name, rows) in enumerate(view.by_task().items())),
        id=f"b{index}",
    )


def _plot(view: BenchmarkView, unit: str, values: Callable[[EpisodeResult], int]) -> Markup:
    results = [episode.result for episode in view.episodes]
    series = [
        (name, [values(result) for result in results if result.ending in endings])
        for name, endings in (
            ("right", (Ending.RIGHT,)),
            ("not right", (Ending.WRONG, Ending.NO_ANSWER, Ending.TRUNCATED)),
            ("no verdict", (Ending.UNSCORED,)),
        )
    ]
    caption = f"{unit} per episode: right below, not right above it; errors left out"
    return tag("figure", histogram(series, unit=unit), tag("figcaption", caption))


def _problems(view: BenchmarkView, index: int) -> Markup:
    head = tag("thead", tag("tr", *(tag("th", name, scope="col") for name in COLUMNS)))
    rows = [_problem_row(name, rows, f"b{index}p{i}") for i, (name, rows) in enumerate(view.by_task().items())]
    return tag("table", head, tag("tbody", *rows), class_="problems")


def _problem_row(name: str, episodes: Sequence[EpisodeView], anchor: str) -> Markup:
    results = [episode.result for episode in episodes]
    count = Counter(result.ending for result in results)
    scored = sum(result.is_scored for result in results)
    share = count[Ending.RIGHT] / scored if scored else None
    sizes = (sum(one.n_action for one in results) / len(results), sum(one.turns for one in results) / len(results))
    return tag(
        "tr",
        tag("td", tag("a", name, href=f"#{anchor}")),
        *(tag("td", count[ending]) for ending in ENDINGS),
        tag("td", scored),
        tag("td", "–" if share is None else f"{share:.2f}", data_value=-1 if share is None else round(share, 6)),
        *(tag("td", f"{size:,.1f}", data_value=round(size, 3)) for size in sizes),
    )


def _problem(name: str, episodes: Sequence[EpisodeView], anchor: str, most: int) -> Markup:
    endings = [episode.result.ending for episode in episodes]
    marks = join(
        tag("span", f" {MARKS[ending]}", class_=f"mark {_word(ending)}", title=ending.value) for ending in endings
    )
    summary = tag("summary", f"{name} · {endings.count(Ending.RIGHT)} right of {len(endings)} samples", marks)
    return tag("details", summary, tag("div", *(_episode(one, most) for one in episodes)), class_="problem", id=anchor)


def _episode(episode: EpisodeView, most: int) -> Markup:
    result = episode.result
    return tag(
        "details",
        tag("summary", tag("span", result.ending.value, class_="mark"), " · ".join(["", *_facts(result)])),
        tag("div", tag("p", result.detail, class_="soft") if result.detail else None, *_said(episode.segments, most)),
        class_=f"episode {_word(result.ending)}",
    )


def _facts(result: EpisodeResult) -> Iterator[str]:
    yield f"sample {result.attempt}"
    if result.value is not None:
        yield f"score {result.value:g}" + (f" by {result.method}" if result.has_answer and result.method else "")
    if result.answer is not None:
        yield f"answer {textwrap.shorten(result.answer, 80, placeholder=' …')}"
    if result.stage or result.reason:
        yield ": ".join(part for part in (result.stage, result.reason) if part)
    yield f"{result.turns} turn{'' if result.turns == 1 else 's'}"
    yield f"{result.n_action:,} tokens"
    yield f"{result.seconds:.1f} s"
    yield result.uid


def _said(segments: Sequence[SegmentView], most: int) -> Iterator[Markup]:
    if not segments:
        yield tag("p", "nothing of this episode was recorded", class_="soft")
    for segment in segments:
        yield tag("div", " · ".join([segment.title, *segment.facts]), class_="soft")
        yield tag("pre", *_excerpt(segment, most), class_="action" if segment.is_action else "observation")


def _excerpt(segment: SegmentView, most: int) -> Iterator[str]:
    text = segment.text
    if not text.left_out:
        text = shorten(text.head, most)
    elif len(text) > most:
        head, tail = text.head[: most - most // 2], text.tail[len(text.tail) - most // 2 :]
        text = type(text)(head, tail, text.left_out + len(text) - len(head) - len(tail))
    yield text.head
    if text.left_out:
        yield tag("span", f"\n[… {text.left_out:,} characters left out …]\n", class_="cut")
        yield text.tail


def _word(ending: Ending) -> str:
    return ending.value.replace(" ", "-")
