"""Two folders of results compared on the benchmarks of both; `sao_gym.comparison` says what chance may have done."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sao_gym.commands.eval_records import RESULTS, SAMPLES, read_samples
from sao_gym.comparison import ResultSet, compare, compare_text
from sao_gym.errors import ConfigError, RunFolderError
from sao_gym.evaluation import passed_by_task


def compare_folders(first: Path, second: Path) -> int:
    """Print the comparison of every benchmark that both hold. Raises UserError where there is none, or one has no results."""
    sets = [result_sets(folder) for folder in (first, second)]
    shared = [name for name in sets[0] if name in sets[1]]
    if not shared:
        raise ConfigError(
            f"{first} and {second} have no benchmark in common: {', '.join(sets[0])} there, {', '.join(sets[1])} here"
        )
    print("\n\n".join(compare_text(compare(sets[0][name], sets[1][name])) for name in shared))
    alone = [name for each in sets for name in each if name not in shared]
    if alone:
        print(f"\nleft out, as only one of the two has them: {', '.join(alone)}")
    return 0


def result_sets(folder: Path) -> dict[str, ResultSet]:
    """What an evaluation's folder says, by benchmark. Raises RunFolderError, TaskFileError."""
    try:
        manifest = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["manifest"]
        benchmarks = manifest["benchmarks"]
    except (OSError, ValueError, KeyError) as error:
        raise RunFolderError(
            f"{folder} holds no results of an evaluation (no readable {RESULTS}); give the folder that --out named, and "
            "if it did not end, --resume it first"
        ) from error
    samples = read_samples(folder / SAMPLES)
    return {
        name: ResultSet(
            name=str(folder),
            benchmark=name,
            content_hash=facts["tasks"]["content_hash"],
            passed=passed_by_task(samples.get(name, [])),
            settings=settings(manifest, facts, {one.grader_version for one in samples.get(name, []) if one.is_scored}),
        )
        for name, facts in benchmarks.items()
    }


def settings(manifest: Mapping[str, Any], facts: Mapping[str, Any], graders: Iterable[str]) -> dict[str, str]:
    """All but the policy that decides a result, by names that people read."""
    found = {
        **{f"sampling.{name}": value for name, value in manifest.get("sampling", {}).items()},
        **{f"budgets.{name}": value for name, value in manifest.get("budgets", {}).items()},
        "protocol": manifest.get("protocol", {}).get("name"),
        "environment": facts.get("env"),
        "environment options": json.dumps(manifest.get("env_options", {}), sort_keys=True, default=str),
        "samples per task": facts.get("samples"),
        "grader version": ", ".join(sorted(graders)),
    }
    return {name: str(value) for name, value in found.items()}
