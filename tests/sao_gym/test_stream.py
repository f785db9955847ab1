"""Segments, streams and trajectories: what is derived, what is refused, and the round trip through parquet."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.errors import InvariantError, TaskFileError
from sao_gym.parquet import dumps, loads, read_trajectories, write_trajectories
from sao_gym.stream import Outcome, Score, Segment, SegmentKind, StopReason, TokenStream, Trajectory


def make_action(ids: list[int], *, version: int = 0, temperature: float = 1.0, **extras: object) -> Segment:
    return Segment.action(
        ids,
        logprobs=[-0.25 * (1 + i % 3) for i in range(len(ids))],
        versions=[version] * len(ids),
        temperature=temperature,
        stop=StopReason.STOP,
        extras=extras,
    )


def make_trajectory(*streams: TokenStream, uid: str = "u", score: Score | None = None) -> Trajectory:
    trajectory = Trajectory(
        uid=uid, task_id="t", env_id="e", attempt=0, streams=streams, outcome=Outcome.terminated(), seed=2**63
    )
    return trajectory if score is None else trajectory.scored(score)


ids = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    tokens = draw(ids)
    if draw(st.booleans()):
        extras = {"experts": np.arange(len(tokens) * 2).reshape(len(tokens), 2)} if draw(st.booleans()) else {}
        return Segment.observation(tokens, **extras)
    n = len(tokens)
    return Segment.action(
        tokens,
        logprobs=draw(st.lists(st.floats(-50, 0, width=32), min_size=n, max_size=n)),
        versions=sorted(draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))),
        temperature=draw(st.sampled_from([0.7, 1.0])),
        stop=draw(st.sampled_from(StopReason)),
    )


streams = st.builds(lambda s: TokenStream(segments=tuple(s)), st.lists(segments(), max_size=6))
trajectories = st.builds(
    lambda s, info: Trajectory(
        uid="ü\u2028",
        task_id="t",
        env_id="e",
        attempt=1,
        streams=tuple(s),
        outcome=Outcome.truncated("turns"),
        info=info,
    ),
    st.lists(streams, max_size=3),
    st.dictionaries(st.text(), st.text() | st.integers(-(2**60), 2**60) | st.none(), max_size=3),
)


def check_derived_properties(stream: TokenStream) -> None:
    walked_ids: list[int] = []
    walked_mask: list[bool] = []
    walked_turns: list[int] = []
    turn = -1
    for segment in stream.segments:
        turn += segment.kind is SegmentKind.ACTION and len(segment) > 0
        for token in segment.token_ids:
            walked_ids.append(int(token))
            walked_mask.append(segment.kind is SegmentKind.ACTION)
            walked_turns.append(turn)
    assert stream.token_ids.tolist() == walked_ids
    assert stream.action_mask.tolist() == walked_mask
    assert stream.turns.tolist() == walked_turns
    assert stream.positions.tolist() == list(range(len(walked_ids)))
    assert stream.action_positions.tolist() == [i for i, m in enumerate(walked_mask) if m]
    assert len(stream.behavior_logprobs) == len(stream.versions) == len(stream.temperatures) == sum(walked_mask)


@given(streams)
def test_derived_properties_equal_a_walk(stream: TokenStream) -> None:
    check_derived_properties(stream)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(trajectories)
def test_ten_thousand_streams(trajectory: Trajectory) -> None:
    for stream in trajectory.streams:
        check_derived_properties(stream)
    assert loads(dumps(trajectory)) == trajectory


@settings(max_examples=60)
@given(st.lists(trajectories, max_size=3))
def test_parquet_round_trip_is_exact(tmp_path_factory: pytest.TempPathFactory, batch: list[Trajectory]) -> None:
    path = tmp_path_factory.mktemp("t") / "x.parquet"
    write_trajectories(path, batch)
    assert read_trajectories(path) == batch
    assert [loads(dumps(t)) for t in batch] == batch


def test_the_file_opens_with_pyarrow_and_datasets(tmp_path: Path) -> None:
    stream = TokenStream(segments=(Segment.observation([1, 2]), make_action([3, 4, 5])))
    path = tmp_path / "x.parquet"
    write_trajectories(path, [make_trajectory(stream, score=Score(value=1.0, passed=True))])
    assert pq.read_table(path).column("streams")[0].as_py()[0][1]["token_ids"] == [3, 4, 5]
    datasets = pytest.importorskip("datasets")
    row = datasets.Dataset.from_parquet(str(path), cache_dir=str(tmp_path / "cache"))[0]
    assert row["streams"][0][1]["behavior_logprobs"][0] == -0.25
    assert row["score"]["value"] == 1.0


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"nothing of the sort")
    with pytest.raises(TaskFileError, match=r"x\.parquet"):
        read_trajectories(path)


def test_append_leaves_the_old_stream_alone() -> None:
    old = TokenStream(segments=(Segment.observation([1]),))
    new = old.append(make_action([2]))
    assert (len(old), len(new)) == (1, 2)
    with pytest.raises(ValueError, match="read-only"):
        new.token_ids[0] = 9


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"logprobs": [-0.1]}, "must agree"),
        ({"versions": [1]}, "must agree"),
        ({"logprobs": [-0.1, float("nan")]}, "finite"),
        ({"logprobs": [-0.1, 0.5]}, "above 0"),
        ({"versions": [2, 1]}, "never fall"),
        ({"extras": {"entropy": [1.0]}}, "1 entries for 2 tokens"),
    ],
)
def test_an_action_that_does_not_fit_together_is_refused(changes: dict, match: str) -> None:
    good = {"logprobs": [-0.1, -0.2], "versions": [0, 0], "temperature": 1.0, "stop": StopReason.STOP}
    with pytest.raises(InvariantError, match=match):
        Segment.action([1, 2], **{**good, **changes})


def test_an_observation_carries_nothing_of_an_action() -> None:
    with pytest.raises(InvariantError, match="observation carries no"):
        Segment(kind=SegmentKind.OBSERVATION, token_ids=np.array([1], dtype=np.int32), temperature=1.0)


def test_rewards_stand_on_the_last_token_of_the_action_that_earned_them() -> None:
    """Trap 2: an episode that ends in an observation keeps its reward."""
    stream = TokenStream(
        segments=(
            Segment.observation([1]),
            make_action([2, 3]),
            Segment.observation([4]),
            make_action([5, 6, 7]),
            Segment.observation([8, 9]),
        )
    )
    assert make_trajectory(stream, score=Score(value=1.0, passed=True)).rewards()[0].tolist() == [
        0,
        0,
        0,
        0,
        1,
    ]
    shares = Score(value=1.0, passed=True, per_action=(0.25, 0.75))
    assert make_trajectory(stream, score=shares).rewards()[0].tolist() == [0, 0.25, 0, 0, 0.75]


def test_several_streams_share_the_score() -> None:
    first = TokenStream(segments=(Segment.observation([1]), make_action([2, 3])))
    empty = TokenStream(segments=(Segment.observation([1]),))
    second = TokenStream(segments=(Segment.observation([1]), make_action([4])))
    trajectory = make_trajectory(first, second, empty, score=Score(value=2.0, passed=True))
    assert [r.tolist() for r in trajectory.rewards("chain")] == [[0, 0], [2], []]
    assert [r.tolist() for r in trajectory.rewards("local")] == [[0, 2], [2], []]


def test_scores_that_do_not_fit_are_refused() -> None:
    trajectory = make_trajectory(TokenStream(segments=(make_action([1]), make_action([2]))))
    with pytest.raises(InvariantError, match="3 shares for 2 actions"):
        trajectory.scored(Score(value=1.0, passed=True, per_action=(0.2, 0.3, 0.5)))
    with pytest.raises(InvariantError, match="sum to"):
        trajectory.scored(Score(value=1.0, passed=True, per_action=(0.2, 0.3)))
    with pytest.raises(InvariantError, match="finite"):
        trajectory.scored(Score(value=float("nan"), passed=False))


def test_versions_of_a_trajectory() -> None:
    first = TokenStream(segments=(Segment.observation([1]),))
    second = TokenStream(segments=(make_action([2, 3], version=3), make_action([4], version=5)))
    trajectory = make_trajectory(first, second)
    assert (trajectory.first_version, trajectory.last_version) == (3, 5)
    assert make_trajectory(first).first_version is None


def test_a_stream_that_grows_counts_each_segment_once() -> None:
    """Two thousand turns: what one append costs does not grow with what is there."""
    counted = 0

    class Counted(Segment):
        def __len__(self) -> int:
            nonlocal counted
            counted += 1
            return len(self.token_ids)

    stream, segment = TokenStream(), Counted(kind=SegmentKind.OBSERVATION, token_ids=np.arange(3, dtype=np.int32))
    counted = 0
    for turn in range(2000):
        stream = stream.append(segment)
        assert len(stream) == 3 * (turn + 1)
    assert counted <= 2 * 2000
    assert len(stream.token_ids) == len(stream) == 6000
