"""`sao_gym.feedback`: a policy that answers an application and learns from what its users say of the answers.

Example:
    $ python -m sao_gym.feedback serve --model start --out runs/app
    $ python -m sao_gym.feedback status runs/app
    $ python -m sao_gym.feedback delete runs/app 5f0c9a41d2e87b36aa10c4f2
    $ python -m sao_gym.feedback rollback runs/app 12
"""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from sao_gym.commands.base import Options, run_command, take_options
from sao_gym.config import resolve
from sao_gym.errors import ConfigError, RunFolderError
from sao_gym.feedback.book import BOOK, FeedbackBook, ServedEpisode, ServedState
from sao_gym.feedback.reconcile import by_episode, episode_of
from sao_gym.ledger import LEDGER_FILE, Ledger, RowStatus
from sao_gym.runfolder import CONFIG, RunFolder
from sao_gym.trainer.config import TrainConfig

if TYPE_CHECKING:
    from sao_gym.trainer.rollback import RolledBack

HELP = """usage: python -m sao_gym.feedback COMMAND ...

  serve [settings of sao_gym.train]   train on what an application asks and its users say: --model FOLDER begins a run,
                                      --resume RUN goes on with one (preset: trainer/presets/feedback.toml)
  status RUN                          how many episodes were served, and what became of them; also of a run that goes on
  delete RUN EPISODE [EPISODE ...]    take episodes out of a run's ledger, book and files; the run must not be going on
  rollback RUN VERSION [--again]      go back to an earlier published version, and never again train on what was trained since
                                      (--again: do train on it again); the run must not be going on

An application sends what it would send to OpenAI's API, to the address in RUN/feedback.address under the key in
RUN/feedback.key. The header x-sao-episode of an answer names its episode: sent back it goes on with that conversation, and
POST .../v1/feedback {"episode": "...", "score": 1.0} says how good it was, from 0 to 1. See docs/feedback.md.
"""


@run_command
def main(argv: list[str]) -> int:
    """Entry point of `python -m sao_gym.feedback`."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if name == "serve":
        return _serve(argv[1:])
    command = COMMANDS.get(name)
    if command is None:
        raise ConfigError(f"there is no {name!r}; take serve, {', '.join(COMMANDS)}")
    words = take_options(argv[1:], switches=("help", "again"), positionals=True)
    if words.has("help"):
        print(HELP, end="")
        return 0
    if words.rest or (words.has("again") and name != "rollback"):
        raise ConfigError(f"{name} does not know {' '.join(words.rest) or '--again'}; see --help")
    run, *rest = words.all("") or ("",)
    if not run:
        raise ConfigError(f"{name} takes the folder of a run first")
    command(Path(run), rest, words)
    return 0


def _serve(words: Sequence[str]) -> int:
    from sao_gym.commands.train import main as train

    if other := [word for word in words if word.partition("=")[0] in ("--env", "--env.name")]:
        raise ConfigError(f"serve is for the environment feedback, so leave {other[0]} out; sao_gym.train takes any")
    return train(list(words) if "--resume" in words or "--help" in words else ["--env", "feedback", *words])


def _book(run: Path) -> FeedbackBook:
    if not (run / BOOK).is_file():
        raise RunFolderError(f"{run} holds no {BOOK}: give the folder of a run that served an application")
    return FeedbackBook(run / BOOK)


def _status(run: Path, rest: Sequence[str], words: Options) -> None:
    if rest:
        raise ConfigError(f"status takes the folder of a run alone, got also {' '.join(rest)}")
    with closing(_book(run)) as book:
        lines = book.episodes()
    print(f"{len(lines)} episodes served")
    for state in ServedState:
        if found := [line for line in lines if line.state is state]:
            print(f"  {state:<8} {len(found)}{_reasons(found)}")
    if scores := [line.score for line in lines if line.score is not None]:
        print(f"mean score {sum(scores) / len(scores):.3f} of {len(scores)}")


def _reasons(lines: Sequence[ServedEpisode]) -> str:
    """Why some of them are not trained, by frequency."""
    counted = Counter(line.why for line in lines if line.why).most_common()
    return f"   not trained: {', '.join(f'{count} {why}' for why, count in counted)}" if counted else ""


def _delete(run: Path, names: Sequence[str], words: Options) -> None:
    if not names:
        raise ConfigError("delete takes the names of episodes after the run's folder")
    with RunFolder.open_for_resume(run), closing(_book(run)) as book, closing(Ledger(run / LEDGER_FILE)) as ledger:
        if missing := [name for name in names if book.find(name) is None]:
            raise ConfigError(f"{run} served no episode {missing[0]!r}; nothing was deleted")
        _take_out(run, ledger, book, set(names))
        book.delete(*names)
    print(f"deleted {len(names)}: text, score and comment are gone; what the weights learnt from it stays in them")


def _take_out(run: Path, ledger: Ledger, book: FeedbackBook, names: set[str]) -> None:
    """Files first, the ledger then: whatever interrupts, the same command finishes it."""
    from sao_gym.trainer.rollback import forget_canary, take_out  # torch

    take_out(run, lambda trajectory: episode_of(trajectory) in names)
    for row in ledger.rows(RowStatus.READY):
        held = ledger.trajectory(row.number)
        if episode_of(held) in names:
            forget_canary(run, [held])
            ledger.set_dropped(row.number, "deleted")
    # One that a crash took out of the files after the canary was cut from it stands in the book alone.
    forget_canary(run, [kept for name in names if (kept := book.trajectory(name)) is not None])
    ledger.scrub()


def _rollback(run: Path, rest: Sequence[str], words: Options) -> None:
    from sao_gym.trainer.rollback import roll_back  # torch

    if len(rest) != 1 or not rest[0].isdecimal():
        raise ConfigError(
            f"rollback takes a run's folder and the number of a version, got {' '.join(rest) or 'no version'}"
        )
    with RunFolder.open_for_resume(run), closing(Ledger(run / LEDGER_FILE)) as ledger:
        done = roll_back(run, ledger, version=int(rest[0]), again=words.has("again"), now=datetime.now(UTC))
        if (run / BOOK).is_file():
            _note_dropped(run, done)
    print(f"version {done.state.version}, step {done.state.step}, is the newest of {run} now")
    print(
        f"{done.checkpoints} later checkpoints set aside, {len(done.dropped)} rows trained since dropped: {done.aside}"
    )
    print(f"go on with python -m sao_gym.train --resume {run}")


def _note_dropped(run: Path, done: "RolledBack") -> None:
    """The book learns of what will not be trained again; what the run does not keep is not kept aside either."""
    from sao_gym.trainer.files import TRAJECTORIES  # torch

    keep = resolve(TrainConfig, preset=run / CONFIG).config.feedback.keep
    with closing(FeedbackBook(run / BOOK, keep)) as book:
        for name, trajectory in by_episode(done.dropped).items():
            book.set_untrained(name, f"rolled back to version {done.state.version}", trajectory)
    if keep == "until_trained":
        shutil.rmtree(done.aside / TRAJECTORIES, ignore_errors=True)


COMMANDS: Mapping[str, Callable[[Path, Sequence[str], Options], None]] = MappingProxyType(
    {"status": _status, "delete": _delete, "rollback": _rollback}
)
