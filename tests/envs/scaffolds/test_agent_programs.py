"""The real OpenHands and the real mini-swe-agent through the gateway, with a policy that says what it was told to."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from program_world import call, heard, play, require_program, traced
from traces import load

from sao_gym.models import tiny_qwen3
from sao_gym.parquet import read_trajectories
from sao_gym.stream import Outcome
from sao_gym.tokenizer import train_tokenizer

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.openhands, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def openhands() -> str:
    require_program("openhands")
    return "openhands"


@pytest.fixture(scope="module")
def mini() -> str:
    require_program("mini")
    return "mini"


def test_openhands_mends_the_repository_in_one_stream(openhands: str) -> None:
    made, trace = traced("openhands")
    assert trace == load("openhands"), "made again by record_traces.py"
    assert made.outcome == Outcome.terminated()
    assert made.score is not None
    assert made.score.value == 1.0, made.score.detail
    assert (len(made.streams), made.n_turns) == (1, 6)
    told = made.info["gateway"]
    assert (told["break_rate"], told["delivered_fraction"], told["auxiliary_calls"]) == (0.0, 1.0, 0)
    assert "shelf" in heard(made)[0]
    assert "Nobody is here to answer" in heard(made)[4]


def test_mini_mends_the_repository_in_one_stream(mini: str) -> None:
    made, trace = traced("mini")
    assert trace == load("mini"), "made again by record_traces.py"
    assert made.outcome == Outcome.terminated()
    assert made.score is not None
    assert made.score.value == 1.0, made.score.detail
    assert (len(made.streams), made.n_turns) == (1, 5)
    assert made.info["gateway"]["break_rate"] == 0.0
    assert "oops" in heard(made)[0]
    assert "/workspace/shelf" in heard(made)[3]


def test_mini_drops_a_turn_without_a_call_and_that_is_a_branch(mini: str) -> None:
    made, trace = traced("mini_only_talks")
    assert trace == load("mini_only_talks"), "made again by record_traces.py"
    assert made.outcome == Outcome.terminated()
    assert made.n_turns == 3, "each turn is in some stream"
    assert made.info["gateway"]["breaks"]


def test_openhands_terminal_and_files_are_the_sandboxes(openhands: str) -> None:
    """Keys, soft timeouts, a shell that ended, paths of this machine: all of it happens inside, and nothing outside."""
    outside = ROOT / "pyproject.toml"
    before = outside.read_bytes()
    edit = {"command": "str_replace", "old_str": "x = 1", "new_str": "x = 2"}
    made = play(
        openhands,
        [
            call("terminal", command="cd /tmp && export A=5; hostname; ls -d /root/.pyenv /work 2>&1 | head -3"),
            call("terminal", command="pwd; echo A=$A; cat <<'EOF' >b.py\nx = 1\nEOF\nfalse"),
            call("terminal", command="sleep 3; echo slept", timeout=1),
            call("terminal", command="", is_input=True, timeout=30),
            call("terminal", command="cat", timeout=1),
            call("terminal", command="hello", is_input=True, timeout=1),
            call("terminal", command="C-d", is_input=True, timeout=20),
            call("terminal", command="sleep 100", timeout=1),
            call("terminal", command="C-c", is_input=True, timeout=20),
            call("file_editor", path="/tmp/b.py", **edit),
            call("file_editor", command="undo_edit", path="/tmp/b.py"),
            call("file_editor", command="create", path="/workspace/new/c.py", file_text="é = 'ü'\n"),
            call("terminal", command="cat /tmp/b.py /workspace/new/c.py"),
            call("file_editor", command="view", path="/workspace"),
            call("file_editor", path=str(outside), **edit),
            call("file_editor", command="view", path=f"/workspace/../../../../../..{outside}"),
            call("file_editor", command="create", path="/../escaped.txt", file_text="x"),
            call("terminal", command="exit 3"),
            call("terminal", command="echo again $A"),
            call("finish", message="."),
        ],
    )
    assert made.outcome == Outcome.terminated()
    assert len(made.streams) == 1
    said = heard(made)
    assert "/tmp\nA=5\n" in said[1]
    assert "exit code 1" in said[1]
    assert "timed out after 1.0 seconds" in said[2]
    assert "slept" in said[3]
    assert "exit code 0" in said[3]
    assert "hello" in said[5]
    assert "exit code 0" in said[6]
    assert "exit code 130" in said[8]
    assert "has been edited" in said[9]
    assert "undone successfully" in said[10]
    assert "File created successfully at: /workspace/new/c.py" in said[11]
    assert "x = 1\né = 'ü'" in said[12]
    assert "/workspace/new/" in said[13]
    assert "does not exist" in said[14]
    assert "does not exist" in said[15]
    assert "again" in said[18]
    assert "A=5" not in said[18]
    assert not any("sao-gym-worker" in text or "episode-" in text for text in said), "no path of this machine is shown"
    assert outside.read_bytes() == before
    assert not Path("/escaped.txt").exists()


@pytest.mark.parametrize("kind", ["mini", "openhands"])
def test_streams_of_a_program_train_a_policy(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The local engine, a tiny model that knows nothing, one step of SAO: plumbing, whatever the episodes come to."""
    request.getfixturevalue(kind)
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    tokenizer = train_tokenizer(texts, vocab_size=4000)  # bytes would make 42,000 tokens of OpenHands' first prompt
    model = tiny_qwen3(len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=1 << 16)
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    words = ["--env", "terminal", "--env.options", f'{{scaffold = "{kind}"}}', "--model", str(tmp_path / "m")]
    sizes = [
        "--steps",
        "1",
        "--batch-size",
        "2",
        "--rollout.max-in-flight",
        "2",
        "--max-tokens",
        "24",
        "--max-turns",
        "2",
    ]
    command = [
        sys.executable,
        "-m",
        "sao_gym.train",
        *words,
        *sizes,
        "--critic-init",
        "cold",
        "--out",
        str(tmp_path / "r"),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=800
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_trajectories(tmp_path / "r" / "trajectories" / "step_000001.parquet")
    assert len(rows) == 2
    assert all(row.n_action > 0 and not row.outcome.is_error and row.score is not None for row in rows)
