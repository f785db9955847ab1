"""Episodes from reset to record: failures are errors and never reward 0 (trap 15), budgets of time, seeds, pools."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sao_gym.clock import VirtualClock
from sao_gym.core import AgentEnv, Budgets, Reply, TokenEnv
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.errors import ConfigError, EngineError, EpisodeError, GradingError, InvariantError, SandboxError
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Sampling, Task
from sao_gym.rollout import GRADING_S, EnvPool, Episode, require_training_sampling, white_box
from sao_gym.stream import OutcomeStatus, Score, Trajectory
from sao_gym.tokenizer import train_tokenizer

CHAT = OwnChat(train_tokenizer(["hello"] * 4, vocab_size=270), describe_tools=False)
END = CHAT.stop_token_ids[0]
SAID = [*CHAT.codec.encode("hello"), END]
SAMPLING = Sampling(max_tokens=64)
TASK = Task(id="t", prompt="?", answer="x")


class Talk(AgentEnv):
    """Answers `turns` messages, then ends. `at` says what happens instead at a place; everything is awaited."""

    def __init__(self, turns: int = 2, at: dict[str, Any] | None = None, clock: VirtualClock | None = None) -> None:
        super().__init__([TASK])
        self.turns, self.at, self.clock, self.closed = turns, at or {}, clock, 0

    async def _happens(self, place: str) -> None:
        what = self.at.get(place)
        if isinstance(what, BaseException):
            raise what
        if what is not None:
            assert self.clock is not None
            await self.clock.sleep(what)

    async def setup(self, task: Task) -> None:
        await self._happens("setup")

    async def respond(self, message: Any) -> Reply:
        await self._happens("respond")
        return Reply(reward=0.5, is_final=self.turn >= self.turns)

    async def grade(self) -> Score:
        await self._happens("grade")
        return Score(value=self.episode_return, passed=True, detail="graded as it stands")

    async def opening(self, task: Task) -> Any:
        from sao_gym.messages import Message

        return (Message.user(task.prompt),)

    async def teardown(self) -> None:
        self.closed += 1
        await self._happens("teardown")


def an_episode(attempt: int = 0, *, task: Task = TASK, seed: int = 0) -> Episode:
    return Episode(uid=f"e{attempt}", task=task, env_id="talk", attempt=attempt, run_seed=seed)


def token_env(env: Talk, **budgets: Any) -> TokenEnv:
    return TokenEnv(env, CHAT, Budgets(**budgets))


async def run(
    env: TokenEnv,
    engine: ScriptedEngine,
    episode: Episode | None = None,
    clock: VirtualClock | None = None,
    **more: Any,
) -> Trajectory:
    clock = clock or VirtualClock()
    work = asyncio.ensure_future(
        white_box(env, engine, episode or an_episode(), sampling=more.pop("sampling", SAMPLING), clock=clock, **more)
    )
    await clock.run(work.done)
    assert work.done(), "the episode waits for something that never comes"
    return work.result()


async def test_an_episode_that_goes_well() -> None:
    engine = ScriptedEngine(lambda prompt: SAID, version=4)
    heard: list[int] = []
    made = await run(token_env(Talk()), engine, an_episode(3), on_version=heard.append)
    assert made.outcome.status is OutcomeStatus.TERMINATED
    assert made.score is not None
    assert (made.score.value, made.n_turns, made.n_action) == (1.0, 2, 2 * len(SAID))
    assert (made.uid, made.task_id, made.env_id, made.attempt) == ("e3", "t", "talk", 3)
    assert (made.admitted_version, made.first_version) == (4, 4)
    assert heard == [4, 4]
    assert set(made.timings) == {"episode_s", "engine_s", "env_s"}
    assert engine.ended_sessions == ["e3"]
    assert {call.session for call in engine.calls} == {"e3"}
    assert [len(call.prompt) for call in engine.calls] == sorted(len(call.prompt) for call in engine.calls)
    assert all(call.sampling.stop_token_ids == CHAT.stop_token_ids for call in engine.calls)


# -- failures


@pytest.mark.parametrize(
    ("place", "error", "kind"),
    [
        ("respond", RuntimeError("boom"), "RuntimeError"),
        ("respond", SandboxError("container died"), "sandbox"),
        ("respond", MemoryError(), "MemoryError"),
        ("respond", TimeoutError("tool"), "TimeoutError"),
        ("respond", SandboxError("out of memory", kind="sandbox_oom"), "sandbox_oom"),
        ("setup", SandboxError("no image"), "sandbox"),
        ("setup", OSError("disk full"), "OSError"),
        ("grade", GradingError("no verdict"), "grading"),
        ("grade", ValueError("grader's bug"), "grading"),
        ("teardown", SandboxError("stuck"), "sandbox"),
    ],
)
async def test_trap_15_what_fails_in_the_environment_is_an_error_and_no_reward(
    place: str, error: Exception, kind: str
) -> None:
    engine = ScriptedEngine(lambda prompt: SAID)
    made = await run(token_env(Talk(at={place: error})), engine)
    assert (made.outcome.status, made.outcome.reason) == (OutcomeStatus.ERROR, kind)
    assert made.score is None
    sampled = sum(len(call.generation.token_ids) for call in engine.calls if call.generation)
    assert made.n_action == sampled, "what was sampled stays in the account"
    assert engine.ended_sessions == ["e0"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("429"), "engine"),
        (EngineError("dead", kind="engine_deadline"), "engine_deadline"),
        (OSError(), "OSError"),
    ],
)
@pytest.mark.parametrize("call", [0, 1])
async def test_trap_15_what_fails_in_the_engine(error: Exception, kind: str, call: int) -> None:
    engine = ScriptedEngine(lambda prompt: SAID, failures={call: error})
    made = await run(token_env(Talk()), engine)
    assert (made.outcome.status, made.outcome.reason, made.score) == (OutcomeStatus.ERROR, kind, None)
    assert made.n_action == call * len(SAID)
    assert engine.ended_sessions == ["e0"]


@pytest.mark.parametrize("error", [ConfigError("no such thing"), InvariantError("a bug")])
async def test_what_is_nobodys_bad_luck_is_raised(error: Exception) -> None:
    engine = ScriptedEngine(lambda prompt: SAID)
    with pytest.raises(type(error), match=str(error)):
        await run(token_env(Talk(at={"respond": error})), engine)
    assert engine.ended_sessions == ["e0"], "the session ends all the same"


async def test_a_failed_reset_leaves_nothing_of_the_episode_before() -> None:
    talk = Talk()
    env, engine = token_env(talk), ScriptedEngine(lambda prompt: SAID)
    assert (await run(env, engine)).n_action
    talk.at = {"setup": SandboxError("gone")}
    made = await run(env, engine, an_episode(1))
    assert (made.outcome.reason, made.score, made.n_action, made.attempt) == ("sandbox", None, 0, 1)


async def test_a_prompt_without_room_for_an_answer_is_told_apart() -> None:
    env = TokenEnv(Talk(), CHAT, Budgets(max_tokens_per_episode=2))
    made = await run(env, ScriptedEngine(lambda prompt: SAID))
    assert (made.outcome.status, made.outcome.reason) == (OutcomeStatus.ERROR, "prompt_too_long")


# -- the wall clock


def test_budgets_of_time_are_seconds_above_0() -> None:
    with pytest.raises(ConfigError, match="wall_clock_s must be above 0"):
        Budgets(wall_clock_s=0)


async def test_out_of_time_while_the_engine_samples() -> None:
    clock = VirtualClock()
    engine = ScriptedEngine(lambda prompt: SAID, latency_s=10.0, clock=clock)
    made = await run(token_env(Talk(turns=99), wall_clock_s=25.0), engine, clock=clock)
    assert (made.outcome.status, made.outcome.reason) == (OutcomeStatus.TRUNCATED, "wall_clock")
    assert clock.now() == 25.0
    assert made.n_turns == 2, "the third was not sampled to its end"
    assert made.score is not None
    assert (made.score.value, made.score.detail) == (1.0, "graded as it stands")
    assert made.timings["episode_s"] == 25.0
    assert made.timings["engine_s"] == 20.0
    assert (await engine.health()).running == 0, "the request was taken back"


async def test_out_of_time_while_a_tool_runs() -> None:
    clock = VirtualClock()
    talk = Talk(at={"respond": 1e6}, clock=clock)
    engine = ScriptedEngine(lambda prompt: SAID, latency_s=10.0, clock=clock)
    made = await run(token_env(talk, wall_clock_s=60.0), engine, clock=clock)
    assert (made.outcome.status, made.outcome.reason) == (OutcomeStatus.TRUNCATED, "wall_clock")
    assert made.n_action == len(SAID), "the action that called the tool stays"
    assert made.score is not None
    assert sum(float(rewards.sum()) for rewards in made.rewards("chain")) == made.score.value
    assert clock.now() == 60.0
    assert talk.closed == 1


async def test_just_in_time() -> None:
    clock = VirtualClock()
    engine = ScriptedEngine(lambda prompt: SAID, latency_s=10.0, clock=clock)
    made = await run(token_env(Talk(turns=2), wall_clock_s=20.5), engine, clock=clock)
    assert made.outcome.status is OutcomeStatus.TERMINATED
    assert clock.now() == 20.0


async def test_an_environment_that_is_never_ready_is_an_error() -> None:
    clock = VirtualClock()
    env = token_env(Talk(at={"setup": 1e6}, clock=clock), wall_clock_s=30.0)
    made = await run(env, ScriptedEngine(lambda prompt: SAID), clock=clock)
    assert (made.outcome.status, made.outcome.reason, made.score) == (OutcomeStatus.ERROR, "reset_timeout", None)
    assert clock.now() == 30.0


async def test_a_grade_that_never_comes_is_an_error() -> None:
    clock = VirtualClock()
    engine = ScriptedEngine(lambda prompt: SAID, latency_s=10.0, clock=clock)
    env = token_env(Talk(turns=99, at={"grade": 1e6}, clock=clock), wall_clock_s=25.0)
    made = await run(env, engine, clock=clock)
    assert (made.outcome.status, made.outcome.reason, made.score) == (OutcomeStatus.ERROR, "grading_timeout", None)
    assert clock.now() == 25.0 + GRADING_S


# -- seeds, versions, limits


async def seeds(episode: Episode) -> list[int]:
    engine = ScriptedEngine(lambda prompt: SAID)
    await run(token_env(Talk(turns=3)), engine, episode)
    return [call.sampling.seed for call in engine.calls]


async def test_every_request_has_a_seed_of_its_own_and_the_same_one_again() -> None:
    other = Task(id="u", prompt="?")
    made = [
        await seeds(episode)
        for episode in (an_episode(0), an_episode(1), an_episode(0, seed=1), an_episode(0, task=other))
    ]
    flat = [seed for episode in made for seed in episode]
    assert len(set(flat)) == len(flat) == 12
    assert await seeds(an_episode(0)) == made[0]
    assert {an_episode(0).seed(-1)} & set(flat) == set()


async def test_a_request_asks_for_no_more_than_any_budget_allows() -> None:
    engine = ScriptedEngine(lambda prompt: SAID)
    env = TokenEnv(Talk(turns=3), CHAT, Budgets(max_tokens_per_turn=20, max_tokens_per_episode=40))
    await run(env, engine, sampling=Sampling(max_tokens=16))
    asked = [call.sampling.max_tokens for call in engine.calls]
    assert asked[0] == 16
    assert asked == [min(16, 40 - len(call.prompt)) for call in engine.calls]


async def test_the_first_tokens_version_is_heard_exactly() -> None:
    """A publication between asking and sampling: first the engine's version, then the token's own."""
    clock = VirtualClock()
    engine = ScriptedEngine(lambda prompt: SAID, latency_s=10.0 * len(SAID), clock=clock)
    heard: list[tuple[float, int]] = []

    class Weights:
        names, weight_hash = (), "h"

        def tensors(self) -> Any:
            return iter(())

    async def publish() -> None:
        await clock.sleep(5.0)
        await engine.publish(Weights(), 1)

    publication = asyncio.ensure_future(publish())
    made = await run(
        token_env(Talk(turns=1)), engine, clock=clock, on_version=lambda version: heard.append((clock.now(), version))
    )
    await publication
    assert heard == [(0.0, 0), (10.0 * len(SAID), 1)]
    assert (made.admitted_version, made.first_version) == (0, 1)


@pytest.mark.parametrize("changed", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_training_samples_from_the_whole_distribution(changed: dict[str, Any]) -> None:
    require_training_sampling(SAMPLING)
    with pytest.raises(EngineError, match="top_p 1, top_k 0, temperature above 0"):
        require_training_sampling(Sampling(max_tokens=1, **changed))


# -- pools


class Made:
    """Makes environments and keeps them."""

    def __init__(self, behave: Callable[[int], dict[str, Any]] = lambda n: {}) -> None:
        self.all: list[Talk] = []
        self.behave = behave

    def __call__(self) -> Talk:
        self.all.append(Talk(at=self.behave(len(self.all))))
        return self.all[-1]


async def test_a_pool_uses_an_environment_again_one_episode_at_a_time() -> None:
    make, engine = Made(), ScriptedEngine(lambda prompt: SAID)
    pool = EnvPool(make, CHAT, Budgets())
    for attempt in range(3):
        async with pool.lease() as env:
            await run(env, engine, an_episode(attempt))
    assert len(make.all) == 1
    async with pool.lease() as one, pool.lease() as other:
        assert one is not other
        await run(one, engine)
        await run(other, engine)
    assert len(make.all) == 2
    await pool.close()
    await pool.close()
    async with pool.lease() as env:
        assert env.unwrapped is make.all[2], "what was closed is not used again"
        await run(env, engine)


@pytest.mark.parametrize("place", ["respond", "setup", "grade"])
async def test_a_pool_throws_a_failed_environment_away(place: str) -> None:
    make = Made(lambda n: {place: SandboxError("dead")} if n == 0 else {})
    pool, engine = EnvPool(make, CHAT, Budgets()), ScriptedEngine(lambda prompt: SAID)
    outcomes = []
    for attempt in range(3):
        async with pool.lease() as env:
            outcomes.append((await run(env, engine, an_episode(attempt))).outcome.is_error)
    assert outcomes == [True, False, False]
    assert len(make.all) == 2
    assert make.all[0].closed == 1, "taken down, once"


async def test_an_environment_that_cannot_even_be_closed_ends_no_run() -> None:
    dead = SandboxError("dead")
    make = Made(lambda n: {"respond": dead, "teardown": dead} if n == 0 else {})
    pool, engine = EnvPool(make, CHAT, Budgets()), ScriptedEngine(lambda prompt: SAID)
    for attempt in range(2):
        async with pool.lease() as env:
            made = await run(env, engine, an_episode(attempt))
    assert not made.outcome.is_error
    assert len(make.all) == 2


@pytest.mark.parametrize("error", [ConfigError("bad"), KeyboardInterrupt()])
async def test_a_lease_that_ends_in_an_exception_closes_and_passes_it_on(error: BaseException) -> None:
    make = Made()
    pool, engine = EnvPool(make, CHAT, Budgets()), ScriptedEngine(lambda prompt: SAID)

    async def broken() -> None:
        async with pool.lease() as env:
            await run(env, engine)
            raise error

    with pytest.raises(type(error)):
        await broken()
    async with pool.lease() as env:
        assert env.unwrapped is make.all[1]
        await run(env, engine)


async def test_a_cancelled_episode_gives_everything_back() -> None:
    clock = VirtualClock()
    make = Made()
    pool = EnvPool(make, CHAT, Budgets(wall_clock_s=1e6))
    engine = ScriptedEngine(lambda prompt: SAID, latency_s=100.0, clock=clock)

    async def lifetime() -> None:
        async with pool.lease() as env:
            await white_box(env, engine, an_episode(), sampling=SAMPLING, clock=clock)

    task = asyncio.ensure_future(lifetime())
    await clock.run(lambda: len(engine.calls) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.ended_sessions == ["e0"]
    assert make.all[0].closed == 1
    assert (await engine.health()).running == 0


def test_kinds_of_failure_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    again = pickle.loads(pickle.dumps(SandboxError("x", kind="oom")))
    assert isinstance(again, EpisodeError)
    assert (str(again), again.kind) == ("x", "oom")
