"""The figures of a study, from the run folders alone: of each run, and of each arm against the one that they are compared with.

A recovery that was not reached within its phase counts with the phase's length, which is less than the truth; how many there
are stands beside the figure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sao_gym.commands.study_plan import BASE, Arm, Places, Study
from sao_gym.errors import ConfigError
from sao_gym.over_seeds import SeedDifference, compare_seeds, holm, mean_over_seeds
from sao_gym.recovery import TAIL, BatchSuccess, read_batches, recoveries
from sao_gym.statistics import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """One run: measures by name, those that are only bounds, and the batches that they come from."""

    arm: str
    seed: int
    measures: Mapping[str, float]
    bounds: frozenset[str]
    batches: tuple[BatchSuccess, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """One arm in one measure: mean over its seeds, 95 % t interval, and how many of them are only bounds."""

    measure: str
    arm: str
    seeds: int
    mean: float
    interval: Interval
    bounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An arm against the base in one measure. `p_holm` is adjusted over the arms."""

    measure: str
    arm: str
    difference: SeedDifference
    p_holm: float
    bounds: int


def figures_of(arm: str, seed: int, records: Sequence[Mapping[str, object]]) -> RunFigures:
    """Measures of one run from the lines of its metrics. Raises ConfigError where there are none."""
    batches = tuple(read_batches(records))
    if not batches:
        raise ConfigError(f"the run of {arm} with seed {seed} has no batches")
    rows = sum(batch.rows for batch in batches)
    measures = {"success": sum(batch.rows * batch.success for batch in batches) / rows}
    bounds: set[str] = set()
    for phase in sorted({batch.phase for batch in batches}):
        own = [batch for batch in batches if batch.phase == phase]
        measures[f"plateau_{phase + 1}"] = _end(own)
    for found in recoveries(batches):
        name = f"recovery_{found.phase + 1}"
        measures[name] = float(found.at_least if found.rows is None else found.rows)
        bounds |= {name} if found.rows is None else set()
    return RunFigures(arm=arm, seed=seed, measures=measures, bounds=frozenset(bounds), batches=batches)


def _end(batches: Sequence[BatchSuccess]) -> float:
    """Success over the last quarter of rows."""
    wanted = TAIL * sum(batch.rows for batch in batches)
    counted, successes = 0, 0.0
    for batch in reversed(batches):
        counted += batch.rows
        successes += batch.rows * batch.success
        if counted >= wanted:
            break
    return successes / counted


def read_figures(study: Study, places: Places) -> list[RunFigures]:
    """Of every run that is done, seed by seed."""
    return [
        figures_of(arm.name, seed, places.metrics(arm, seed))
        for arm, seed in study.pairs
        if places.is_done(study, arm, seed)
    ]


def whole_seeds(study: Study, found: Sequence[RunFigures]) -> list[int]:
    """Seeds with which every arm is done: the only ones that can be compared."""
    done = {(figures.arm, figures.seed) for figures in found}
    return [seed for seed in study.seeds if all((arm.name, seed) in done for arm in study.arms)]


def measures_of(found: Sequence[RunFigures]) -> list[str]:
    """The measures that every run has, in order."""
    return [name for name in found[0].measures if all(name in figures.measures for figures in found)] if found else []


def arm_figures(study: Study, found: Sequence[RunFigures]) -> list[ArmFigures]:
    """Every arm in every measure, over the seeds that it has; arms with fewer than two are left out."""
    return [
        _of_arm([figures for figures in found if figures.arm == arm.name], measure)
        for measure in measures_of(found)
        for arm in study.arms
        if sum(figures.arm == arm.name for figures in found) > 1
    ]


def _of_arm(found: Sequence[RunFigures], measure: str) -> ArmFigures:
    mean, interval = mean_over_seeds({figures.seed: figures.measures[measure] for figures in found})
    bounds = sum(measure in figures.bounds for figures in found)
    return ArmFigures(measure=measure, arm=found[0].arm, seeds=len(found), mean=mean, interval=interval, bounds=bounds)


def comparisons(study: Study, found: Sequence[RunFigures]) -> list[Comparison]:
    """Every arm against the base in every measure, over the seeds that all arms have. None with fewer than two such seeds."""
    seeds = set(whole_seeds(study, found))
    chosen = [figures for figures in found if figures.seed in seeds]
    if len(seeds) < 2:
        return []
    return [one for measure in measures_of(chosen) for one in _of_measure(study, chosen, measure)]


def _of_measure(study: Study, found: Sequence[RunFigures], measure: str) -> Iterator[Comparison]:
    def by_seed(arm: Arm | str) -> dict[int, float]:
        name = arm if isinstance(arm, str) else arm.name
        return {figures.seed: figures.measures[measure] for figures in found if figures.arm == name}

    others = [arm for arm in study.arms if arm.name != BASE]
    differences = [compare_seeds(by_seed(BASE), by_seed(arm)) for arm in others]
    for arm, difference, adjusted in zip(others, differences, holm([d.p for d in differences]), strict=True):
        bounds = sum(measure in figures.bounds for figures in found if figures.arm in (arm.name, BASE))
        yield Comparison(measure=measure, arm=arm.name, difference=difference, p_holm=adjusted, bounds=bounds)
