"""One episode of an evaluation: as a driver hands it over, and as a line that is kept.

Torch-free.

Example:
    >>> result = EpisodeResult(uid="a", task_id="t", attempt=0, outcome=OutcomeStatus.TERMINATED, value=1.0, passed=True)
    >>> EpisodeResult.from_record(result.to_record()) == result
    True
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from sao_gym.conversation import turns_of
from sao_gym.stream import OutcomeStatus, Trajectory


class Ending(StrEnum):
    """What became of a sample: each has one, the first that fits in this order."""

    ERROR = "error"
    UNSCORED = "no verdict"
    RIGHT = "right"
    TRUNCATED = "truncated"
    NO_ANSWER = "no answer"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an episode cost at an API, in tokens, requests and the currency of the prices given; zeros for an engine.

    `unmetered` counts answers that did not say their tokens: with any, tokens and cost are lower bounds.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    retries: int = 0
    cost: float = 0.0
    unmetered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRun:
    """An episode's record, the stage that failed (reset, generate, step, grade) or None, the policy's last words."""

    trajectory: Trajectory
    stage: str | None = None
    text: str = ""
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeResult:
    """One episode in a line. `value` and `passed` are None without a verdict, `stage` says where an error arose.

    `stage` is reset, generate, step or grade; `text` is what the policy said last, `answer` what of it was judged, where
    the evaluation tells answers; `method` how (`Score.method`); `version` the policy's first one.
    """

    uid: str
    task_id: str
    attempt: int
    outcome: OutcomeStatus
    reason: str | None = None
    stage: str | None = None
    value: float | None = None
    passed: bool | None = None
    detail: str = ""
    grader_version: str = ""
    method: str = ""
    answer: str | None = None
    turns: int = 0
    n_action: int = 0
    version: int | None = None
    seed: int = 0
    seconds: float = 0.0
    text: str = ""
    usage: Usage = Usage()

    @property
    def is_scored(self) -> bool:
        """Whether a grader gave a verdict; truncated episodes are graded as they stand."""
        return self.value is not None

    @property
    def has_answer(self) -> bool:
        """Whether the policy gave an answer to judge; a grader that does not say how it judged found one."""
        return self.is_scored and self.method != "none"

    @property
    def ending(self) -> Ending:
        """What became of the sample; the last four are the scored ones."""
        if self.outcome is OutcomeStatus.ERROR:
            return Ending.ERROR
        if not self.is_scored:
            return Ending.UNSCORED
        if self.passed:
            return Ending.RIGHT
        if self.outcome is OutcomeStatus.TRUNCATED:
            return Ending.TRUNCATED
        return Ending.WRONG if self.has_answer else Ending.NO_ANSWER

    def to_record(self) -> dict[str, Any]:
        """The result as JSON values."""
        return {**asdict(self), "outcome": self.outcome.value}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "EpisodeResult":
        """The result that `to_record` wrote. Raises ValueError, KeyError or TypeError for what is none."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        usage = Usage(**values.pop("usage", {}))
        return cls(**{**values, "outcome": OutcomeStatus(values["outcome"]), "usage": usage})


def to_result(run: EpisodeRun, answer: str | None = None) -> EpisodeResult:
    """An episode in a line; `answer` is what of its text was judged."""
    trajectory = run.trajectory
    score, outcome = trajectory.score, trajectory.outcome
    return EpisodeResult(
        uid=trajectory.uid,
        task_id=trajectory.task_id,
        attempt=trajectory.attempt,
        outcome=outcome.status,
        reason=outcome.reason,
        stage=run.stage,
        value=score.value if score else None,
        passed=score.passed if score else None,
        detail=score.detail if score else "",
        grader_version=score.grader_version if score else "",
        method=score.method if score else "",
        answer=answer if score else None,
        turns=turns_of(trajectory),
        n_action=trajectory.n_action or run.usage.completion_tokens,
        version=trajectory.first_version,
        seed=trajectory.seed,
        seconds=trajectory.timings.get("episode_s", 0.0),
        text=run.text,
        usage=run.usage,
    )
