"""One evaluation from its settings to its report: every benchmark in turn, kept in a folder as it goes."""

import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sao_gym.clock import SystemClock
from sao_gym.commands.eval_config import EvalConfig, SamplingConfig
from sao_gym.commands.eval_manifest import manifest
from sao_gym.commands.eval_policy import EvalPolicy, open_eval_policy
from sao_gym.commands.eval_progress import EvalProgress
from sao_gym.commands.eval_records import RESULTS, EvalRecords, Recovered
from sao_gym.commands.eval_report import counts, notes_on, table, write_page, write_results
from sao_gym.commands.eval_targets import Recorded, Target, open_targets
from sao_gym.config import Resolved, dump
from sao_gym.errors import ConfigError
from sao_gym.evaluation import EpisodeResult, Evaluation, evaluate
from sao_gym.runfolder import RunFolder
from sao_gym.stream import Trajectory
from sao_gym.tasks.grading import extract_boxed

NOTHING_SCORED = 1
_NONE: Mapping[str, Recorded] = MappingProxyType({})
_INTEGER = re.compile(r"\+?(-?)0*([0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An evaluation that is ready to run: what on, by whom, and what of it is there already."""

    config: EvalConfig
    targets: tuple[Target, ...]
    policy: EvalPolicy
    facts: dict[str, Any]
    records: EvalRecords | None = None
    kept: Mapping[str, EpisodeResult] = field(default_factory=dict)


async def run_new(resolved: Resolved[EvalConfig], protocol: str | None, folder: RunFolder | None) -> int:
    """Run an evaluation from its beginning. Returns the exit code: 1 where nothing was scored."""
    async with AsyncExitStack() as closing:
        begun = await _open(resolved, protocol, closing)
        if folder is None:
            return await _finish(begun)
        records = EvalRecords(folder)
        records.begin(begun.targets)
        folder.write_manifest(begun.facts)
        folder.write_config(dump(resolved))
        return await _finish(_with(begun, records))


async def run_again(resolved: Resolved[EvalConfig], folder: RunFolder) -> int:
    """Run what is missing, torn or ended in an error. Raises UserError where model or tasks are not those of the run."""
    records = EvalRecords(folder)
    before = records.manifest()
    async with AsyncExitStack() as closing:
        begun = await _open(resolved, None, closing, records.recorded())
        _require_same(before, begun.facts)
        recovered = records.recover()
        total = sum(len(target.uids()) for target in begun.targets)
        print(_told(recovered, total))
        if len(recovered.results) < total:
            records.go_on(begun.targets, recovered)
        again = [*before.get("resumed", []), {"kept": len(recovered.results), "problems": list(recovered.problems)}]
        facts = {**before, "resumed": again}
        return await _finish(_with(begun, records, facts, recovered.results))


async def _open(
    resolved: Resolved[EvalConfig],
    protocol: str | None,
    closing: AsyncExitStack,
    recorded: Mapping[str, Recorded] = _NONE,
) -> Begun:
    targets = await open_targets(resolved.config, closing, recorded)
    policy = open_eval_policy(resolved.config, targets)
    closing.push_async_callback(policy.close)
    facts = await manifest(resolved, protocol, targets, policy)
    return Begun(config=resolved.config, targets=targets, policy=policy, facts=facts)


def _with(
    begun: Begun,
    records: EvalRecords,
    facts: dict[str, Any] | None = None,
    kept: Mapping[str, EpisodeResult] = MappingProxyType({}),
) -> Begun:
    return Begun(
        config=begun.config,
        targets=begun.targets,
        policy=begun.policy,
        facts=facts or begun.facts,
        records=records,
        kept=kept,
    )


def _require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise ConfigError where the policy is not the one whose results are there."""
    for part in ("model", "chat"):
        for name, value in before.get(part, {}).items():
            if name != "path" and now.get(part, {}).get(name) != value:
                raise ConfigError(
                    f"the {part} is not the one of the run: its {name} was {value}, and is {now.get(part, {}).get(name)} "
                    "now; start a new evaluation with --out"
                )


def _told(recovered: Recovered, total: int) -> str:
    kept = len(recovered.results)
    said = f"{kept} of {total} episodes stand, {total - kept} run again ({recovered.n_error} ended in an error)"
    return "\n".join([said, *(f"  {problem}" for problem in recovered.problems)])


async def _finish(begun: Begun) -> int:
    """Run what is missing, and say and write what came out."""
    named = {}
    for target in begun.targets:
        named[target.name] = await _evaluate(begun, target)
        await target.environments.close()  # else every benchmark's sandboxes would stand until the last has ended
    for name, one in named.items():
        print(f"{_headline(begun, name)}\n\n{table(one)}\n", flush=True)
    records = begun.records
    if records is not None:
        keep_report(records, begun.targets, named, begun.facts, begun.policy.tokenizer)
        print(f"wrote {records.folder.file(RESULTS)}")
    return 0 if any(one.summary.n_scored for one in named.values()) else NOTHING_SCORED


def keep_report(
    records: EvalRecords,
    targets: Sequence[Target],
    named: Mapping[str, Evaluation],
    facts: Mapping[str, Any],
    tokenizer: Any,
) -> None:
    """Write all that a finished evaluation consists of."""
    records.gather(targets)
    records.write_samples({name: one.results for name, one in named.items()})
    whole = {**facts, "counts": counts(named)}
    records.folder.write_manifest(whole)
    write_results(records.folder, named, whole)
    write_page(records.folder, named, whole, records.episodes(), tokenizer)


async def _evaluate(begun: Begun, target: Target) -> Evaluation:
    config, records = begun.config, begun.records
    total = len(target.uids())
    kept = {uid: begun.kept[uid] for uid in target.uids() if uid in begun.kept}
    with EvalProgress(target.name, total, len(kept)) as progress:

        def on_result(result: EpisodeResult, done: int, total: int) -> None:
            if records is not None:
                records.keep_result(target.name, result)
            progress(result)

        def on_trajectory(trajectory: Trajectory) -> None:
            if records is not None:
                records.keep_episode(trajectory)

        return await evaluate(
            runner=begun.policy.runner(target),
            tasks=target.tasks,
            samples=target.samples,
            clock=SystemClock(),
            seed=config.sampling.seed,
            env_id=target.environments.name,
            concurrency=config.concurrency,
            label=target.label,
            level=config.level,
            kept=kept,
            answer_of=answer_of,
            on_result=on_result,
            on_trajectory=on_trajectory,
        )


def _headline(begun: Begun, name: str) -> str:
    facts = begun.facts["protocol"]
    protocol = f", {facts['name']}" if facts["name"] else ""
    changed = f" but {'; '.join(facts['departures'])}" if facts["departures"] else ""
    said = f"{name}: {begun.config.kind} engine, {_spoken(begun.config.sampling)}{protocol}{changed}"
    return "\n".join([said, *(f"  {note}" for note in notes_on(begun.facts["benchmarks"][name]["tasks"]))])


def _spoken(config: SamplingConfig) -> str:
    how = "greedy" if config.is_greedy else f"temperature {config.temperature:g}"
    return f"{how}, seed {config.seed}"


def answer_of(text: str) -> str | None:
    """The boxed answer of a policy's last words as votes compare it: spaces aside, integers without leading zeros."""
    answer = extract_boxed(text)
    if answer is None:
        return None
    plain = "".join(answer.split())
    number = _INTEGER.fullmatch(plain)
    return plain if number is None else number[1] + number[2]
