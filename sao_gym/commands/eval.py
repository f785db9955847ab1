"""`sao_gym.eval`: sample benchmarks N times and say how often the policy succeeds, and how sure that is.

An error of the infrastructure is never a wrong answer: scored, truncated and failed episodes are counted apart. With
`--out` the folder holds the raw episodes: what is missing can be run later, and all can be graded again without sampling.

Example:
    python -m sao_gym.eval --model runs/quickstart/policy --bench arithmetic,aime2025 --n 4 --limit 10 --out result
"""

import asyncio
from pathlib import Path

from sao_gym.commands.base import Options, run_command, take_options
from sao_gym.commands.eval_config import EvalConfig, resolve_eval
from sao_gym.commands.presets import EVAL_PRESETS
from sao_gym.config import changes, help_text, preset_names
from sao_gym.errors import ConfigError, RunFolderError
from sao_gym.runfolder import CONFIG, LOCK, RunFolder, new_folder

FREE = ("out", "concurrency")
"""Settings that a resumed evaluation may change: they decide no result."""
EXAMPLES = """usage: python -m sao_gym.eval [--protocol NAME] [--key value ...]

Sample benchmarks N times against a policy; prints success with its interval; no answer, truncations and errors apart.

examples
  python -m sao_gym.eval --model DIR --bench aime2025,hmmt_feb_2025 --protocol paper_math --out result
      as the paper measures: 16 samples of each problem, 128K tokens, at most 50 turns with the Python tool; the
      problems come from --data DIR, else from the folder SAO_GYM_DATA, else from the Hub
  python -m sao_gym.eval --resume result
      runs what is missing, torn or ended in an error, and nothing else
  python -m sao_gym.eval --rescore result
      grades the recorded episodes again, without sampling, and shows what changed
  python -m sao_gym.eval --compare before after
      two results on the same problems: difference, paired test, the smallest difference that they could show
  python -m sao_gym.eval --api-base https://api.example.com/v1 --api-model NAME --bench aime2025 --limit 5 --out result
      a model behind an OpenAI-compatible API; its key is in OPENAI_API_KEY, or in the variable --api-key-env names
  python -m sao_gym.eval --env arithmetic --model DIR --n 4 --limit 128
      4 samples of each of 128 held-out tasks of an environment
  python -m sao_gym.eval --tasks problems.jsonl --columns prompt=question,answer=gold --model DIR --greedy --tools none
      one greedy answer to each problem of a file (or of hf:owner/name), without the Python tool
  python -m sao_gym.eval --env my_env.py:MyEnv --engine scripted --completions said.jsonl
      an environment debugged without a model: each line of said.jsonl is a JSON text, the next turn of every episode

exit codes
  0 something was scored   1 nothing was   2 input that cannot be used, in one sentence   130 interrupted
"""
OWN_OPTIONS = (
    ("--protocol NAME", "a named bundle of settings, or the path of a .toml file; flags win over it"),
    ("--config FILE", "settings from a .toml file, after the protocol (may be repeated)"),
    ("--resume OUT", "go on with the evaluation in this folder; needs nothing beside it"),
    ("--rescore OUT", "grade the episodes in this folder again"),
    ("--compare A B", "compare the results in two folders"),
    ("--max-concurrency N", "the same as --concurrency"),
)


@run_command
def main(argv: list[str]) -> int:
    """Entry point of `python -m sao_gym.eval`."""
    words = take_options(
        argv, values=("config", "protocol", "resume", "rescore", "compare"), switches=("help",), positionals=True
    )
    if words.has("help"):
        print(EXAMPLES + "\n" + _settings())
        return 0
    if words.all(""):
        raise ConfigError(f"unexpected argument {words.all('')[0]!r}: settings are given as --key value")
    if (modes := [name for name in ("resume", "rescore", "compare") if words.value(name)]) and len(modes) > 1:
        raise ConfigError(f"--{modes[0]} and --{modes[1]} exclude each other; give one of them")
    if first := words.value("compare"):
        return _compare(first, words)
    if rescored := words.value("rescore"):
        return _rescore(Path(rescored), words)
    if resumed := words.value("resume"):
        return _resume(Path(resumed), words)
    return _new(words)


def _settings() -> str:
    return (
        help_text(EvalConfig, "", preset_names(EVAL_PRESETS), OWN_OPTIONS)
        .split("\n", 4)[-1]
        .replace("presets:", "protocols:", 1)
    )


def _new(words: Options) -> int:
    protocol = words.value("protocol")
    resolved = resolve_eval(protocol, words.all("config"), words.rest)
    from sao_gym.commands.eval_run import run_new  # slow, and not needed to refuse bad input

    if resolved.config.out is None:
        return asyncio.run(run_new(resolved, protocol, None))
    _refuse_used(Path(resolved.config.out))
    with new_folder(Path(resolved.config.out)) as folder:
        return asyncio.run(run_new(resolved, protocol, folder))


def _refuse_used(path: Path) -> None:
    names = sorted(item.name for item in path.iterdir()) if path.is_dir() else []
    if CONFIG in names:
        raise RunFolderError(
            f"{path} is not empty: it holds an evaluation; go on with it by --resume {path}, or give a new folder with --out"
        )
    if others := [name for name in names if name != LOCK]:  # a lock alone is left by a run that was refused
        raise RunFolderError(f"{path} is not empty (it has {', '.join(others[:3])}); give a new folder with --out")


def _resume(path: Path, words: Options) -> int:
    if words.value("protocol"):
        raise ConfigError("--resume goes on with the evaluation's own settings: leave --protocol out")
    with RunFolder.open_for_resume(path) as folder:
        own = str(folder.file(CONFIG))
        before, after = resolve_eval(own, (), ()), resolve_eval(own, words.all("config"), words.rest)
        if different := [one for one in changes(before.config, after.config) if one.key not in FREE]:
            listed = "; ".join(str(change) for change in different)
            raise ConfigError(
                f"the evaluation was started with other settings ({listed}): leave them out, or start a new one with --out"
            )
        from sao_gym.commands.eval_run import run_again

        return asyncio.run(run_again(after, folder))


def _rescore(path: Path, words: Options) -> int:
    _refuse_more(words, "--rescore")
    with RunFolder.open_for_resume(path) as folder:
        from sao_gym.commands.eval_rescore import rescore

        return asyncio.run(rescore(resolve_eval(str(folder.file(CONFIG)), (), ()), folder))


def _compare(first: str, words: Options) -> int:
    if len(words.rest) != 1 or words.rest[0].startswith("--"):
        raise ConfigError("--compare needs two folders of results and nothing else: --compare A B")
    from sao_gym.commands.eval_compare import compare_folders

    return compare_folders(Path(first), Path(words.rest[0]))


def _refuse_more(words: Options, mode: str) -> None:
    if words.rest or words.all("config") or words.value("protocol"):
        raise ConfigError(f"{mode} uses the evaluation's own settings: give nothing beside it")


if __name__ == "__main__":
    raise SystemExit(main())
