"""Task sets and their files."""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.errors import ConfigError, TaskFileError
from sao_gym.jsonl import write_jsonl
from sao_gym.protocols import Task
from sao_gym.tasks.base import ListTaskSet, load_jsonl, load_tasks, save_jsonl
from sao_gym.tasks.mathematics import math_tasks


def test_ids_differ_and_a_set_is_never_empty() -> None:
    task = Task(id="a", prompt="p")
    with pytest.raises(ConfigError, match="'a' twice"):
        ListTaskSet("toy", [task, Task(id="b", prompt="q"), task])
    with pytest.raises(ConfigError, match="no tasks"):
        ListTaskSet("toy", [])
    with pytest.raises(ConfigError, match="no task with the id 'b'"):
        ListTaskSet("toy", [task]).by_id("b")


def test_the_hash_covers_every_field() -> None:
    base = Task(id="a", prompt="p", answer="1", info={"k": 1})
    others = [
        Task(id="b", prompt="p", answer="1", info={"k": 1}),
        Task(id="a", prompt="q", answer="1", info={"k": 1}),
        Task(id="a", prompt="p", answer="2", info={"k": 1}),
        Task(id="a", prompt="p", answer="1", info={"k": 2}),
    ]
    hashes = {ListTaskSet("toy", [task]).content_hash for task in (base, *others)}
    assert len(hashes) == 5
    assert ListTaskSet("other name", [base]).content_hash in hashes


texts = st.text(min_size=1)
infos = st.dictionaries(texts, st.none() | st.integers() | st.text() | st.lists(st.text()), max_size=3)
tasks = st.builds(Task, id=texts, prompt=texts, answer=st.text(), info=infos)


@settings(max_examples=50, deadline=None)
@given(written=st.lists(tasks, min_size=1, max_size=5, unique_by=lambda task: task.id))
def test_a_written_set_is_read_back_equal(written: list[Task], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Case CF-01: whatever line separators the strings hold."""
    path = tmp_path_factory.mktemp("tasks") / "t.jsonl"
    save_jsonl(path, written)
    assert list(load_jsonl(path)) == written
    assert load_jsonl(path).content_hash == ListTaskSet("x", written).content_hash


def test_a_file_with_every_oddity(tmp_path: Path) -> None:
    """Case CF-01."""
    path = tmp_path / "t.jsonl"
    rows = [
        '{"id": 1, "problem": "a\u2028b", "answer": 3, "level": 5}',
        "",
        '{"id": 2, "problem": "\u0085", "answer": "x"}',
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode())
    assert list(load_tasks(path)) == [
        Task(id="1", prompt="a\u2028b", answer="3", info={"level": 5}),
        Task(id="2", prompt="\u0085", answer="x"),
    ]


@pytest.mark.parametrize("names", [("problem", "answer"), ("prompt", "gold"), ("question", "solution")])
def test_columns_are_found_and_missing_ids_are_stable(names: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [{names[0]: "2+2?", names[1]: "4"}, {names[0]: "3+3?", names[1]: "6"}])
    found = load_jsonl(path)
    assert [(task.prompt, task.answer) for task in found] == [("2+2?", "4"), ("3+3?", "6")]
    assert [task.id for task in found] == [task.id for task in load_jsonl(path)]
    write_jsonl(path, [{names[0]: "3+3?", names[1]: "6"}])
    assert load_jsonl(path)[0].id == found[1].id


def test_a_row_that_stands_there_twice_is_two_tasks(tmp_path: Path) -> None:
    """Sets from elsewhere hold such rows, and nobody can edit them."""
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [{"problem": "a"}, {"problem": "b"}, {"problem": "a"}, {"problem": "a"}])
    ids = [task.id for task in load_jsonl(path)]
    assert ids == [ids[0], ids[1], f"{ids[0]}-2", f"{ids[0]}-3"]
    assert ids == [task.id for task in load_jsonl(path)]


def test_csv_files_are_read_and_refused_alike(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes('\ufeffproblem,answer,level\r\n"a, ""b""\nc\u2028",4,\r\nd,5,2\r\n'.encode())
    assert [(t.prompt, t.answer, t.info) for t in load_tasks(path)] == [
        ('a, "b"\nc\u2028', "4", {"level": ""}),
        ("d", "5", {"level": "2"}),
    ]
    for data, words in (
        (b"problem,answer\na,1,2\n", "line 2: more cells than the header has"),
        (b"problem,answer\n\xff,1\n", "save it as CSV with a header, in UTF-8"),
        (b"text,answer\na,1\n", "line 2: no text under prompt"),
        (b"", "holds no tasks"),
    ):
        path.write_bytes(data)
        with pytest.raises(TaskFileError, match=words):
            load_tasks(path)


def test_a_mapping_decides(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [{"problem": "no", "text": "yes", "key": 7}])
    assert load_jsonl(path, {"prompt": "text", "id": "key"})[0] == Task(id="7", prompt="yes", info={"problem": "no"})
    with pytest.raises(ConfigError, match="unknown task field 'promt'"):
        load_jsonl(path, {"promt": "text"})
    for field in ("answer", "id"):  # else every answer would be empty, and every score 0
        with pytest.raises(TaskFileError, match=f"line 1: the column mapping says that {field} stands under 'gone'"):
            load_jsonl(path, {"prompt": "text", field: "gone"})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "holds no tasks"),
        ([{"problem": "a"}, [1]], "line 2: expected a JSON object, got list"),
        ([{"text": "a"}], "line 1: no text under prompt or problem or question; columns there: text"),
        ([{"problem": 5}], "line 1: no text under"),
        ([{"problem": "a", "answer": [1]}], "line 1: 'answer' must be text or a number"),
        ([{"problem": "a", "answer": float("nan")}], "line 1: 'answer' must be text or a finite number, got nan"),
        ([{"prompt": [{"role": "user"}]}], "line 1: no text under prompt but a list; columns there: prompt"),
        ([{"id": "\ud800", "problem": "a"}], "holds half a character"),
        ([{"id": "x", "problem": "a"}, {"id": "x", "problem": "b"}], "line 2: the id 'x' was given at line 1"),
    ],
)
def test_what_is_no_task_is_named(rows: list[Any], words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(path, rows)
    with pytest.raises(TaskFileError) as caught:
        load_tasks(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_parquet_files_are_read_and_refused_alike(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"question": ["2+2?"], "gold": ["4"], "level": [1]}), path)
    (task,) = load_tasks(path)
    assert (task.prompt, task.answer, task.info) == ("2+2?", "4", {"level": 1})
    path.write_bytes(b"PAR0")
    with pytest.raises(TaskFileError, match="cannot read"):
        load_tasks(path)


def test_what_only_parquet_can_hold_is_written_and_read_back_equal(tmp_path: Path) -> None:
    row = {
        "question": ["q"],
        "gold": [Decimal("1.50")],
        "when": [datetime.datetime(2020, 1, 2, 3, 4, 5)],
        "image": [b"\xff"],
        "nested": [{"a": [1, None], "b": Decimal("2.5")}],
        "pairs": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    }
    parquet.write_table(pa.table(row), tmp_path / "t.parquet")
    found = load_tasks(tmp_path / "t.parquet")
    assert found[0].answer == "1.50"
    assert found[0].info["when"] == "2020-01-02T03:04:05"
    assert found[0].info["nested"] == {"a": [1, None], "b": "2.5"}
    save_jsonl(tmp_path / "t.jsonl", found)
    again = load_tasks(tmp_path / "t.jsonl")
    assert (list(again), again.content_hash) == (list(found), found.content_hash)


def test_a_column_of_nulls_hides_no_other_and_half_characters_have_an_id(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "t.jsonl", [{"prompt": None, "question": "\ud800", "id": None, "uid": None}])
    (task,) = load_tasks(tmp_path / "t.jsonl")
    assert (task.prompt, len(task.id)) == ("\ud800", 16)


def test_mathematics_has_examples() -> None:
    assert len(math_tasks()) == 8
    assert math_tasks()[1].answer == "303"


def test_mathematics_reads_files(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(r'{"id": "m-1", "problem": "Solve \\(x=1\\).", "answer": "1", "difficulty": 4.5}', encoding="utf-8")
    assert list(math_tasks(path)) == [Task(id="m-1", prompt=r"Solve \(x=1\).", answer="1", info={"difficulty": 4.5})]
    assert math_tasks(path).name == "train"


def test_an_unchanged_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_jsonl(path, [{"problem": "a"}])
    first = load_tasks(path)
    assert load_tasks(path) is first
    write_jsonl(path, [{"problem": "ab"}])
    assert load_tasks(path)[0].prompt == "ab"
