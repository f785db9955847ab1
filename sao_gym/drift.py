"""A preference that changes while training goes on: phases by trained samples or by time, sudden or blended.

Invariants: which phase an episode is in follows from the position (rows trained so far, or seconds) and one number
drawn by the episode's own seed, so with the same position it is the same whenever it is run again. The last phase
never ends. A blend of w means that over the first w of a phase its share of new episodes rises evenly from 0 to 1.

Example:
    >>> drift = Drift(phases=DEFAULT_PHASES, blend=100)
    >>> [drift.phase_at(position, draw=0.5) for position in (0, 3999, 4049, 4051, 9000)]
    [0, 0, 0, 1, 2]
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from sao_gym.errors import ConfigError
from sao_gym.protocols import Clock
from sao_gym.tools import nearest
from sao_gym.writing_styles import require_style

Unit = Literal["samples", "seconds"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """For how long (`lasts`, None: for ever) which style is wanted, and which ones the policy is told of."""

    target: str
    candidates: tuple[str, ...]
    lasts: float | None = None

    def __post_init__(self) -> None:
        require_style(self.target, "the target of a phase")
        for name in self.candidates:
            require_style(name, "the candidates of a phase")
        if self.target not in self.candidates or len(set(self.candidates)) < max(2, len(self.candidates)):
            raise ConfigError(
                f"a phase needs two or more different candidates, its target {self.target!r} among them; got "
                f"{list(self.candidates)}"
            )
        if self.lasts is not None and not (math.isfinite(self.lasts) and self.lasts > 0):
            raise ConfigError(f"a phase lasts a number above 0, got {self.lasts}")


WITHOUT_CLASSICAL, WITHOUT_ACADEMIC = ("academic", "cute", "chuunibyou"), ("cute", "chuunibyou", "classical")
DEFAULT_PHASES = (
    Phase(target="cute", candidates=WITHOUT_CLASSICAL, lasts=4000),
    Phase(target="chuunibyou", candidates=WITHOUT_CLASSICAL, lasts=4000),
    Phase(target="classical", candidates=WITHOUT_ACADEMIC),
)
"""The paper's targets and candidates; how long a phase lasts it leaves open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A schedule of phases."""

    phases: tuple[Phase, ...] = DEFAULT_PHASES
    unit: Unit = "samples"
    blend: float = 0.0

    def __post_init__(self) -> None:
        if not self.phases or any(phase.lasts is None for phase in self.phases[:-1]):
            raise ConfigError(
                "a drift needs at least one phase, and every phase but the last must say how long it lasts"
            )
        if self.phases[-1].lasts is not None:
            raise ConfigError("the last phase of a drift has no end: leave out how long it lasts")
        if self.unit not in ("samples", "seconds"):
            raise ConfigError(f"a drift counts samples or seconds, got {self.unit!r}")
        shortest = min((phase.lasts or math.inf for phase in self.phases), default=math.inf)
        if not 0 <= self.blend <= shortest:
            raise ConfigError(f"a blend lasts from 0 to the shortest phase ({shortest:g}), got {self.blend}")

    def phase_at(self, position: float, *, draw: float) -> int:
        """Index of the phase of an episode that begins at `position`; `draw` from [0, 1) settles a blend."""
        begins, index = 0.0, 0
        for phase in self.phases[:-1]:
            if position < begins + (phase.lasts or 0.0):
                break
            begins, index = begins + (phase.lasts or 0.0), index + 1
        is_blended = index > 0 and position < begins + self.blend
        return index - 1 if is_blended and draw >= (position - begins) / self.blend else index


def read_phases(given: Sequence[Any]) -> tuple[Phase, ...]:
    """Phases of a configuration: tables with `target`, `candidates` and `lasts`. Raises ConfigError."""
    return tuple(given_phase if isinstance(given_phase, Phase) else _phase(given_phase) for given_phase in given)


def _phase(given: Any) -> Phase:
    known = [field.name for field in fields(Phase)]
    if not isinstance(given, Mapping):
        raise ConfigError(f"a phase is a table with {', '.join(known)}, got {type(given).__name__}")
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ConfigError(f"a phase takes no {unknown[0]!r}; {nearest(str(unknown[0]), known, what='key')}")
    candidates, lasts = given.get("candidates", ()), given.get("lasts")
    if not isinstance(candidates, list | tuple):
        raise ConfigError(f"the candidates of a phase are a list of styles, got {type(candidates).__name__}")
    if lasts is not None and (isinstance(lasts, bool) or not isinstance(lasts, int | float)):
        raise ConfigError(f"a phase lasts a number above 0, got {lasts!r}")
    return Phase(target=given.get("target", ""), candidates=tuple(candidates), lasts=lasts)


class Progress:
    """How far training has come, as the environments of a run see it; one for all of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._samples, self._began = 0, clock.now()

    def note_trained(self, samples: int) -> None:
        """So many rows of the run have been trained."""
        with self._lock:
            self._samples = samples

    def note_spent(self, seconds: float) -> None:
        """The run has spent so many seconds before now (in an earlier process)."""
        with self._lock:
            self._began = self._clock.now() - seconds

    def position(self, unit: Unit) -> float:
        """Rows trained, or seconds spent."""
        with self._lock:
            return float(self._samples) if unit == "samples" else self._clock.now() - self._began
