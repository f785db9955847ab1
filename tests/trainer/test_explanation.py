"""The explanation of one trajectory agrees with what the learner computes of it."""

from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from sao_gym.clock import SystemClock
from sao_gym.errors import TaskFileError
from sao_gym.models import tiny_qwen3
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory, TruncationReason
from sao_gym.trainer.actor import Actor
from sao_gym.trainer.config import CriticConfig, LossConfig, StalenessConfig, TrainConfig
from sao_gym.trainer.critic import Critic, critic_from_model
from sao_gym.trainer.explanation import Explanation, Fate, explain
from sao_gym.trainer.learner import Learner
from sao_gym.trainer.losses import ExplainedVariance
from sao_gym.trainer.plan import make_plan

VOCABULARY = 32
VERSION = 3
USUAL = -float(np.log(VOCABULARY))


def action(rng: np.random.Generator, offsets: list[float], versions: list[int]) -> Segment:
    """An action whose recorded log-probs lie `offsets` above those of an untrained model, about."""
    return Segment.action(
        rng.integers(0, VOCABULARY, len(offsets)),
        logprobs=np.minimum(USUAL + np.array(offsets), 0.0),
        versions=versions,
        temperature=1.0,
        stop=StopReason.STOP,
    )


def stream(rng: np.random.Generator, *, ends_in_observation: bool = True) -> TokenStream:
    """An old token, tokens that are far too likely now (ratio high) or too unlikely (low), and usual ones."""
    segments = [
        Segment.observation(rng.integers(0, VOCABULARY, 5)),
        action(rng, [0.0, 0.0, -4.0], [0, VERSION - 1, VERSION - 1]),
        Segment.observation(rng.integers(0, VOCABULARY, 3)),
        action(rng, [3.0, 0.1, 0.0], [VERSION] * 3),
    ]
    if ends_in_observation:
        segments.append(Segment.observation(rng.integers(0, VOCABULARY, 2)))
    return TokenStream(segments=tuple(segments))


def trajectory(streams: int = 1, outcome: Outcome | None = None, shares: tuple[float, ...] = ()) -> Trajectory:
    rng = np.random.default_rng(5)
    made = tuple(stream(rng) for _ in range(streams))
    bare = Trajectory(
        uid="r7", task_id="t", env_id="e", attempt=0, streams=made, outcome=outcome or Outcome.terminated()
    )
    return bare.scored(Score(value=sum(shares) if shares else 1.0, passed=True, per_action=shares))


def config(**loss: Any) -> TrainConfig:
    return TrainConfig(
        loss=LossConfig(**loss),
        critic=CriticConfig(only_steps=0, lr_warmup_steps=0),
        staleness=StalenessConfig(max_staleness=1),
    )


def networks() -> tuple[Any, Critic]:
    """A model and a critic whose head is not zero, so that values say something."""
    model = tiny_qwen3(VOCABULARY, layers=1, hidden=16, heads=2, kv_heads=1)
    critic = critic_from_model(model)
    with torch.no_grad():
        torch.manual_seed(3)
        critic.value_head.weight.normal_(0.0, 0.3)
        critic.value_head.bias.fill_(0.2)
    return model, critic


def explained(row: Trajectory, settings: TrainConfig) -> Explanation:
    model, critic = networks()
    return explain(row, Actor(model), critic, settings, version=VERSION, text_of=lambda ids: f"<{ids[0]}>")


@pytest.mark.parametrize("policy", ["dis", "ppo", "cispo", "icepop", "trm"])
def test_it_is_what_the_learner_computes(policy: str) -> None:
    settings, row = config(policy=policy), trajectory()
    told = explained(row, settings)
    model, critic = networks()
    learner = Learner(settings, model, critic, Accelerator(cpu=True), SystemClock())
    plan = make_plan([row], settings, batch=0, actor_batches=0, version=VERSION, trains_actor=True)
    stats = learner.step(plan)

    figures = told.figures
    assert [told.count(fate) for fate in (Fate.KEPT, Fate.LOW, Fate.HIGH, Fate.STALE)] == [
        stats.account.kept,
        stats.account.rejected_low,
        stats.account.rejected_high,
        stats.account.stale_masked,
    ]
    np.testing.assert_allclose([f.weight for f in figures], stats.weights, rtol=1e-5)
    if policy != "icepop":
        np.testing.assert_allclose(np.log([f.ratio for f in figures]), stats.log_ratios, atol=1e-5)
    assert np.mean([f.advantage for f in figures]) == pytest.approx(stats.metrics()["advantage_mean"], rel=1e-6)
    seen = ExplainedVariance.of([f.target for f in figures], [f.value for f in figures]).value
    assert seen == stats.before_passes.value  # None: one reward, no discount, so returns are constant
    squares = [(f.value - f.target) ** 2 for f in figures if f.fate is not Fate.STALE]
    assert sum(squares) / len(figures) == pytest.approx(stats.value_loss, rel=1e-5)
    if policy == "dis":
        terms = [-f.weight * f.advantage * f.current_logprob for f in figures]
        assert sum(terms) / len(figures) == pytest.approx(stats.policy_loss, rel=1e-5)


def test_fates_cover_all_four_and_ratios_are_those_of_the_log_probs() -> None:
    told = explained(trajectory(), config())
    fates = [f.fate for f in told.figures]
    assert fates == [Fate.STALE, Fate.KEPT, Fate.HIGH, Fate.LOW, Fate.KEPT, Fate.KEPT]
    for f in told.figures:
        assert f.ratio == pytest.approx(np.exp(f.current_logprob - f.behavior_logprob), rel=1e-5)
        assert (f.weight > 0) == (f.fate is Fate.KEPT)
        if f.fate is not Fate.STALE:
            assert (0.7 < f.ratio < 6.0) == (f.fate is Fate.KEPT)


def test_one_entry_per_token_in_order() -> None:
    row = trajectory()
    told = explained(row, config())
    (only,) = row.streams
    assert [t.token_id for t in told.tokens] == only.token_ids.tolist()
    assert [t.turn for t in told.tokens] == only.turns.tolist()
    assert [t.position for t in told.tokens] == only.positions.tolist()
    assert [t.figures is not None for t in told.tokens] == only.action_mask.tolist()
    assert [t.segment for t in told.tokens] == [0] * 5 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 2
    assert told.tokens[0].text == f"<{only.token_ids[0]}>"
    recorded = [f.behavior_logprob for f in told.figures]
    np.testing.assert_array_equal(np.array(recorded, np.float32), only.behavior_logprobs)
    assert [f.version for f in told.figures] == only.versions.tolist()


@pytest.mark.parametrize(("credit", "copies"), [("chain", 1), ("local", 2)])
def test_reward_delta_and_advantage_by_hand(credit: str, copies: int) -> None:
    """Trap 2: all of the score is placed. Deltas and advantages follow from the rewards and values that are shown."""
    told = explained(trajectory(streams=2), config(credit=credit))
    assert told.reward_sum == pytest.approx(copies)
    assert len(told.lambdas) == copies
    ends = [5, 11] if credit == "local" else [11]
    figures, start = told.figures, 0
    for end, lam in zip(ends, told.lambdas, strict=True):
        assert lam == pytest.approx(1 - 1 / (1.5 * (end - start + 1)))
        after = 0.0
        for t in range(end, start - 1, -1):
            following = figures[t + 1].value if t < end else 0.0
            assert figures[t].delta == pytest.approx(figures[t].reward + following - figures[t].value, abs=1e-9)
            after = figures[t].delta + lam * after
            assert figures[t].advantage == pytest.approx(after, abs=1e-9)
            assert figures[t].target == pytest.approx(sum(f.reward for f in figures[t : end + 1]))
        start = end + 1


def test_shares_stand_on_the_actions_that_earned_them() -> None:
    told = explained(trajectory(shares=(0.25, 0.75)), config())
    assert [f.reward for f in told.figures] == [0, 0, 0.25, 0, 0, 0.75]


def test_a_budgets_end_is_bootstrapped_where_that_is_asked_for() -> None:
    row = trajectory(outcome=Outcome.truncated(TruncationReason.TURNS))
    terminal, bootstrap = explained(row, config()), explained(row, config(truncation="bootstrap"))
    assert terminal.figures[-1].target == 1.0
    last = bootstrap.figures[-1]
    assert last.delta == pytest.approx(last.target - last.value)
    assert last.target != 1.0


def test_a_row_without_action_tokens_is_refused() -> None:
    bare = TokenStream(segments=(Segment.observation([1, 2]),))
    row = Trajectory(uid="r9", task_id="t", env_id="e", attempt=0, streams=(bare,), outcome=Outcome.terminated())
    with pytest.raises(TaskFileError, match="r9 holds no action token"):
        explained(row, config())
