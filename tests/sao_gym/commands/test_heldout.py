"""What a run is evaluated on: which tasks, and that training has not seen them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sao_gym.commands.heldout import EVALUATIONS, rewind_evaluations
from sao_gym.commands.heldout_tasks import HeldoutTasks, open_tasks
from sao_gym.commands.train import main
from sao_gym.config import resolve
from sao_gym.errors import ConfigError
from sao_gym.loops import run_blocking
from sao_gym.models import tiny_qwen3
from sao_gym.protocols import Task
from sao_gym.registry import make_tasks
from sao_gym.tasks.base import ListTaskSet, load_tasks
from sao_gym.tokenizer import train_tokenizer
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.config_rules import TRAIN_RULES

EVALUATED = ("--evaluation.every", "1", "--evaluation.episodes", "8")
LONG = "how many of the first seventy odd numbers are prime and also"
ENV = """
from sao_gym.core import AgentEnv, Reply
from sao_gym.protocols import Task
from sao_gym.stream import Score


class Parity(AgentEnv):
    def __init__(self) -> None:
        super().__init__([Task(id=f"t{i}", prompt=f"{i}?") for i in range(5)])

    def respond(self, message):
        return Reply(is_final=True)

    def grade(self):
        passed = len(self.last_action.content) % 2 == 0
        return Score(value=float(passed), passed=passed)


class Other(Parity):
    def __init__(self) -> None:
        super(Parity, self).__init__([Task(id=f"h{i}", prompt=f"{i}+{i}?") for i in range(3)] + [Task(id="t4", prompt="4?")])
"""


@pytest.fixture
def opened() -> Iterator[Callable[..., HeldoutTasks]]:
    made: list[HeldoutTasks] = []

    def opened(training: Any, *words: str) -> HeldoutTasks:
        config = resolve(TrainConfig, overrides=[*EVALUATED, *words], rules=TRAIN_RULES).config
        made.append(open_tasks(config, training))
        return made[-1]

    yield opened
    for one in made:
        run_blocking(one.environments.close())


@pytest.fixture
def task_file(tmp_path: Path) -> Callable[..., Path]:
    def write(*prompts: str) -> Path:
        path = tmp_path / "tasks.jsonl"
        rows = [{"id": f"e{i}", "problem": prompt, "answer": "1"} for i, prompt in enumerate(prompts)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_without_a_name_it_is_the_held_out_split(opened: Callable[..., HeldoutTasks]) -> None:
    training = make_tasks("arithmetic")
    found = opened(training)
    heldout = make_tasks("arithmetic", split="heldout")
    assert [task.id for task in found.tasks] == [heldout[index].id for index in range(8)]
    assert not {task.prompt for task in found.tasks} & {training[index].prompt for index in range(len(training))}
    assert not found.is_contaminated


def test_an_environment_by_name_gives_its_own_held_out_split(opened: Callable[..., HeldoutTasks]) -> None:
    found = opened([Task(id="x", prompt="say hello")], "--evaluation.bench", "arithmetic")
    assert [task.id for task in found.tasks] == [make_tasks("arithmetic", split="heldout")[i].id for i in range(8)]
    assert found.environments.name == "arithmetic"


def test_a_benchmark_by_name_comes_with_its_environment_and_where_it_is_from(
    opened: Callable[..., HeldoutTasks], data_dir: Path
) -> None:
    training = load_tasks(data_dir / "math_train_sample.jsonl")
    found = opened(training, "--evaluation.bench", "aime2025", "--evaluation.data", str(data_dir))
    assert (found.name, found.environments.name, len(found.tasks)) == ("aime2025", "python_math", 8)
    facts = found.facts()
    assert facts["contaminated"] is False
    assert str(data_dir) in facts["tasks"]["source"]
    assert facts["tasks"]["file_hash"]
    assert found.describe().startswith("8 tasks of aime2025, in python_math")


def test_issues_are_compared_by_what_names_them(
    opened: Callable[..., HeldoutTasks], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out split is SWE-Bench Verified; forms that issues share are no overlap, an issue under another id is one."""
    monkeypatch.setenv("SAO_GYM_DATA", str(data_dir))
    env = ("--env", "swe_verified")
    verified = make_tasks("swe_verified", split="heldout")
    stock = Task(id="a__b-1", prompt="\n".join(verified[0].prompt.splitlines()[1:]), info={"swe": {}})
    clean = opened(ListTaskSet("train", [stock]), *env)
    assert (clean.name, len(clean.tasks), clean.is_contaminated) == ("swe_verified", 8, False)
    seen = ListTaskSet("train", [stock, Task(id="a__b-2", prompt=verified[1].prompt.upper(), info={"swe": {}})])
    marked = opened(seen, *env)
    assert [one.benchmark_id for one in marked.overlaps] == [verified[1].id]
    named = (*env, "--evaluation.bench", "swe_verified")
    assert not opened(ListTaskSet("train", [stock]), *named).is_contaminated
    with pytest.raises(ConfigError, match=f"{verified[1].id} is the text of a__b-2"):
        opened(seen, *named)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("What is 1 + 1?", "e1 is the text of t0"),
        (f"Say {LONG} square", f'e1 shares 12 words with t1 ("{" ".join(LONG.split()[:10])} ..."'),
    ],
)
def test_tasks_that_training_has_seen_are_refused_or_marked(
    prompt: str, said: str, opened: Callable[..., HeldoutTasks], task_file: Callable[..., Path]
) -> None:
    training = ListTaskSet("mine", [Task(id="t0", prompt="What is 1 + 1?"), Task(id="t1", prompt=f"Tell me {LONG}")])
    words = ("--evaluation.tasks", str(task_file("something else entirely", prompt)))
    with pytest.raises(ConfigError, match=r"1 prompt of .* overlaps .*; take other tasks, or add --evaluation\.allow"):
        opened(training, *words)
    found = opened(training, *words, "--evaluation.allow-overlap")
    assert found.is_contaminated
    assert [one.benchmark_id for one in found.overlaps] == ["e1"]
    facts = found.facts()
    assert (facts["contaminated"], facts["overlaps"]["count"]) == (True, 1)
    assert "contaminated: 1 prompt" in found.describe()


def test_ten_words_and_not_nine(opened: Callable[..., HeldoutTasks], task_file: Callable[..., Path]) -> None:
    nine = " ".join(LONG.split()[:9])
    found = opened([Task(id="t", prompt=f"a {nine} b")], "--evaluation.tasks", str(task_file(f"c {nine} d")))
    assert not found.is_contaminated


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--evaluation.bench", "arithmetic", "--evaluation.data", "d"), "is an environment, which reads no such file"),
        (
            ("--evaluation.bench", "aime2025", "--evaluation.tasks", "f"),
            "has tasks of its own: leave evaluation.tasks out",
        ),
        (("--evaluation.bench", "aime2052"), "aime2052"),
        (("--evaluation.tasks", "none.jsonl"), "cannot read"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    assert main(["--env", "arithmetic", "--critic-init", "cold", *EVALUATED, *words, "--out", str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not out.exists()


def test_a_contaminated_run_is_refused_and_else_says_so_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "parity.py").write_text(ENV)
    tokenizer = train_tokenizer(["a?"] * 4, vocab_size=268)
    model = tiny_qwen3(vocab_size=len(tokenizer), layers=1, hidden=32, heads=2, kv_heads=1, context_length=64)
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    run = tmp_path / "run"
    words = ["--env", f"{tmp_path / 'parity.py'}:Parity", "--model", str(tmp_path / "tiny"), "--critic-init", "cold"]
    words += ["--batch-size", "2", "--max-tokens", "4", "--critic.only-steps", "1", "--steps", "2", "--out", str(run)]
    words += ["--evaluation.bench", f"{tmp_path / 'parity.py'}:Other", "--evaluation.at-ends", *EVALUATED]
    capsys.readouterr()
    assert main([*words, "--trackers", "none"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "t4 is the text of t4" in line
    assert not run.exists()
    assert main([*words, "--trackers", "none", "--evaluation.allow-overlap"]) == 0
    assert "contaminated: 1 of 4 tasks overlap" in capsys.readouterr().out
    assert json.loads((run / "manifest.json").read_text())["evaluation"]["contaminated"] is True
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [record for record in records if record.get("event") == "evaluation"]
    assert all(record["heldout_contaminated"] for record in found)
    kinds = [(record["step"], "heldout_greedy" in record) for record in found]
    assert kinds == [(0, False), (0, True), (1, False), (2, False), (2, True)], "the last step is evaluated once"
    assert [path.name for path in sorted((run / EVALUATIONS).iterdir())] == [
        *("step_000000.jsonl", "step_000000_greedy.jsonl", "step_000001.jsonl"),
        *("step_000002.jsonl", "step_000002_greedy.jsonl"),
    ]
    before = (run / "metrics.jsonl").read_text()
    assert main(["--resume", str(run)]) == 0
    assert (run / "metrics.jsonl").read_text() == before


def test_files_of_lost_steps_are_taken_away(tmp_path: Path) -> None:
    (tmp_path / EVALUATIONS).mkdir()
    names = ["step_000002.jsonl", "step_000010.jsonl", "step_000010_greedy.jsonl", "step_1.txt"]
    for name in names:
        (tmp_path / EVALUATIONS / name).write_text("")
    rewind_evaluations(tmp_path, 9)
    assert sorted(path.name for path in (tmp_path / EVALUATIONS).iterdir()) == ["step_000002.jsonl", "step_1.txt"]
