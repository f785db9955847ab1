"""Benchmarks by name: the known rows, wherever they come from; what differs and what was repaired is said."""

import csv
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.errors import ConfigError, TaskFileError
from sao_gym.jsonl import write_jsonl
from sao_gym.protocols import Task
from sao_gym.registry import make
from sao_gym.tasks._fingerprints import Fingerprint, aligned, content_hash, differences, stored
from sao_gym.tasks._repairs import repaired
from sao_gym.tasks.base import load_tasks
from sao_gym.tasks.benchmarks import (
    BENCHMARKS,
    LoadedBenchmark,
    Repair,
    environment_of,
    find_benchmark,
    load_benchmark,
)
from sao_gym.tasks.grading import grade_answer
from sao_gym.tasks.hub import HubPath, parse_hub_path

# Rows of google-deepmind/superhuman, imobench/answerbench_v2.csv, as they stand there (CC BY 4.0, Luong et al. 2025).
RAW = r'''Problem ID,Problem,Short Answer,Category,Subcategory,Source
imo-bench-algebra-036,"Find all functions $Y: \mathbb{R} \backslash\{0\} \rightarrow \mathbb{R}$ such that for any non-zero real numbers $a, b$ with $ab \neq -1$, the following equation holds:
\[
a Y\left(a+\frac{1}{b}\right)+b Y(b)+\frac{a}{b}=b Y\left(b+\frac{1}{a}\right)+a Y(a)+\frac{b}{a}
\]
,"$Y(x)=A+\frac{B}{x}-x$",Algebra,Functional Equation,Iran 2002
imo-bench-algebra-097,"Let $\{a_n\}_{n=1}^\infty$ be the sequence of positive integers defined recursively with $a_1=1$ and
\[
a_{n+1}=\begin{cases}
a_n+2 & \text{ if }n=a_{a_n-n+1}\\
a_n+1 & \text{ otherwise }
\end{cases}
\]
for all $n\geq1$. Find an explicit formula for $a_n$.
","$\lfloor\varphi n\rfloor$, where $\varphi = \frac{\sqrt{5}+1}{2}",Algebra,Sequence,Iran 2000
imo-bench-geometry-004,"Let $n$ cities lie on the circumference of a circular lake. Exactly half of the triangles formed by connecting any three of these cities are acute-angled triangles. Find the value of $n$ for which this is possible.
",45752,Geometry,combinatorial_geometry,Sharygin 2009
imo-bench-geometry-096," Let $PQRS$ be a convex quadrilateral with perimeter $\frac{8}{3}$ and $PR=QS=1$. Determine the maximum possible area of $PQRS$.
",$\frac{7}{18},Geometry,extremal_geometry,USAMTS 2016
imo-bench-number_theory-048," Find all pairs $(a, b)$ of positive real numbers such that for every prime number $p$ and real number $x$ satisfying
\[
    2^{2^{p + 1}x} = 2^px + 1,
\]
we have
\[
    \frac{a^x + b^x + 1}{3} \ge x + 1.
\]
"," $\left\{ (a,b):ab\leq e^{3}\right\}$",Number theory,Diophantine Equation,Vietnam 1997
imo-bench-number_theory-055,"""A positive integer $m$ consisting of distinct nonzero digits is considered """"good"""" if it is a single-digit number, or if removing one of its digits results in a divisor of $m$ that is also a good number.

Find the largest good number.
""",$14625$,Number theory,Base and Digit,Estonia TST 2018
'''


@pytest.fixture
def raw(tmp_path: Path) -> LoadedBenchmark:
    (tmp_path / "answerbench_v2.csv").write_text(RAW, encoding="utf-8", newline="")
    return load_benchmark("imo_answerbench", data=tmp_path)


def test_a_spreadsheets_date_becomes_the_list_that_it_was(raw: LoadedBenchmark) -> None:
    """Case GR-11."""
    assert raw.tasks.by_id("imo-bench-geometry-004").answer == "4, 5"
    (repair,) = [one for one in raw.facts()["repairs"] if one["id"] == "imo-bench-geometry-004"]
    assert (repair["column"], repair["raw"], repair["value"]) == ("answer", "45752", "4, 5")
    assert "spreadsheet" in repair["reason"]
    assert grade_answer("4, 5", "45752").value == 0


def test_an_answer_that_is_right_is_not_repaired(raw: LoadedBenchmark) -> None:
    """Case GR-11: the proposal to put >= there is wrong."""
    assert raw.tasks.by_id("imo-bench-number_theory-048").answer == r"$\left\{ (a,b):ab\leq e^{3}\right\}$"
    assert "imo-bench-number_theory-048" not in {repair.id for repair in raw.repairs}


def test_every_known_defect_is_repaired_with_its_reason(raw: LoadedBenchmark) -> None:
    changed = {(repair.id.removeprefix("imo-bench-"), repair.column) for repair in raw.repairs}
    assert changed == {
        *(("algebra-036", column) for column in ("problem", "answer", "category", "subcategory", "origin")),
        ("algebra-097", "answer"),
        ("geometry-004", "answer"),
        ("geometry-096", "answer"),
        ("number_theory-055", "problem"),
    }
    assert all(repair.reason and repair.raw != repair.value for repair in raw.repairs)
    tasks = {task.id.removeprefix("imo-bench-"): task for task in raw.tasks}
    assert tasks["algebra-036"].answer == r"$Y(x)=A+\frac{B}{x}-x$"
    assert tasks["algebra-036"].prompt.endswith("\n\\]")
    assert tasks["algebra-036"].info == {
        "category": "Algebra",
        "subcategory": "Functional Equation",
        "origin": "Iran 2002",
        "answer_raw": "Algebra",
    }
    assert tasks["algebra-097"].answer.endswith(r"\frac{\sqrt{5}+1}{2}$")
    assert tasks["geometry-096"].answer == r"$\frac{7}{18}$"
    assert tasks["number_theory-055"].prompt.startswith("A positive integer $m$ consisting")
    assert 'considered "good" if' in tasks["number_theory-055"].prompt
    assert tasks["number_theory-055"].prompt.endswith("Find the largest good number.")


def test_the_repaired_rows_are_the_known_ones(raw: LoadedBenchmark) -> None:
    """After the repairs nothing differs but what is missing."""
    rows, missing = raw.differences
    assert rows == "6 rows, 400 were expected"
    assert missing.startswith("394 rows missing: imo-bench-algebra-001, imo-bench-algebra-002, ")
    assert missing.endswith("imo-bench-algebra-010 and 384 more")


def test_a_row_without_its_defect_is_left_alone() -> None:
    row = {"id": "imo-bench-geometry-004", "problem": "p", "answer": "4, 5"}
    assert repaired(row) == (row, ())
    row = {"id": "imo-bench-geometry-005", "problem": "p", "answer": "45752"}
    assert repaired(row) == (row, ())
    for task_id in ("imo-bench-algebra-036", "imo-bench-geometry-096", "imo-bench-number_theory-055"):
        row = {"id": task_id, "problem": 'p, "q"', "answer": "$1$"}
        assert repaired(row) == (row, ())


def test_repairs_that_a_file_brings_with_it_are_said_as_well(data_dir: Path) -> None:
    loaded = load_benchmark("imo_answerbench", data=data_dir)
    said = {repair.id: (repair.raw, repair.value) for repair in loaded.repairs}
    assert said["imo-bench-geometry-004"] == ("45752", "4, 5")
    assert len(said) == 4


# -- names


def test_names_versions_and_their_mistakes() -> None:
    assert find_benchmark("imo_answerbench", "v1") is BENCHMARKS["imo_answerbench_v1"]
    assert find_benchmark("imo_answerbench", "v2") is find_benchmark("imo_answerbench") is BENCHMARKS["imo_answerbench"]
    for name, version, words in (
        ("aime25", None, "unknown benchmark 'aime25'; did you mean 'aime2025'"),
        ("imo_answerbench", "v3", "'imo_answerbench' has no version 'v3'; give v1 or v2"),
        ("aime2025", "v1", "'aime2025' has no versions"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_benchmark(name, version=version)


def test_every_record_says_what_the_protocol_needs() -> None:
    samples = {name: one.samples for name, one in BENCHMARKS.items()}
    assert samples.pop("beyond_aime") == 4
    assert samples.pop("swe_verified") == 1
    assert set(samples.values()) == {16}
    for name, one in BENCHMARKS.items():
        assert one.name == name
        assert one.licence
        assert one.revision is None  # until somebody has compared one
        assert [len(stored(name)), len(one.content_hash)] == [one.n_rows, 64]
        assert len({fingerprint.id for fingerprint in stored(name)}) == one.n_rows


def test_the_environment_of_a_benchmark_is_there_or_is_said_to_be_missing() -> None:
    assert environment_of(BENCHMARKS["aime2025"]) == "python_math"
    assert environment_of(BENCHMARKS["swe_verified"]) == "swe_verified"
    missing = replace(find_benchmark("aime2025"), environment="abacus")
    with pytest.raises(ConfigError, match=r"'aime2025' runs in the environment 'abacus', which this version does not"):
        environment_of(missing)


# -- the known rows


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_shared_files_are_the_known_rows(name: str, data_dir: Path) -> None:
    loaded, benchmark = load_benchmark(name, data=data_dir), BENCHMARKS[name]
    assert loaded.differences == ()
    assert (loaded.content_hash, len(loaded.tasks)) == (benchmark.content_hash, benchmark.n_rows)
    assert [Fingerprint.of(task, benchmark.graded) for task in loaded.tasks] == list(stored(name))
    assert loaded.file_hash is not None
    assert all(task.prompt and task.answer for task in loaded.tasks)
    assert json.loads(json.dumps(loaded.facts()))["content_hash"] == benchmark.content_hash


def test_what_a_file_says_besides_is_kept(data_dir: Path) -> None:
    task = load_benchmark("imo_answerbench", data=data_dir).tasks[0]
    assert set(task.info) == {"source", "category", "subcategory", "origin"}
    swe = load_benchmark("swe_verified", data=data_dir).tasks[0]
    assert {"repo", "base_commit", "test_patch", "FAIL_TO_PASS", "version", "eval_script", "image"} <= set(swe.info)
    assert swe.answer.startswith("diff --git")
    assert swe.answer.endswith("\n")  # a patch without its last newline does not apply


def rows_of(name: str, data_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_dir / f"{name}.jsonl").read_text(encoding="utf-8").split("\n") if line]


def other_copy(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As other places keep these rows: no ids, numbers as numbers, columns of their own, another order."""
    copy = [
        {"problem_idx": i, "problem": row["problem"] + "\n", "answer": int(row["answer"])}
        for i, row in enumerate(rows, 1)
    ]
    random.Random(0).shuffle(copy)
    return copy


def test_the_same_problems_in_any_form_are_the_same_benchmark(data_dir: Path, tmp_path: Path) -> None:
    whole = load_benchmark("aime2024", data=data_dir)
    rows = other_copy(rows_of("aime2024", data_dir))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write_jsonl(tmp_path / "a.jsonl", rows)
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    for name in ("a.parquet", "a.jsonl", "a.csv"):
        loaded = load_benchmark("aime2024", data=tmp_path / name)
        assert (loaded.differences, loaded.content_hash) == ((), whole.content_hash)
        assert [task.id for task in loaded.tasks] == [task.id for task in whole.tasks]
        assert loaded.source == str(tmp_path / name)
        assert loaded.tasks[0].info["problem_idx"] in (1, "1")


def test_rows_that_differ_are_named_and_never_refused(data_dir: Path, tmp_path: Path) -> None:
    rows = rows_of("hmmt_feb_2025", data_dir)
    rows[2]["answer"], rows[3]["problem"] = "7", "What?"
    del rows[10], rows[10]
    write_jsonl(tmp_path / "hmmt_feb_2025.jsonl", [*rows, {"problem": "New?", "answer": "1", "id": "new"}])
    loaded = load_benchmark("hmmt_feb_2025", data=tmp_path)
    assert loaded.differences == (
        "29 rows, 30 were expected",
        "2 rows missing: hmmt_feb_2025-11, hmmt_feb_2025-12",
        "1 row not among the known ones: new",
        "1 row with another prompt: hmmt_feb_2025-4",
        "1 row with another answer: hmmt_feb_2025-3",
    )
    assert len(loaded.tasks) == 29
    assert loaded.facts()["content_hash"] != loaded.facts()["expected_content_hash"]


def test_a_copy_with_other_wording_keeps_its_ids_by_place(data_dir: Path, tmp_path: Path) -> None:
    rows = [
        {"problem": f"In other words: {row['problem']}", "answer": row["answer"]}
        for row in rows_of("aime2025", data_dir)
    ]
    write_jsonl(tmp_path / "t.jsonl", rows)
    loaded = load_benchmark("aime2025", data=tmp_path / "t.jsonl")
    assert [task.id for task in loaded.tasks] == [one.id for one in stored("aime2025")]
    (said,) = loaded.differences
    assert said.startswith("30 rows with another prompt: aime2025-I-1, ")


def test_another_versions_rows_are_recognised(data_dir: Path) -> None:
    loaded = load_benchmark("imo_answerbench", data=data_dir / "imo_answerbench_v1.jsonl")
    whose, prompts, answers = loaded.differences
    assert whose == "these are the rows of imo_answerbench_v1, not of imo_answerbench"
    assert "rows with another prompt" in prompts
    changed = ("combinatorics-005", "geometry-002", "geometry-096", "number_theory-048", "number_theory-055")
    assert all(f"imo-bench-{one}" in answers for one in changed)


def test_a_changed_test_of_swe_verified_is_seen_and_other_columns_are_not(data_dir: Path, tmp_path: Path) -> None:
    rows = parquet.read_table(data_dir / "swe_verified.parquet").to_pylist()
    plain = [
        {**row, "hints_text": "", "image": "other", "FAIL_TO_PASS": json.loads(row["FAIL_TO_PASS"])} for row in rows
    ]
    parquet.write_table(pa.Table.from_pylist(plain), tmp_path / "swe_verified.parquet")
    assert load_benchmark("swe_verified", data=tmp_path).differences == ()
    plain[7]["FAIL_TO_PASS"] = plain[7]["FAIL_TO_PASS"][1:]
    plain[9]["patch"] += " "
    parquet.write_table(pa.Table.from_pylist(plain), tmp_path / "swe_verified.parquet")
    (said,) = load_benchmark("swe_verified", data=tmp_path).differences
    assert said == f"2 rows with another patch or other tests: {rows[7]['instance_id']}, {rows[9]['instance_id']}"


texts = st.text(alphabet="ab \n", max_size=6)
toy = st.lists(
    st.builds(Task, id=st.text("xyz", min_size=1, max_size=3), prompt=texts, answer=texts),
    max_size=6,
    unique_by=lambda task: task.id,
)


@given(tasks=toy, expected=toy, seed=st.integers(0, 99))
def test_aligning_loses_no_row_and_repeats_no_id(tasks: list[Task], expected: list[Task], seed: int) -> None:
    known = [Fingerprint.of(task, ()) for task in expected]
    found = aligned(tasks, known)
    assert sorted((task.prompt, task.answer) for task in found) == sorted((task.prompt, task.answer) for task in tasks)
    assert len({task.id for task in found}) == len(found)
    named = [task.id for task in found if task.id in {one.id for one in known}]
    assert named == [one.id for one in known if one.id in named]
    shuffled = random.Random(seed).sample(expected, len(expected))
    again = aligned(shuffled, known)
    assert [task.id for task in again] == [one.id for one in known]
    assert differences(again, known, ()) == ()
    assert content_hash(shuffled, ()) == content_hash(expected, ())


def test_how_a_whole_number_is_written_makes_no_difference() -> None:
    def hashed(answer: str) -> str:
        return content_hash([Task(id="a", prompt="p", answer=answer)], ())

    assert hashed("025") == hashed("25") == hashed(" 25.0 ") == hashed("+25")
    assert len({hashed(answer) for answer in ("25", "-25", "250", "2 5", "25.5", "0", "")}) == 7


# -- where the rows come from


def test_the_folder_of_the_environment_is_used_where_no_data_is_given(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAO_GYM_DATA", str(data_dir))
    assert load_benchmark("aime2026").source == str(data_dir / "aime2026.jsonl")
    assert load_benchmark("imo_answerbench", version="v1").source == str(data_dir / "imo_answerbench_v1.jsonl")
    with pytest.raises(TaskFileError, match=r"holds no file of aime2026; expected aime2026.jsonl in it"):
        load_benchmark("aime2026", data=tmp_path)
    with pytest.raises(TaskFileError, match=r"cannot read .*none: No such file or directory; give a benchmark's file"):
        load_benchmark("aime2026", data=tmp_path / "none")


def write_like_the_hub(folder: Path, **splits: list[dict[str, Any]]) -> None:
    """A data set's folder as the Hub lays it out: a card that names the splits, parquet shards below data/."""
    (folder / "data").mkdir(parents=True)
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n"
    for split, rows in splits.items():
        half = len(rows) // 2
        for shard, part in enumerate((rows[:half], rows[half:])):
            table = pa.Table.from_pylist(part)
            parquet.write_table(table, folder / "data" / f"{split}-{shard:05d}-of-00002.parquet")
        card += f"  - split: {split}\n    path: data/{split}-*\n"
    (folder / "README.md").write_text(card + "---\n")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the datasets library looks before it asks the Hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.delenv("SAO_GYM_DATA", raising=False)
    (tmp_path / "hub").mkdir()
    monkeypatch.chdir(tmp_path / "hub")
    return tmp_path / "hub"


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_hubs_form_of_every_benchmark_is_read(name: str, hub: Path, data_dir: Path) -> None:
    """With the columns that the Hub's copies have; numbers where they have numbers, no ids where they have none."""
    benchmark = BENCHMARKS[name]
    theirs = {ours: name for name, ours in benchmark.columns.items()}
    if name == "swe_verified":
        rows = parquet.read_table(data_dir / "swe_verified.parquet").to_pylist()
    elif theirs:
        rows = [{theirs.get(k, k): v for k, v in row.items() if k != "source"} for row in rows_of(name, data_dir)]
    else:
        rows = [{"problem_idx": i, **row} for i, row in enumerate(rows_of(name, data_dir), 1)]
        for row in rows:
            del row["id"], row["source"]
            row["answer"] = int(row["answer"]) if "hmmt" not in name else row["answer"]
    size = len(rows) // len(benchmark.hub)
    for i, place in enumerate(benchmark.hub):
        write_like_the_hub(hub / place.repo, **{place.split or "train": rows[i * size : (i + 1) * size]})
    loaded = load_benchmark(name)
    assert (loaded.differences, loaded.content_hash) == ((), benchmark.content_hash)
    assert [task.id for task in loaded.tasks] == [one.id for one in stored(name)]
    assert loaded.file_hash is None
    assert all(place.repo in loaded.source for place in benchmark.hub)


def test_any_data_set_of_the_hub_is_a_task_file(hub: Path) -> None:
    write_like_the_hub(hub / "owner" / "toy", validation=[{"Q": "2+2?", "A": 4}, {"Q": "3+3?", "A": 6}])
    mapping = {"prompt": "Q", "answer": "A"}
    for path in ("hf:owner/toy", "hf:owner/toy:validation", "hf:owner/toy:default:validation"):
        tasks = load_tasks(path, mapping)
        assert [(task.prompt, task.answer) for task in tasks] == [("2+2?", "4"), ("3+3?", "6")]
        assert load_tasks(path, mapping) is tasks  # every environment of a run asks for the same
    with pytest.raises(TaskFileError, match=r"hf:owner/toy, row 1: no text under prompt or problem or question"):
        load_tasks("hf:owner/toy")
    with pytest.raises(ConfigError, match=r"has no split 'test'; it has validation: give hf:owner/toy:SPLIT"):
        load_tasks("hf:owner/toy:test", mapping)
    rows = [{"problem": "a"}, {"problem": "b"}, {"problem": "c"}]
    write_like_the_hub(hub / "owner" / "two", train=rows, test=rows[:2])
    with pytest.raises(ConfigError, match=r"has more than one split, and none was named; it has train, test"):
        load_tasks("hf:owner/two")
    assert len(load_tasks("hf:owner/two:test")) == 2


def test_a_set_of_several_configurations_says_which(hub: Path) -> None:
    folder = hub / "owner" / "many"
    card = "---\nconfigs:\n"
    for name, answer in (("easy", 1), ("hard", 2)):
        (folder / name).mkdir(parents=True)
        parquet.write_table(pa.table({"problem": ["p"], "answer": [answer]}), folder / name / "train.parquet")
        card += f"- config_name: {name}\n  data_files:\n  - split: train\n    path: {name}/train.parquet\n"
    (folder / "README.md").write_text(card + "---\n")
    assert load_tasks("hf:owner/many:hard:train")[0].answer == "2"
    with pytest.raises(TaskFileError, match=r"Config name is missing.*'easy', 'hard'"):
        load_tasks("hf:owner/many:train")


def test_an_environment_takes_its_tasks_from_the_hub(hub: Path) -> None:
    write_like_the_hub(
        hub / "owner" / "toy", train=[{"problem": "2+2?", "answer": "4"}, {"problem": "3?", "answer": "3"}]
    )
    env = make("python_math", tasks="hf:owner/toy", allow_unsafe=True)
    messages, _ = env.reset(options={"task_id": load_tasks("hf:owner/toy")[1].id})
    assert messages[-1].content == "3?"
    env.close()


def test_hub_paths_are_read_and_written_alike() -> None:
    assert parse_hub_path("hf:a/b") == HubPath(repo="a/b")
    assert parse_hub_path("hf:a/b:test") == HubPath(repo="a/b", split="test")
    whole = HubPath(repo="a/b", config="c", split="d", revision="e")
    assert parse_hub_path("hf:a/b@e:c:d") == whole
    assert parse_hub_path(str(whole)) == whole
    for bad in ("hf:", "hf:a/b:", "hf:a/b:c:d:e", "hf:a/b@"):
        with pytest.raises(ConfigError, match="names no data set on the Hub"):
            parse_hub_path(bad)


def run_python(code: str, **environment: str) -> str:
    kept = {key: value for key, value in os.environ.items() if key != "SAO_GYM_DATA"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=kept | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FAILS = """
from sao_gym.errors import UserError
from sao_gym.tasks.base import load_tasks
from sao_gym.tasks.benchmarks import load_benchmark
for load, name in ((load_benchmark, "aime2025"), (load_tasks, "hf:owner/name:test")):
    try:
        load(name)
    except UserError as error:
        print(error)
"""


def test_no_way_to_the_hub_is_one_sentence_with_the_way_out(tmp_path: Path) -> None:
    said = run_python(FAILS, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path), SAO_GYM_DATA=str(tmp_path))
    first, second = said.splitlines()
    assert first.startswith(f"SAO_GYM_DATA={tmp_path} holds no aime2025.jsonl, and cannot read hf:MathArena/aime_2025")
    assert "for aime2025 give --data PATH" in first
    assert second.startswith("cannot read hf:owner/name:test from the Hub")
    assert "give a local file" in second


def test_without_the_library_its_extra_is_named() -> None:
    blocked = "import sys; sys.modules['datasets'] = None" + FAILS
    first, second = run_python(blocked).splitlines()
    assert "needs the datasets library; install sao-gym[hub]" in first
    assert "for aime2025 give --data PATH" in first
    assert "install sao-gym[hub]" in second


def test_the_library_is_not_imported_before_it_is_needed() -> None:
    code = (
        "import sys, sao_gym.tasks.benchmarks, sao_gym.tasks.overlap; print({'datasets', 'torch'} & set(sys.modules))"
    )
    assert run_python(code).strip() == "set()"


# -- what is done with them


def test_a_sample_is_drawn_and_not_the_first_rows(data_dir: Path) -> None:
    """BeyondAIME is sorted by its answers."""
    loaded = load_benchmark("beyond_aime", data=data_dir)
    few, more = loaded.take(5), loaded.take(20)
    assert [task.id for task in loaded.take()] == [one.id for one in stored("beyond_aime")]
    assert (len(few), len(more), len(loaded.take(1000))) == (5, 20, 100)
    assert {task.id for task in few} < {task.id for task in more}
    assert few == loaded.take(5) != loaded.take(5, seed=1)
    assert few != tuple(loaded.tasks)[:5]
    places = [one.id for one in stored("beyond_aime")]
    assert [places.index(task.id) for task in more] == sorted(places.index(task.id) for task in more)
    assert max(places.index(task.id) for task in more) > 50
    with pytest.raises(ConfigError, match="at least 1"):
        loaded.take(0)


@pytest.mark.parametrize("name", [name for name, one in BENCHMARKS.items() if one.environment == "python_math"])
def test_a_policy_sees_the_problem_and_neither_id_nor_answer(name: str, data_dir: Path) -> None:
    loaded = load_benchmark(name, data=data_dir)
    env = make("python_math", tasks=loaded.tasks, allow_unsafe=True)
    systems = set()
    for task in loaded.take(5):
        (system, user), _ = env.reset(options={"task_id": task.id})
        assert user.content == task.prompt
        assert task.id not in user.content + system.content
        systems.add(system.content)
    assert len(systems) == 1
    env.close()


def test_a_row_that_is_no_object_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "aime2025.jsonl").write_text('{"problem": "a", "answer": "1"}\n[1]\n')
    with pytest.raises(TaskFileError, match=r"aime2025.jsonl, line 2: expected a JSON object, got list"):
        load_benchmark("aime2025", data=tmp_path)


def test_a_repair_is_a_record_that_says_everything() -> None:
    row = {"id": "imo-bench-geometry-096", "problem": "p", "answer": "$x"}
    mended, (repair,) = repaired(row)
    assert mended == {**row, "answer": "$x$", "answer_raw": "$x"}
    assert repair == Repair(
        id="imo-bench-geometry-096",
        column="answer",
        raw="$x",
        value="$x$",
        reason="the last $ of the answer is missing",
    )
