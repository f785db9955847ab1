"""The documents name what exists: functions, tests, fields with their defaults, metrics keys, files, commands."""

import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sao_gym.commands import serving
from sao_gym.commands.heldout import EVALUATIONS
from sao_gym.commands.main import COMMANDS
from sao_gym.config_schema import Schema
from sao_gym.stream import Outcome, Score, Segment, StopReason, TokenStream, Trajectory
from sao_gym.trainer import files, loop
from sao_gym.trainer.config import TrainConfig
from sao_gym.trainer.critic import ModuleKind
from sao_gym.trainer.metrics import batch_metrics, loss_metrics
from sao_gym.trainer.parity import CANARY
from sao_gym.trainer.runtime import Batch, Losses
from sao_gym.trainer.statistics import StepStatistics

ROOT = Path(__file__).parents[1]
PAPER, RUNS = ROOT / "docs" / "paper.md", ROOT / "docs" / "runs.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.M | re.S)
FIELD = re.compile(r"`([a-z_.0-9]+) = ([^`]+)` ([PO])\b")


def table_rows(path: Path) -> Iterator[list[str]]:
    """Cells of every table row below a head."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("|") and not re.match(r"^\|[-| ]+\|$", line):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def paper_rows() -> list[tuple[str, str, str]]:
    """(functions, tests, fields) of every row of the two tables that tie the paper to the code."""
    rows = [row for row in table_rows(PAPER) if len(row) in (4, 6)]
    found = [(row[-3], row[-2], row[-1]) for row in rows if row[-3] not in ("function",)]
    return [row for row in found if row[1].startswith(("`", "none"))]


def paper_names(column: int) -> list[str]:
    return sorted({name for row in paper_rows() for name in re.findall(r"`([\w.]+)`", row[column])})


@cache
def known_tests() -> set[str]:
    """file.function of every test, by the file's bare name."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.add(f"{path.stem}.{node.name}")
    return found


def find(name: str) -> Any:
    """The object at a dotted path below sao_gym: the longest part that is a module, then attributes."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module("sao_gym." + ".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            found = getattr(found, attribute)
        return found
    raise ModuleNotFoundError(name)


def test_the_paper_table_is_read_whole() -> None:
    numbered = [int(row[0]) for row in table_rows(PAPER) if row[0].isdecimal()]
    assert numbered == list(range(1, 29))
    assert len(paper_rows()) > 28
    assert len(paper_names(0)) > 25


@pytest.mark.parametrize("name", paper_names(0))
def test_functions_exist(name: str) -> None:
    assert callable(find(name))


@pytest.mark.parametrize("name", paper_names(1))
def test_tests_exist(name: str) -> None:
    assert name in known_tests()


def test_every_row_has_a_function_and_a_test_or_says_none() -> None:
    for functions, tests, fields in paper_rows():
        assert functions == tests == "none" or (functions.startswith("`") and tests.startswith("`"))
        assert FIELD.search(fields) or fields.startswith(("none, ", "see rows "))


def test_fields_and_defaults_are_as_written() -> None:
    settings = Schema.of(TrainConfig).settings
    written = [match for row in paper_rows() for match in FIELD.findall(row[2])]
    assert len(written) > 25
    for key, text, whose in written:
        default = None if text == "unset" else tomllib.loads(f"value = {text}")["value"]
        assert key in settings, key
        assert settings[key].default is not MISSING
        assert settings[key].default == default, key
        assert settings[key].source.value == {"P": "paper", "O": "ours"}[whose], key


def test_every_value_of_the_paper_is_in_the_table() -> None:
    written = {key for row in paper_rows() for key, _, _ in FIELD.findall(row[2])}
    of_the_paper = {key for key, leaf in Schema.of(TrainConfig).settings.items() if leaf.source.value == "paper"}
    assert of_the_paper - written == set()


def documented_keys() -> tuple[set[str], set[str]]:
    """Keys of a training line and of an evaluation's line, with `<kind>` spelled out."""
    training, evaluation = RUNS.read_text(encoding="utf-8").split("A line of an evaluation holds")
    tables = []
    for text in (training.split("## Metrics")[1], evaluation):
        keys = re.findall(r"^\| `([\w<>]+)` \|", text, flags=re.M)
        assert len(keys) == len(set(keys))
        spelled = {key.replace("<kind>", kind) for key in keys for kind in (ModuleKind if "<kind>" in key else ("",))}
        tables.append(spelled)
    return tables[0], tables[1]


def keys_written_by(path: Path, *functions: str) -> set[str]:
    """Constant keys of dict literals and of `name[key] = ...` in these functions of a file."""
    keys = set()
    bodies = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name in functions
    ]
    assert len(bodies) == len(functions)
    for node in (inner for body in bodies for inner in ast.walk(body)):
        if isinstance(node, ast.Dict):
            keys |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        if isinstance(node, ast.Assign):
            stored = [target for target in node.targets if isinstance(target, ast.Subscript)]
            keys |= {target.slice.value for target in stored if isinstance(target.slice, ast.Constant)}
    return keys


def one_batch() -> Batch:
    said = Segment.action([3], logprobs=[-1.0], versions=[0], temperature=1.0, stop=StopReason.STOP)
    made = TokenStream(segments=(Segment.observation([1, 2]), said))
    row = Trajectory(uid="r1", task_id="t", env_id="e", attempt=0, streams=(made,), outcome=Outcome.terminated())
    scored = row.scored(Score(value=1.0, passed=True))
    return Batch(numbers=(1,), trajectories=(scored,), version=0, raises_version=True, wait_s=0.0)


def keys_of_a_step() -> set[str]:
    of_batch = batch_metrics(one_batch(), credit="chain", max_staleness=4)
    return {*of_batch, *StepStatistics().metrics(), *loss_metrics(Losses())} | keys_written_by(
        Path(loop.__file__), "_record"
    )


def test_metrics_of_a_step_are_documented_and_written() -> None:
    documented, _ = documented_keys()
    written = keys_of_a_step()
    assert written - documented == set(), "written, not documented"
    assert documented - written == set(), "documented, not written"


def test_metrics_of_an_evaluation_are_documented_and_written() -> None:
    _, documented = documented_keys()
    path = ROOT / "sao_gym" / "commands" / "heldout.py"
    written = keys_written_by(path, "_line", "_line_without_result") - {"step", "event"}
    written |= {"heldout_success", "heldout_greedy"}  # one of them, by the kind of the evaluation
    text = path.read_text(encoding="utf-8")
    assert {key for key in documented if f'"{key}"' in text} == documented
    assert written == documented


def test_the_metrics_that_people_rely_on() -> None:
    asked = (
        "step policy_version reward_mean success_mean tokens_action tokens_total staleness_max staleness_mean "
        "stale_masked dis_reject_low dis_reject_high ratio_p50 ratio_p99 ess ev_pre ev_post value_loss policy_loss "
        "entropy actor_grad_norm critic_grad_norm advantage_mean reward_mass_error time_rollout_s time_wait_s "
        "time_critic_s time_actor_s time_publish_s weight_hash"
    )
    assert set(asked.split()) - documented_keys()[0] == set()


def test_the_run_folders_files_are_those_that_are_written() -> None:
    written = {"config.toml", "manifest.json", "metrics.jsonl", "ledger.sqlite", "curves.png", "lock"}
    listed = re.findall(r"^\| `([\w./-]+)` \|", RUNS.read_text(encoding="utf-8").split("## Commands")[0], flags=re.M)
    folders = {f"{files.TRAJECTORIES}/step_NNNNNN.parquet", f"{files.CHECKPOINTS}/step_N/"}
    folders |= {*serving.FILES, f"{files.ROLLED_BACK}-TIME/"}
    folders |= {f"{loop.EVENTS}/", f"{loop.HISTOGRAMS}/", f"{loop.PARITY}/", CANARY, f"{EVALUATIONS}/step_NNNNNN.jsonl"}
    assert set(listed) == written | folders
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "sao_gym").rglob("*.py")]
    for name in written:
        assert any(f'"{name}"' in text for text in sources), name


@pytest.mark.parametrize(
    ("name", "block"),
    [
        (path.name, block)
        for path in DOCS
        for block in PYTHON_BLOCK.findall(path.read_text(encoding="utf-8"))
        if path != RUNS  # its block reads a run that the reader has made
    ],
)
def test_python_in_the_documents_runs(name: str, block: str, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120
    )
    assert done.returncode == 0, f"{name}: {block}{done.stderr}"


def test_python_in_the_runs_document_imports() -> None:
    (block,) = PYTHON_BLOCK.findall(RUNS.read_text(encoding="utf-8"))
    imports = [line for line in block.splitlines() if line.startswith(("from ", "import "))]
    exec("\n".join(imports), {})
    compile(block, "docs/runs.md", "exec")


@pytest.mark.parametrize("path", [*DOCS, ROOT / "README.md"], ids=lambda path: path.name)
def test_commands_links_and_flags(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    known = {entry.name for entry in COMMANDS}
    assert set(re.findall(r"python -m sao_gym\.(\w+)", text)) - known == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    assert set(re.findall(r"`make ([a-z-]+)`", text)) - targets == set()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / link).exists(), link


def test_the_readmes_tree_stands() -> None:
    """Every file and folder that the tree names is where it says."""
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## Where things are")[1].split("```")[1]
    top = sub = ROOT
    named = 0
    for line in tree.strip("\n").splitlines():
        names = re.findall(r"\b\w+(?:\.py\b|/)", line)
        if not line.startswith(" "):
            top = sub = ROOT / names.pop(0)
            assert top.is_dir(), top
        elif re.match(r"  \w+/", line):
            sub = top / names.pop(0)
            assert sub.is_dir(), sub
        else:
            sub = top
        for name in names:
            assert (sub / name).exists() or (top / name).exists(), f"{top.name}: {name}"
            named += 1
    assert named > 60


def test_no_figure_without_a_benchmark() -> None:
    """Measured figures live in docs/quickstart.md, which names the benchmark that makes them."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\d(?:\.\d+)? ?(?:%|tok/s|ms\b)", text) == []


def test_these_checks_can_fail() -> None:
    with pytest.raises(AttributeError):
        find("trainer.losses.no_such_loss")
    with pytest.raises(ModuleNotFoundError):
        find("nowhere.at_all")
    assert FIELD.findall("`loss.gamma = 0.99` O") == [("loss.gamma", "0.99", "O")]
    assert Schema.of(TrainConfig).settings["loss.gamma"].default != 0.99
