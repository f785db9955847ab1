"""Packing: what was recorded of each action token, and the state before it, on one flat axis."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.errors import InvariantError
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.trainer.batch import micro_batches, pack


def action(ids, logprobs=None, versions=None, temperature=1.0):
    n = len(ids)
    return Segment.action(
        ids,
        logprobs=[-1.0] * n if logprobs is None else logprobs,
        versions=[0] * n if versions is None else versions,
        temperature=temperature,
        stop=StopReason.STOP,
    )


def episode(*streams, uid="r0", value=0.0, **changes):
    made = Trajectory(
        uid=uid,
        task_id="t",
        env_id="test",
        attempt=0,
        streams=tuple(TokenStream(segments=tuple(segments)) for segments in streams),
        outcome=Outcome.terminated(),
        **changes,
    )
    return made.scored(Score(value=value, passed=value > 0))


def test_every_field_of_two_rows():
    first = episode(
        [
            Segment.observation([10, 11]),
            action([1, 2], [-0.5, -0.25], [3, 4], 0.7),
            Segment.observation([12]),
            action([3], [-0.125], [4], 0.7),
        ],
        value=1.0,
    )
    second = episode([Segment.observation([20]), action([4]), Segment.observation([21, 22])], uid="r1", value=0.5)
    packed = pack([first, second], bootstrap=[False, True])
    assert packed.token_ids.tolist() == [10, 11, 1, 2, 12, 3, 20, 4, 21, 22]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert packed.doc_starts.tolist() == [0, 6, 10]
    assert packed.state_index.tolist() == [1, 2, 4, 6]
    assert packed.target_ids.tolist() == [1, 2, 3, 4]
    assert packed.behavior_logprobs.tolist() == [-0.5, -0.25, -0.125, -1.0]
    assert packed.temperature.tolist() == pytest.approx([0.7, 0.7, 0.7, 1.0])
    assert packed.versions.tolist() == [3, 4, 4, 0]
    assert packed.rewards.tolist() == [0.0, 0.0, 1.0, 0.5]
    assert packed.row.tolist() == [0, 0, 0, 1]
    assert packed.stream.tolist() == [0, 0, 0, 0]
    assert packed.turn.tolist() == [0, 0, 1, 0]
    assert packed.bootstrap_index.tolist() == [-1, 9]
    assert packed.group.tolist() == [0, 1]
    assert packed.n_action_global == 4


def test_reward_stands_on_the_last_action_though_the_episode_ends_in_an_observation():
    """Trap 2."""
    packed = pack([episode([Segment.observation([1]), action([2, 3]), Segment.observation([4, 5, 6])], value=1.0)])
    assert packed.rewards.tolist() == [0.0, 1.0]


def test_streams_are_documents_of_one_row():
    packed = pack(
        [
            episode(
                [Segment.observation([1, 2]), action([3])],
                [Segment.observation([4]), action([5, 6])],
                value=1.0,
            )
        ],
        bootstrap=[True],
    )
    assert packed.doc_starts.tolist() == [0, 3, 6]
    assert packed.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert packed.stream.tolist() == [0, 1, 1]
    assert packed.row.tolist() == [0, 0, 0]
    assert packed.rewards.tolist() == [0.0, 0.0, 1.0]
    assert packed.bootstrap_index.tolist() == [5]


def test_local_credit_ends_each_stream_with_the_score():
    row = episode([Segment.observation([1]), action([3])], [Segment.observation([4]), action([5, 6])], value=0.5)
    assert pack([row], credit="local").rewards.tolist() == [0.5, 0.0, 0.5]


def test_groups_follow_their_ids():
    rows = [
        episode([Segment.observation([1]), action([2])], uid=f"r{i}", group_id=group)
        for i, group in enumerate(["a", "b", "a", None])
    ]
    assert pack(rows).group.tolist() == [0, 1, 0, 2]


def test_a_row_without_action_tokens_is_refused():
    with pytest.raises(InvariantError, match="r7 has no action token"):
        pack([episode([Segment.observation([1])], uid="r7")])


def test_an_action_without_a_state_before_it_is_refused():
    with pytest.raises(InvariantError, match="opens with an action token"):
        pack([episode([action([1])])])


def test_nothing_packs_to_nothing():
    packed = pack([], n_action_global=9)
    assert packed.n_rows == packed.n_action == 0
    assert packed.doc_starts.tolist() == [0]
    assert packed.n_action_global == 9


@given(
    counts=st.lists(st.integers(1, 50), max_size=40),
    most=st.integers(1, 80),
    parts=st.integers(1, 4),
)
def test_micro_batches_hold_every_row_once_and_within_the_budget(counts, most, parts):
    dealt = micro_batches(counts, most, parts=parts)
    assert len(dealt) == parts
    assert len({len(rank) for rank in dealt}) == 1  # same number of collectives everywhere
    flat = sorted(row for rank in dealt for part in rank for row in part)
    assert flat == list(range(len(counts)))
    for rank in dealt:
        for part in rank:
            assert len(part) <= 1 or sum(counts[row] for row in part) <= most


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 6))
def test_packing_loses_and_moves_nothing(seed, rows):
    """Trap 4: unpack by row, stream and turn gives back what each stream recorded."""
    rng = np.random.default_rng(seed)
    batch = []
    for row in range(rows):
        streams = []
        for _ in range(rng.integers(1, 3)):
            segments = [Segment.observation(rng.integers(0, 9, rng.integers(1, 4)))]
            for _ in range(rng.integers(1, 4)):
                n = int(rng.integers(1, 4))
                segments.append(action(rng.integers(0, 9, n), -rng.random(n), np.sort(rng.integers(0, 5, n))))
                segments.append(Segment.observation(rng.integers(0, 9, rng.integers(0, 3))))
            streams.append(segments)
        batch.append(episode(*streams, uid=f"r{row}", value=float(rng.random())))
    packed = pack(batch)
    for row, trajectory in enumerate(batch):
        for index, stream in enumerate(trajectory.streams):
            here = (packed.row == row) & (packed.stream == index)
            start = packed.state_index[here][0] - packed.position_ids[packed.state_index[here][0]]
            assert packed.target_ids[here].tolist() == stream.token_ids[stream.action_mask].tolist()
            assert packed.behavior_logprobs[here].tolist() == stream.behavior_logprobs.tolist()
            assert packed.versions[here].tolist() == stream.versions.tolist()
            assert packed.turn[here].tolist() == stream.turns[stream.action_mask].tolist()
            assert (packed.state_index[here] - start + 1).tolist() == stream.action_positions.tolist()
            ids = packed.token_ids[start : start + len(stream)]
            assert ids.tolist() == stream.token_ids.tolist()
            assert packed.token_ids[packed.state_index[here]].tolist() == [
                int(stream.token_ids[p - 1]) for p in stream.action_positions
            ]
    assert packed.rewards.sum() == pytest.approx(sum(t.score.value for t in batch))


def test_an_empty_stream_is_no_document():
    row = episode([], [Segment.observation([1]), action([2])])
    packed = pack([replace(row, score=None)])
    assert packed.doc_starts.tolist() == [0, 2]
    assert packed.stream.tolist() == [1]
