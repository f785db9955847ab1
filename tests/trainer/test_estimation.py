"""Estimation on packed batches: observations leave no trace, flags and not widths say what was cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.trainer.batch import pack
from sao_gym.trainer.config import LossConfig
from sao_gym.trainer.estimation import critic_targets, estimation_units, policy_advantages


def action(n):
    return Segment.action([1] * n, logprobs=[-1.0] * n, versions=[0] * n, temperature=1.0, stop=StopReason.STOP)


def episode(*streams, value=0.0, uid="r", outcome=None):
    """Streams of ints: n > 0 is an action of n tokens, n < 0 an observation of -n."""
    made = Trajectory(
        uid=uid,
        task_id="t",
        env_id="test",
        attempt=0,
        streams=tuple(
            TokenStream(segments=tuple(action(n) if n > 0 else Segment.observation([2] * -n) for n in stream))
            for stream in streams
        ),
        outcome=outcome or Outcome.terminated(),
    )
    return made.scored(Score(value=value, passed=value > 0))


def estimate(trajectories, values, config, after=None, bootstrap=None):
    packed = pack(trajectories, credit=config.credit, bootstrap=bootstrap)
    ends = np.zeros(packed.n_rows) if after is None else np.array(after)
    units = estimation_units(packed, ends, config)
    values = np.broadcast_to(np.asarray(values, dtype=float), packed.n_action)
    return policy_advantages(packed, values, units, config), critic_targets(packed, units, config), units


def plain_gae(values, rewards, lam, gamma, after=0.0):
    """The recursion, written out."""
    advantages, following, ahead = [], after, 0.0
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        ahead = reward + gamma * following - value + gamma * lam * ahead
        advantages.append(ahead)
        following = value
    return advantages[::-1]


@given(
    turns=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    gaps=st.lists(st.integers(1, 40), min_size=6, max_size=6),
    gamma=st.floats(0.5, 1.0),
    alpha=st.floats(0.8, 10.0),
    seed=st.integers(0, 1000),
    ends_in_observation=st.booleans(),
)
def test_observations_leave_no_trace(turns, gaps, gamma, alpha, seed, ends_in_observation):
    """Trap 1: advantages are GAE on the stream without its observations, whatever stands between the actions."""
    rng = np.random.default_rng(seed)
    n = sum(turns)
    values, reward = rng.normal(size=n), float(rng.normal())
    config = LossConfig(gamma=gamma, alpha=alpha)
    stream = [part for turn, gap in zip(turns, gaps, strict=False) for part in (-gap, turn)]
    stream += [-gaps[-1]] if ends_in_observation else []
    advantages, targets, units = estimate([episode(stream, value=reward)], values, config)
    lam = min(max(1 - 1 / (alpha * n), 0.0), 1.0)
    rewards = [0.0] * (n - 1) + [reward]
    np.testing.assert_allclose(units.lam, [lam], rtol=1e-12)
    placed = [0.0] * (n - 1) + [float(np.float32(reward))]
    np.testing.assert_allclose(advantages, plain_gae(values, placed, lam, gamma), rtol=1e-9, atol=1e-12)
    expected = [float(np.float32(reward)) * gamma ** (n - 1 - t) for t in range(len(rewards))]
    np.testing.assert_allclose(targets, expected, rtol=1e-9, atol=1e-12)


def test_a_thousand_observation_tokens_change_nothing():
    """Trap 1."""
    values = [0.1, 0.5, -0.2, 0.3]
    config = LossConfig(alpha=0.9)
    short = estimate([episode([-1, 2, -1, 2], value=1.0)], values, config)
    long = estimate([episode([-1, 2, -1000, 2], value=1.0)], values, config)
    np.testing.assert_array_equal(short[0], long[0])
    np.testing.assert_array_equal(short[1], long[1])
    assert abs(short[0][0]) > 0.1


def test_an_episode_that_ends_in_an_observation_pays_its_last_action():
    """Trap 2: V = 0.5 everywhere, R = 1: every advantage is +0.5, where lambda is 1."""
    row = episode([-3, 2, -2, 3, -4], value=1.0)
    advantages, _, _ = estimate([row], 0.5, LossConfig(alpha=1e12))
    np.testing.assert_allclose(advantages, 0.5, atol=1e-9)
    faded, _, units = estimate([row], 0.5, LossConfig())
    np.testing.assert_allclose(faded, 0.5 * units.lam[0] ** np.arange(4, -1, -1), rtol=1e-12)


def test_only_the_flag_says_that_an_episode_was_cut(plan_of, make_config):
    """Trap 3: two rows of one shape, one cut by a budget; widths and neighbours say nothing."""
    cut = episode([-2, 2, -1], outcome=Outcome.truncated("turns"), uid="cut")
    ended = episode([-2, 2, -1], uid="ended")
    wide = episode([-9, 7, -9], uid="wide")
    for mode, wanted in (("bootstrap", True), ("terminal", False)):
        plan = plan_of([ended, cut, wide], make_config(loss={"truncation": mode}))
        (packed,) = plan.micro_batches[0]
        assert packed.bootstrap_index.tolist() == [-1, 9 if wanted else -1, -1]
    # the state after the cut row's last observation: documents of 5, 5 and 25 tokens
    assert packed.doc_starts.tolist() == [0, 5, 10, 35]


def test_bootstrap_enters_once_times_gamma(golden):
    """Case 04: a cut row goes on with the value after its last observation, a finished one does not."""
    case = golden("04")
    expected = case["expected"]
    row = episode([-1, 2, -1, 1, -2], outcome=Outcome.truncated("turns"))
    values = [0.1, 0.3, 0.5]
    alpha = 1 / (0.2 * 3)  # lambda 0.8 at l = 3
    config = LossConfig(alpha=alpha)
    mask = np.array(case["inputs"]["action_mask"], dtype=bool)
    for name, after in (("truncated_bootstrap", 0.4), ("treated_as_terminal", 0.0)):
        advantages, targets, units = estimate([row], values, config, after=[after])
        np.testing.assert_allclose(units.lam, [0.8])
        np.testing.assert_allclose(advantages, np.array(expected[name]["advantages"])[mask], atol=1e-12)
        np.testing.assert_allclose(targets, np.array(expected[name]["returns_lambda_1"])[mask], atol=1e-12)
    _, targets, _ = estimate([row], values, LossConfig(alpha=alpha, gamma=0.9), after=[0.4])
    wanted = np.array(expected["truncated_bootstrap"]["returns_lambda_1_gamma_0_9"])[mask]
    np.testing.assert_allclose(targets, wanted, atol=1e-12)


def test_two_streams_chain_and_local(golden):
    """Case 16 and docs/paper.md row 27, through packing: `chain` is one axis, `local` ends each stream with the score."""
    case = golden("16")
    row = episode([-1, 2, -1, 1], [-2, 2], value=1.0)
    values = [0.5, 0.6, 0.7, 0.8, 0.9]
    masks = [np.array(case["inputs"][name]["action_mask"], dtype=bool) for name in ("stream_1", "stream_2")]
    wanted = {
        credit: np.concatenate(
            [np.array(case["expected"][credit][f"stream_{i + 1}"])[mask] for i, mask in enumerate(masks)]
        )
        for credit in ("chain", "local")
    }
    chain, _, units = estimate([row], values, LossConfig(alpha=1.0))  # l = 5: lambda 0.8
    np.testing.assert_allclose(units.lam, [0.8])
    np.testing.assert_allclose(chain, wanted["chain"], atol=1e-12)
    # l is the stream's own with `local`: 3 and 2 tokens, so the streams are held against case 16 one by one
    for alpha, part in ((1 / (0.2 * 3), slice(0, 3)), (1 / (0.2 * 2), slice(3, 5))):
        local, targets, units = estimate([row], values, LossConfig(alpha=alpha, credit="local"))
        assert units.lengths.tolist() == [3, 2]
        np.testing.assert_allclose(local[part], wanted["local"][part], atol=1e-12)
        np.testing.assert_allclose(targets, 1.0)


def test_compactionrl_fades_the_advantage_that_enters_a_stream_and_no_reward():
    """docs/paper.md row 27: with one stream it is the chain; a perfect critic blames no success."""
    two = episode([-1, 3], [-2, 2], value=1.0)
    config = LossConfig(alpha=1.0, credit="compactionrl")  # l = 5: lambda 0.8
    values = [0.5, 0.6, 0.7, 0.8, 0.9]
    faded, targets, _ = estimate([two], values, config)
    chain, _, _ = estimate([two], values, LossConfig(alpha=1.0))
    np.testing.assert_allclose(faded[3:], chain[3:], atol=1e-12)
    # What enters the first stream is 0.8 * A_3, once more times 0.8^2 for the two tokens that follow.
    np.testing.assert_allclose(faded[2], (0.8 - 0.7) + 0.8 * 0.8**2 * chain[3], atol=1e-12)
    np.testing.assert_allclose(targets, 1.0)
    perfect, _, _ = estimate([two], 1.0, config)
    np.testing.assert_allclose(perfect, 0.0, atol=1e-12)
    one = episode([-1, 2, -1, 1], value=1.0)
    alone, _, _ = estimate([one], 0.3, config)
    np.testing.assert_allclose(alone, estimate([one], 0.3, LossConfig(alpha=1.0))[0], atol=1e-12)


def test_local_credit_bootstraps_only_the_last_stream_of_a_cut_row():
    rows = [
        episode([-1, 2], [-1, 1], outcome=Outcome.truncated("turns"), uid="a"),
        episode([-1, 1], [-1, 2], uid="b"),
    ]
    config = LossConfig(credit="local", truncation="bootstrap")
    advantages, targets, units = estimate(rows, 0.0, config, after=[0.4, 0.0])
    assert units.lengths.tolist() == [2, 1, 1, 2]
    assert units.bootstrap.tolist() == [0.0, 0.4, 0.0, 0.0]
    np.testing.assert_allclose(targets, [0, 0, 0.4, 0, 0, 0])
    np.testing.assert_allclose(advantages, [0, 0, 0.4, 0, 0, 0])


@pytest.mark.parametrize(
    ("lambda_length", "expected"), [("actions", [5, 2]), ("all_tokens", [13, 4]), ("turns", [3, 1])]
)
def test_what_l_counts(lambda_length, expected):
    """docs/paper.md row 8."""
    rows = [episode([-2, 2, -3, 1], [-3, 2], uid="a"), episode([-1, 2, -1], uid="b")]
    config = LossConfig(lambda_length=lambda_length, alpha=2.0)
    _, _, units = estimate(rows, 0.0, config)
    np.testing.assert_allclose(units.lam, [1 - 1 / (2.0 * n) for n in expected])
    assert units.lengths.tolist() == [5, 2]


def test_what_l_counts_per_stream():
    config = LossConfig(lambda_length="all_tokens", alpha=2.0, credit="local")
    _, _, units = estimate([episode([-2, 2, -3, 1], [-3, 2])], 0.0, config)
    np.testing.assert_allclose(units.lam, [1 - 1 / 16, 1 - 1 / 10])
    turns = LossConfig(lambda_length="turns", alpha=2.0, credit="local")
    _, _, units = estimate([episode([-2, 2, -3, 1], [-3, 2])], 0.0, turns)
    np.testing.assert_allclose(units.lam, [1 - 1 / 4, 1 - 1 / 2])
