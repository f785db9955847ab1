"""Two evaluations of the same tasks, told apart from chance: what `--compare` says.

Invariant: only tasks whose content is the same are compared, and only those with a scored sample in both; how many are
left out is said, and so is every setting in which the two runs differ.

Example:
    >>> def run(name, solved):
    ...     return ResultSet(name=name, benchmark="aime2025", content_hash="c0ffee", settings={"temperature": "1.0"},
    ...                      passed={f"t{i}": [float(i < solved)] for i in range(30)})
    >>> found = compare(run("before", 10), run("after", 19))
    >>> found.paired.p_value, len(found.flips), found.n_left_out
    (0.00390625, 9, 0)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from sao_gym.errors import ConfigError
from sao_gym.paired import Detectable, PairedDifference, compare_paired, detectable_difference
from sao_gym.statistics import Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultSet:
    """One run's results on one benchmark.

    `passed` holds 0/1 of each scored sample by task. `content_hash` is of the task set as it was loaded, whatever part
    of it was taken. `settings` is everything that must agree for the policy alone to make the difference: sampling,
    budgets, protocol, grader version, each by a name that people read.
    """

    name: str
    benchmark: str
    content_hash: str
    passed: Samples
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A task that most samples of one run pass and most of the other do not; the shares that pass."""

    task_id: str
    first: float
    second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Second run minus first, over the tasks of both.

    `n_only_first` and `n_only_second` tasks had a scored sample in one run alone. `warnings` are sentences on what else
    differs between the runs.
    """

    benchmark: str
    first: str
    second: str
    mean_first: float
    mean_second: float
    paired: PairedDifference
    detectable: Detectable
    flips: tuple[Flip, ...]
    n_only_first: int
    n_only_second: int
    warnings: tuple[str, ...]

    @property
    def n_left_out(self) -> int:
        """Tasks that only one run has results of."""
        return self.n_only_first + self.n_only_second


def compare(first: ResultSet, second: ResultSet, level: float = 0.95) -> Comparison:
    """Compare two runs on one benchmark. Raises ConfigError for different tasks, or none in common."""
    if first.benchmark != second.benchmark or first.content_hash != second.content_hash:
        raise ConfigError(
            f"{first.name} was run on {first.benchmark} with content hash {first.content_hash[:12]} and {second.name} on "
            f"{second.benchmark} with {second.content_hash[:12]}: not the same tasks; compare runs over the same data"
        )
    means = [{task: sum(row) / len(row) for task, row in one.passed.items() if len(row)} for one in (first, second)]
    shared = [task for task in means[0] if task in means[1]]
    if not shared:
        raise ConfigError(f"{first.name} and {second.name} have no scored task of {first.benchmark} in common")
    return Comparison(
        benchmark=first.benchmark,
        first=first.name,
        second=second.name,
        mean_first=sum(means[0][task] for task in shared) / len(shared),
        mean_second=sum(means[1][task] for task in shared) / len(shared),
        paired=compare_paired(first.passed, second.passed, level),
        detectable=detectable_difference(first.passed, second.passed, level=level),
        flips=_flips(means[0], means[1], shared),
        n_only_first=len(means[0]) - len(shared),
        n_only_second=len(means[1]) - len(shared),
        warnings=tuple(_warnings(first, second, shared)),
    )


def _flips(first: Mapping[str, float], second: Mapping[str, float], shared: list[str]) -> tuple[Flip, ...]:
    """Largest change first, then in order of the tasks."""
    found = [Flip(task_id=task, first=first[task], second=second[task]) for task in shared]
    crossed = [flip for flip in found if (flip.first > 0.5) != (flip.second > 0.5)]
    return tuple(sorted(crossed, key=lambda flip: -abs(flip.second - flip.first)))


def _warnings(first: ResultSet, second: ResultSet, shared: list[str]) -> list[str]:
    told = [
        f"{name} differs: {first.settings.get(name, 'not said')} and {second.settings.get(name, 'not said')}"
        for name in dict.fromkeys([*first.settings, *second.settings])
        if first.settings.get(name) != second.settings.get(name)
    ]
    sizes = [sum(len(one.passed[task]) for task in shared) for one in (first, second)]
    if sizes[0] != sizes[1]:
        told.append(f"{sizes[0]} and {sizes[1]} scored samples on the {len(shared)} common tasks")
    return told


def compare_text(comparison: Comparison, most_flips: int = 10) -> str:
    """The comparison in plain words, for a console."""
    paired, level = comparison.paired, comparison.paired.interval.level
    low, high = paired.interval.low, paired.interval.high
    rows = [
        ("first", f"{comparison.mean_first:.3f}  {comparison.first}"),
        ("second", f"{comparison.mean_second:.3f}  {comparison.second}"),
        ("difference", f"{paired.difference:+.3f}  [{low:+.3f}, {high:+.3f}] at {level:.0%}"),
        ("p-value", f"{paired.p_value:.3g}  (paired sign-flip test)  {_verdict(comparison)}"),
        ("tasks", f"{paired.n_tasks} in both: {paired.n_better} better, {paired.n_worse} worse{_left_out(comparison)}"),
        ("smallest to show", _detectable(comparison.detectable)),
        ("flipped", f"{len(comparison.flips)} tasks" if comparison.flips else "no task"),
    ]
    lines = [f"{comparison.benchmark}: second minus first, mean over tasks", ""]
    lines += [f"{name:<18}{text}" for name, text in rows]
    lines += [f"  {flip.first:.2f} -> {flip.second:.2f}  {flip.task_id}" for flip in comparison.flips[:most_flips]]
    if len(comparison.flips) > most_flips:
        lines.append(f"  and {len(comparison.flips) - most_flips} more")
    return "\n".join([*lines, *(f"warning: {text}" for text in comparison.warnings)])


def _verdict(comparison: Comparison) -> str:
    paired = comparison.paired
    if paired.p_value >= 1 - paired.interval.level:
        return "chance alone may have done this"
    return "the second is better" if paired.difference > 0 else "the second is worse"


def _left_out(comparison: Comparison) -> str:
    if not comparison.n_left_out:
        return ""
    return f"; left out {comparison.n_only_first} of the first alone, {comparison.n_only_second} of the second alone"


def _detectable(found: Detectable) -> str:
    if found.value is None:
        return f"unknown: {found.reason}"
    return f"{found.value:.3f}, found {found.power:.0%} of the time with these tasks and samples"
