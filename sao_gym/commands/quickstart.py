"""`sao_gym.quickstart`: from nothing to an agent that uses its tool reliably, on two CPU cores.

A tiny policy is started by imitation, half of it of wrong demonstrations, and then gets better by the whole method:
asynchronous episodes, DIS, a critic, skip-observation GAE, the staleness rule, publication in flight.

Example:
    python -m sao_gym.quickstart --seed 1 --out runs/mine
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sao_gym.commands.base import Options, run_command, take_options
from sao_gym.errors import ConfigError, RunFolderError
from sao_gym.runfolder import METRICS, default_path

HELP = """usage: python -m sao_gym.quickstart [options] [settings of sao_gym.train]

Starts a tiny policy by imitation (sao_gym.sft --preset quickstart), trains it (sao_gym.train --preset quickstart),
and shows success before and after, one episode with its segments, and curves.png. Settings that are not named here go
to the training, e.g. --steps 20 or --actor.lr 1e-4.

  --out DIR     new folder for both parts (default: runs/quickstart-<UTC time>)
  --start DIR   start from this policy in place of the imitation part
  --seed N      seed of the training (default 0)
  --moe         a mixture-of-experts policy, trained with preset quickstart_moe"""


@dataclass(frozen=True, slots=True)
class Gain:
    """Held-out success before and after, sampled at temperature 1 and greedy."""

    before: float
    after: float
    greedy_before: float
    greedy_after: float


@run_command
def main(argv: list[str]) -> int:
    """Entry point of `python -m sao_gym.quickstart`."""
    options = take_options(argv, values=("out", "start", "seed"), switches=("help", "moe"))
    if options.has("help"):
        print(HELP)
        return 0
    preset = "quickstart_moe" if options.has("moe") else "quickstart"
    out = Path(options.value("out") or default_path(preset, datetime.now(UTC)))
    if out.exists() and any(out.iterdir()):
        raise RunFolderError(f"{out} is not empty: give a new folder with --out")
    start = Path(options.value("start") or out / "start")
    if options.value("start") is None and (code := _imitate(preset, start)):
        return code
    if code := _train(preset, start, out / "run", options):
        return code
    _show(out / "run")
    return 0


def _imitate(preset: str, start: Path) -> int:
    from sao_gym.commands.sft import main as sft

    print("-- 1 of 2: imitation, half of the demonstrations wrong on purpose", flush=True)
    kind = "qwen3_moe_tiny" if preset == "quickstart_moe" else "qwen3_tiny"
    return sft(["--preset", "quickstart", "--new", kind, "--out", str(start)])


def _train(preset: str, start: Path, run: Path, options: Options) -> int:
    from sao_gym.commands.train import main as train

    print("\n-- 2 of 2: asynchronous SAO", flush=True)
    words = ["--preset", preset, "--model", str(start), "--out", str(run), "--seed", options.value("seed") or "0"]
    return train([*words, *options.rest])


def read_gain(run: Path) -> Gain:
    """First and last evaluation of a run. Raises ConfigError if it holds none."""
    from sao_gym.jsonl import read_jsonl

    records: list[dict[str, Any]] = [record for _, record in read_jsonl(run / METRICS) if isinstance(record, dict)]
    sampled = [record["heldout_success"] for record in records if "heldout_success" in record]
    greedy = [record["heldout_greedy"] for record in records if "heldout_greedy" in record]
    if not sampled or not greedy:
        raise ConfigError(f"{run} holds no evaluation; train with --evaluation.at-ends")
    return Gain(sampled[0], sampled[-1], greedy[0], greedy[-1])


def _show(run: Path) -> None:
    """One episode of the last batch, and what the run achieved."""
    from sao_gym.models import load_policy
    from sao_gym.parquet import read_trajectories
    from sao_gym.trainer.checkpoint import find_checkpoints
    from sao_gym.trainer.files import CHECKPOINTS, TRAJECTORIES
    from sao_gym.transcript import show_episode

    whole, _ = find_checkpoints(run / CHECKPOINTS)
    tokenizer = load_policy(whole[-1][1] / "actor").tokenizer
    rows = read_trajectories(max((run / TRAJECTORIES).glob("*.parquet")))
    shown = max(rows, key=lambda row: (row.score is not None and row.score.passed, row.n_turns))
    print(f"\nan episode of the last batch:\n{show_episode(shown, tokenizer)}")
    gain = read_gain(run)
    print(
        f"\nheld-out success at temperature 1: {gain.before:.3f} before, {gain.after:.3f} after   "
        f"(greedy: {gain.greedy_before:.3f}, {gain.greedy_after:.3f})"
    )
    print(
        f"run folder: {run}   curves: {run / 'curves.png'}   token by token: python -m sao_gym.explain {run} {shown.uid}"
    )
