"""Benchmarks, protocols, task files and an API, as the evaluation's flags name them."""

import html
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sao_gym.commands.eval import main
from sao_gym.commands.eval_config import departures, resolve_eval
from sao_gym.commands.eval_run import answer_of
from sao_gym.commands.eval_targets import Target, open_targets
from sao_gym.config import Origin, dump
from sao_gym.conversation import conversation_of
from sao_gym.errors import ConfigError
from sao_gym.jsonl import read_jsonl, write_jsonl
from sao_gym.parquet import read_trajectories

MODEL = ("--model", "m")


def record(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def scripted(folder: Path, *turns: str) -> list[str]:
    write_jsonl(folder / "said.jsonl", turns)
    return ["--engine", "scripted", "--completions", str(folder / "said.jsonl")]


async def targets_of(*words: str, protocol: str | None = None, will_run: bool = True) -> tuple[Target, ...]:
    async with AsyncExitStack() as closing:
        return await open_targets(resolve_eval(protocol, (), words).config, closing, will_run=will_run)


# -- protocols


def test_a_protocol_is_a_bundle_of_settings_and_flags_win() -> None:
    resolved = resolve_eval(
        "paper_math", (), ("--bench", "aime2025", *MODEL, "--temperature", "0.7", "--max-turns", "50")
    )
    config = resolved.config
    assert (config.protocol, config.sampling.n, config.sampling.top_p) == ("paper_math", None, 1.0)
    assert (config.sampling.max_tokens_per_episode, config.sampling.max_turns) == (131072, 50)
    assert (config.env.tools, config.sampling.wall_clock_s) == ("python", None)
    assert resolved.origins["sampling.top_p"] is Origin.PRESET
    assert resolved.origins["sampling.temperature"] is Origin.USER
    assert re.search(r"temperature = 0.7 +# user \(--temperature\)", dump(resolved))
    # what differs from the protocol is said; what was given and is the same does not differ
    assert [str(one) for one in departures("paper_math", resolved)] == ["sampling.temperature: 1.0 -> 0.7"]
    assert departures(None, resolved) == []


def test_a_dump_is_a_protocol_that_gives_the_same_again(tmp_path: Path) -> None:
    words = ("--bench", "aime2025,arithmetic", *MODEL, "--max-concurrency=3")
    first = resolve_eval("quick", (), words)
    assert first.config.concurrency == 3
    (tmp_path / "config.toml").write_text(dump(first))
    assert resolve_eval(str(tmp_path / "config.toml"), (), ()).config == first.config


async def test_the_papers_samples_and_a_draw_that_runs_share(data_dir: Path) -> None:
    words = ("--bench", "aime2025,beyond_aime,arithmetic", *MODEL, "--data", str(data_dir))
    five = await targets_of(*words, "--limit", "5", protocol="paper_math")
    assert [(one.name, one.samples, len(one.tasks)) for one in five] == [
        ("aime2025", 16, 5),
        ("beyond_aime", 4, 5),
        ("arithmetic", 16, 5),
    ]
    ten = await targets_of(*words, "--limit", "10", "--seed", "9", "--n", "2")
    assert [one.samples for one in ten] == [2, 2, 2]
    for few, more in zip(five[:2], ten[:2], strict=True):
        assert {task.id for task in few.tasks} < {task.id for task in more.tasks}
    # BeyondAIME stands by the size of its answers: the first rows are no sample
    rows = [row["answer"] for _, row in read_jsonl(data_dir / "beyond_aime.jsonl")]
    assert [task.answer for task in ten[1].tasks] != [str(answer) for answer in rows[:10]]
    assert ten[0].facts["tasks"]["differences"] == []
    assert ten[0].facts["tasks"]["content_hash"] != ten[0].facts["tasks"]["taken_hash"]


async def test_software_engineering_runs_in_its_environment(data_dir: Path) -> None:
    words = ("--data", str(data_dir), "--limit", "3", *MODEL)
    shell = ("--env.options", '{scaffold = "shell"}')
    (target,) = await targets_of(*words, *shell, protocol="paper_swe", will_run=False)
    assert (target.name, target.environments.name, target.samples, len(target.tasks)) == (
        "swe_verified",
        "swe_verified",
        1,
        3,
    )
    (plain,) = await targets_of("--bench", "swe_verified", *words, will_run=False)
    assert [task.id for task in plain.tasks] == [task.id for task in target.tasks]
    assert {tool.name for tool in plain.environments.tools} == {"bash", "edit"}
    assert plain.facts["tasks"]["differences"] == []


async def test_rows_of_repositories_are_read_as_their_set_has_them(tmp_path: Path) -> None:
    row = {"repo": "a/b", "base_commit": "0" * 40, "problem_statement": "p", "FAIL_TO_PASS": ["t.py::t"], "patch": ""}
    write_jsonl(tmp_path / "rows.jsonl", [{**row, "instance_id": f"a__b-{n}", "box": f"x/{n}"} for n in range(6)])
    words = ("--env", "swe_verified", "--tasks", str(tmp_path / "rows.jsonl"), *MODEL)
    (named,) = await targets_of(*words, "--columns", "image=box", will_run=False)
    assert [task.info["swe"]["image"] for task in named.tasks] == [f"x/{n}" for n in range(6)]
    options = '{images = "y/{id_s}:1", limit = 2}'
    (drawn,) = await targets_of(*words, "--env.options", options, will_run=False)
    assert len(drawn.tasks) == 2
    assert drawn.tasks[0].info["swe"]["image"] == f"y/{drawn.tasks[0].id.replace('__', '_s_')}:1"
    with pytest.raises(ConfigError, match="takes no argument 'image_names'"):
        await targets_of(*words, "--columns", "image=box", "--env.options", "{image_names = 1}", will_run=False)


def test_names_that_are_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = scripted(tmp_path, "x")
    cases = [
        (["--bench", "aime25"], "unknown benchmark 'aime25'; did you mean 'aime2025'"),
        (["--bench", "arithmetics"], "did you mean 'arithmetic'"),
        (["--bench", "aime2025,aime2025"], "names 'aime2025' twice"),
        (["--bench", "aime2025", "--tasks", "x.jsonl"], "give --bench NAMES or --tasks FILE"),
        (["--bench", "arithmetic", "--env", "python_math"], "is no benchmark; leave --env out"),
        (["--bench", "arithmetic", "--tools", "none"], "has no form without its tools"),
        (["--bench", "aime2025", "--data", str(tmp_path)], "holds no file of aime2025"),
        (["--tasks", "x.jsonl", "--columns", "prompt"], "without a column"),
        (["--env", "arithmetic", "--columns", "prompt=x"], "no effect"),
        (["--env", "arithmetic", "--protocol", "paper"], "there is no preset 'paper'"),
        (["--env", "arithmetic", "--api-base", "http://x/v1"], "would have no effect"),
        (["quick"], "unexpected argument 'quick'"),
    ]
    for words, sentence in cases:
        assert main([*words, *said]) == 2, words
        assert sentence in capsys.readouterr().err, words
    api = ["--env", "arithmetic", "--api-base", "http://127.0.0.1:9/v1"]
    for words, sentence in (
        (api, "give --api-base URL --api-model NAME"),
        ([*api, "--api-model", "m", "--api-key-env", "NOBODY_SET_THIS"], "holds no API key"),
        ([*api, "--api-model", "m", "--top-k", "4"], "would have no effect"),
    ):
        assert main(words) == 2, words
        assert sentence in capsys.readouterr().err, words


# -- several benchmarks, task files


def test_several_benchmarks_in_one_run(data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = scripted(tmp_path, r"so \boxed{70}")
    words = ["--bench", "aime2025,arithmetic,hmmt_feb_2025", "--tools", "python", "--limit", "2", "--n", "2"]
    words += ["--data", str(data_dir), *said, "--out", str(tmp_path / "out")]
    assert main(words) == 0
    found = record(tmp_path / "out")
    assert list(found["benchmarks"]) == ["aime2025", "arithmetic", "hmmt_feb_2025"]
    assert [one["summary"]["n_samples"] for one in found["benchmarks"].values()] == [4, 4, 4]
    rows = [row for _, row in read_jsonl(tmp_path / "out" / "samples.jsonl")]
    assert [row["bench"] for row in rows] == ["aime2025"] * 4 + ["arithmetic"] * 4 + ["hmmt_feb_2025"] * 4
    assert len({row["uid"] for row in rows}) == 12
    assert {row["answer"] for row in rows} == {"70"}
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if "scripted engine" in line] == list(found["benchmarks"])
    assert "maj@2" in out


def test_without_the_tool_a_problem_is_one_turn(data_dir: Path, tmp_path: Path) -> None:
    call = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call>'
    said = scripted(tmp_path, call, r"\boxed{70}")
    words = ["--bench", "aime2025", "--limit", "2", "--data", str(data_dir), *said]
    assert main([*words, "--tools", "none", "--out", str(tmp_path / "bare")]) == 0
    assert main([*words, "--out", str(tmp_path / "python")]) == 0
    bare, python = (record(tmp_path / name)["benchmarks"]["aime2025"]["summary"] for name in ("bare", "python"))
    assert (bare["turns_mean"], python["turns_mean"]) == (1.0, 2.0)
    assert bare["endings"]["no answer"] + bare["endings"]["truncated"] == 2
    assert record(tmp_path / "bare")["manifest"]["benchmarks"]["aime2025"]["env"] == "math"


def test_a_file_with_columns_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(
        tmp_path / "own.jsonl",
        [{"ask": "One half?", "gold_text": "1/2", "n": 1}, {"ask": "Two?", "gold_text": "2", "n": 2}],
    )
    words = ["--tasks", str(tmp_path / "own.jsonl"), "--columns", "prompt=ask,answer=gold_text,id=n", "--tools", "none"]
    assert main([*words, *scripted(tmp_path, r"\boxed{0.5}"), "--out", str(tmp_path / "out")]) == 0
    assert "(1 of 2 scored)" in capsys.readouterr().out
    # what was asked stands in the folder: the file itself is not needed any more
    (tmp_path / "own.jsonl").unlink()
    assert main(["--resume", str(tmp_path / "out")]) == 0
    assert main(["--rescore", str(tmp_path / "out")]) == 0
    assert "0 of 2 verdicts changed" in capsys.readouterr().out


def test_an_answer_for_votes() -> None:
    assert answer_of(r"\boxed{ +007 } and") == "7"
    assert answer_of(r"\boxed{-0}") == "-0"
    assert answer_of(r"\boxed{\frac{1}{2} }") == r"\frac{1}{2}"
    assert answer_of("7") is None


# -- what people read


PLANTED = """
from sao_gym.core import AgentEnv, Reply
from sao_gym.errors import GradingError, SandboxError
from sao_gym.protocols import Task
from sao_gym.stream import Score

class Planted(AgentEnv):
    def __init__(self):
        super().__init__([Task(id=f"t{i}", prompt="Say yes.", answer="yes") for i in range(5)])
    def setup(self, task):
        if task.id == "t3":
            raise OSError("no reset")
    def respond(self, message):
        return Reply(is_final=True)
    def grade(self):
        if self.task.id == "t4":
            raise GradingError("no verdict")
        right = self.last_action.content == "yes"
        return Score(value=float(right), passed=right)

class Flaky(AgentEnv):
    left = 2
    def __init__(self):
        super().__init__([Task(id=f"p{i}", prompt="Say yes.", answer="yes") for i in range(3)])
    def setup(self, task):
        if task.id == "p1" and Flaky.left:
            Flaky.left -= 1
            raise SandboxError("planted")
    def respond(self, message):
        return Reply(is_final=True)
    def grade(self):
        return Score(value=1.0, passed=True)
"""


def text_of(page: str) -> str:
    """What a reader sees of a page: no markup, single spaces."""
    bare = re.sub(r"<(style|script)\b.*?</\1>", " ", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", bare)).split())


def test_the_same_counts_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case EV-04: rewards 1, 1, 0, a reset that raises and a grader that raises."""
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "said.jsonl").write_text('"yes"\n{"task_id": "t2", "turns": ["no"]}\n')
    words = ["--env", f"{tmp_path / 'planted.py'}:Planted", "--engine", "scripted"]
    words += ["--completions", str(tmp_path / "said.jsonl"), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    console = capsys.readouterr().out
    assert "0.667  [" in console
    assert "(2 of 3 scored)" in console
    assert "0.400 of 5 samples" in console
    assert "2  (reset: OSError 1, grade: grading 1)" in console
    found = record(tmp_path / "out")
    (one,) = found["benchmarks"].values()
    summary = one["summary"]
    assert (summary["n_samples"], summary["n_scored"], summary["n_passed"], summary["n_error"]) == (5, 3, 2, 2)
    assert summary["errors"] == {"reset: OSError": 1, "grade: grading": 1}
    assert summary["lower_bound"] == 0.4
    assert summary["endings"] == {"error": 2, "no verdict": 0, "right": 2, "truncated": 0, "no answer": 0, "wrong": 1}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == found["manifest"]
    (counts,) = manifest["counts"].values()
    assert counts == {"samples": 5, "scored": 3, "passed": 2, "truncated": 0, "error": 2}
    page = text_of((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    assert "2 of 3 scored, 2 errors, 5 samples" in page
    assert "reset: OSError" in page
    assert "grade: grading" in page
    assert "0.400" in page


def test_samples_that_failed_are_never_taken_for_fewer_samples(tmp_path: Path) -> None:
    """Case EV-01: errors leave 4, 2 and 4 samples of three problems; pass@4 says over how many problems it is."""
    (tmp_path / "planted.py").write_text(PLANTED)
    words = ["--env", f"{tmp_path / 'planted.py'}:Flaky", "--n", "4", "--concurrency", "1", *scripted(tmp_path, "yes")]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    (one,) = record(tmp_path / "out")["benchmarks"].values()
    table = {each["k"]: each for each in one["summary"]["pass_at_k"]}
    assert (table[4]["value"], table[4]["n_tasks"], table[4]["n_left_out"]) == (1.0, 2, 1)
    assert "1 of 3 tasks have fewer than 4 scored samples" in table[4]["reason"]
    assert (one["summary"]["n_samples"], one["summary"]["n_scored"], one["samples_per_task"]) == (12, 10, 4)
    # the samples that are missing are run again
    assert main(["--resume", str(tmp_path / "out")]) == 0
    (one,) = record(tmp_path / "out")["benchmarks"].values()
    assert [each["n_tasks"] for each in one["summary"]["pass_at_k"]] == [3, 3, 3]


# -- an API


@contextmanager
def api(say: Callable[[dict[str, Any]], tuple[int, str]]) -> Iterator[str]:
    """The address of a server that answers each request with (status, text)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, text = say(request)
            choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1000, "completion_tokens": 500}
            body = json.dumps({"model": "m-1", "choices": [choice], "usage": usage}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        finally:
            server.shutdown()
            thread.join()


def test_an_api_is_measured_by_the_same_command(
    data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret-key")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    out, requests, broken = tmp_path / "out", [], [True]

    def say(request: dict[str, Any]) -> tuple[int, str]:
        requests.append(request)
        return (500, "") if broken[0] and len(requests) > 2 else (200, r"I say \boxed{70}")

    with api(say) as base:
        words = ["--api-base", base, "--api-model", "big", "--api-key-env", "MY_KEY", "--tools", "none"]
        words += ["--bench", "aime2025", "--limit", "3", "--n", "2", "--data", str(data_dir), "--concurrency", "1"]
        words += ["--price-in", "2", "--price-out", "8", "--api.max-retries", "1", "--out", str(out)]
        assert main(words) == 0
        text = capsys.readouterr().out
        assert "aime2025: api engine" in text
        assert "2,000 tokens in, 1,000 out, cost 0.01" in text
        assert "generate:" in text
        assert len(requests) == 2 + 4 * 2
        assert len({one["seed"] for one in requests[:2]}) == 2, "two samples are two draws"
        broken[0] = False
        assert main(["--resume", str(out)]) == 0
        assert "2 of 6 episodes stand, 4 run again (4 ended in an error)" in capsys.readouterr().out
    summary = record(out)["benchmarks"]["aime2025"]["summary"]
    assert (summary["n_scored"], summary["usage"]["prompt_tokens"]) == (6, 6000)
    said = [conversation_of(one) for one in read_trajectories(out / "trajectories.parquet")]
    assert [messages[-1].content for messages in said if messages] == [r"I say \boxed{70}"] * 6
    assert main(["--rescore", str(out)]) == 0
    assert "0 of 6 verdicts changed" in capsys.readouterr().out
    assert r"I say \boxed{70}" in (out / "report.html").read_text(encoding="utf-8")
    assert not [file.name for file in out.iterdir() if b"very-secret" in file.read_bytes()]
