"""`python -m sao_gym.eval` as people run it: real processes, environments, sandboxes and models."""

import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sao_gym.commands.eval import main
from sao_gym.jsonl import read_jsonl, write_jsonl
from sao_gym.models import tiny_qwen3
from sao_gym.parquet import read_trajectories
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.registry import make_tasks
from sao_gym.stream import OutcomeStatus

ROOT = Path(__file__).resolve().parents[2]


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


def eval_process(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sao_gym.eval", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)


def results(folder: Path, bench: str | None = None) -> dict[str, Any]:
    """results.json with the figures of one benchmark, the only one by default, beside the manifest."""
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    benchmarks = found["benchmarks"]
    return {"manifest": found["manifest"], **benchmarks[bench or next(iter(benchmarks))]}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random policy, as a training run would leave it."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    tiny_qwen3(len(tokenizer), 1, 32, heads=2, kv_heads=1, context_length=512).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_scripted_arithmetic_in_a_process(tmp_path: Path) -> None:
    """The tool runs in the real sandbox: a right answer, a wrong one, and one that is cut."""
    tasks = make_tasks("arithmetic", split="heldout")
    first, second, third = (tasks[index] for index in range(3))
    steps = "; ".join(f"{name}={text}" for name, text in zip("abcdefgh", first.info["expressions"], strict=False))
    last = "abcdefgh"[len(first.info["expressions"]) - 1]
    write_jsonl(
        tmp_path / "said.jsonl",
        [
            {"task_id": first.id, "turns": [call(f"{steps}\nprint({last})"), f"\\boxed{{{first.answer}}}"]},
            {"task_id": second.id, "turns": [call("1/0"), "I give up: \\boxed{1}"]},
            {"task_id": third.id, "turns": ["so " * 100]},
        ],
    )
    words = ["--env", "arithmetic", "--limit", "3", "--n", "2", "--max-tokens", "150", "--concurrency", "2"]
    words += ["--engine", "scripted", "--completions", str(tmp_path / "said.jsonl"), "--out", str(tmp_path / "out")]
    done = eval_process(*words)
    assert done.returncode == 0, done.stderr
    assert "0.333" in done.stdout
    assert "(2 of 6 scored)" in done.stdout
    assert "turn_tokens 2" in done.stdout
    report = results(tmp_path / "out")
    summary, manifest = report["summary"], report["manifest"]
    assert (summary["n_scored"], summary["n_passed"], summary["n_truncated"], summary["n_error"]) == (6, 2, 2, 0)
    assert summary["interval"]["low"] < 1 / 3 < summary["interval"]["high"]
    assert report["tasks"][first.id] == {"samples": 2, "scored": 2, "passed": 2, "truncated": 0, "error": 0}
    tasks_of = manifest["benchmarks"]["arithmetic-heldout"]["tasks"]
    assert tasks_of["name"] == "arithmetic-heldout"
    assert len(tasks_of["content_hash"]) == 64
    assert manifest["versions"]["sao_gym"]
    # trap 25: the raw outputs are kept, in order, and say what was scored
    samples = [value for _, value in read_jsonl(tmp_path / "out" / "samples.jsonl")]
    assert [(s["task_id"], s["attempt"]) for s in samples] == [
        (t.id, a) for t in (first, second, third) for a in (0, 1)
    ]
    assert samples[0]["text"] == f"\\boxed{{{first.answer}}}"
    assert {s["grader_version"] for s in samples} == {"integer-1"}
    trajectories = read_trajectories(tmp_path / "out" / "trajectories.parquet")
    assert [t.uid for t in trajectories] == [s["uid"] for s in samples]
    tokenizer = byte_tokenizer()
    assert f"<|tool|>{first.answer}" in tokenizer.decode(trajectories[0].streams[0].token_ids)
    assert "ZeroDivisionError" in tokenizer.decode(trajectories[2].streams[0].token_ids)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    again = main(words)
    assert again == 2
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before


def test_a_real_model_repeats(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--env", "arithmetic", "--model", str(model_folder), "--limit", "3", "--n", "2", "--max-tokens", "12"]
    words += ["--max-turns", "2", "--engine.threads", "1", "--engine.deterministic"]
    for name, more in (("a", []), ("b", ["--concurrency", "1"]), ("c", ["--seed", "1"])):
        assert main([*words, *more, "--out", str(tmp_path / name)]) == 0
    a, b, c = (results(tmp_path / name) for name in "abc")
    texts = {name: [value["text"] for _, value in read_jsonl(tmp_path / name / "samples.jsonl")] for name in "abc"}
    assert texts["a"] == texts["b"]
    assert texts["a"] != texts["c"]
    assert len(set(texts["a"])) == 6, "samples of one task differ"
    assert a["manifest"]["model"]["weight_hash"] == c["manifest"]["model"]["weight_hash"] != ""
    assert a["manifest"]["chat"] == b["manifest"]["chat"]
    assert a["summary"]["n_samples"] == a["summary"]["n_scored"] == 6
    for trajectory in read_trajectories(tmp_path / "a" / "trajectories.parquet"):
        assert trajectory.outcome.status is not OutcomeStatus.ERROR
        assert trajectory.streams[0].n_action == len(trajectory.streams[0].behavior_logprobs) > 0
    assert "6, 2 per task" in capsys.readouterr().out
    assert main([*words[:4], "--limit", "2", "--greedy", "--max-tokens", "8", "--engine.threads", "1"]) == 0
    assert "greedy, seed 0" in capsys.readouterr().out


def test_a_real_model_that_was_stopped_goes_on(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deterministic engine says the same in any company, so what is missing can be run later; another model cannot."""
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    words = ["--env", "arithmetic", "--model", str(model), "--limit", "2", "--n", "2", "--max-tokens", "12"]
    words += ["--max-turns", "2", "--engine.threads", "1", "--engine.deterministic", "--out", str(tmp_path / "out")]
    assert main(words) == 0
    samples, whole = tmp_path / "out" / "samples.jsonl", results(tmp_path / "out")
    rows = [value for _, value in read_jsonl(samples)]
    write_jsonl(samples, rows[1:3])
    assert main(["--resume", str(tmp_path / "out")]) == 0
    assert "2 of 4 episodes stand, 2 run again" in capsys.readouterr().out
    again = [value for _, value in read_jsonl(samples)]
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in rows]
    assert results(tmp_path / "out")["summary"] == whole["summary"]
    write_jsonl(samples, rows[1:3])
    tiny_qwen3(len(byte_tokenizer()), 1, 32, heads=2, kv_heads=1, context_length=512, seed=7).save_pretrained(model)
    assert main(["--resume", str(tmp_path / "out")]) == 2
    assert "the model is not the one of the run: its weight_hash was" in capsys.readouterr().err
    assert [value for _, value in read_jsonl(samples)] == rows[1:3]


@pytest.mark.slow
def test_an_untrained_model_on_two_benchmarks_ends_and_its_page_opens(tmp_path: Path, data_dir: Path) -> None:
    tokenizer = byte_tokenizer()
    tiny_qwen3(len(tokenizer), 1, 32, heads=2, kv_heads=1, context_length=4096).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--bench", "arithmetic,aime2025", "--n", "2", "--limit", "5"]
    done = eval_process(*words, "--max-tokens", "64", "--data", str(data_dir), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    for bench in ("arithmetic", "aime2025"):
        summary = results(tmp_path / "out", bench)["summary"]
        assert (summary["n_samples"], summary["n_error"], sum(summary["endings"].values())) == (10, 0, 10)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    reader = HTMLParser()
    reader.feed(page)
    reader.close()
    assert page.count("aime2025-") >= 10


def test_planted_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case EV-04, through an environment of the user's own: a reset and a grader that fail."""
    (tmp_path / "planted.py").write_text(
        "from sao_gym.core import AgentEnv, Reply\n"
        "from sao_gym.errors import GradingError\n"
        "from sao_gym.protocols import Task\n"
        "from sao_gym.stream import Score\n"
        "class Planted(AgentEnv):\n"
        "    def __init__(self):\n"
        "        super().__init__([Task(id=f't{i}', prompt='Say yes.', answer='yes') for i in range(5)])\n"
        "    def setup(self, task):\n"
        "        if task.id == 't3':\n"
        "            raise OSError('no reset')\n"
        "    def respond(self, message):\n"
        "        return Reply(is_final=True)\n"
        "    def grade(self):\n"
        "        if self.task.id == 't4':\n"
        "            raise GradingError('no verdict')\n"
        "        right = self.last_action.content == 'yes'\n"
        "        return Score(value=float(right), passed=right)\n"
    )
    (tmp_path / "said.jsonl").write_text('"yes"\n{"task_id": "t2", "turns": ["no"]}\n')
    words = ["--env", f"{tmp_path / 'planted.py'}:Planted", "--engine", "scripted"]
    words += ["--completions", str(tmp_path / "said.jsonl"), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "0.667  [" in out
    assert "(2 of 3 scored)" in out
    assert "0.400 of 5 samples" in out
    assert "reset: OSError 1" in out
    assert "grade: grading 1" in out
    summary = results(tmp_path / "out")["summary"]
    assert (summary["n_scored"], summary["n_error"], summary["lower_bound"]) == (3, 2, 0.4)
    assert summary["errors"] == {"reset: OSError": 1, "grade: grading": 1}
    assert summary["success"] == pytest.approx(2 / 3)


def test_bad_input_is_one_sentence(tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "said.jsonl").write_text('"yes"\n')
    (tmp_path / "broken.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n{"problem": \n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "number.jsonl").write_text("7\n")
    (tmp_path / "foreign.jsonl").write_text('{"task_id": "nobody", "turns": ["x"]}\n')
    full = tmp_path / "full"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    corrupt = tmp_path / "corrupt"
    corrupt.mkdir()
    for file in model_folder.iterdir():
        (corrupt / file.name).write_bytes(file.read_bytes()[: 200 if file.suffix == ".safetensors" else None])
    model = ["--model", str(model_folder)]
    said = ["--engine", "scripted", "--completions", str(tmp_path / "said.jsonl")]
    cases = [
        ([], "give --bench NAMES, --env NAME"),
        (["--env", "arithmetic"], "give --model FOLDER"),
        (["--env", "arithmetics", *model], "did you mean 'arithmetic'"),
        (["--env", "arithmetic", "--model", str(tmp_path / "none")], "there is no model folder"),
        (["--env", "arithmetic", "--model", str(corrupt)], "incomplete or damaged"),
        (["--tasks", str(tmp_path / "broken.jsonl"), *model], "line 2, column"),
        (["--tasks", str(tmp_path / "empty.jsonl"), *model], "holds no tasks"),
        (["--env", "arithmetic", "--limit", "0", *model], "at least 1"),
        (["--env", "arithmetic", "--split", "test", *model], "'heldout'"),
        (["--env", "arithmetic", "--env.options.pool", "null", *model], "endless"),
        (["--env", "arithmetic", "--greedy", "--n", "2", *model], "says the same each time"),
        (["--env", "arithmetic", "--completions", "x.jsonl", *model], "no effect"),
        (["--env", "arithmetic", "--limits", "3", *model], "there is no setting"),
        (["--env", "arithmetic", *said[:3], str(tmp_path / "number.jsonl")], "line 1: expected a text"),
        (["--env", "arithmetic", *said[:3], str(tmp_path / "foreign.jsonl")], "not among the"),
        (["--env", "arithmetic", *said, "--out", str(full)], "is not empty"),
    ]
    for words, sentence in cases:
        out = [] if "--out" in words else ["--out", str(tmp_path / "deep" / "out")]
        assert main([*words, *out]) == 2, words
        assert not (tmp_path / "deep").exists(), words
        err = capsys.readouterr().err.strip().splitlines()[-1]
        assert err.startswith("sao-gym: error: "), words
        assert sentence in err, words
    assert [file.name for file in full.iterdir()] == ["notes.txt"]


def test_no_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where isolation cannot be had, the run ends with a sentence; nothing is scored without it."""
    (tmp_path / "said.jsonl").write_text(json.dumps(call("print(1)")) + "\n")
    (tmp_path / "bare.py").write_text(
        "from sao_gym.errors import SandboxUnavailableError\n"
        "from sao_gym.envs.arithmetic import ArithmeticEnv\n"
        "from sao_gym.tasks.arithmetic import arithmetic_tasks\n"
        "class Nowhere:\n"
        "    async def lease(self):\n"
        "        raise SandboxUnavailableError('this machine has no user namespaces')\n"
        "    async def close(self):\n"
        "        pass\n"
        "class Bare(ArithmeticEnv):\n"
        "    def __init__(self, sandboxes=None):\n"
        "        super().__init__(arithmetic_tasks('heldout', pool=4), sandboxes=sandboxes)\n"
        "    @classmethod\n"
        "    def make_sandboxes(cls, size, *, allow_unsafe=False):\n"
        "        return Nowhere()\n"
    )
    words = ["--env", f"{tmp_path / 'bare.py'}:Bare", "--engine", "scripted"]
    assert main([*words, "--completions", str(tmp_path / "said.jsonl"), "--out", str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.strip().splitlines()[-1] == "sao-gym: error: this machine has no user namespaces"
    assert not (tmp_path / "out").exists()
    assert "success" not in captured.out


def test_tasks_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file alone is enough: Python-tool mathematics, graded by the answer grader."""
    write_jsonl(
        tmp_path / "problems.jsonl",
        [{"problem": "One half?", "answer": "\\frac{1}{2}"}, {"problem": "Two?", "answer": "2"}],
    )
    (tmp_path / "said.jsonl").write_text('"so \\\\boxed{0.5}"\n')
    words = ["--tasks", str(tmp_path / "problems.jsonl"), "--engine", "scripted"]
    assert main([*words, "--completions", str(tmp_path / "said.jsonl")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("problems: scripted engine")
    assert "(1 of 2 scored)" in out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "examples" in out
    assert "--completions" in out
    assert "--preset" not in out
