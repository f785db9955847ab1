"""From trajectories to flat arrays: every estimator and loss sees the action-token axis [A] and nothing else.

Documents (token streams) are laid end to end. `state_index` points at the position *before* each action token, whose
hidden state has read exactly the prefix that the token was sampled from (traps 1 and 4). No padding, no mask.

Shapes: T packed tokens, D documents, R rows (trajectories), A action tokens.

Example: one row [prompt p q | action a b | observation o | action c] packs to T = 6, A = 3,
state_index [1, 2, 4], target_ids [a, b, c], doc_starts [0, 6].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sao_gym.errors import InvariantError
from sao_gym.stream import Credit, TokenStream, Trajectory

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed:
    """A batch, or a micro-batch of it, as flat arrays.

    token_ids, position_ids [T]; doc_starts [D+1]; state_index, target_ids, behavior_logprobs, temperature, versions,
    rewards, row, stream, turn [A]; bootstrap_index [R] (state after a row's last token, -1: none); group [R];
    n_action_global: action tokens of the whole batch, over all micro-batches and ranks.
    """

    token_ids: Int
    position_ids: Int
    doc_starts: Int
    state_index: Int
    target_ids: Int
    behavior_logprobs: npt.NDArray[np.float32]
    temperature: npt.NDArray[np.float32]
    versions: Int
    rewards: Float
    row: Int
    stream: Int
    turn: Int
    bootstrap_index: Int
    group: Int
    n_action_global: int

    @property
    def n_rows(self) -> int:
        """Number of trajectories."""
        return len(self.bootstrap_index)

    @property
    def n_action(self) -> int:
        """Number of action tokens here."""
        return len(self.state_index)


def pack(
    trajectories: Sequence[Trajectory],
    *,
    credit: Credit = "chain",
    bootstrap: Sequence[bool] | None = None,
    n_action_global: int | None = None,
) -> Packed:
    """Lay trajectories end to end. `bootstrap` says per row whether the value after its end is wanted.

    Raises InvariantError for a row without action tokens or one that opens with an action token: neither has a state.
    """
    for trajectory in trajectories:
        if not trajectory.n_action:
            raise InvariantError(f"trajectory {trajectory.uid} has no action token; leave it out of the batch")
    wanted = bootstrap or [False] * len(trajectories)
    documents = _documents(trajectories)
    streams = [document.stream for document in documents]
    rewards = [trajectory.rewards(credit) for trajectory in trajectories]
    ends = {document.row: document.start + len(document.stream) - 1 for document in documents}
    groups: dict[str, int] = {}
    state_index = _join([d.start + d.stream.action_positions - 1 for d in documents], np.int64)
    return Packed(
        token_ids=_join([s.token_ids for s in streams], np.int64),
        position_ids=_join([s.positions for s in streams], np.int64),
        doc_starts=np.cumsum([0, *(len(s) for s in streams)], dtype=np.int64),
        state_index=state_index,
        target_ids=_join([s.token_ids[s.action_mask] for s in streams], np.int64),
        behavior_logprobs=_join([s.behavior_logprobs for s in streams], np.float32),
        temperature=_join([s.temperatures for s in streams], np.float32),
        versions=_join([s.versions for s in streams], np.int64),
        rewards=_join([rewards[d.row][d.index] for d in documents], np.float64),
        row=_join([np.full(d.stream.n_action, d.row) for d in documents], np.int64),
        stream=_join([np.full(d.stream.n_action, d.index) for d in documents], np.int64),
        turn=_join([s.turns[s.action_mask] for s in streams], np.int64),
        bootstrap_index=np.array([ends[r] if w else -1 for r, w in enumerate(wanted)], dtype=np.int64),
        group=np.array([groups.setdefault(t.group_id or t.uid, len(groups)) for t in trajectories], dtype=np.int64),
        n_action_global=len(state_index) if n_action_global is None else n_action_global,
    )


@dataclass(frozen=True, slots=True)
class _Document:
    row: int
    index: int
    start: int
    stream: TokenStream


def _documents(trajectories: Sequence[Trajectory]) -> list[_Document]:
    documents, start = [], 0
    for row, trajectory in enumerate(trajectories):
        for index, stream in enumerate(trajectory.streams):
            if not len(stream):
                continue
            if stream.action_mask[0]:
                raise InvariantError(f"{trajectory.uid} opens with an action token: no state stands before it")
            documents.append(_Document(row, index, start, stream))
            start += len(stream)
    return documents


def _join(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)


def micro_batches(token_counts: Sequence[int], max_tokens: int, *, parts: int = 1) -> list[list[list[int]]]:
    """Rows cut into micro-batches of at most `max_tokens` (a longer row stands alone), dealt to `parts` ranks.

    Returns per rank a list of micro-batches of row numbers; all ranks get the same number, short ones empty lists, so
    that every rank issues the same collectives. Long rows are placed first; the cut does not change any result.
    """
    order = sorted(range(len(token_counts)), key=lambda row: (-token_counts[row], row))
    bins: list[list[int]] = []
    loads: list[int] = []
    for row in order:
        fitting = next((i for i, load in enumerate(loads) if load + token_counts[row] <= max_tokens), None)
        if fitting is None:
            bins.append([])
            loads.append(0)
            fitting = len(bins) - 1
        bins[fitting].append(row)
        loads[fitting] += token_counts[row]
    dealt = [[sorted(rows) for rows in bins[rank::parts]] for rank in range(parts)]
    most = max((len(part) for part in dealt), default=0)
    return [part + [[] for _ in range(most - len(part))] for part in dealt]
