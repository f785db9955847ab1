"""Episodes kept one by one as they end, and gathered into one parquet file when all are there.

Invariants: an episode that was appended survives the death of the process, whatever it was doing; a record that was
cut is found by its length or its checksum, said, and never read as an episode; of one uid the last record counts.

Example:
    log = EpisodeLog(Path("result/episodes.log"))
    log.append(trajectory)
    log.uids, log.problems
    write_in_parts(Path("result/trajectories.parquet"), log.read(["e-0-0", "e-0-1"]))
"""

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from sao_gym.parquet import dumps, loads
from sao_gym.runfolder import write_or_undo
from sao_gym.stream import Trajectory

_HEAD = struct.Struct("<QI")
"""Length of the record, and its CRC-32."""


class EpisodeLog:
    """A file of records, each a head and the bytes of `parquet.dumps`. Opening it cuts off what is no whole record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self._places: dict[str, tuple[int, int]] = {}
        if path.exists():
            self._scan()

    @property
    def uids(self) -> frozenset[str]:
        """Whose episodes are here."""
        return frozenset(self._places)

    def append(self, trajectory: Trajectory) -> None:
        """Keep an episode; it is on the disk when this returns. Raises OSError, with the file as it was."""
        data = dumps(trajectory)
        record = _HEAD.pack(len(data), zlib.crc32(data)) + data
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            write_or_undo(descriptor, record, size)
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        self._places[trajectory.uid] = (size + _HEAD.size, len(data))

    def read(self, uids: Iterable[str]) -> Iterator[Trajectory]:
        """The episodes of these uids, in their order; one that is not here is left out."""
        if not self._places:
            return
        with self.path.open("rb") as file:
            for uid in uids:
                if uid in self._places:
                    offset, length = self._places[uid]
                    file.seek(offset)
                    yield loads(file.read(length))

    def remove(self) -> None:
        """Forget all, file included."""
        self.path.unlink(missing_ok=True)
        self._places = {}

    def _scan(self) -> None:
        end = 0
        with self.path.open("r+b") as file:
            while (data := _next_record(file)) is not None:
                self._places[loads(data).uid] = (end + _HEAD.size, len(data))
                end += _HEAD.size + len(data)
            if left := self.path.stat().st_size - end:
                self.problems.append(f"{self.path.name}: {left} bytes of a record that was cut")
                file.truncate(end)


def _next_record(file: BinaryIO) -> bytes | None:
    """The bytes of the record that begins here, None where there is no whole one."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, checksum = _HEAD.unpack(head)
    left = os.fstat(file.fileno()).st_size - file.tell()
    data = file.read(length) if length <= left else b""  # a damaged length is not believed
    return data if data and zlib.crc32(data) == checksum else None
