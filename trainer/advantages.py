"""Credit over sampled tokens: generalised advantage estimation on the action-token axis.

Axes: A action tokens of all rows, rows end to end, each row's tokens in causal order; R rows; S streams or steps;
T tokens of one row, observations included. Time runs over action tokens alone (arXiv 2607.07508, skip-observation
GAE): observations are not on [A], so from the last token of one action the ordinary recursion goes straight to the
first token of the next. `values[a]` is V of the prefix *before* token a, so it has read the observation in between.

Invariant: everything is float64 inside (at 131072 tokens 1 - lambda is 5e-6, below float32's comfort), and no
estimate crosses from one row into another.

Example:
    >>> gae = compute_gae([0.2, 0.4], [0.0, 1.0], [2], gamma=1.0, lam=0.5)
    >>> gae.advantages.round(3).tolist(), gae.returns.round(3).tolist()
    ([0.5, 0.6], [0.7, 1.0])
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from sao_gym.errors import InvariantError
from sao_gym.stream import Credit

Floats64 = npt.NDArray[np.float64]
Ints64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
StepValue = Literal["average", "last"]


@dataclass(frozen=True, eq=False, slots=True)
class Advantages:
    """What an estimator says of each action token: advantages [A] and lambda-returns [A] = advantages + values."""

    advantages: Floats64
    returns: Floats64


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class StepAdvantages:
    """Step-level credit spread over tokens.

    Shapes: advantages, returns, value_mask [A]; step_values, step_advantages, step_returns [S]. `returns` is the
    critic's lambda = 1 target; only tokens of `value_mask` carry value loss.
    """

    advantages: Floats64
    returns: Floats64
    value_mask: Bools
    step_values: Floats64
    step_advantages: Floats64
    step_returns: Floats64


def row_lengths(row: npt.ArrayLike) -> Ints64:
    """Action tokens of each row [R], from the row index of each token [A].

    Rows are 0..R-1, each in one piece and in order. Raises InvariantError otherwise; so does a row without tokens.
    """
    index = np.asarray(row, dtype=np.int64)
    if index.size and (index[0] != 0 or not np.isin(np.diff(index), (0, 1)).all()):
        raise InvariantError("row indices must run 0, 0, .., 1, 1, ..: in one piece, in order, none without tokens")
    return np.bincount(index)


def length_adaptive_lambda(lengths: npt.ArrayLike, alpha: float = 1.5) -> Floats64:
    """Length-adaptive lambda, 1 - 1/(alpha * l) held within [0, 1]; same shape as `lengths`.

    l counts what one link of the recursion joins: a row's action tokens, or its steps at step level. Then lambda**l
    tends to exp(-1/alpha) whatever the length. Raises InvariantError where l is below 1 (such a row has no
    advantage) or alpha is not positive. Source: VAPO, arXiv 2504.05118.
    """
    count = np.asarray(lengths, dtype=np.float64)
    if alpha <= 0 or (count < 1).any():
        raise InvariantError(f"lambda needs alpha > 0 and lengths of at least 1, got alpha {alpha}, {count.tolist()}")
    return np.clip(1.0 - 1.0 / (alpha * count), 0.0, 1.0)


def compute_gae(
    values: npt.ArrayLike,
    rewards: npt.ArrayLike,
    lengths: npt.ArrayLike,
    *,
    gamma: float = 1.0,
    lam: npt.ArrayLike = 1.0,
    bootstrap: npt.ArrayLike | None = None,
) -> Advantages:
    """Skip-observation GAE: delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1}.

    Shapes: values, rewards [A]; lengths [R]; lam a number or [R]; bootstrap [R] is V of the state after a row's last
    token or observation, 0 (the default) where the row terminated. It enters the last delta once, times gamma.
    Raises InvariantError for a row without action tokens or shapes that do not fit. Source: arXiv 1506.02438
    on the axis of arXiv 2607.07508, section 3.
    """
    v, r, n = _checked(values, rewards, lengths)
    decay = gamma * np.broadcast_to(np.asarray(lam, dtype=np.float64), n.shape)
    advantages = np.empty_like(v)
    returns = np.empty_like(v)
    # Row by row: a row's arrays stay in the processor's cache, a batch's do not.
    for start, stop, rate, after in zip(*_bounds(n), decay, _per_row(bootstrap, n), strict=True):
        row = v[start:stop]
        deltas = r[start:stop] - row
        deltas[:-1] += gamma * row[1:]
        deltas[-1] += gamma * after
        advantages[start:stop] = _accumulate(deltas, float(rate))
        np.add(advantages[start:stop], row, out=returns[start:stop])
    return Advantages(advantages, returns)


def compute_returns(
    rewards: npt.ArrayLike,
    lengths: npt.ArrayLike,
    *,
    gamma: float = 1.0,
    bootstrap: npt.ArrayLike | None = None,
) -> Floats64:
    """The critic's target [A], lambda = 1: R_t = r_t + gamma R_{t+1}; it reads no value but the bootstrap.

    Shapes as in `compute_gae`. Source: arXiv 2607.07508 (lambda_critic = 1); docs/paper.md rows 9 and 16.
    """
    _, r, n = _checked(rewards, rewards, lengths)
    returns = np.empty_like(r)
    for start, stop, after in zip(*_bounds(n), _per_row(bootstrap, n), strict=True):
        returns[start:stop] = _accumulate(r[start:stop], gamma, float(after))
    return returns


def compute_stream_advantages(
    values: npt.ArrayLike,
    rewards: npt.ArrayLike,
    lengths: npt.ArrayLike,
    stream_lengths: npt.ArrayLike,
    *,
    credit: Credit = "chain",
    gamma: float = 1.0,
    lam: npt.ArrayLike = 1.0,
    bootstrap: npt.ArrayLike | None = None,
) -> Advantages:
    """Credit for rows that consist of several streams (compaction, sub-agents).

    `stream_lengths` [S] counts the action tokens of each stream, in order, and its cuts include those of `lengths`.
    `chain`: one recursion over the row. `local`: each stream ends for itself; rewards then hold the shared score at
    the end of each stream, lam is a number or [S], and the bootstrap belongs to a row's last stream.
    `compactionrl`: the chain, with the advantage that enters a stream from the next one multiplied by
    (gamma lambda)^(action tokens in all later streams of the row). The factor is on the advantage, never on the
    reward: a perfect critic keeps advantage 0.
    """
    v, r, n = _checked(values, rewards, lengths)
    pieces = np.asarray(stream_lengths, dtype=np.int64)
    _, _, pieces = _checked(v, r, pieces)
    row_ends, piece_ends = np.cumsum(n), np.cumsum(pieces)
    if not np.isin(row_ends, piece_ends).all():
        raise InvariantError(f"streams of {pieces.tolist()} tokens do not fit rows of {n.tolist()}")
    if credit == "chain":
        return compute_gae(v, r, n, gamma=gamma, lam=lam, bootstrap=bootstrap)
    if credit == "local":
        after = np.where(np.isin(piece_ends, row_ends), _per_row(bootstrap, n)[_owner(piece_ends, row_ends)], 0.0)
        return compute_gae(v, r, pieces, gamma=gamma, lam=lam, bootstrap=after)
    if credit == "compactionrl":
        decay = gamma * np.broadcast_to(np.asarray(lam, dtype=np.float64), n.shape)
        deltas = r + gamma * _next_values(v, n, _per_row(bootstrap, n)) - v
        advantages = _faded_chain(deltas, decay[_owner(piece_ends, row_ends)], piece_ends, row_ends)
        return Advantages(advantages, advantages + v)
    raise InvariantError(f"credit is chain, local or compactionrl, got {credit!r}")


def _faded_chain(deltas: Floats64, decay: Floats64, piece_ends: Ints64, row_ends: Ints64) -> Floats64:
    """The chain over streams, last to first; what enters a stream is faded by the length of all that follows."""
    later = row_ends[_owner(piece_ends, row_ends)] - piece_ends
    advantages = np.empty_like(deltas)
    starts = np.concatenate([[0], piece_ends[:-1]])
    for start, stop, rate, rest in reversed(list(zip(starts, piece_ends, decay, later, strict=True))):
        entering = advantages[stop] * rate ** float(rest) if rest else 0.0
        advantages[start:stop] = _accumulate(deltas[start:stop], float(rate), float(entering))
    return advantages


def compute_step_advantages(
    values: npt.ArrayLike,
    step_rewards: npt.ArrayLike,
    step_lengths: npt.ArrayLike,
    steps_per_row: npt.ArrayLike,
    *,
    step_value: StepValue,
    gamma: float = 1.0,
    lam: npt.ArrayLike = 1.0,
) -> StepAdvantages:
    """One advantage per model turn, shared by its tokens (arXiv 2607.07508, appendix A.1).

    Shapes: values [A]; step_rewards, step_lengths [S]; steps_per_row [R]; lam a number or [R], from the step count.
    `average`: a step's value is the mean over its tokens, and all of them carry value loss. `last`: its last token's
    value, which alone carries value loss.
    """
    n = np.asarray(step_lengths, dtype=np.int64)
    v, _, n = _checked(values, values, n)
    ends = np.cumsum(n)
    value_mask = np.ones(len(v), dtype=np.bool_)
    if step_value == "average":
        step_values = np.add.reduceat(v, ends - n) / n if len(n) else np.zeros(0)
    else:
        step_values = v[ends - 1]
        value_mask[:] = False
        value_mask[ends - 1] = True
    steps = compute_gae(step_values, step_rewards, steps_per_row, gamma=gamma, lam=lam)
    targets = compute_returns(step_rewards, steps_per_row, gamma=gamma)
    return StepAdvantages(
        advantages=np.repeat(steps.advantages, n),
        returns=np.repeat(targets, n),
        value_mask=value_mask,
        step_values=step_values,
        step_advantages=steps.advantages,
        step_returns=targets,
    )


def gae_all_positions(
    values: npt.ArrayLike, rewards: npt.ArrayLike, *, gamma: float = 1.0, lam: float = 1.0
) -> Advantages:
    """Plain GAE over all T positions of one row, observations included: the arm that skipping is compared with."""
    return compute_gae(values, rewards, [np.size(values)], gamma=gamma, lam=lam)


def reward_index(action_mask: npt.ArrayLike) -> int:
    """Where a row's one reward stands: its last action token in [T], -1 for a row that has none."""
    positions = np.flatnonzero(np.asarray(action_mask))
    return int(positions[-1]) if positions.size else -1


def place_rewards(rewards: npt.ArrayLike, action_mask: npt.ArrayLike) -> Floats64:
    """Rewards [T] with each one that stands on an observation moved to the action token before it (docs/paper.md row 5).

    The sum stays. Raises InvariantError for a reward that no action precedes: nobody earned it.
    """
    given, mask = np.asarray(rewards, dtype=np.float64), np.asarray(action_mask, dtype=np.bool_)
    if given.shape != mask.shape:
        raise InvariantError(f"{given.shape} rewards for a mask of {mask.shape}")
    earner = np.maximum.accumulate(np.where(mask, np.arange(mask.size), -1))
    if (given[earner < 0] != 0).any():
        raise InvariantError("a reward stands before the first action: no action earned it")
    placed = np.zeros_like(given)
    np.add.at(placed, earner[earner >= 0], given[earner >= 0])
    return placed


def whiten(advantages: npt.ArrayLike) -> Floats64:
    """Advantages [A] of a whole batch at mean 0 and deviation 1; all 0 where they are equal (docs/paper.md row 10)."""
    a = np.asarray(advantages, dtype=np.float64)
    centred = a - a.mean() if a.size else a
    deviation = centred.std() if a.size else 0.0
    return centred / deviation if deviation > 1e-12 else np.zeros_like(a)


def _checked(
    values: npt.ArrayLike, rewards: npt.ArrayLike, lengths: npt.ArrayLike
) -> tuple[Floats64, Floats64, Ints64]:
    v, r = np.asarray(values, dtype=np.float64), np.asarray(rewards, dtype=np.float64)
    n = np.asarray(lengths, dtype=np.int64)
    if v.ndim != 1 or v.shape != r.shape or n.ndim != 1 or int(n.sum()) != v.size:
        raise InvariantError(f"values {v.shape} and rewards {r.shape} do not fit rows of {n.sum()} tokens in all")
    if (n < 1).any():
        raise InvariantError(
            f"row {int(np.argmax(n < 1))} has no action tokens: leave it out of the batch, it has no advantage"
        )
    return v, r, n


def _per_row(bootstrap: npt.ArrayLike | None, lengths: Ints64) -> Floats64:
    after = np.asarray(0.0 if bootstrap is None else bootstrap, dtype=np.float64)
    return np.broadcast_to(after, lengths.shape)


def _bounds(lengths: Ints64) -> tuple[Ints64, Ints64]:
    ends = np.cumsum(lengths)
    return ends - lengths, ends


def _owner(piece_ends: Ints64, row_ends: Ints64) -> npt.NDArray[np.intp]:
    """Row that each piece lies in [S]."""
    return np.searchsorted(row_ends, piece_ends)


def _next_values(values: Floats64, lengths: Ints64, bootstrap: Floats64) -> Floats64:
    following = np.empty_like(values)
    following[:-1] = values[1:]
    following[np.cumsum(lengths) - 1] = bootstrap
    return following


def _accumulate(x: Floats64, rate: float, after: float = 0.0) -> Floats64:
    """y_t = x_t + rate * y_{t+1} with y after the end given: a one-pole filter run backwards, at C speed."""
    y, _ = lfilter([1.0], [1.0, -rate], x[::-1], zi=[rate * after])
    return np.asarray(y[::-1], dtype=np.float64)
