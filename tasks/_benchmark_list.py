"""The benchmarks that are known by name.

Counts and hashes are those of the rows that the figures of this project are about. Nobody has compared them with a
revision on the Hub yet, so `revision` is None everywhere: what is loaded from there is compared row by row.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from sao_gym.tasks.hub import HubPath

_MATHARENA = "evaluation only, non-commercial, share-alike (CC BY-NC-SA 4.0 on the Hub); text (c) "
_IMO_COLUMNS = MappingProxyType(
    {
        "Problem ID": "id",
        "Problem": "problem",
        "Short Answer": "answer",
        "Category": "category",
        "Subcategory": "subcategory",
        "Source": "origin",
    }
)
_SWE_COLUMNS = MappingProxyType({"instance_id": "id", "problem_statement": "problem", "patch": "answer"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A set of problems with a name.

    `content_hash` covers ids, prompts, answers and the `graded` columns. `files` are names in a data folder, first name
    first; `hub` the sets that make it up, in order; `columns` maps names of a source's columns to ours. `samples` is
    the n of avg@n in the paper's protocol, `environment` what runs it unless another is named.
    """

    name: str
    n_rows: int
    content_hash: str
    files: tuple[str, ...]
    hub: tuple[HubPath, ...]
    licence: str
    columns: Mapping[str, str] = field(default_factory=dict)
    graded: tuple[str, ...] = ()
    samples: int = 16
    environment: str = "python_math"

    @property
    def is_of_repositories(self) -> bool:
        """Whether its tasks are issues of repositories, judged by tests."""
        return self.environment == "swe_verified"

    @property
    def revision(self) -> str | None:
        """The verified revision on the Hub; None until somebody has verified every part."""
        revisions = [place.revision for place in self.hub]
        return ", ".join(filter(None, revisions)) if all(revisions) else None


def _hub(*names: str, split: str = "train") -> tuple[HubPath, ...]:
    return tuple(HubPath(repo=name, split=split) for name in names)


_LIST = (
    Benchmark(
        name="aime2024",
        n_rows=30,
        content_hash="c27b0e2b81893d4202af40db61b882e9a597195e11113f384a490615fcae69ed",
        files=("aime2024.jsonl",),
        hub=_hub("MathArena/aime_2024_I", "MathArena/aime_2024_II"),
        licence=_MATHARENA + "MAA",
    ),
    Benchmark(
        name="aime2025",
        n_rows=30,
        content_hash="e80c479bfa70365183ac67f07da337b50bf58f85d9b8945b006b8174bae275e0",
        files=("aime2025.jsonl",),
        hub=_hub("MathArena/aime_2025"),
        licence=_MATHARENA + "MAA",
    ),
    Benchmark(
        name="aime2026",
        n_rows=30,
        content_hash="116fca94a340f185f0be6309a7d87d10b0c4920147505a3851979b4ce95876ac",
        files=("aime2026.jsonl",),
        hub=_hub("MathArena/aime_2026"),
        licence=_MATHARENA + "MAA",
    ),
    Benchmark(
        name="hmmt_feb_2025",
        n_rows=30,
        content_hash="446bc6db0589f840f542b5cd370fb671187369b781e24dd0ad75cfd3e80d0441",
        files=("hmmt_feb_2025.jsonl",),
        hub=_hub("MathArena/hmmt_feb_2025"),
        licence=_MATHARENA + "HMMT",
    ),
    Benchmark(
        name="hmmt_nov_2025",
        n_rows=30,
        content_hash="8ded49619364b187131dde8e0e592ecdd4bf069a3cd307a19d3f4f09d0a66826",
        files=("hmmt_nov_2025.jsonl",),
        hub=_hub("MathArena/hmmt_nov_2025"),
        licence=_MATHARENA + "HMMT",
    ),
    Benchmark(
        name="beyond_aime",
        n_rows=100,
        content_hash="e3e49538619b839cddf1f8e04f1ab878fd4a688f2e6cae2df2f85c1832136f00",
        files=("beyond_aime.jsonl",),
        hub=_hub("ByteDance-Seed/BeyondAIME", split="test"),
        licence="CC0 1.0",
        samples=4,
    ),
    Benchmark(
        name="imo_answerbench",
        n_rows=400,
        content_hash="92499542f941a82faf05f67a5ee0bb7905c63dd9f3476b3f118a2c7c485961ee",
        files=("imo_answerbench.jsonl", "answerbench_v2.csv"),
        hub=_hub("OpenEvals/IMO-AnswerBench"),
        licence="CC BY 4.0; cite Luong et al. 2025, Towards Robust Mathematical Reasoning",
        columns=_IMO_COLUMNS,
    ),
    Benchmark(
        name="imo_answerbench_v1",
        n_rows=400,
        content_hash="17e1bc6d2bf1f47464ebd320bb7ed0982205261f62a62b1f0b96a263e2e62507",
        files=("imo_answerbench_v1.jsonl", "answerbench.csv"),
        hub=_hub("Hwilner/imo-answerbench"),
        licence="CC BY 4.0; cite Luong et al. 2025, Towards Robust Mathematical Reasoning",
        columns=_IMO_COLUMNS,
    ),
    Benchmark(
        name="swe_verified",
        n_rows=500,
        content_hash="a3a5c5a470b404265bfde1cf23f860af5ab6ac1cd188b5c77e4ccc3fe98f7c28",
        files=("swe_verified.parquet",),
        hub=_hub("SWE-bench/SWE-bench_Verified", split="test"),
        licence="MIT for the collection; issues and patches carry the licences of their projects",
        columns=_SWE_COLUMNS,
        graded=("repo", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"),
        samples=1,
        environment="swe_verified",
    ),
)
BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType({one.name: one for one in _LIST})
"""Every benchmark by its name."""
