"""What a study runs: arms, which are presets with a few words more, times seeds; and where everything lies.

    OUT/study.json  starts/seed-0/  critics/seed-0/  runs/ARM/seed-0/  logs/  runs.csv  arms.csv  comparisons.csv  curves.png  report.html

Invariant: with one seed all arms start from the same policy and see the same prompts in the same order, so figures are compared
seed by seed. A folder holds one study: a description that differs from the one in it is refused.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sao_gym.errors import ConfigError
from sao_gym.runfolder import METRICS, write_whole

DESCRIPTION = "study.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of training: words of sao_gym.train beside the study's preset, and how its critic starts."""

    name: str
    about: str
    words: tuple[str, ...] = ()
    has_fitted_critic: bool = False


def _mean_of(window: int) -> Arm:
    return Arm(
        name=f"running_mean_{window}",
        about=f"the mean of the last {window} rewards in the critic's place",
        words=("--loss.advantage", "running_mean_global", "--loss.window", str(window)),
    )


BASE = "sao_cold"
ARMS = (
    Arm(name=BASE, about="SAO, its critic from zero"),
    Arm(name="sao_fitted", about="SAO, its critic fitted on the start policy's own episodes", has_fitted_critic=True),
    _mean_of(32),
    _mean_of(128),
    _mean_of(512),
    Arm(
        name="global_loo",
        about="the mean of the batch's other rewards in the critic's place",
        words=("--loss.advantage", "global_leave_one_out"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The whole of it. `settings` go to every training."""

    name: str = "online"
    preset: str = "writing_study"
    start: str = "writing_quickstart"
    critic: str = "writing_study"
    steps: int = 72
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    arms: tuple[Arm, ...] = ARMS
    settings: tuple[str, ...] = ()

    @property
    def pairs(self) -> list[tuple[Arm, int]]:
        """Every run, seed by seed, so that a study that is broken off has whole seeds."""
        return [(arm, seed) for seed in self.seeds for arm in self.arms]


def chosen_arms(names: str | None) -> tuple[Arm, ...]:
    """Those named, with commas, in our order; the one that others are compared with is always there. Raises ConfigError."""
    known = [arm.name for arm in ARMS]
    wanted = known if names is None else [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"the study has no arm {unknown[0]!r}; there are {', '.join(known)}")
    return tuple(arm for arm in ARMS if arm.name in {*wanted, BASE})


def chosen_seeds(given: str | None) -> tuple[int, ...]:
    """`0-5` or `0,3,7`. Raises ConfigError."""
    if given is None:
        return Study().seeds
    first, dash, last = given.partition("-")
    words = given.split(",")
    if dash and first.isdecimal() and last.isdecimal() and int(first) <= int(last):
        return tuple(range(int(first), int(last) + 1))
    if not all(word.strip().isdecimal() for word in words):
        raise ConfigError(f"--seeds takes numbers, as 0-5 or 0,3,7; got {given!r}")
    return tuple(dict.fromkeys(int(word) for word in words))


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a study in `out` lie."""

    out: Path
    folders: tuple[str, ...] = field(default=("starts", "critics", "runs", "logs"))

    def start(self, seed: int) -> Path:
        """The policy that all arms of a seed start from."""
        return self.out / "starts" / f"seed-{seed}"

    def critic(self, seed: int) -> Path:
        """The critic that was fitted to it."""
        return self.out / "critics" / f"seed-{seed}"

    def run(self, arm: Arm, seed: int) -> Path:
        """The run folder of an arm with a seed."""
        return self.out / "runs" / arm.name / f"seed-{seed}"

    def metrics(self, arm: Arm, seed: int) -> list[dict[str, object]]:
        """The lines of a run's metrics, none where it has not begun."""
        path = self.run(arm, seed) / METRICS
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def is_done(self, study: Study, arm: Arm, seed: int) -> bool:
        """Whether a run has all its steps, and its last checkpoint."""
        return (self.run(arm, seed) / "checkpoints" / f"step_{study.steps}" / "state.json").is_file()

    def read(self) -> Study:
        """The study that the folder holds. Raises ConfigError."""
        path = self.out / DESCRIPTION
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            found["arms"] = tuple(Arm(**{**arm, "words": tuple(arm["words"])}) for arm in found["arms"])
            return Study(**found | {name: tuple(found[name]) for name in ("seeds", "settings")})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.out} holds no study ({DESCRIPTION} cannot be read: {error})") from error

    def hold(self, study: Study) -> None:
        """Write the description, or compare it with the one that is there. Raises ConfigError where they differ."""
        if (self.out / DESCRIPTION).exists():
            require_same(self.read(), study, self.out)
            return
        if self.out.exists() and any(self.out.iterdir()):
            raise ConfigError(f"{self.out} is not empty and holds no study: give a new folder with --out")
        for name in self.folders:
            (self.out / name).mkdir(parents=True, exist_ok=True)
        write_whole(self.out / DESCRIPTION, json.dumps(asdict(study), indent=1) + "\n")


def require_same(before: Study, now: Study, out: Path) -> None:
    """Raise ConfigError, naming the first thing that differs. More seeds of the same arms are a difference too."""
    for name in ("name", "preset", "start", "critic", "steps", "seeds", "settings", "arms"):
        was, wanted = getattr(before, name), getattr(now, name)
        if was != wanted:
            raise ConfigError(
                f"{out} holds a study with other {name} ({_short(was)}, now {_short(wanted)}): give a new --out"
            )


def _short(value: object) -> str:
    if isinstance(value, Sequence) and value and isinstance(value[0], Arm):
        return ", ".join(arm.name for arm in value if isinstance(arm, Arm))
    return str(value)
