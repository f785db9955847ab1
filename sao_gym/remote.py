"""RemoteRunner: any API that speaks OpenAI's chat completions as the policy of an evaluation.

Invariants: an episode is held to its budgets as at token level, with tokens as the API counts them; what fails in the
API, waits for it included, is an outcome `error` and never a score. Nothing is invented: the record holds the messages
(`sao_gym.conversation`), no ids, no log-probs, no versions, so nothing can be trained on it.

Example:
    policy = RemotePolicy(api_base="http://localhost:8000/v1", model="qwen")
    runner = RemoteRunner(
        policy=policy, make_env=lambda: make("arithmetic"), budgets=Budgets(max_turns=4),
        sampling=Sampling(max_tokens=512), clock=SystemClock())
    evaluation = await evaluate(runner=runner, tasks=tasks, samples=4, clock=SystemClock(), seed=0)
"""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from sao_gym.budgets import Budgets
from sao_gym.errors import EpisodeError, InvariantError, UserError
from sao_gym.evaluation_results import EpisodeRun, Usage
from sao_gym.message_episode import MessageEnv, MessageEpisode
from sao_gym.messages import Message
from sao_gym.protocols import Clock, Sampling
from sao_gym.remote_client import OpenAIClient
from sao_gym.remote_episode import RemoteEpisode
from sao_gym.remote_policy import RemotePolicy
from sao_gym.rollout import Episode
from sao_gym.stream import Outcome
from sao_gym.usage import total

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFacts:
    """What the API said of itself, for a manifest: names of models and fingerprints, with the number of answers."""

    models: dict[str, int]
    fingerprints: dict[str, int]


class RemoteRunner:
    """Drives episodes with an API; implements `sao_gym.evaluation.EpisodeRunner`. Raises ConfigError without its key."""

    def __init__(
        self,
        *,
        policy: RemotePolicy,
        make_env: Callable[[], MessageEnv],
        budgets: Budgets,
        sampling: Sampling,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self.policy, self.budgets, self.sampling = policy, budgets, sampling
        self._make_env, self._clock = make_env, clock
        self._client = OpenAIClient(policy, clock=clock, rng=rng)
        self._free: list[MessageEpisode] = []
        self._usage = Usage()

    @property
    def version(self) -> int:
        """Always 0: an API tells no policy version."""
        return 0

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn, as far as a temperature of 0 says so to an API."""
        return self.sampling.temperature == 0

    @property
    def usage(self) -> Usage:
        """What the episodes of this runner cost so far, those that failed included."""
        return self._usage

    @property
    def facts(self) -> RemoteFacts:
        """What the API said of itself so far."""
        return RemoteFacts(models=dict(self._client.models), fingerprints=dict(self._client.fingerprints))

    async def run(self, episode: Episode) -> EpisodeRun:
        """One episode. Raises UserError (ApiError: no request of the run will pass); other failures are outcomes `error`."""
        driver = self._free.pop() if self._free else MessageEpisode(self._make_env())
        going = RemoteEpisode(
            episode, driver, self._client, budgets=self.budgets, sampling=self.sampling, clock=self._clock
        )
        start = self._clock.now()
        try:
            failed = await _failure(going)
        except BaseException:
            await _discard(driver)
            raise
        finally:
            self._usage = total([self._usage, going.meter.usage])
        if failed is None:
            self._free.append(driver)
        else:
            await _discard(driver)
        return EpisodeRun(
            trajectory=going.trajectory(failed=failed, seconds=self._clock.now() - start),
            stage=None if failed is None else _stage(going, failed),
            text=_words(driver.last_action),
            usage=going.meter.usage,
        )

    async def close(self) -> None:
        """Close the environments and the connections; idempotent."""
        while self._free:
            await _discard(self._free.pop())
        await self._client.close()


async def _failure(going: RemoteEpisode) -> Outcome | None:
    """Take an episode to its end. Returns the outcome `error` if something failed, else None."""
    uid, task = going.episode.uid, going.episode.task.id
    try:
        await going.run()
    except (UserError, InvariantError):
        raise
    except EpisodeError as error:
        _log.warning("episode %s of task %s failed (%s): %s", uid, task, error.kind, error)
        return Outcome.error(error.kind)
    except Exception as error:
        _log.warning("episode %s of task %s failed", uid, task, exc_info=error)
        return Outcome.error(type(error).__name__)
    return None


def _stage(going: RemoteEpisode, failed: Outcome) -> str:
    return "grade" if (failed.reason or "").startswith("grading") else going.stage


def _words(action: Message | None) -> str:
    """What graders of final answers see; where the last turn holds calls alone, the calls as they were written."""
    if action is None:
        return ""
    return action.content or "\n".join(call.raw for call in action.tool_calls)


async def _discard(driver: MessageEpisode) -> None:
    """Close an environment that may be broken: its episode is over, and the run goes on."""
    try:
        await driver.close()
    except Exception as error:
        _log.warning("an environment could not be closed", exc_info=error)
