"""TokenEnv: episodes as token streams, over the project's own chat and tokenizer."""

import asyncio
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import TimeLimit, TransformReward
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.core import AgentEnv, Budgets, Reply, TokenEnv, ToolEnv
from sao_gym.errors import ConfigError, EngineError, EpisodeError
from sao_gym.messages import Message
from sao_gym.own_chat import OwnChat
from sao_gym.protocols import Generation, Task
from sao_gym.stream import Outcome, Score, StopReason
from sao_gym.tokenizer import train_tokenizer

CHAT = OwnChat(train_tokenizer(["hello", "print(1)"] * 4, vocab_size=290), describe_tools=False)
END = CHAT.stop_token_ids[0]
TASKS = [Task(id="t", prompt="1+1?", answer="2")]


def generation(text: str, stop: StopReason = StopReason.STOP, *, version: int = 3) -> Generation:
    """What an engine would have sampled to say `text`; markers are control ids."""
    ids = CHAT.codec.encode(text) + ([END] if stop is StopReason.STOP else [])
    return Generation(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -0.5, dtype=np.float32),
        versions=np.full(len(ids), version, dtype=np.int32),
        stop=stop,
        temperature=0.7,
    )


def block(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


RUN = block('{"name": "python", "arguments": {"code": "print(1)"}}')


class Python(ToolEnv):
    """Logs what would be run."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            TASKS,
            tools=[self.python],
            grader=lambda gold, response: Score(value=float(gold == response), passed=gold == response),
            **kwargs,
        )
        self.log: list[str] = []
        self.waits = asyncio.Event()
        self.answer = "1"

    def python(self, code: str) -> str:
        """Run code."""
        self.log.append(code)
        return self.answer


def begun(budgets: Budgets | None = None, **kwargs: Any) -> tuple[TokenEnv, Python]:
    inner = Python(**kwargs.pop("env", {}))
    env = TokenEnv(inner, CHAT, budgets, **kwargs)
    env.reset(seed=0)
    return env, inner


def record(env: TokenEnv) -> Any:
    return env.trajectory(uid="u", env_id="python", attempt=0)


@pytest.mark.filterwarnings("ignore:.*(different from the unwrapped version|alternative render modes)")
def test_gymnasiums_checker_finds_nothing() -> None:
    check_env(TokenEnv(Python(), CHAT))


def test_an_episode_is_its_segments() -> None:
    env = TokenEnv(Python(), CHAT)
    first, info = env.reset(seed=0)
    assert info == {"task_id": "t"}
    assert CHAT.codec.decode(first) == "<|user|>1+1?<|end|><|assistant|>"
    answer, reward, terminated, truncated, _ = env.step(generation(RUN))
    assert CHAT.codec.decode(answer) == "<|tool|>1<|end|><|assistant|>"
    assert (reward, terminated, truncated) == (0.0, False, False)
    last, reward, terminated, truncated, info = env.step(generation("2"))
    assert (len(last), reward, terminated, truncated) == (0, 1.0, True, False)
    assert info["score"].passed
    assert [s.is_action for s in env.stream.segments] == [False, True, False, True]
    np.testing.assert_array_equal(
        env.token_ids, np.concatenate([first, generation(RUN).token_ids, answer, generation("2").token_ids])
    )
    trajectory = record(env)
    assert trajectory.outcome == Outcome.terminated()
    assert trajectory.score == Score(value=1.0, passed=True)
    assert (trajectory.task_id, trajectory.n_turns) == ("t", 2)
    assert trajectory.streams[0].temperatures.tolist() == pytest.approx([0.7] * trajectory.n_action)
    assert set(trajectory.streams[0].versions.tolist()) == {3}


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, len(CHAT.codec.tokenizer) - 1), min_size=1, max_size=30), st.booleans())
def test_sampled_ids_are_kept_whatever_they_spell(ids: list[int], stops: bool) -> None:
    """Trap 5, trap 7: two spellings of one string stay apart, and nothing sampled is dropped or moved."""
    env, _ = begun()
    ids = [i for i in ids if i != END] + ([END] if stops else [])
    stop = StopReason.STOP if stops else StopReason.LENGTH
    sampled = Generation(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.zeros(len(ids), dtype=np.float32),
        versions=np.zeros(len(ids), dtype=np.int32),
        stop=stop,
        temperature=1.0,
    )
    before = env.token_ids
    observation, *_ = env.step(sampled)
    np.testing.assert_array_equal(env.token_ids, np.concatenate([before, sampled.token_ids, observation]))
    np.testing.assert_array_equal(env.stream.token_ids[env.stream.action_mask], ids)


def test_two_spellings_of_one_text_stay_as_sampled() -> None:
    """Trap 5."""
    merged = CHAT.codec.encode("hello")
    spelled = [i for letter in "hello" for i in CHAT.codec.encode(letter)]
    assert merged != spelled
    for ids in (merged, spelled):
        env, _ = begun()
        env.step(
            Generation(
                token_ids=np.array([*ids, END], dtype=np.int32),
                logprobs=np.zeros(len(ids) + 1, dtype=np.float32),
                versions=np.zeros(len(ids) + 1, dtype=np.int32),
                stop=StopReason.STOP,
                temperature=1.0,
            )
        )
        assert env.stream.token_ids[env.stream.action_mask].tolist() == [*ids, END]


TC01 = {
    "a": '{"name": "python", "arguments": "{\\"code\\": \\"print(1)\\"}"}',
    "b": '{"name": "python", "arguments": "\\"{\\\\\\"code\\\\\\": \\\\\\"print(1)\\\\\\"}\\""}',
    "c": '{"name": "python", "arguments": [1]}',
    "d": '{"name": "python", "arguments": 7}',
    "e": '{"name": "python", "arguments": null}',
    "f": '{"name": "python"}',
    "g": '{"name": "python", "arguments": {"code": 5}}',
    "h": '{"name": "python", "arguments": {"code": "1", "code": "2"}}',
    "i": '{"name": "python", "arguments": {"code": "1"}}\n{"name": "python", "arguments": {"code": "2"}}',
    "j": '{"arguments": {"code": "1"}}',
}


def test_malformed_calls_are_answered_and_the_episode_goes_on() -> None:
    """Case TC-01, trap 21: ten completions, ten observations, no exception, at most (a) runs."""
    env, inner = begun()
    kinds = {}
    for letter, body in TC01.items():
        sampled = generation(block(body))
        observation, reward, terminated, truncated, info = env.step(sampled)
        assert len(observation), letter
        assert (reward, terminated, truncated) == (0.0, False, False), letter
        np.testing.assert_array_equal(env.stream.actions[-1].token_ids, sampled.token_ids)
        kinds[letter] = ",".join(info["call_problems"])
        text = CHAT.codec.decode(observation)
        assert not kinds[letter] or f"Error ({kinds[letter]}): " in text, letter
    assert inner.log in ([], ["print(1)"])
    assert all(kinds[letter] for letter in "bcdefghij")
    assert (kinds["f"], kinds["g"], kinds["j"]) == ("missing_argument", "wrong_type", "missing_name")
    assert sum(inner.call_problems.values()) == sum(bool(kind) for kind in kinds.values())
    env.step(generation("2"))
    trajectory = record(env)
    assert trajectory.n_turns == 11
    assert trajectory.info["call_problems"] == dict(inner.call_problems)


def test_a_length_stop_ends_the_episode_and_runs_nothing() -> None:
    """Trap 19."""
    env, inner = begun(Budgets(max_tokens_per_turn=200))
    observation, reward, terminated, truncated, info = env.step(generation(RUN, StopReason.LENGTH))
    assert (len(observation), reward, terminated, truncated) == (0, 0.0, False, True)
    assert info["truncation_reason"] == "turn_tokens"
    assert not inner.log
    assert record(env).outcome == Outcome.truncated("turn_tokens")
    assert env.next_max_tokens == 0
    with pytest.raises(ResetNeeded):
        env.step(generation("2"))


def test_a_turn_cap_never_cuts_a_long_episode() -> None:
    """Trap 18."""
    env, _ = begun(Budgets(max_tokens_per_turn=8192, max_tokens_per_episode=100_000))
    turn = generation("x" * 6000 + RUN)
    turns = 0
    while True:
        assert env.next_max_tokens == min(8192, 100_000 - len(env.token_ids))
        if env.next_max_tokens < len(turn.token_ids):
            break
        *_, terminated, truncated, _ = env.step(turn)
        assert not terminated
        assert not truncated
        turns += 1
    assert turns == 100_000 // (len(turn.token_ids) + 6)
    cut = generation("x" * env.next_max_tokens, StopReason.LENGTH)
    *_, truncated, info = env.step(cut)
    assert truncated
    assert info["truncation_reason"] == "episode_tokens"
    assert len(env.token_ids) == 100_000


@pytest.mark.parametrize("kind", ["episode_tokens", "context"])
@pytest.mark.parametrize("answer", ["1", "1" * 500])
def test_an_observation_that_leaves_no_room_ends_the_episode(kind: str, answer: str) -> None:
    """Trap 18: with its reason; one that does not even fit is left out, and counted."""
    used = len(CHAT.prompt([Message.user("1+1?")])) + len(generation(RUN).token_ids)
    limit = used + 4
    budgets = Budgets(max_tokens_per_episode=limit if kind == "episode_tokens" else None)
    env, inner = begun(budgets, context_length=limit if kind == "context" else None)
    inner.answer = answer
    observation, reward, terminated, truncated, info = env.step(generation(RUN))
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert info["truncation_reason"] == kind
    assert info["score"] == Score(value=0.0, passed=False)
    assert len(env.token_ids) <= limit
    bridge = len(CHAT.bridge([Message.tool(answer, call=inner.messages[1].tool_calls[0])], last_id=END))
    dropped = 0 if bridge <= 4 else bridge
    assert len(observation) == bridge - dropped
    assert record(env).info.get("dropped_observation_tokens", 0) == dropped
    assert record(env).outcome == Outcome.truncated(kind)


@pytest.mark.parametrize("budgeted", [True, False])
def test_turn_limits_have_a_reason_and_the_last_answer_still_terminates(budgeted: bool) -> None:
    """Case EN-02 (c): by the wrapper's budget or by the environment's own."""
    budgets, own = (Budgets(max_turns=2), {}) if budgeted else (None, {"max_turns": 2})
    env, _ = begun(budgets, env=own)
    env.step(generation(RUN))
    *_, terminated, truncated, info = env.step(generation(RUN))
    assert (terminated, truncated, info["truncation_reason"]) == (False, True, "turns")
    assert CHAT.codec.decode(env.stream.segments[-1].token_ids) == "<|tool|>1<|end|><|assistant|>"
    env.reset()
    env.step(generation(RUN))
    _, reward, terminated, truncated, info = env.step(generation("2"))
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert "truncation_reason" not in info


def test_a_time_limit_below_is_a_truncation_by_turns() -> None:
    """Case EN-02 (b)."""
    env = TokenEnv(TimeLimit(Python(), 2), CHAT)
    assert not env.is_async
    env.reset(seed=0)
    env.step(generation(RUN))
    _, _, terminated, truncated, info = env.step(generation("2" + RUN))
    assert (terminated, truncated, info["truncation_reason"]) == (False, True, "turns")
    trajectory = record(env)
    assert trajectory.outcome == Outcome.truncated("turns")
    assert trajectory.score == Score(value=1.0, passed=True)
    assert sum(float(r.sum()) for r in trajectory.rewards()) == 1.0


class Hints(AgentEnv):
    """A quarter for each hint, one for the answer."""

    def respond(self, message: Message) -> Reply:
        if message.content == "hint":
            return Reply(messages=(Message.user("warm"),), reward=0.25)
        return Reply(messages=(Message.user("bye"),), reward=1.0, is_final=True)


def test_rewards_on_the_way_are_shares_of_the_score() -> None:
    env = TokenEnv(Hints(TASKS), CHAT)
    env.reset(seed=0)
    env.step(generation("hint"))
    env.step(generation("go"))
    trajectory = record(env)
    assert trajectory.score.per_action == (0.25, 1.0)
    ends = np.cumsum([len(action) for action in trajectory.streams[0].actions]) - 1
    assert trajectory.rewards()[0][ends].tolist() == [0.25, 1.0]
    assert not trajectory.streams[0].segments[-1].is_action  # its last word is an observation


def test_wrappers_in_between_are_never_bypassed() -> None:
    env = TokenEnv(TransformReward(Hints(TASKS), lambda r: 2 * float(r)), CHAT)

    async def episode() -> list[float]:
        await env.reset_async(seed=0)
        return [(await env.step_async(generation(text)))[1] for text in ("hint", "go")]

    assert asyncio.run(episode()) == [0.5, 2.0]
    assert record(env).score.value == 2.5
    assert record(env).score.per_action == (0.5, 2.0)


async def test_asynchronous_and_blocking_steps_give_the_same_record() -> None:
    streams = []
    for awaited in (True, False):
        env = TokenEnv(Python(), CHAT)
        if awaited:
            assert env.is_async
            await env.reset_async(seed=0)
            await env.step_async(generation(RUN))
            await env.step_async(generation("2"))
            await env.close_async()
        else:
            env.reset(seed=0)
            env.step(generation(RUN))
            env.step(generation("2"))
            env.close()
        streams.append(record(env))
    assert streams[0] == streams[1]


def test_passive_wrappers_do_not_cost_the_asynchronous_step() -> None:
    gymnasium.register(id="sao_gym_test/Python-v0", entry_point=Python)
    try:
        env = gymnasium.make("sao_gym_test/Python-v0")
        assert TokenEnv(env, CHAT).is_async
    finally:
        del gymnasium.registry["sao_gym_test/Python-v0"]


async def test_a_budget_outside_ends_the_episode_as_it_stands() -> None:
    env, _ = begun()
    await env.step_async(generation("2" + RUN))
    score = await env.finish_async("wall_clock")
    assert score == env.finish("wall_clock") == Score(value=1.0, passed=True)
    trajectory = record(env)
    assert trajectory.outcome == Outcome.truncated("wall_clock")
    assert trajectory.score == score
    assert not trajectory.streams[0].segments[-1].is_action


def test_an_aborted_generation_keeps_what_was_sampled() -> None:
    env, _ = begun()
    env.step(generation(RUN))
    *_, truncated, info = env.step(generation("", StopReason.ABORT))
    assert (truncated, info["truncation_reason"]) == (True, "wall_clock")
    assert record(env).n_turns == 1


def test_errors_have_no_score_and_are_never_reward_zero() -> None:
    """Trap 15."""
    env, _ = begun()
    with pytest.raises(ResetNeeded):
        record(env)
    trajectory = env.trajectory(uid="u", env_id="e", attempt=0, outcome=Outcome.error("sandbox"))
    assert trajectory.score is None


def test_a_prompt_without_room_for_an_answer_is_an_error_of_the_episode() -> None:
    env = TokenEnv(Python(), CHAT, Budgets(max_tokens_per_episode=3))
    with pytest.raises(EpisodeError, match="task 't'") as caught:
        env.reset(seed=0)
    assert caught.value.kind == "prompt_too_long"


def test_an_engine_that_samples_more_than_it_may_is_an_error() -> None:
    env, _ = begun(Budgets(max_tokens_per_turn=2))
    with pytest.raises(EngineError, match="at most 2"):
        env.step(generation("hello you"))


@pytest.mark.parametrize("field", ["max_tokens_per_turn", "max_tokens_per_episode", "max_turns", "wall_clock_s"])
def test_budgets_are_above_zero(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Budgets(**{field: 0})


def test_a_smaller_cap_than_the_budgets_cuts_a_turn() -> None:
    env, _ = begun(Budgets(max_tokens_per_episode=100))
    *_, info = env.step(generation("hello", StopReason.LENGTH))
    assert info["truncation_reason"] == "turn_tokens"


class Waiting(Hints):
    """Its second answer never comes; neither does its second reset."""

    resets = 0

    def __init__(self) -> None:
        super().__init__(TASKS)
        self.waits = asyncio.Event()

    async def setup(self, task: Task) -> None:
        self.resets += 1
        if self.resets > 1:
            await self.wait()

    async def wait(self) -> None:
        self.waits.set()
        await asyncio.Event().wait()

    async def respond(self, message: Message) -> Reply:
        if message.content == "wait":
            await self.wait()
        reply: Reply = super().respond(message)
        return reply


async def cancelled(work: Any, inner: Any) -> None:
    task = asyncio.ensure_future(work)
    await inner.waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_step_leaves_an_episode_that_can_be_finished() -> None:
    inner = Waiting()
    env = TokenEnv(inner, CHAT)
    await env.reset_async(seed=0)
    await env.step_async(generation("hint"))
    await cancelled(env.step_async(generation("wait")), inner)
    await env.finish_async("wall_clock")
    trajectory = record(env)
    assert trajectory.n_turns == 2
    assert trajectory.score.per_action == (0.25, 0.0)
    assert [float(r.sum()) for r in trajectory.rewards()] == [0.25]


async def test_an_interrupted_reset_leaves_nothing_of_the_last_episode() -> None:
    inner = Waiting()
    env = TokenEnv(inner, CHAT)
    await env.reset_async(seed=0)
    await env.step_async(generation("go"))
    assert env.outcome == Outcome.terminated()
    await cancelled(env.reset_async(), inner)
    assert env.outcome is None
    assert env.score is None
    with pytest.raises(ResetNeeded):
        await env.finish_async("wall_clock")
    with pytest.raises(ResetNeeded):
        record(env)


class Ungraded(Python):
    """Its first verdict never comes."""

    grades = 0

    async def grade(self) -> Score:  # type: ignore[override]
        self.grades += 1
        if self.grades == 1:
            self.waits.set()
            await asyncio.Event().wait()
        score: Score = super().grade()
        return score


async def test_an_interrupted_verdict_is_asked_for_again() -> None:
    inner = Ungraded()
    env = TokenEnv(inner, CHAT, Budgets(max_turns=1))
    await env.reset_async(seed=0)
    await cancelled(env.step_async(generation("2" + RUN)), inner)
    assert env.outcome is None
    assert await env.finish_async("wall_clock") == Score(value=1.0, passed=True)
    assert record(env).outcome == Outcome.truncated("wall_clock")
