r"""Rows of task files, whatever their format.

Invariant: each row comes with the place where a person finds it: lines count from 1, blank ones too.

Example:
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "t.csv"
    ...     _ = path.write_text("problem,answer\n2+2?,4\n")
    ...     list(read_records(path))
    [('line 2', {'problem': '2+2?', 'answer': '4'})]
"""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path

from sao_gym.errors import TaskFileError
from sao_gym.jsonl import read_jsonl
from sao_gym.tasks.hub import Record


def read_records(path: Path) -> Iterable[Record]:
    """(place, record) of each row of a task file, in the format that its name ends in. Raises TaskFileError."""
    read = {".parquet": read_parquet_records, ".csv": _read_csv}.get(path.suffix.lower(), read_jsonl_records)
    return read(path)


def read_jsonl_records(path: Path) -> Iterator[Record]:
    """The lines of a JSON lines file."""
    return ((f"line {number}", value) for number, value in read_jsonl(path))


def read_parquet_records(path: Path) -> Iterator[Record]:
    """The rows of a parquet file."""
    import pyarrow.parquet as parquet  # only here: most task files are JSON lines

    try:
        with parquet.ParquetFile(path) as file:  # read_table would import pandas first, which takes longer than reading
            rows = file.read().to_pylist()
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise TaskFileError(f"cannot read {path}: {reason}; give the path of a parquet file") from error
    return ((f"row {i}", row) for i, row in enumerate(rows, start=1))


def _read_csv(path: Path) -> Iterator[Record]:
    """A row with too few cells has None in the last columns; one with too many is refused."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows = [(f"line {reader.line_num}", dict(row)) for row in reader]
    except OSError as error:
        raise TaskFileError(f"cannot read {path}: {error.strerror}; give the path of a CSV file") from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise TaskFileError(f"cannot read {path}: {error}; save it as CSV with a header, in UTF-8") from error
    for place, row in rows:
        if None in row:
            raise TaskFileError(f"{path}, {place}: more cells than the header has; is a quotation mark missing?")
    return iter(rows)
