"""Trajectories in files and database fields: what a policy can make a grader or an environment say is never in the way."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sao_gym.errors import TaskFileError
from sao_gym.parquet import dumps, loads, read_trajectories, to_table, write_trajectories
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory

ACTION = Segment.action([7], logprobs=[-1.0], versions=[3], temperature=0.5, stop=StopReason.STOP)
PLAIN = Trajectory(
    uid="r1",
    task_id="t",
    env_id="e",
    attempt=0,
    streams=(TokenStream(segments=(Segment.observation([1]), ACTION)),),
    outcome=Outcome.truncated("turns"),
)


@pytest.mark.parametrize("text", ["", "\u2028 \u0085 \x0b \x00", "é 字 🙂", "half \ud83d alone"])
def test_any_text_goes_in_and_comes_back(text: str, tmp_path: Path) -> None:
    said = replace(PLAIN, info={"said": text}).scored(Score(value=1.0, passed=True, detail=text))
    write_trajectories(tmp_path / "a.parquet", [said])
    for back in (loads(dumps(said)), *read_trajectories(tmp_path / "a.parquet")):
        assert back.info == {"said": text}
        assert back.score is not None
        assert back.score.detail == text.replace("\ud83d", "\\ud83d"), "a half character is written as its escape"
        assert back.outcome == Outcome.truncated("turns")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"], "no draft is left"


def test_the_method_of_a_verdict_is_kept_and_files_from_before_it_are_read(tmp_path: Path) -> None:
    graded = PLAIN.scored(Score(value=1.0, passed=True, grader_version="2", method="symbolic"))
    assert loads(dumps(graded)).score == graded.score
    old = to_table([graded, PLAIN])
    fields = [field for field in old.schema.field("score").type if field.name != "method"]
    at = old.schema.get_field_index("score")
    rows = [None if row is None else {f.name: row[f.name] for f in fields} for row in old.column("score").to_pylist()]
    old = old.set_column(at, pa.field("score", pa.struct(fields)), pa.array(rows, pa.struct(fields)))
    pq.write_table(old, tmp_path / "old.parquet")
    first, second = read_trajectories(tmp_path / "old.parquet")
    assert first.score == Score(value=1.0, passed=True, grader_version="2")
    assert second.score is None


def test_what_is_no_trajectory_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_trajectories(path, [PLAIN])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TaskFileError, match=r"a\.parquet is not a trajectory file of sao-gym"):
        read_trajectories(path)
    with pytest.raises(TaskFileError, match="is not a trajectory file"):
        read_trajectories(tmp_path / "none.parquet")
