"""An evaluation as people and programs read it: the table, the progress line, the files."""

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sao_gym import __version__
from sao_gym.evaluation import EpisodeResult, Evaluation, Summary
from sao_gym.jsonl import append_jsonl, dump_line
from sao_gym.runfolder import RunFolder, write_whole

RESULTS, SAMPLES, TRAJECTORIES = "results.json", "samples.jsonl", "trajectories.parquet"


class EvalProgress:
    """A line that moves on a terminal; elsewhere a plain line at each tenth. Written to standard error."""

    def __init__(self, folder: RunFolder | None = None) -> None:
        self._folder = folder
        self._scored, self._passed, self._errors, self._tenth = 0, 0, 0, 0

    def __call__(self, result: EpisodeResult, done: int, total: int) -> None:
        """Take note of one episode, and keep it in the folder at once."""
        if self._folder is not None:
            append_jsonl(self._folder.file(SAMPLES), sample_record(result))
        self._scored += result.is_scored
        self._passed += bool(result.passed)
        self._errors += result.stage is not None
        line = f"{done}/{total} episodes, {self._passed} passed of {self._scored} scored, {self._errors} errors"
        if sys.stderr.isatty():
            print(f"\r{line}", end="\n" if done == total else "", file=sys.stderr, flush=True)
        elif 10 * done // total > self._tenth:
            self._tenth = 10 * done // total
            print(line, file=sys.stderr, flush=True)


def sample_record(result: EpisodeResult) -> dict[str, Any]:
    """A line of samples.jsonl."""
    return {**asdict(result), "outcome": result.outcome.value}


def table(evaluation: Evaluation) -> str:
    """The figures in plain words; every mean with its denominator."""
    summary = evaluation.summary
    rows = [
        ("tasks", str(summary.n_tasks)),
        ("samples", f"{summary.n_samples}, {evaluation.samples} per task"),
        ("success", _success(summary)),
        ("with errors as 0", f"{summary.lower_bound:.3f} of {summary.n_samples} samples"),
        ("mean score", _figure(summary.value_mean, ".3f", f" over {summary.n_scored} scored")),
        ("truncated", _counted(summary.n_truncated, summary.truncations)),
        ("errors", _counted(summary.n_error, summary.errors)),
        ("turns", _figure(summary.turns_mean, ".1f", " per scored episode")),
        ("action tokens", _figure(summary.action_tokens_mean, ".1f", " per scored episode")),
    ]
    if summary.n_unscored:
        rows.insert(7, ("without verdict", str(summary.n_unscored)))
    rows += [(f"pass@{one.k}", _passing(summary, i)) for i, one in enumerate(summary.pass_at_k) if one.k > 1]
    rows.append(("time", f"{evaluation.seconds:.1f} s"))
    return "\n".join(f"{name:<18}{text}" for name, text in rows)


def _success(summary: Summary) -> str:
    if summary.success is None or summary.interval is None:
        return f"unknown: none of {summary.n_samples} samples was scored"
    low, high, level = summary.interval.low, summary.interval.high, summary.interval.level
    counts = f"{summary.n_passed} of {summary.n_scored} scored"
    return f"{summary.success:.3f}  [{low:.3f}, {high:.3f}] at {level:.0%}  ({counts})"


def _passing(summary: Summary, index: int) -> str:
    one = summary.pass_at_k[index]
    reason = f" ({one.reason})" if one.reason else ""
    return _figure(one.value, ".3f", f" over {one.n_tasks} of {summary.n_tasks} tasks") + reason


def _figure(value: float | None, form: str, after: str) -> str:
    return "unknown" if value is None else format(value, form) + after


def _counted(total: int, kinds: Mapping[str, int]) -> str:
    detail = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    return f"{total}  ({detail})" if detail else str(total)


def versions(packages: Sequence[str] = ("torch", "transformers", "tokenizers", "renderers", "numpy")) -> dict[str, str]:
    """Releases of what took part."""
    found = {"sao_gym": __version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_report(
    folder: RunFolder, evaluation: Evaluation, facts: Mapping[str, Any], record: Mapping[str, Any]
) -> None:
    """Write results.json, and samples.jsonl once more in order, each whole or not at all."""
    lines = (dump_line(sample_record(result)) for result in evaluation.results)
    write_whole(folder.file(SAMPLES), "".join(lines))
    write_whole(
        folder.file(RESULTS), json.dumps({"manifest": dict(facts), **record}, indent=2, ensure_ascii=False) + "\n"
    )
