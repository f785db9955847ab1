"""A benchmark's figures on the page: every one with its denominator, and what failed apart from what was wrong."""

from collections.abc import Iterator, Mapping
from statistics import quantiles

from sao_gym.commands.eval_html_records import BenchmarkView
from sao_gym.commands.html_markup import Markup, tag
from sao_gym.evaluation_results import Ending
from sao_gym.evaluation_summary import Summary
from sao_gym.statistics import AtK, Interval

Row = tuple[str, str, str]
"""Name, figure, remark."""
ENDINGS = {
    Ending.RIGHT: "",
    Ending.WRONG: "an answer, and not the right one",
    Ending.NO_ANSWER: "ended by itself without an answer",
    Ending.TRUNCATED: "a budget ended the episode before a right answer",
    Ending.ERROR: "infrastructure failed; never a wrong answer",
    Ending.UNSCORED: "ended, but no grader spoke",
}
"""In the order of the page, with what each says."""


def figures_table(view: BenchmarkView) -> Markup:
    """All figures of a benchmark as one table."""
    summary = view.summary
    rows = [*_counts(summary, view.samples), *_success(summary), *_at_k(summary), *_sizes(view)]
    cells = [tag("tr", tag("th", name, scope="row"), tag("td", figure), tag("td", why)) for name, figure, why in rows]
    return tag("table", tag("tbody", *cells), class_="figures")


def ends(interval: Interval | None) -> str:
    """An interval in brackets, nothing for None."""
    return f"[{interval.low:.3f}, {interval.high:.3f}]" if interval else ""


def _counts(summary: Summary, samples: int) -> Iterator[Row]:
    remarks = {**ENDINGS, Ending.ERROR: _listed(summary.errors) or ENDINGS[Ending.ERROR]}
    yield "problems", f"{summary.n_tasks:,}", ""
    yield "samples", f"{summary.n_samples:,}", f"{samples} asked of each problem; the six kinds below"
    yield from ((ending.value, f"{summary.endings[ending.value]:,}", remark) for ending, remark in remarks.items())
    yield (
        "scored",
        f"{summary.n_scored:,} of {summary.n_samples:,}",
        "the first four kinds; only these are in the success",
    )
    yield "truncated in all", f"{summary.n_truncated:,}", _listed(summary.truncations) or "right or not"
    if summary.methods:
        yield "judged by", f"{summary.n_scored:,} scored", _listed(summary.methods)


def _success(summary: Summary) -> Iterator[Row]:
    counts = f"{summary.n_passed:,} of {summary.n_scored:,} scored samples"
    if summary.success is None or summary.interval is None:
        yield "success", "unknown", f"none of {summary.n_samples:,} samples was scored"
    else:
        yield "success (avg@n)", f"{summary.success:.3f}", counts
        yield (
            f"interval, {summary.interval.level:.0%}",
            ends(summary.interval),
            "Wilson, samples of a problem hang together",
        )
    if summary.interval_bootstrap is not None:
        yield "bootstrap", ends(summary.interval_bootstrap), "problems drawn again, then samples within each"
    lower = f"{summary.n_passed:,} of {summary.n_samples:,} samples: a lower bound"
    yield "with errors as 0", f"{summary.lower_bound:.3f}", lower
    if summary.value_mean is not None:
        yield "mean score", f"{summary.value_mean:.3f}", f"over {summary.n_scored:,} scored samples"
    if (least := summary.detectable) is not None:
        how = f"from a second such run; a paired test at {least.level:.0%} finds it {least.power:.0%} of the time"
        yield "smallest difference", _figure(least.value), least.reason or how


def _at_k(summary: Summary) -> Iterator[Row]:
    for name, estimates in (("pass", summary.pass_at_k), ("maj", summary.maj_at_k)):
        yield from (_estimate(f"{name}@{one.k}", one, summary.n_tasks) for one in estimates if one.k > 1)


def _estimate(name: str, one: AtK, n_tasks: int) -> Row:
    remark = f"over {one.n_tasks:,} of {n_tasks:,} problems" + (f": {one.reason}" if one.reason else "")
    return name, _figure(one.value), remark


def _sizes(view: BenchmarkView) -> Iterator[Row]:
    done = [episode.result for episode in view.episodes if episode.result.ending is not Ending.ERROR]
    for name, values in (("tokens", [one.n_action for one in done]), ("turns", [one.turns for one in done])):
        if values:
            tenths = quantiles(values, n=10, method="inclusive") if len(values) > 1 else values * 9
            spread = f"median {tenths[4]:,.0f}, 90 % below {tenths[8]:,.0f}, most {max(values):,}"
            yield (
                name,
                f"{sum(values) / len(values):,.1f}",
                f"mean over {len(values):,} samples without errors; {spread}",
            )
    usage = view.summary.usage
    if usage.requests:
        unknown = f"; {usage.unmetered:,} answers did not say, so at least that" if usage.unmetered else ""
        tokens = f"{usage.prompt_tokens:,} in, {usage.completion_tokens:,} out"
        yield "paid tokens", tokens, f"{usage.requests:,} requests, {usage.retries:,} retries{unknown}"
        yield "cost", f"{usage.cost:,.4f}", "in the currency of the prices given"
    yield "time", f"{view.seconds:,.1f} s", ""


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())
