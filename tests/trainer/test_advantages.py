"""Properties of credit assignment: traps 1, 2 and 3, invariance, refusals."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.errors import InvariantError
from sao_gym.trainer import advantages as adv
from sao_gym.trainer import baselines

unit = st.floats(0, 1)
real = st.floats(-2, 2, width=32)


def textbook_gae(
    values: list[float], rewards: list[float], gamma: float, lam: float, after: float = 0.0
) -> list[float]:
    """The recursion, written out."""
    out, carried, following = [], 0.0, after
    for v, r in zip(reversed(values), reversed(rewards), strict=True):
        carried = r + gamma * following - v + gamma * lam * carried
        following = v
        out.append(carried)
    return out[::-1]


def skip_links_gae(mask: list[bool], v: list[float], r: list[float], gamma: float, lam: float) -> list[float]:
    """The paper's wording over all positions: each action token links to the next one, over any observation."""
    actions = [t for t, is_action in enumerate(mask) if is_action]
    out = [0.0] * len(mask)
    for t, following in reversed(list(zip(actions, [*actions[1:], None], strict=True))):
        next_v, next_a = (v[following], out[following]) if following is not None else (0.0, 0.0)
        out[t] = r[t] + gamma * next_v - v[t] + gamma * lam * next_a
    return out


@given(st.lists(st.tuples(st.booleans(), real, real), min_size=1, max_size=40), unit, unit)
def test_gae_skips_observations(steps: list[tuple[bool, float, float]], gamma: float, lam: float) -> None:
    # trap 1: any interleaving equals the recursion over the linked action tokens.
    mask, v, r = ([step[i] for step in steps] for i in range(3))
    if not any(mask):
        return
    keep = np.array(mask)
    got = adv.compute_gae(np.array(v)[keep], np.array(r)[keep], [keep.sum()], gamma=gamma, lam=lam)
    want = np.array(skip_links_gae(mask, v, r, gamma, lam))[keep]
    np.testing.assert_allclose(got.advantages, want, atol=1e-9)


def test_a_thousand_observation_tokens_change_nothing() -> None:
    # trap 1: plain GAE at lambda 0.95 keeps 5e-23 of the reward across them.
    v, r = [0.0, 0.0], [0.0, 1.0]
    skipped = adv.compute_gae(v, r, [2], lam=0.95).advantages
    assert skipped.tolist() == pytest.approx([0.95, 1.0])
    plain = adv.gae_all_positions([0.0] * 1002, [0.0] * 1001 + [1.0], lam=0.95).advantages
    assert plain[0] == pytest.approx(0.95**1001)
    assert plain[0] < 1e-22


def test_reward_of_an_episode_that_ends_in_an_observation() -> None:
    # trap 2: V = 0.5 everywhere and R = 1: every action advantage is +0.5.
    mask = np.array([0, 1, 1, 0, 1, 0, 0], dtype=bool)
    written = np.array([0, 0, 0, 0, 0, 0, 1.0])
    placed = adv.place_rewards(written, mask)
    assert placed.sum() == 1.0
    assert adv.compute_gae([0.5] * 3, placed[mask], [3]).advantages.tolist() == [0.5] * 3
    assert adv.compute_gae([0.5] * 3, written[mask], [3]).advantages.tolist() == [-0.5] * 3


def test_reward_before_any_action_is_refused() -> None:
    with pytest.raises(InvariantError, match="before the first action"):
        adv.place_rewards([1.0, 0.0], [False, True])


@given(
    st.lists(st.lists(st.tuples(real, real), min_size=1, max_size=9), min_size=1, max_size=5),
    unit,
    unit,
    st.lists(real, min_size=5, max_size=5),
)
def test_rows_do_not_touch(rows: list[Any], gamma: float, lam: float, after: list[float]) -> None:
    # trap 3: only the explicit bootstrap tells truncation from termination; neighbours and widths do not matter.
    v, r = ([cell[i] for row in rows for cell in row] for i in range(2))
    lengths = [len(row) for row in rows]
    bootstrap = after[: len(rows)]
    got = adv.compute_gae(v, r, lengths, gamma=gamma, lam=lam, bootstrap=bootstrap)
    targets = adv.compute_returns(r, lengths, gamma=gamma, bootstrap=bootstrap)
    start = 0
    for row, end in zip(rows, bootstrap, strict=True):
        part = slice(start, start + len(row))
        values, rewards = [cell[0] for cell in row], [cell[1] for cell in row]
        want = textbook_gae(values, rewards, gamma, lam, end)
        np.testing.assert_allclose(got.advantages[part], want, atol=1e-9)
        want = np.array(textbook_gae(values, rewards, gamma, 1.0, end)) + values
        np.testing.assert_allclose(targets[part], want, atol=1e-9)
        start += len(row)


def test_critic_targets_read_no_value() -> None:
    assert adv.compute_returns([0.0, 0.5, 1.0], [3], gamma=0.5).tolist() == [0.5, 1.0, 1.0]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), unit, unit)
def test_chain_is_one_recursion_and_local_is_many(pieces: list[int], gamma: float, lam: float) -> None:
    n = sum(pieces)
    rng = np.random.default_rng(n)
    v, r = rng.normal(size=n), rng.normal(size=n)
    options: dict[str, Any] = {"gamma": gamma, "lam": lam, "bootstrap": [0.25]}
    chain = adv.compute_stream_advantages(v, r, [n], pieces, credit="chain", **options)
    np.testing.assert_array_equal(chain.advantages, adv.compute_gae(v, r, [n], **options).advantages)
    local = adv.compute_stream_advantages(v, r, [n], pieces, credit="local", **options)
    after = [0.0] * (len(pieces) - 1) + [0.25]
    want = adv.compute_gae(v, r, pieces, gamma=gamma, lam=lam, bootstrap=after)
    np.testing.assert_array_equal(local.advantages, want.advantages)
    last = adv.compute_stream_advantages(v, r, [n], pieces, credit="compactionrl", **options)
    np.testing.assert_allclose(last.advantages[-pieces[-1] :], chain.advantages[-pieces[-1] :], atol=1e-12)


def test_streams_of_several_rows() -> None:
    v, r = np.arange(7) / 10, np.array([0, 0, 1.0, 0, 0, 0, 1.0])
    for credit in ("chain", "local", "compactionrl"):
        lam = [0.5, 0.5, 0.9] if credit == "local" else [0.5, 0.9]
        whole = adv.compute_stream_advantages(v, r, [3, 4], [2, 1, 4], credit=credit, lam=lam)  # type: ignore[arg-type]
        first = adv.compute_stream_advantages(v[:3], r[:3], [3], [2, 1], credit=credit, lam=0.5)  # type: ignore[arg-type]
        second = adv.compute_gae(v[3:], r[3:], [4], lam=0.9)
        np.testing.assert_allclose(whole.advantages, [*first.advantages, *second.advantages])
    with pytest.raises(InvariantError, match="do not fit rows"):
        adv.compute_stream_advantages(v, r, [3, 4], [4, 3])


def test_row_lengths() -> None:
    assert adv.row_lengths([0, 0, 1, 2, 2, 2]).tolist() == [2, 1, 3]
    for broken in ([1, 1], [0, 2], [0, 1, 0]):
        with pytest.raises(InvariantError, match="row indices"):
            adv.row_lengths(broken)


def test_rows_without_actions_and_wrong_shapes_are_refused() -> None:
    with pytest.raises(InvariantError, match="row 1 has no action tokens"):
        adv.compute_gae([0.0, 0.0], [0.0, 0.0], [2, 0])
    with pytest.raises(InvariantError, match="do not fit"):
        adv.compute_gae([0.0, 0.0], [0.0, 0.0], [3])


def test_whitening() -> None:
    white = adv.whiten([1.0, 2.0, 3.0])
    assert (white.mean(), white.std()) == pytest.approx((0.0, 1.0))
    assert adv.whiten([0.3] * 3).tolist() == [0.0] * 3
    assert adv.whiten([]).size == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1)), min_size=1, max_size=20))
def test_baselines_depend_on_their_own_group_only(rows: list[tuple[str, float]]) -> None:
    names, rewards = [name for name, _ in rows], [reward for _, reward in rows]
    for compute in (baselines.group_advantages, baselines.leave_one_out):
        mixed = compute(rewards, names)
        for name in set(names):
            own = [i for i, other in enumerate(names) if other == name]
            np.testing.assert_allclose(mixed[own], compute([rewards[i] for i in own]), atol=1e-6)


def test_baselines_refuse_what_does_not_fit() -> None:
    with pytest.raises(InvariantError, match="one per row"):
        baselines.leave_one_out([1.0, 0.0], ["a"])
    with pytest.raises(InvariantError, match="window"):
        baselines.RunningMean(0)
