"""Held-out success while a run trains: the live engine, environments of their own, episodes outside the staleness rule."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sao_gym.collect import Success, collect, numbered
from sao_gym.commands.environments import Environments
from sao_gym.commands.policy import heldout_options
from sao_gym.loops import run_blocking
from sao_gym.protocols import Sampling
from sao_gym.rollout import EnvPool

if TYPE_CHECKING:
    from sao_gym.commands.training import Run
    from sao_gym.trainer.checkpoint import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldoutResult:
    """Success after `step` batches; `greedy` at temperature 0, else at 1."""

    step: int
    greedy: bool
    success: Success


class Heldout:
    """Evaluates the engine's present weights; keeps what it found, also as lines of metrics."""

    def __init__(self, run: "Run") -> None:
        config = run.parts.config
        self._run = run
        options = heldout_options(config.env)
        self._environments = Environments(config.env.name, options, size=config.rollout.max_in_flight)
        self._tasks = self._environments.tasks
        self._pool: EnvPool = run.pool.like(self._environments.make)
        self.results: list[HeldoutResult] = []

    def both(self, state: "RunState") -> None:
        """Sampled at temperature 1, then greedily."""
        self.sampled(state)
        self._evaluate(state, greedy=True)

    def sampled(self, state: "RunState") -> None:
        """Sampled at temperature 1."""
        self._evaluate(state, greedy=False)

    def _evaluate(self, state: "RunState", *, greedy: bool) -> None:
        parts = self._run.parts
        config = parts.config
        name = f"eval-{state.step}-{'greedy' if greedy else 'sampled'}"
        count = min(config.evaluation.episodes, len(self._tasks)) if greedy else config.evaluation.episodes
        episodes = numbered(self._tasks, count, env_id=config.env.name, seed=config.seed + 1, name=name)
        sampling = Sampling(max_tokens=parts.engine.context_length, temperature=0.0 if greedy else 1.0)
        gathered = collect(
            self._pool,
            parts.engine,
            episodes,
            sampling=sampling,
            clock=parts.clock,
            max_in_flight=config.rollout.max_in_flight,
        )
        success = Success.of(run_blocking(gathered))
        self.results.append(HeldoutResult(step=state.step, greedy=greedy, success=success))
        kind = "greedy" if greedy else "T = 1"
        print(
            f"held-out success after {state.step} batches ({kind}): {success.rate:.3f} of {success.episodes}",
            flush=True,
        )
        key = "heldout_greedy" if greedy else "heldout_success"
        parts.folder.append_metrics(
            {"step": state.step, "event": "evaluation", key: success.rate, "episodes": success.episodes}
        )

    def close(self) -> None:
        """Close the environments; idempotent."""
        run_blocking(self._pool.close())
        run_blocking(self._environments.close())
