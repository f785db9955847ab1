"""`python -m sao_gym.study online`: arms of training times seeds, and what comes of their comparison.

Example:
    $ python -m sao_gym.study online --out study
    $ python -m sao_gym.study online --out study --report-only
"""

import asyncio
import os
import shlex
from pathlib import Path

from sao_gym.commands.base import INTERRUPTED, Options, run_command, take_options
from sao_gym.commands.study_plan import ARMS, BASE, Places, Study, chosen_arms, chosen_seeds
from sao_gym.errors import ConfigError

HELP = f"""usage: python -m sao_gym.study online [options] [settings of sao_gym.train]

Trains a tiny policy for a reader whose taste changes twice, in several ways, over several seeds, and compares how soon each
way recovers. Each run is one process on one thread. The same command goes on where it was broken off; settings that are not
named here go to every training, e.g. --actor.lr 1e-4.

  --out DIR        folder of the study (default: runs/study-online)
  --arms A,B       of {", ".join(arm.name for arm in ARMS)}
                   (default: all; {BASE} is always there, for the others are compared with it)
  --seeds 0-5      seeds, as 0-5 or 0,3,7
  --steps N        batches of each run (default {Study().steps})
  --jobs N         runs side by side (default: processors that this process may use)
  --dry-run        list the runs, and which are done
  --report-only    make every figure again from the run folders: runs.csv, arms.csv, comparisons.csv, curves.png, report.html

arms
""" + "".join(f"  {arm.name:<17}{arm.about}\n" for arm in ARMS)


@run_command
def main(argv: list[str]) -> int:
    """Entry point of `python -m sao_gym.study`."""
    words = take_options(
        argv,
        values=("out", "arms", "seeds", "steps", "jobs"),
        switches=("help", "dry-run", "report-only"),
        positionals=True,
    )
    if words.has("help") or not argv:
        print(HELP, end="")
        return 0
    if words.all("") != ("online",):
        raise ConfigError(f"there is one study, online; got {' '.join(words.all('')) or 'none'}")
    places = Places(Path(words.value("out") or "runs/study-online"))
    if words.has("report-only"):
        return _report(places.read(), places)
    study = Study(
        arms=chosen_arms(words.value("arms")),
        seeds=chosen_seeds(words.value("seeds")),
        steps=_count(words, "steps", Study().steps),
        settings=words.rest,
    )
    if words.has("dry-run"):
        for arm, seed in study.pairs:
            state = "done" if places.is_done(study, arm, seed) else "to run"
            print(f"{arm.name:<18}seed {seed}  {state}  {shlex.join(arm.words)}".rstrip())
        return 0
    return _run(study, places, _count(words, "jobs", len(os.sched_getaffinity(0))))


def _run(study: Study, places: Places, jobs: int) -> int:
    from sao_gym.commands.study_run import StudyRunner

    places.hold(study)
    runner = StudyRunner(study=study, places=places, jobs=jobs, say=lambda line: print(line, flush=True))
    failed = asyncio.run(runner.run())
    if runner.is_stopping:
        print(f"stopped; the same command goes on in {places.out}", flush=True)
        return INTERRUPTED
    _report(study, places)
    if failed:
        print(f"{len(failed)} runs failed: {', '.join(failed)}; the same command tries them again", flush=True)
    return int(bool(failed))


def _report(study: Study, places: Places) -> int:
    from sao_gym.commands.study_report import write_report

    print(f"report: {write_report(study, places)}", flush=True)
    return 0


def _count(words: Options, name: str, default: int) -> int:
    given = words.value(name)
    if given is None:
        return default
    if not given.isdecimal() or int(given) < 1:
        raise ConfigError(f"--{name} takes a number of at least 1, got {given!r}")
    return int(given)
