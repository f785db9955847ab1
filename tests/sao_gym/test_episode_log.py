"""Episodes in a log: what was appended is read back, what was cut is said and never read."""

from pathlib import Path

import numpy as np

from sao_gym.episode_log import EpisodeLog
from sao_gym.parquet import read_in_parts, read_trajectories, read_uids, write_in_parts
from sao_gym.stream import Outcome, Segment, StopReason, TokenStream, Trajectory


def episode(uid: str, length: int = 3) -> Trajectory:
    action = Segment.action(
        np.arange(length), logprobs=[-0.5] * length, versions=[0] * length, temperature=1.0, stop=StopReason.STOP
    )
    return Trajectory(
        uid=uid,
        task_id="t",
        env_id="say",
        attempt=0,
        streams=(TokenStream(segments=(Segment.observation([1, 2]), action)),),
        outcome=Outcome.terminated(),
        info={"response": uid},
    )


def test_what_was_appended_comes_back_in_the_order_asked_for(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes.log")
    each = {uid: episode(uid, length) for length, uid in enumerate(("a", "b", "c"), start=1)}
    for one in each.values():
        log.append(one)
    again = EpisodeLog(tmp_path / "episodes.log")
    assert again.uids == {"a", "b", "c"}
    assert list(again.read(["c", "nobody", "a"])) == [each["c"], each["a"]]
    assert again.problems == []
    again.remove()
    assert not again.path.exists()
    assert list(again.read(["a"])) == []


def test_of_one_uid_the_last_record_counts(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes.log")
    log.append(episode("a", 1))
    log.append(episode("a", 5))
    for each in (log, EpisodeLog(log.path)):
        assert [one.n_action for one in each.read(["a"])] == [5]


def test_a_record_cut_at_any_byte_is_dropped_and_said(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes.log")
    log.append(episode("a"))
    first = log.path.stat().st_size
    log.append(episode("b"))
    whole = log.path.read_bytes()
    for end in (first + 1, first + 7, first + 13, (first + len(whole)) // 2, len(whole) - 1):
        log.path.write_bytes(whole[:end])
        cut = EpisodeLog(log.path)
        assert cut.uids == {"a"}
        assert f"{end - first} bytes" in cut.problems[0]
        cut.append(episode("c"))
        assert EpisodeLog(log.path).uids == {"a", "c"}, "what follows a cut record is readable"


def test_damaged_bytes_are_no_episode(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path / "episodes.log")
    log.append(episode("a"))
    first = log.path.stat().st_size
    log.append(episode("b"))
    data = bytearray(log.path.read_bytes())
    data[first + 40] ^= 0xFF
    log.path.write_bytes(data)
    assert EpisodeLog(log.path).uids == {"a"}
    log.path.write_bytes(bytes(data[:first]) + b"\xff" * 12 + b"x")  # a length beyond all that there is
    assert EpisodeLog(log.path).uids == {"a"}


def test_parts_of_a_file_are_the_file(tmp_path: Path) -> None:
    each = [episode(str(index), index + 1) for index in range(7)]
    write_in_parts(tmp_path / "parts.parquet", iter(each), rows=3)
    assert read_trajectories(tmp_path / "parts.parquet") == each
    assert list(read_in_parts(tmp_path / "parts.parquet")) == each
    assert read_uids(tmp_path / "parts.parquet") == tuple("0123456")
