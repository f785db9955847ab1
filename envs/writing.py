"""Writing for a reader whose taste changes: one request, one answer, one verdict.

The system prompt names the candidate styles of the phase; which one is wanted shows only in what a text earns (or is said,
with `tells_target`). The reward is quality times style, both 0 or 1 from a judge that is never told the target: it says
which style a text is in. A judge that fails is an error and never 0. With `revision` a first answer is followed by a wish,
and the second answer is judged.

Example:
    env = make("writing_style", phases=[{"target": "cute", "candidates": ["academic", "cute"]}])
    (system, user), info = env.reset(seed=0)
    _, reward, *_ = env.step("Yay, a fluffy little letter for my dear neighbour, hugs and kisses! <3")
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sao_gym.agent_env import AgentEnv, Reply
from sao_gym.clock import SystemClock
from sao_gym.drift import Drift, Phase, Progress, Unit, read_phases
from sao_gym.envs.judges.make import JudgeOptions, make_judge
from sao_gym.envs.judges.signals import signals
from sao_gym.envs.late_feedback import LateFeedback
from sao_gym.loops import on_background, run_blocking
from sao_gym.messages import Message
from sao_gym.protocols import Clock, Judge, Task, TaskSet, Verdict
from sao_gym.stream import Score
from sao_gym.writing_styles import PLAIN, STYLES, system_prompt

JUDGING_S = 300.0
"""How long a verdict may take that is asked for as the episode's time runs out; what feedback may take comes on top."""
REVISIONS = (
    "Please revise it: make it a little shorter, and keep its tone.",
    "Please revise it: add one more detail, and keep its tone.",
    "Please revise it: let it begin in another way, and keep its tone.",
    "Please revise it: say the most important thing first, and keep its tone.",
)


class Judging:
    """What all writing environments of a run share: the judge, and how far training has come."""

    def __init__(self, judge: Judge, progress: Progress | None = None, clock: Clock | None = None) -> None:
        self.judge = judge
        self.clock = clock or SystemClock()
        self.progress = progress or Progress(self.clock)

    async def close(self) -> None:
        """Close the judge; idempotent."""
        await self.judge.close()


class WritingEnv(AgentEnv):
    """One writing request under a drifting preference.

    `judge` is "rule", "openai", "ensemble" or a `Judge`; `judge_model`, `judge_base` and `judge_options` (see
    `JudgeOptions`) say which API. `phases` are tables with target, candidates and lasts, counted in `unit` ("samples"
    that were trained, or "seconds"), each one blended in over `blend`. `feedback_*` let it come late or never, see
    `LateFeedback`. `judging` is shared and outlives the environment.
    """

    def __init__(
        self,
        tasks: TaskSet | Sequence[Task],
        *,
        judge: str | Judge = "rule",
        judge_model: str | None = None,
        judge_base: str | None = None,
        judge_options: Mapping[str, Any] | None = None,
        phases: Sequence[Any] | None = None,
        unit: Unit = "samples",
        blend: float = 0.0,
        tells_target: bool = False,
        revision: bool = False,
        feedback_late_share: float = 0.0,
        feedback_never_share: float = 0.0,
        feedback_delay_s: float = 60.0,
        feedback_deadline_s: float = 600.0,
        judging: Judging | None = None,
    ) -> None:
        super().__init__(tasks, max_turns=2 if revision else 1)
        self.feedback = LateFeedback(
            late_share=feedback_late_share,
            never_share=feedback_never_share,
            delay_s=feedback_delay_s,
            deadline_s=feedback_deadline_s,
        )
        self.grades_apart = self.feedback.is_on
        self.grading_s = JUDGING_S + (feedback_deadline_s if self.feedback.is_on else 0.0)
        self._delay_s, self._asked_at = 0.0, math.nan
        given = {} if phases is None else {"phases": read_phases(phases)}
        self.drift = Drift(unit=unit, blend=blend, **given)
        self._tells_target, self._revision = tells_target, revision
        self._owns_judging = judging is None
        self.judging = judging or self.make_judging(
            1, judge=judge, judge_model=judge_model, judge_base=judge_base, judge_options=judge_options
        )
        self._phase, self._wish = 0, ""
        self.episode_info: dict[str, Any] = {}

    @classmethod
    def make_judging(
        cls,
        size: int,
        *,
        judge: str | Judge = "rule",
        judge_model: str | None = None,
        judge_base: str | None = None,
        judge_options: Mapping[str, Any] | None = None,
    ) -> Judging:
        """What `size` episodes at a time may share. Raises ConfigError."""
        if not isinstance(judge, str):
            return Judging(judge)
        options = JudgeOptions.of(model=judge_model, base=judge_base, **(judge_options or {}))
        return Judging(make_judge(judge, options))

    @property
    def phase(self) -> Phase:
        """The phase of this episode."""
        return self.drift.phases[self._phase]

    def setup(self, task: Task) -> None:
        """Settle which phase the episode is in; it stays so, whatever is trained meanwhile."""
        draw = float(self.np_random.random())
        self._phase = self.drift.phase_at(self.judging.progress.position(self.drift.unit), draw=draw)
        self._wish = str(self.np_random.choice(REVISIONS)) if self._revision else ""
        self._delay_s, self._asked_at = self.feedback.drawn(self.np_random), math.nan
        self.episode_info = {
            "phase": self._phase,
            "target": self.phase.target,
            "candidates": list(self.phase.candidates),
        }

    def opening(self, task: Task) -> tuple[Message, ...]:
        """What the reader may like, and the request."""
        target = self.phase.target if self._tells_target else None
        return (Message.system(system_prompt(self.phase.candidates, target=target)), Message.user(task.prompt))

    def respond(self, message: Message) -> Reply:
        """The wish for a revision, after the first of two answers; else the end."""
        if self._revision and self.turn == 1:
            return Reply(messages=(Message.user(self._wish),))
        return Reply(is_final=True)

    async def grade(self) -> Score:
        """The judge's verdict on the last answer. Raises GradingError, and NoFeedbackError where none comes in time."""
        await self._feedback_comes()
        said = self.last_action
        text = said.content if said else ""
        if text.strip():
            request = f"{self.task.prompt}\n{self._wish}".strip()
            verdict = await on_background(self.judging.judge.judge(request, text, tuple(STYLES)))
        else:
            verdict = Verdict(quality=False, label=PLAIN, judge=self.judging.judge.version, problems=("empty",))
        is_on_target = verdict.label == self.phase.target
        self._note(text, verdict, is_on_target)
        passed = verdict.quality and is_on_target
        problems = f" ({', '.join(verdict.problems)})" if verdict.problems else ""
        return Score(
            value=float(passed),
            passed=passed,
            detail=f"quality {int(verdict.quality)}{problems}, style {verdict.label}, wanted {self.phase.target}",
            grader_version=verdict.judge,
            method=verdict.label,
        )

    async def _feedback_comes(self) -> None:
        """Asked again, as an episode is that ran out of time meanwhile, it waits for the same moment."""
        if self._delay_s:
            clock = self.judging.clock
            self._asked_at = clock.now() if math.isnan(self._asked_at) else self._asked_at
            await self.feedback.wait(clock, self._asked_at, self._delay_s)
            self.episode_info["feedback_s"] = self._delay_s

    def _note(self, text: str, verdict: Verdict, is_on_target: bool) -> None:
        """What is recorded with the trajectory; the mean of every signal is a metric of its batch."""
        asked = self.task.info.get("words", 0)
        counted = signals(self.task.prompt, text, words_asked=asked if isinstance(asked, int | float) else 0)
        shares = {f"style_{name}": float(verdict.label == name) for name in STYLES}
        self.episode_info |= {
            "judge": verdict.judge,
            "problems": list(verdict.problems),
            "verdict": verdict.detail,
            "signals": {
                "phase": float(self._phase),
                "quality": float(verdict.quality),
                "on_target": float(is_on_target),
                **shares,
                **{name: float(value) for name, value in asdict(counted).items()},
            },
        }

    def close(self) -> None:
        """Give everything back, a judge of its own too; idempotent."""
        super().close()
        if self._owns_judging:
            run_blocking(self.judging.close())

    async def close_async(self) -> None:
        """`close` for a caller that has other episodes to go on with."""
        await super().close_async()
        if self._owns_judging:
            await on_background(self.judging.close())
