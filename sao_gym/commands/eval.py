"""`sao_gym.eval`: sample tasks N times and say how often the policy succeeds, and how sure that is.

An error of the infrastructure is never a wrong answer: scored, truncated and failed episodes are counted apart. With
`--out` the folder holds the raw outputs, so that they can be scored again without sampling.

Example:
    python -m sao_gym.eval --env arithmetic --model runs/quickstart/policy --n 4 --limit 128 --out result
"""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from sao_gym.budgets import Budgets
from sao_gym.chat import make_chat
from sao_gym.clock import SystemClock
from sao_gym.commands.base import run_command, take_options
from sao_gym.commands.environments import Environments
from sao_gym.commands.eval_config import RULES, EvalConfig, SamplingConfig, TasksConfig, is_scripted
from sao_gym.commands.eval_report import RESULTS, TRAJECTORIES, EvalProgress, table, versions, write_report
from sao_gym.completions import check_script, read_script, scripted_engine
from sao_gym.config import Resolved, dump, help_text, resolve
from sao_gym.errors import RunFolderError
from sao_gym.evaluation import Evaluation, TokenRunner, episode_uid, evaluate, take, to_record
from sao_gym.parquet import write_trajectories
from sao_gym.policy_loading import OpenPolicy, byte_tokenizer, chat_fingerprint, load_tokenizer, open_policy
from sao_gym.protocols import Sampling, Task
from sao_gym.registry import resolve as find_object
from sao_gym.registry import spec
from sao_gym.runfolder import LOCK, RunFolder
from sao_gym.stream import Trajectory
from sao_gym.tasks.base import hash_tasks, load_tasks

LABEL = "eval"
NOTHING_SCORED = 1
EXAMPLES = """usage: python -m sao_gym.eval [--key value ...]

Sample tasks N times against a policy; prints success with its interval, truncations and errors apart.

examples
  python -m sao_gym.eval --env arithmetic --model DIR --n 4 --limit 128 --out result
      4 samples of each of 128 held-out tasks; result/ then holds results.json, samples.jsonl, trajectories.parquet
  python -m sao_gym.eval --tasks problems.jsonl --model DIR --greedy
      one greedy answer to each problem of a file with "problem" and "answer" columns, with the Python tool
  python -m sao_gym.eval --env my_env.py:MyEnv --engine scripted --completions said.jsonl
      an environment debugged without a model: each line of said.jsonl is a JSON text, the next turn of every episode
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setup:
    """What is evaluated on: environments, the tasks taken, and what names them."""

    environments: Environments
    tasks: tuple[Task, ...]
    facts: dict[str, Any]


@run_command
def main(argv: list[str]) -> int:
    """Entry point of `python -m sao_gym.eval`."""
    words = take_options(argv, values=("config",), switches=("help",))
    if words.has("help"):
        taken = (("--config FILE", "a TOML file of settings"),)
        settings = help_text(EvalConfig, "", options=taken).split("\n", 4)[-1]
        print(EXAMPLES + "\n" + settings)
        return 0
    files = [Path(name) for name in words.all("config")]
    resolved = resolve(EvalConfig, files=files, overrides=words.rest, rules=RULES)
    if resolved.config.out is None:
        return asyncio.run(_run(resolved, None))
    _refuse_used(Path(resolved.config.out))
    with RunFolder.create(Path(resolved.config.out)) as folder:
        return asyncio.run(_run(resolved, folder))


def _refuse_used(path: Path) -> None:
    names = sorted(item.name for item in path.iterdir()) if path.is_dir() else []
    if others := [name for name in names if name != LOCK]:  # a lock alone is left by a run that was refused
        raise RunFolderError(f"{path} is not empty (it has {', '.join(others[:3])}); give a new folder with --out")


async def _run(resolved: Resolved[EvalConfig], folder: RunFolder | None) -> int:
    config = resolved.config
    setup = _setup(config.env, config.concurrency)
    try:
        await setup.environments.check()
        policy = _policy(config, setup)
        try:
            facts = await _manifest(config, setup, policy)
            if folder is not None:
                folder.write_config(dump(resolved))
                folder.write_manifest(facts)
            trajectories: list[Trajectory] = []
            keep = trajectories.append if folder is not None else None
            evaluation = await _evaluate(config, setup, policy, EvalProgress(folder), keep)
        finally:
            await policy.engine.close()
    finally:
        await setup.environments.close()
    print(f"{facts['tasks']['name']}: {config.engine.kind} engine, {_spoken(config.sampling)}\n\n{table(evaluation)}")
    if folder is not None:
        order = {result.uid: index for index, result in enumerate(evaluation.results)}
        write_trajectories(folder.file(TRAJECTORIES), sorted(trajectories, key=lambda one: order[one.uid]))
        write_report(folder, evaluation, facts, to_record(evaluation))
        print(f"\nwrote {folder.file(RESULTS)}")
    return 0 if evaluation.summary.n_scored else NOTHING_SCORED


async def _evaluate(
    config: EvalConfig,
    setup: _Setup,
    policy: OpenPolicy,
    progress: EvalProgress,
    keep: Callable[[Trajectory], None] | None,
) -> Evaluation:
    clock = SystemClock()
    runner = TokenRunner(
        engine=policy.engine,
        chat=policy.chat,
        make_env=setup.environments.make,
        budgets=_budgets(config.sampling),
        sampling=_sampling(config.sampling),
        clock=clock,
    )
    return await evaluate(
        runner=runner,
        tasks=setup.tasks,
        samples=config.sampling.n,
        clock=clock,
        seed=config.sampling.seed,
        env_id=setup.environments.name,
        concurrency=config.concurrency,
        label=LABEL,
        level=config.level,
        on_result=progress,
        on_trajectory=keep,
    )


# -- environment and tasks


def _setup(config: TasksConfig, size: int) -> _Setup:
    name = config.name or "python_math"
    options = dict(config.options)
    if config.tasks is not None:
        options["tasks"] = load_tasks(config.tasks)
    elif split := config.split or ("heldout" if _has_split(name) else None):
        options.setdefault("split", split)
    environments = Environments(name, options, size=size)
    given = environments.tasks
    tasks = take(given, config.limit)
    facts = {
        "name": getattr(given, "name", name),
        "content_hash": getattr(given, "content_hash", None) or hash_tasks(take(given)),
        "taken": len(tasks),
        "taken_hash": hash_tasks(tasks),
    }
    return _Setup(environments=environments, tasks=tasks, facts=facts)


def _has_split(name: str) -> bool:
    factory = spec(name).tasks
    found = find_object(factory) if isinstance(factory, str) else factory
    return found is not None and "split" in inspect.signature(found).parameters


# -- policy


def _policy(config: EvalConfig, setup: _Setup) -> OpenPolicy:
    if not is_scripted(config):
        return open_policy(
            config.model.path or "",
            chat_kind=config.model.chat,
            describe_tools=config.model.describe_tools,
            dtype=config.model.dtype,
            device=config.engine.device,
            slots=config.concurrency,
            context_length=config.engine.context_length,
            deterministic=config.engine.deterministic,
            threads=config.engine.threads,
        )
    path = config.engine.completions or ""
    script = read_script(path)
    check_script(script, setup.tasks, path)
    tokenizer = load_tokenizer(config.model.path) if config.model.path else byte_tokenizer()
    chat = make_chat(tokenizer, config.model.chat, describe_tools=config.model.describe_tools)
    episodes = {
        episode_uid(LABEL, index, attempt): script.lines(task.id, attempt)
        for index, task in enumerate(setup.tasks)
        for attempt in range(config.sampling.n)
    }
    return OpenPolicy(
        engine=scripted_engine(episodes, tokenizer, chat.stop_token_ids[0]), chat=chat, tokenizer=tokenizer
    )


def _sampling(config: SamplingConfig) -> Sampling:
    temperature = 0.0 if config.is_greedy else config.temperature
    return Sampling(max_tokens=config.max_tokens, temperature=temperature, top_p=config.top_p, top_k=config.top_k)


def _budgets(config: SamplingConfig) -> Budgets:
    return Budgets(
        max_tokens_per_turn=config.max_tokens,
        max_tokens_per_episode=config.max_tokens_per_episode,
        max_turns=config.max_turns,
        wall_clock_s=config.wall_clock_s,
    )


def _spoken(config: SamplingConfig) -> str:
    how = "greedy" if config.is_greedy else f"temperature {config.temperature:g}"
    return f"{how}, seed {config.seed}"


async def _manifest(config: EvalConfig, setup: _Setup, policy: OpenPolicy) -> dict[str, Any]:
    """All that it takes to do it again, and to see what differed."""
    template = getattr(policy.tokenizer, "chat_template", None)
    sampling = _sampling(config.sampling)
    return {
        "versions": versions(),
        "env": {"name": setup.environments.name, "options": config.env.options},
        "tasks": setup.facts,
        "model": {"path": config.model.path, "weight_hash": (await policy.engine.health()).weight_hash or None},
        "chat": {
            "kind": type(policy.chat).__name__,
            "fingerprint": chat_fingerprint(policy.chat),
            "describe_tools": getattr(policy.chat, "describe_tools", None),
            "template_hash": sha256(str(template).encode()).hexdigest() if template else None,
            "stop_token_ids": list(policy.chat.stop_token_ids),
        },
        "engine": {**asdict(config.engine), "dtype": config.model.dtype, "policy_version": policy.engine.version},
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "samples": config.sampling.n,
        },
        "seed": config.sampling.seed,
        "first_attempt": 0,
        "budgets": asdict(_budgets(config.sampling)),
    }


if __name__ == "__main__":
    raise SystemExit(main())
