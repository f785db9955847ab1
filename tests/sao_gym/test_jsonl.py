"""JSON lines that survive what strings may hold: case CF-01."""

import importlib
import json
import re
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.chat import make_chat
from sao_gym.commands.eval import main as evaluation_command
from sao_gym.commands.eval_records import SAMPLES, TRAJECTORIES, EvalRecords, read_samples
from sao_gym.completions import read_script
from sao_gym.demonstrations import read_conversations
from sao_gym.errors import TaskFileError
from sao_gym.jsonl import append_jsonl, dump_line, read_jsonl, write_jsonl
from sao_gym.parquet import read_trajectories
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.protocols import Task
from sao_gym.runfolder import METRICS, RunFolder
from sao_gym.tasks.base import load_jsonl, save_jsonl
from sao_gym.tasks.benchmarks import load_benchmark

NASTY = ["a\u2028b", "a\u2029b", "a\u0085b", "a\u000bb", "a\r\nb"]


def test_every_line_end_but_lf_is_text(tmp_path: Path) -> None:
    """Case CF-01: BOM, CRLF, blank lines, raw separators, no final newline; numbers count LF lines."""
    path = tmp_path / "t.jsonl"
    lines = [json.dumps({"x": text}, ensure_ascii=False) for text in NASTY]
    lines.insert(2, "")
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert list(read_jsonl(path)) == [(n, {"x": text}) for n, text in zip([1, 2, 4, 5, 6], NASTY, strict=True)]


CHAT = make_chat(byte_tokenizer())


def read_prompts(path: Path) -> list[str]:
    return [task.prompt for task in load_jsonl(path)]


def read_benchmark_prompts(path: Path) -> list[str]:
    return [task.prompt for task in load_benchmark("aime2025", data=path).tasks]


def read_answers(path: Path) -> list[str]:
    actions = [row.streams[0].actions[0].token_ids for row in read_conversations(path, CHAT)]
    return [CHAT.parse(ids).content for ids in actions]


def read_turns(path: Path) -> list[str]:
    return list(read_script(path).turns)


def conversation(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": text}]}


READERS: Mapping[str, tuple[Callable[[str], Any], Callable[[Path], list[str]]]] = MappingProxyType(
    {
        "tasks": (lambda text: {"problem": text, "answer": "1"}, read_prompts),
        "benchmark": (lambda text: {"problem": text, "answer": "1"}, read_benchmark_prompts),
        "demonstrations": (conversation, read_answers),
        "completions": (lambda text: text, read_turns),
    }
)
"""How a text stands in a file that people bring, and what reads it there."""


@pytest.mark.parametrize("kind", READERS)
def test_every_reader_of_what_people_bring_takes_every_oddity(kind: str, tmp_path: Path) -> None:
    """Case CF-01: five records, a BOM, CRLF, a blank line in the middle, no final newline."""
    record, read = READERS[kind]
    lines = [json.dumps(record(text), ensure_ascii=False) for text in NASTY]
    lines.insert(2, "")
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert read(path) == NASTY
    write_jsonl(path, map(record, NASTY))
    assert read(path) == NASTY


@pytest.mark.parametrize("kind", READERS)
def test_every_reader_names_a_broken_line_as_an_editor_counts_it(kind: str, tmp_path: Path) -> None:
    """Case CF-01: blank lines count, U+2028 within a line does not."""
    record, read = READERS[kind]
    path = tmp_path / "t.jsonl"
    whole = json.dumps(record(NASTY[0]), ensure_ascii=False)
    path.write_bytes(f"{whole}\r\n\r\n{whole}\n{whole[:-1]}\n".encode())
    with pytest.raises(TaskFileError, match=f"^{re.escape(str(path))}, line 4, column [0-9]+: ") as caught:
        read(path)
    assert "\n" not in str(caught.value)


BROKEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "eval --tasks": (
            "eval",
            "--env",
            "arithmetic",
            "--engine",
            "scripted",
            "--completions",
            "said",
            "--tasks",
            "bad",
        ),
        "eval --completions": ("eval", "--env", "arithmetic", "--engine", "scripted", "--completions", "bad"),
        "sft --data": ("sft", "--new", "qwen3_tiny", "--out", "run", "--data", "bad"),
        "train --tasks": ("train", "--preset", "quickstart", "--tasks", "bad", "--out", "run", "--model", "none"),
    }
)


@pytest.mark.parametrize(  # training imports much, and a new model comes before its demonstrations
    "name", [name if name.startswith("eval") else pytest.param(name, marks=pytest.mark.slow) for name in BROKEN]
)
def test_a_command_ends_with_one_sentence_at_a_broken_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case CF-01: exit code 2, file, line and column."""
    monkeypatch.chdir(tmp_path)
    Path("said").write_text('"one"\n')
    Path("bad").write_text('\n{"problem": "a\u2028b", "answer": 1]\n')
    command, *words = BROKEN[name]
    assert importlib.import_module(f"sao_gym.commands.{command}").main(words) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert re.search(r"bad, line 2, column \d+: expecting ',' delimiter", said)


def test_metrics_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Case CF-01."""
    with RunFolder.create(tmp_path / "run") as run:
        for step, text in enumerate(NASTY, start=1):
            run.append_metrics({"step": step, "text": text})
        whole = [{"step": step, "text": text} for step, text in enumerate(NASTY, start=1)]
        assert run.read_metrics() == whole
        assert [value for _, value in read_jsonl(run.file(METRICS))] == whole
        run.rewind_metrics(3)
        assert run.read_metrics() == whole[:3]


def test_an_evaluation_keeps_every_text_as_it_was(tmp_path: Path) -> None:
    """Case CF-01: prompts, a real tool's output and answers, through episodes into our own files and back."""
    tasks = [Task(id=text, prompt=f"Say {text}", answer="1") for text in NASTY]
    save_jsonl(tmp_path / "tasks.jsonl", tasks)
    calls = [json.dumps({"name": "python", "arguments": {"code": f"print({text!r})"}}) for text in NASTY]
    turns = [[f"<tool_call>{call}</tool_call>", f"{text}\\boxed{{1}}"] for call, text in zip(calls, NASTY, strict=True)]
    said = [{"task_id": task.id, "turns": each} for task, each in zip(tasks, turns, strict=True)]
    write_jsonl(tmp_path / "said.jsonl", said)
    words = [
        "--env",
        "arithmetic",
        "--tasks",
        str(tmp_path / "tasks.jsonl"),
        "--n",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    assert evaluation_command([*words, "--engine", "scripted", "--completions", str(tmp_path / "said.jsonl")]) == 0
    (results,) = read_samples(tmp_path / "out" / SAMPLES).values()
    assert [(result.task_id, result.text, result.passed) for result in results] == [
        (text, f"{text}\\boxed{{1}}", True) for text in NASTY
    ]
    with RunFolder.open_for_resume(tmp_path / "out") as folder:
        (recorded,) = EvalRecords(folder).recorded().values()
    assert list(recorded.tasks) == tasks
    for trajectory, text in zip(read_trajectories(tmp_path / "out" / TRAJECTORIES), NASTY, strict=True):
        observed = CHAT.codec.decode(trajectory.streams[0].segments[2].token_ids)
        assert observed == f"<|tool|>{text}<|end|><|assistant|>"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(json_values, max_size=5))
def test_what_is_written_is_read_back(values: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("jsonl") / "t.jsonl"
    write_jsonl(path, values)
    assert [value for _, value in read_jsonl(path)] == values
    assert len(path.read_text(encoding="utf-8").splitlines()) == len(values)  # also for readers that split anywhere


def test_a_lone_surrogate_survives(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "t.jsonl", {"x": "\ud800é"})
    assert list(read_jsonl(tmp_path / "t.jsonl")) == [(1, {"x": "\ud800é"})]
    assert dump_line("é") == '"é"\n'


def test_appending_mends_a_missing_newline(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"x": 1}')
    append_jsonl(path, {"x": 2})
    append_jsonl(path, {"x": 3})
    assert path.read_bytes() == b'{"x": 1}\n{"x": 2}\n{"x": 3}\n'


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"x": 1}\n\n{"x" 2}\n', "line 3, column 6: expecting ':' delimiter"),
        (b'{"x": 1}\n{"x": "\xff"}\n', "line 2, column 8: not UTF-8"),
        (b'{"x": 1} {"x": 2}\n', "line 1, column 10: extra data"),
        (b"\xef\xbb\xbf{", "line 1, column 2"),
        (b"[" * 100_000, "line 1, column 1: nested too deeply"),
    ],
)
def test_a_broken_line_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data)
    with pytest.raises(TaskFileError) as caught:
        list(read_jsonl(path))
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="No such file"):
        list(read_jsonl(tmp_path / "none.jsonl"))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As a full disk: a file takes `size` bytes, a part of a write that goes beyond, and then no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_the_disk_refuses_leaves_no_half(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    append_jsonl(path, {"x": 1})
    with largest_file(path.stat().st_size + 20), pytest.raises(OSError, match=r"too large"):
        append_jsonl(path, {"x": "y" * 100})
    append_jsonl(path, {"x": 2})
    assert list(read_jsonl(path)) == [(1, {"x": 1}), (2, {"x": 2})]


def test_a_metrics_line_that_the_disk_refuses_leaves_no_half(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run") as run:
        run.append_metrics({"step": 1})
        with largest_file(30), pytest.raises(OSError, match=r"too large"):
            run.append_metrics({"step": 2, "note": "y" * 100})
        run.append_metrics({"step": 2})
        assert run.read_metrics() == [{"step": 1}, {"step": 2}]
        run.write_config("a = 1\n")
        with largest_file(3), pytest.raises(OSError, match=r"too large"):
            run.write_config("a = 2\n")
        assert run.file("config.toml").read_text() == "a = 1\n"
        assert not list(run.path.glob(".*.tmp"))
