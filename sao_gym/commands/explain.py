"""`sao_gym.explain`: one trajectory of a run, token by token, as the learner sees it.

Example:
    $ python -m sao_gym.explain runs/first r17
    episode r17 · task ... · terminated · score 1: right · 41 action tokens of 63
    trained at step 3 by policy version 2; figures of checkpoint step_60, policy version 55
    ...
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from sao_gym.commands.base import Options, run_command, take_options
from sao_gym.errors import ConfigError

USAGE = """usage: python -m sao_gym.explain RUN UID [--step N] [--all] [--json]   (or sao-gym explain ...)

Show one trajectory of a run, token by token: segment and turn, text, policy version, log-prob when it was sampled and
now, ratio, whether the policy loss keeps it, value, delta, advantage, reward. RUN is the folder of a run, UID names one
of its trajectories (r17). Nothing is written; a run that is going on can be read.

options
  --step N   weights of checkpoint N instead of the newest whole one; 0: those that the run started from
  --all      one line per token of observations, too
  --json     everything as one JSON object
"""


@run_command
def main(argv: list[str]) -> None:
    """Entry point of `python -m sao_gym.explain`."""
    options = take_options(argv, values=("step",), switches=("help", "all", "json"), positionals=True)
    if options.has("help"):
        print(USAGE, end="")
        return
    run, uid = _run_and_uid([*options.all(""), *options.rest])
    _explain(run, uid, _step(options), options)


def _run_and_uid(words: Sequence[str]) -> tuple[Path, str]:
    unknown = [word for word in words if word.startswith("-")]
    if unknown:
        raise ConfigError(f"explain has no option {unknown[0]}; it takes --step N, --all and --json")
    if len(words) != 2:
        raise ConfigError(f"explain takes the folder of a run and the uid of a trajectory, got {len(words)} words")
    return Path(words[0]), words[1]


def _step(options: Options) -> int | None:
    text = options.value("step")
    if text is not None and not text.isdecimal():
        raise ConfigError(f"--step takes the number of a checkpoint, got {text!r}")
    return None if text is None else int(text)


def _explain(path: Path, uid: str, step: int | None, options: Options) -> None:
    from sao_gym.commands import explain_view  # torch and transformers: slow, and not needed to refuse bad input
    from sao_gym.commands.recorded_run import RecordedRun
    from sao_gym.text_codec import TextCodec
    from sao_gym.trainer.explanation import explain

    run = RecordedRun.open(path)
    if not run.config.loss.has_critic:
        raise ConfigError(
            f"the run in {path} has no critic (loss.advantage = {run.config.loss.advantage}), and explain shows values "
            "and what follows from them; look at its trajectories instead (docs/runs.md)"
        )
    found = run.find(uid)
    networks = run.networks(step)
    explanation = explain(
        found.trajectory,
        networks.actor,
        networks.critic,
        run.config,
        version=found.version,
        text_of=TextCodec.of(networks.tokenizer).decode,
    )
    if options.has("json"):
        print(explain_view.as_json(explanation, found, networks))
    elif sys.stdout.isatty():
        explain_view.show(explanation, found, networks, every_token=options.has("all"))
    else:
        print(explain_view.plain(explanation, found, networks, every_token=options.has("all")))
