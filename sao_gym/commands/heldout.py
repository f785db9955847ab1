"""Held-out success while a run trains: the live engine, environments of their own, episodes outside the staleness rule."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sao_gym.commands.environments import Environments
from sao_gym.commands.policy import heldout_options
from sao_gym.evaluation import TokenRunner, evaluate, take
from sao_gym.loops import run_blocking
from sao_gym.protocols import Sampling
from sao_gym.statistics import Interval

if TYPE_CHECKING:
    from sao_gym.commands.composition import Run
    from sao_gym.trainer.checkpoint import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutResult:
    """Success after `step` batches, over `episodes` scored ones; `greedy` at temperature 0, else at 1."""

    step: int
    greedy: bool
    success: float
    interval: Interval | None
    episodes: int


class Heldout:
    """Evaluates the engine's present weights; keeps what it found, also as lines of metrics."""

    def __init__(self, run: "Run") -> None:
        config = run.parts.config
        self._run = run
        self._environments = Environments(
            config.env.name, heldout_options(config.env), size=config.rollout.max_in_flight
        )
        self._tasks = take(self._environments.tasks, min(config.evaluation.episodes, len(self._environments.tasks)))
        self.results: list[HeldoutResult] = []

    def both(self, state: "RunState") -> None:
        """Sampled at temperature 1, then greedily."""
        self.sampled(state)
        self._evaluate(state, greedy=True)

    def sampled(self, state: "RunState") -> None:
        """Sampled at temperature 1."""
        self._evaluate(state, greedy=False)

    def _evaluate(self, state: "RunState", *, greedy: bool) -> None:
        parts, config = self._run.parts, self._run.parts.config
        samples = 1 if greedy else -(-config.evaluation.episodes // len(self._tasks))
        runner = TokenRunner(
            engine=parts.engine,
            chat=self._run.chat,
            make_env=self._environments.make,
            budgets=self._run.budgets,
            sampling=Sampling(max_tokens=parts.engine.context_length, temperature=0.0 if greedy else 1.0),
            clock=parts.clock,
        )
        work = evaluate(
            runner=runner,
            tasks=self._tasks,
            samples=samples,
            clock=parts.clock,
            seed=config.seed,
            env_id=config.env.name,
            concurrency=config.rollout.max_in_flight,
        )
        summary = run_blocking(work).summary
        result = HeldoutResult(
            step=state.step,
            greedy=greedy,
            success=summary.success or 0.0,
            interval=summary.interval,
            episodes=summary.n_scored,
        )
        self.results.append(result)
        self._report(result)

    def _report(self, result: HeldoutResult) -> None:
        kind = "greedy" if result.greedy else "T = 1"
        spread = f" ({result.interval.low:.3f}-{result.interval.high:.3f})" if result.interval else ""
        print(
            f"held-out success after {result.step} batches ({kind}): {result.success:.3f}{spread} of {result.episodes}",
            flush=True,
        )
        key = "heldout_greedy" if result.greedy else "heldout_success"
        record = {"step": result.step, "event": "evaluation", key: result.success, "episodes": result.episodes}
        self._run.parts.folder.append_metrics(record)

    def close(self) -> None:
        """Close what the environments share; idempotent."""
        run_blocking(self._environments.close())
