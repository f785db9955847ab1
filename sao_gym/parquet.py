"""Trajectories in parquet and out again, to the last bit. The files open with pyarrow and `datasets` as they are.

One row per trajectory; `streams` is a list of streams, each a list of segments with their arrays. `info` and
`timings` are JSON text, so `info` may hold what JSON can say. Extras keep dtype and shape beside their bytes.
"""

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from sao_gym.errors import TaskFileError
from sao_gym.stream import (
    Outcome,
    OutcomeStatus,
    Score,
    Segment,
    SegmentKind,
    StopReason,
    TokenStream,
    Trajectory,
)

_EXTRA = pa.struct(
    [("name", pa.string()), ("dtype", pa.string()), ("shape", pa.list_(pa.int64())), ("data", pa.binary())]
)
_SEGMENT = pa.struct(
    [
        ("kind", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("behavior_logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("temperature", pa.float64()),
        ("stop", pa.string()),
        ("extras", pa.list_(_EXTRA)),
    ]
)
_SCORE = pa.struct(
    [
        ("value", pa.float64()),
        ("passed", pa.bool_()),
        ("per_action", pa.list_(pa.float64())),
        ("detail", pa.string()),
        ("grader_version", pa.string()),
        ("method", pa.string()),
    ]
)
SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("task_id", pa.string()),
        ("env_id", pa.string()),
        ("attempt", pa.int64()),
        ("group_id", pa.string()),
        ("outcome", pa.string()),
        ("reason", pa.string()),
        ("score", _SCORE),
        ("admitted_version", pa.int64()),
        ("seed", pa.uint64()),
        ("timings", pa.string()),
        ("info", pa.string()),
        ("streams", pa.list_(pa.list_(_SEGMENT))),
    ]
)


def _segment_row(segment: Segment) -> dict[str, Any]:
    return {
        "kind": segment.kind.value,
        "token_ids": segment.token_ids,
        "behavior_logprobs": segment.behavior_logprobs,
        "versions": segment.versions,
        "temperature": segment.temperature,
        "stop": segment.stop.value if segment.stop else None,
        "extras": [
            {"name": name, "dtype": values.dtype.str, "shape": list(values.shape), "data": values.tobytes()}
            for name, values in segment.extras.items()
        ],
    }


def _writable(text: str) -> str:
    """The text with half characters, which JSON escapes in a policy's arguments can make, as escapes: UTF-8 has none."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _row(trajectory: Trajectory) -> dict[str, Any]:
    score = trajectory.score
    return {
        "uid": trajectory.uid,
        "task_id": trajectory.task_id,
        "env_id": trajectory.env_id,
        "attempt": trajectory.attempt,
        "group_id": trajectory.group_id,
        "outcome": trajectory.outcome.status.value,
        "reason": trajectory.outcome.reason,
        "score": None
        if score is None
        else {
            "value": score.value,
            "passed": score.passed,
            "per_action": list(score.per_action),
            "detail": _writable(score.detail),
            "grader_version": score.grader_version,
            "method": score.method,
        },
        "admitted_version": trajectory.admitted_version,
        "seed": trajectory.seed,
        "timings": json.dumps(dict(trajectory.timings)),
        "info": _writable(json.dumps(dict(trajectory.info), ensure_ascii=False)),
        "streams": [[_segment_row(segment) for segment in stream.segments] for stream in trajectory.streams],
    }


def to_table(trajectories: Iterable[Trajectory]) -> pa.Table:
    """An Arrow table with one row per trajectory."""
    return pa.Table.from_pylist([_row(trajectory) for trajectory in trajectories], schema=SCHEMA)


def _numbers(scalar: Any, dtype: Any) -> npt.NDArray[Any]:
    return scalar.values.to_numpy(zero_copy_only=False).astype(dtype)  # type: ignore[no-any-return]


def _segment(scalar: Any) -> Segment:
    ids = _numbers(scalar["token_ids"], np.int32)
    extras = {
        extra["name"]: np.frombuffer(extra["data"], dtype=np.dtype(extra["dtype"])).reshape(extra["shape"])
        for extra in scalar["extras"].as_py() or ()
    }
    if scalar["kind"].as_py() == SegmentKind.OBSERVATION.value:
        return Segment.observation(ids, **extras)
    return Segment.action(
        ids,
        logprobs=_numbers(scalar["behavior_logprobs"], np.float32),
        versions=_numbers(scalar["versions"], np.int32),
        temperature=scalar["temperature"].as_py(),
        stop=StopReason(scalar["stop"].as_py()),
        extras=extras,
    )


def _items(scalar: Any) -> list[Any]:
    return [scalar.values[index] for index in range(len(scalar.values))]


def _stream(scalar: Any) -> TokenStream:
    return TokenStream(segments=tuple(_segment(segment) for segment in _items(scalar)))


def _score(row: dict[str, Any] | None) -> Score | None:
    if row is None:
        return None
    method = row.get("method") or ""  # files written before grading methods were counted have none
    return Score(**{**row, "per_action": tuple(row["per_action"]), "method": method})


def from_table(table: pa.Table) -> list[Trajectory]:
    """The trajectories of a table that `to_table` made."""
    plain = table.drop_columns(["streams"]).to_pylist()
    streams = table.column("streams")
    return [
        Trajectory(
            uid=row["uid"],
            task_id=row["task_id"],
            env_id=row["env_id"],
            attempt=row["attempt"],
            group_id=row["group_id"],
            streams=tuple(_stream(stream) for stream in _items(streams[i])),
            outcome=Outcome(OutcomeStatus(row["outcome"]), row["reason"]),
            score=_score(row["score"]),
            admitted_version=row["admitted_version"],
            seed=row["seed"],
            timings=json.loads(row["timings"]),
            info=json.loads(row["info"]),
        )
        for i, row in enumerate(plain)
    ]


def write_trajectories(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Write a parquet file; it appears under its name only when it is whole."""
    partial = path.with_name(path.name + ".partial")
    pq.write_table(to_table(trajectories), partial, compression="zstd")
    partial.replace(path)


def write_in_parts(path: Path, trajectories: Iterable[Trajectory], *, rows: int = 64) -> None:
    """`write_trajectories` for more than memory holds: `rows` of them at a time, each a row group of the file."""
    partial = path.with_name(path.name + ".partial")
    left = iter(trajectories)
    with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        while part := list(islice(left, rows)):
            writer.write_table(to_table(part))
    partial.replace(path)


def read_in_parts(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file, a row group in memory at a time. Raises TaskFileError as `read_trajectories` does."""
    with _readable(path):
        file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        with _readable(path):
            part = from_table(file.read_row_group(group))
        yield from part


def read_uids(path: Path) -> tuple[str, ...]:
    """Uids of the trajectories of a file, in order. Raises TaskFileError as `read_trajectories` does."""
    with _readable(path):
        return tuple(pq.read_table(path, columns=["uid"]).column("uid").to_pylist())


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read a file that `write_trajectories` wrote. Raises TaskFileError naming the file if it is none."""
    with _readable(path):
        return from_table(pq.read_table(path))


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise TaskFileError(
            f"{path} is not a trajectory file of sao-gym ({error}); give a .parquet that a run wrote"
        ) from error


def dumps(trajectory: Trajectory) -> bytes:
    """One trajectory as Arrow IPC bytes, for a database field."""
    sink = io.BytesIO()
    table = to_table([trajectory])
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def loads(data: bytes) -> Trajectory:
    """The trajectory that `dumps` wrote."""
    with pa.ipc.open_stream(data) as reader:
        return from_table(reader.read_all())[0]
