"""From values and rewards to advantages and returns of one packed micro-batch, as the configuration asks.

All of it stays on the action-token axis, where skipping observations is the absence of a special case.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sao_gym.trainer.advantages import (
    compute_returns,
    compute_stream_advantages,
    length_adaptive_lambda,
    row_lengths,
)
from sao_gym.trainer.batch import Packed
from sao_gym.trainer.config import LossConfig

Floats64 = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, slots=True)
class Units:
    """What one recursion runs over: streams [S] with `local` credit, else rows [R].

    lengths, lam, bootstrap are per unit; stream_lengths [S] and row_bootstrap [R] hold whatever the credit.
    """

    lengths: npt.NDArray[np.int64]
    lam: Floats64
    bootstrap: Floats64
    stream_lengths: npt.NDArray[np.int64]
    row_bootstrap: Floats64


def _stream_ids(packed: Packed) -> npt.NDArray[np.int64]:
    """Index of each action token's stream over the whole micro-batch [A], counted over streams that hold tokens."""
    change = (np.diff(packed.row, prepend=-1) != 0) | (np.diff(packed.stream, prepend=-1) != 0)
    return np.cumsum(change) - 1


def _lambda_lengths(packed: Packed, ids: npt.NDArray[np.int64], config: LossConfig) -> npt.NDArray[np.int64]:
    """L of each unit (docs/paper.md row 8): its action tokens, all its tokens, or its turns."""
    lengths = np.bincount(ids)
    if config.lambda_length == "actions":
        return lengths
    if config.lambda_length == "turns":
        starts = (np.diff(packed.turn, prepend=-1) != 0) | (np.diff(ids, prepend=-1) != 0)
        return np.bincount(ids, weights=starts).astype(np.int64)
    document = np.searchsorted(packed.doc_starts, packed.state_index, side="right") - 1
    sizes = np.diff(packed.doc_starts)
    totals = np.zeros(len(lengths), dtype=np.int64)
    for doc in np.unique(document):
        totals[ids[np.searchsorted(document, doc)]] += sizes[doc]
    return totals


def estimation_units(packed: Packed, bootstrap_values: Floats64, config: LossConfig) -> Units:
    """Lengths, lambdas and bootstrap values of the micro-batch's units. `bootstrap_values` [R], 0 where none."""
    streams = _stream_ids(packed)
    ids, bootstrap = packed.row, bootstrap_values
    if config.credit == "local":
        ids, bootstrap = streams, np.zeros(len(row_lengths(streams)))
        last = np.flatnonzero(np.diff(packed.row, append=-1) != 0)
        bootstrap[ids[last]] = bootstrap_values
    if config.fixed_lambda is not None:
        lam = np.full(len(row_lengths(ids)), config.fixed_lambda)
    else:
        lam = length_adaptive_lambda(_lambda_lengths(packed, ids, config), config.alpha)
    return Units(row_lengths(ids), lam, bootstrap, row_lengths(streams), bootstrap_values)


def critic_targets(packed: Packed, units: Units, config: LossConfig) -> Floats64:
    """Returns at lambda = 1 [A]: they read no value but the bootstrap."""
    return compute_returns(packed.rewards, units.lengths, gamma=config.gamma, bootstrap=units.bootstrap)


def policy_advantages(packed: Packed, values: Floats64, units: Units, config: LossConfig) -> Floats64:
    """Skip-observation GAE at the length-adaptive lambda [A]."""
    return compute_stream_advantages(
        values,
        packed.rewards,
        row_lengths(packed.row),
        units.stream_lengths,
        credit=config.credit,
        gamma=config.gamma,
        lam=units.lam,
        bootstrap=units.row_bootstrap,
    ).advantages
