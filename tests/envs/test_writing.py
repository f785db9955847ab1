"""The writing environment: what it asks, what it pays, what it records, and whom it shares its judge with."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from gymnasium.utils.env_checker import check_env

from sao_gym.budgets import Budgets
from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.commands.environments import Environments
from sao_gym.engines.scripted import ScriptedEngine
from sao_gym.envs.judges.rule import RuleJudge
from sao_gym.envs.writing import Judging, WritingEnv
from sao_gym.errors import ConfigError, GradingError
from sao_gym.jsonl import write_jsonl
from sao_gym.messages import Message
from sao_gym.parquet import read_trajectories, write_trajectories
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.protocols import Sampling, Task, Verdict
from sao_gym.registry import make
from sao_gym.rollout import Episode, white_box
from sao_gym.stream import OutcomeStatus, Trajectory
from sao_gym.token_env import TokenEnv
from sao_gym.writing_styles import STYLES

TASK = Task(id="t", prompt="Write a letter to the bakery.", info={"words": 20})
CUTE = "Yay, a fluffy little letter for my dear bakery, hugs and kisses, yummy! <3"
DARK = "Kukuku, tremble, bakery! My cursed eye and the dark flame within me demand buns, mortals."
TWO = [
    {"target": "cute", "candidates": ["academic", "cute"], "lasts": 100},
    {"target": "chuunibyou", "candidates": ["cute", "chuunibyou"]},
]


class Fails(RuleJudge):
    """A judge that cannot be had."""

    async def judge(self, request: str, text: str, labels: Sequence[str]) -> Verdict:
        raise GradingError("no verdict", "judge_malformed")


def writing(**given: object) -> WritingEnv:
    env = make("writing_style", **{"tasks": [TASK], **given})
    assert isinstance(env, WritingEnv)
    return env


def test_gymnasium_finds_no_fault() -> None:
    check_env(writing(), skip_render_check=True)
    check_env(TokenEnv(writing(revision=True), make_chat(byte_tokenizer())), skip_render_check=True)


@pytest.mark.parametrize(
    ("text", "reward"), [(CUTE, 1.0), (DARK, 0.0), ("", 0.0), ("  \n", 0.0), ("yay " * 40, 0.0), ("x", 0.0)]
)
def test_the_reward_is_quality_times_style(text: str, reward: float) -> None:
    env = writing()
    env.reset(seed=0)
    _, paid, terminated, truncated, info = env.step(text)
    assert (paid, terminated, truncated, info["score"].passed) == (reward, True, False, bool(reward))


def test_the_target_is_not_said_unless_asked() -> None:
    (system, user), _ = writing().reset(seed=0)
    assert user.content == TASK.prompt
    listed = [name for name in STYLES if f"{name} (" in system.content]
    assert listed == ["academic", "cute", "chuunibyou"]
    (told, _), _ = writing(tells_target=True).reset(seed=0)
    assert "in the style cute" in told.content
    by_target = {
        writing(phases=[{"target": target, "candidates": ["academic", "cute"]}]).reset(seed=0)[0][0].content
        for target in ("academic", "cute")
    }
    assert len(by_target) == 1  # the same words, whichever is wanted


def test_the_phase_follows_what_was_trained_and_stays_for_the_episode() -> None:
    env = writing(phases=TWO)
    env.reset(seed=0)
    env.judging.progress.note_trained(100)
    assert env.step(CUTE)[1] == 1.0
    env.reset()
    assert (env.phase.target, env.step(CUTE)[1]) == ("chuunibyou", 0.0)
    env.reset()
    assert env.step(DARK)[1] == 1.0
    assert env.episode_info["phase"] == 1


def test_a_blend_is_drawn_by_the_episode_s_seed() -> None:
    env = writing(phases=TWO, blend=100)
    env.judging.progress.note_trained(150)
    drawn = []
    for seed in range(100):
        env.reset(seed=seed)
        drawn.append(env.phase.target)
    assert 30 < Counter(drawn)["cute"] < 70
    for seed in (3, 4, 5):
        env.reset(seed=seed)
        assert env.phase.target == drawn[seed]


def test_seconds_are_a_unit_too() -> None:
    env = writing(phases=TWO, unit="seconds")
    env.judging.progress.note_spent(101.0)
    env.reset(seed=0)
    assert env.phase.target == "chuunibyou"


def test_a_revision_is_asked_for_once_and_the_second_answer_judged() -> None:
    env = writing(revision=True)
    env.reset(seed=0)
    wish, paid, terminated, truncated, _ = env.step(DARK)
    assert (len(wish), wish[0].role, paid, terminated, truncated) == (1, "user", 0.0, False, False)
    assert wish[0].content.startswith("Please revise it")
    _, paid, terminated, _, info = env.step(CUTE)
    assert (paid, terminated, info["score"].value) == (1.0, True, 1.0)


def test_a_judge_that_fails_is_an_error_and_never_0() -> None:
    record = episode(writing(judge=Fails()), CUTE)
    assert (record.outcome.status, record.outcome.reason, record.score) == (
        OutcomeStatus.ERROR,
        "judge_malformed",
        None,
    )


def episode(env: WritingEnv, text: str, number: int = 0) -> Trajectory:
    tokenizer = byte_tokenizer()
    chat = make_chat(tokenizer)
    engine = ScriptedEngine.from_texts([text], tokenizer, stop_id=chat.stop_token_ids[0])
    about = Episode(uid=f"e{number}", task=TASK, env_id="writing_style", attempt=number, run_seed=0)
    token_env = TokenEnv(env, chat, Budgets(max_turns=1))
    return asyncio.run(white_box(token_env, engine, about, sampling=Sampling(max_tokens=400), clock=SystemClock()))


def test_phase_target_and_signals_go_with_the_trajectory(tmp_path: Path) -> None:
    env = writing(phases=TWO)
    records = [episode(env, CUTE), episode(env, "yay " * 30, 1)]
    write_trajectories(tmp_path / "t.parquet", records)
    good, bad = read_trajectories(tmp_path / "t.parquet")
    assert good.score is not None
    assert (good.score.method, good.score.grader_version) == ("cute", "rule-1")
    assert {key: good.info[key] for key in ("phase", "target", "candidates", "judge", "problems")} == {
        "phase": 0,
        "target": "cute",
        "candidates": ["academic", "cute"],
        "judge": "rule-1",
        "problems": [],
    }
    figures = good.info["signals"]
    assert (figures["quality"], figures["on_target"], figures["style_cute"], figures["style_academic"]) == (1, 1, 1, 0)
    assert figures["length_ratio"] == pytest.approx(13 / 20, abs=0.15)
    assert bad.info["signals"]["repetition"] > 0.9
    assert "repetition" in bad.info["problems"]


def test_the_means_of_signals_are_a_metric_of_the_batch() -> None:
    from sao_gym.trainer.metrics import signal_means

    env = writing(phases=TWO)
    means = signal_means([episode(env, CUTE), episode(env, DARK, 1)])
    assert (means["style_cute"], means["style_chuunibyou"], means["on_target"], means["phase"]) == (0.5, 0.5, 0.5, 0)
    assert signal_means([]) == {}


def test_environments_of_a_run_share_judge_and_progress() -> None:
    shared = Environments("writing_style", {"phases": TWO}, size=4)
    one, two = shared.make(), shared.make()
    assert isinstance(one, WritingEnv)
    assert isinstance(two, WritingEnv)
    assert one.judging is two.judging is shared.judging
    heldout = Environments("writing_style", {"phases": TWO, "split": "heldout", "judging": shared.judging}, size=4)
    third = heldout.make()
    assert isinstance(third, WritingEnv)
    assert third.judging is shared.judging
    assert (len(shared.tasks), len(heldout.tasks)) == (312, 72)
    shared.judging.progress.note_trained(100)
    third.reset(seed=0)
    assert third.phase.target == "chuunibyou"


def test_an_environment_closes_the_judge_that_is_its_own() -> None:
    class Counts(RuleJudge):
        closed = 0

        async def close(self) -> None:
            type(self).closed += 1

    writing(judge=Counts()).close()
    assert Counts.closed == 1
    writing(judging=Judging(Counts())).close()
    assert Counts.closed == 1


def test_prompts_of_a_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "mine.jsonl", [{"prompt": "Write a limerick about a cat.", "words": 30}])
    env = make("writing_style", tasks=str(tmp_path / "mine.jsonl"))
    (_, user), _ = env.reset(seed=0)
    assert user == Message.user("Write a limerick about a cat.")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"judge": "opnai"}, "there is no judge 'opnai'"),
        ({"judge": "openai"}, "--judge-model"),
        ({"judge_options": {"order": 3}}, "did you mean 'orders'"),
        ({"phases": [{"target": "cute"}]}, "two or more"),
        ({"unit": "rows"}, "samples or seconds"),
        ({"blend": -1}, "a blend lasts"),
        ({"stylle": 1}, "takes no argument"),
    ],
)
def test_what_cannot_be_said_is_refused_with_a_sentence(given: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        writing(**given)
