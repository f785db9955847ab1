"""Recorded episodes graded again, without sampling: which verdicts the present grader would give, and what changed.

Invariants: the policy is not opened and no episode runs; the raw records stay as they are; where no verdict changes, no
file is touched, else the results before stand beside the new ones as `results.1.json`, `samples.1.jsonl`, ...
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sao_gym.commands.eval_config import EvalConfig
from sao_gym.commands.eval_records import RESULTS, SAMPLES, EvalRecords, read_samples
from sao_gym.commands.eval_report import counts, table, write_page, write_results
from sao_gym.commands.eval_run import answer_of
from sao_gym.commands.eval_targets import Target, open_targets
from sao_gym.config import Resolved
from sao_gym.core import AgentEnv
from sao_gym.errors import ConfigError, GradingError, ModelError, RunFolderError
from sao_gym.evaluation import EpisodeResult, Evaluation
from sao_gym.policy_loading import byte_tokenizer, load_tokenizer
from sao_gym.runfolder import RunFolder
from sao_gym.stream import OutcomeStatus, StopReason, Trajectory
from sao_gym.tasks.grading import GRADER_VERSION
from sao_gym.token_runner import response_of

MOST_SHOWN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Regraded:
    """One sample before and after."""

    before: EpisodeResult
    after: EpisodeResult

    @property
    def is_moved(self) -> bool:
        """Whether the verdict is another one, or there is one now."""
        return (self.before.value, self.before.passed) != (self.after.value, self.after.passed)


async def rescore(resolved: Resolved[EvalConfig], folder: RunFolder) -> int:
    """Grade a finished evaluation again. Raises UserError where an environment cannot grade from a record."""
    records = EvalRecords(folder)
    manifest, config = records.manifest(), resolved.config
    if not folder.file(RESULTS).is_file():
        raise RunFolderError(f"{folder.path} has no {RESULTS}: the evaluation did not end; --resume it first")
    before = read_samples(folder.file(SAMPLES))
    responses = _responses(records)
    async with AsyncExitStack() as closing:
        targets = await open_targets(config, closing, records.recorded(), will_run=False)
        found = {target.name: await _regrade(target, before[target.name], responses, config) for target in targets}
    print(changes_text(found))
    if all(one.before == one.after for each in found.values() for one in each):
        print("nothing changed; no file was touched")
        return 0
    old = json.loads(folder.file(RESULTS).read_text(encoding="utf-8"))["benchmarks"]
    named = {one.name: _evaluation(one, found[one.name], old[one.name], config.level) for one in targets}
    for name, one in named.items():
        print(f"\n{name}: graded again\n\n{table(one)}")
    _keep(records, named, manifest, config)
    return 0


@dataclass(frozen=True, slots=True)
class _Response:
    """What a grader of a record sees, and whether the last action was cut."""

    text: str
    is_cut: bool


def _responses(records: EvalRecords) -> dict[str, _Response]:
    found = {}
    for one in records.episodes():
        text = response_of(one)
        if text is not None:
            found[one.uid] = _Response(text, _is_cut(one))
    return found


def _is_cut(trajectory: Trajectory) -> bool:
    last = next((stream.actions[-1] for stream in reversed(trajectory.streams) if stream.actions), None)
    return last is not None and last.stop is StopReason.LENGTH


async def _regrade(
    target: Target, results: Sequence[EpisodeResult], responses: Mapping[str, _Response], config: EvalConfig
) -> list[Regraded]:
    env = target.environments.make()
    try:
        agent = env.unwrapped
        if not isinstance(agent, AgentEnv) or not agent.is_graded_from_record:
            raise ConfigError(
                f"{target.name} cannot be graded from its record: the environment {target.environments.name!r} does not "
                "promise that task and last message decide (is_graded_from_record); run it again"
            )
        tasks = {task.id: task for task in target.tasks}
        found = []
        for result in results:  # one at a time: the environment holds one episode
            after = result
            if result.uid in responses and result.stage in (None, "grade"):
                said = responses[result.uid]
                after = await _graded(agent, tasks[result.task_id], result, said)
            found.append(Regraded(before=result, after=after))
        return found
    finally:
        await asyncio.to_thread(env.close)


async def _graded(agent: AgentEnv, task: Any, result: EpisodeResult, said: _Response) -> EpisodeResult:
    try:
        score = await agent.regrade_async(task, said.text)
    except GradingError:
        return replace(
            result, outcome=OutcomeStatus.ERROR, reason="grading", stage="grade", value=None, passed=None, answer=None
        )
    if score is None:
        return result
    is_mended = result.stage == "grade"  # the failed grade is all that was wrong with the episode
    ended = OutcomeStatus.TRUNCATED if said.is_cut else OutcomeStatus.TERMINATED
    return replace(
        result,
        outcome=ended if is_mended else result.outcome,
        reason=("turn_tokens" if said.is_cut else None) if is_mended else result.reason,
        stage=None,
        value=score.value,
        passed=score.passed,
        detail=score.detail,
        grader_version=score.grader_version,
        method=score.method,
        answer=answer_of(result.text),
    )


def changes_text(found: Mapping[str, Sequence[Regraded]]) -> str:
    """Verdicts before and after, sample by sample."""
    lines = []
    for name, each in found.items():
        moved = [one for one in each if one.is_moved]
        worded = sum(one.before != one.after for one in each) - len(moved)
        lines.append(
            f"{name}: {len(moved)} of {len(each)} verdicts changed"
            + (f", {worded} more are told in other words" if worded else "")
        )
        lines += [f"  {_verdict(one.before)} -> {_verdict(one.after)}  {_which(one)}" for one in moved[:MOST_SHOWN]]
        if len(moved) > MOST_SHOWN:
            lines.append(f"  and {len(moved) - MOST_SHOWN} more, all in {SAMPLES}")
    return "\n".join(lines)


def _verdict(result: EpisodeResult) -> str:
    return f"error ({result.stage})" if result.value is None else f"{result.value:g}"


def _which(one: Regraded) -> str:
    return f"{one.after.task_id} sample {one.after.attempt}: {one.after.detail}"


def _evaluation(target: Target, found: Sequence[Regraded], old: Mapping[str, Any], level: float) -> Evaluation:
    """The evaluation with its new verdicts; `old` is its part of results.json."""
    return Evaluation(
        results=tuple(one.after for one in found),
        samples=target.samples,
        seconds=old["seconds"],
        version_first=old["policy_version"]["first"],
        version_last=old["policy_version"]["last"],
        level=level,
    )


def _keep(
    records: EvalRecords, named: Mapping[str, Evaluation], manifest: Mapping[str, Any], config: EvalConfig
) -> None:
    folder = records.folder
    number = 1
    while (folder.path / f"results.{number}.json").exists():
        number += 1
    for name in (RESULTS, SAMPLES):
        old = folder.file(name)
        old.rename(old.with_name(f"{Path(name).stem}.{number}{Path(name).suffix}"))
    rescored = [*manifest.get("rescored", []), {"grader_version": GRADER_VERSION, "before": f"results.{number}.json"}]
    facts = {**manifest, "rescored": rescored, "counts": counts(named)}
    records.write_samples({name: one.results for name, one in named.items()})
    folder.write_manifest(facts)
    write_results(folder, named, facts)
    write_page(folder, named, facts, records.episodes(), _tokenizer(config))
    print(f"\nwrote {folder.file(RESULTS)}; what was there before is results.{number}.json and samples.{number}.jsonl")


def _tokenizer(config: EvalConfig) -> Any:
    """What reads the episodes for the page; None where it is not there any more."""
    if config.kind == "api":
        return None
    try:
        return load_tokenizer(config.model.path) if config.model.path else byte_tokenizer()
    except ModelError as error:
        print(f"the page shows no episodes: {error}")
        return None
