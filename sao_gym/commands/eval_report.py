"""An evaluation as people and programs read it: the table, results.json, the page.

Invariant: console, results.json, manifest and page show the counts of one and the same `Summary`.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sao_gym.commands.eval_html import HtmlReport, benchmark_view, flat_facts, segments_of, write_html
from sao_gym.commands.eval_records import REPORT, RESULTS
from sao_gym.errors import SaoGymError
from sao_gym.evaluation import Ending, Evaluation, Summary, to_record
from sao_gym.runfolder import RunFolder, write_whole
from sao_gym.statistics import AtK
from sao_gym.stream import Trajectory
from sao_gym.text_codec import TextCodec
from sao_gym.usage import spoken

_log = logging.getLogger(__name__)
Named = Mapping[str, Evaluation]
"""Benchmark to its evaluation, in the order in which they were asked for."""


def table(evaluation: Evaluation) -> str:
    """The figures in plain words; every mean with its denominator."""
    return "\n".join(f"{name:<22}{text}" for name, text in _rows(evaluation))


def _rows(evaluation: Evaluation) -> Iterator[tuple[str, str]]:
    summary = evaluation.summary
    yield "tasks", str(summary.n_tasks)
    yield "samples", f"{summary.n_samples}, {evaluation.samples} per task"
    yield "success", _success(summary)
    if summary.success is not None and summary.interval_bootstrap is not None:
        low, high = summary.interval_bootstrap.low, summary.interval_bootstrap.high
        yield "  bootstrap", f"[{low:.3f}, {high:.3f}] over problems and samples"
    yield "with errors as 0", f"{summary.lower_bound:.3f} of {summary.n_samples} samples"
    yield "mean score", _figure(summary.value_mean, ".3f", f" over {summary.n_scored} scored")
    yield "no answer", str(summary.endings[Ending.NO_ANSWER.value])
    yield "truncated", _counted(summary.n_truncated, summary.truncations)
    yield "errors", _counted(summary.n_error, summary.errors)
    if summary.n_unscored:
        yield "without verdict", str(summary.n_unscored)
    yield "judged by", ", ".join(f"{name} {count}" for name, count in summary.methods.items()) or "nothing"
    yield "turns", _figure(summary.turns_mean, ".1f", " per scored episode")
    yield "action tokens", _figure(summary.action_tokens_mean, ".1f", " per scored episode")
    yield from _at_k("pass", summary.pass_at_k, summary)
    yield from _at_k("maj", summary.maj_at_k, summary)
    if summary.detectable is not None:
        yield "smallest difference", _detectable(summary)
    if summary.usage.requests:
        yield "API", spoken(summary.usage)
    yield "time", f"{evaluation.seconds:.1f} s"


def _success(summary: Summary) -> str:
    if summary.success is None or summary.interval is None:
        return f"unknown: none of {summary.n_samples} samples was scored"
    low, high, level = summary.interval.low, summary.interval.high, summary.interval.level
    counts = f"{summary.n_passed} of {summary.n_scored} scored"
    return f"{summary.success:.3f}  [{low:.3f}, {high:.3f}] at {level:.0%}  ({counts})"


def _at_k(name: str, each: Sequence[AtK], summary: Summary) -> Iterator[tuple[str, str]]:
    for one in each:
        if one.k > 1:
            reason = f" ({one.reason})" if one.reason else ""
            yield (
                f"{name}@{one.k}",
                _figure(one.value, ".3f", f" over {one.n_tasks} of {summary.n_tasks} tasks") + reason,
            )


def _detectable(summary: Summary) -> str:
    one = summary.detectable
    if one is None or one.value is None:
        return f"unknown ({one.reason})" if one else "unknown"
    return f"{one.value:.3f} to a second run like this one would be found {one.power:.0%} of the time"


def _figure(value: float | None, form: str, after: str) -> str:
    return "unknown" if value is None else format(value, form) + after


def _counted(total: int, kinds: Mapping[str, int]) -> str:
    detail = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    return f"{total}  ({detail})" if detail else str(total)


def counts(named: Named) -> dict[str, dict[str, int]]:
    """By benchmark, how many samples there are, were scored, passed, failed in the infrastructure."""
    return {
        name: {
            "samples": one.summary.n_samples,
            "scored": one.summary.n_scored,
            "passed": one.summary.n_passed,
            "truncated": one.summary.n_truncated,
            "error": one.summary.n_error,
        }
        for name, one in named.items()
    }


def write_results(folder: RunFolder, named: Named, manifest: Mapping[str, Any]) -> None:
    """Write results.json, whole or not at all."""
    record = {"manifest": dict(manifest), "benchmarks": {name: to_record(one) for name, one in named.items()}}
    write_whole(folder.file(RESULTS), json.dumps(record, indent=2, ensure_ascii=True, default=str) + "\n")


def write_page(
    folder: RunFolder, named: Named, manifest: Mapping[str, Any], episodes: Iterable[Trajectory], tokenizer: Any
) -> None:
    """Write report.html; an episode that `tokenizer` cannot read stands there with its figures alone."""
    codec = TextCodec.of(tokenizer) if tokenizer is not None else None
    segments = {}
    for one in episodes:
        if codec is None and one.streams:
            continue
        try:
            segments[one.uid] = segments_of(one, codec)
        except SaoGymError as error:
            _log.warning("episode %s cannot be shown: %s", one.uid, error)
    views = tuple(
        benchmark_view(name, one, segments, notes=notes_on(manifest["benchmarks"][name]["tasks"]))
        for name, one in named.items()
    )
    facts = tuple(flat_facts({key: value for key, value in manifest.items() if key != "counts"}))
    write_html(folder.file(REPORT), HtmlReport(title=_title(manifest), benchmarks=views, facts=facts))


def _title(manifest: Mapping[str, Any]) -> str:
    model = manifest.get("model", {})
    name = model.get("name") or model.get("path") or f"the {manifest['engine']['kind']} engine"
    return f"{name} on {', '.join(manifest['benchmarks'])}"


def notes_on(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What a reader must know of the data: differences from the rows that are known, and repairs."""
    differences = [f"the data differ from the known rows: {text}" for text in facts.get("differences", ())]
    repairs = facts.get("repairs") or ()
    told = [f"repaired in the data: {', '.join(_repaired(one) for one in repairs)}"] if repairs else []
    return (*differences, *told)


def _repaired(repair: Any) -> str:
    return str(repair.get("id") or repair.get("task_id") or repair) if isinstance(repair, Mapping) else str(repair)
