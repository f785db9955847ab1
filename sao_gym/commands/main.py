"""`sao-gym <command> ...`: finds the command and hands it the remaining words.

Commands are named here and imported only when they are asked for, so that listing them is instant.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from sao_gym import __version__
from sao_gym.commands.base import USER_ERROR, Command


@dataclass(frozen=True, slots=True)
class Entry:
    """A command: its name, `module:function`, and one line about it."""

    name: str
    target: str
    about: str

    def load(self) -> Command:
        """Import the command's `main(argv=None) -> exit code`."""
        module, _, function = self.target.partition(":")
        return cast(Command, getattr(importlib.import_module(module), function))


COMMANDS = (
    Entry("quickstart", "sao_gym.commands.quickstart:main", "train a small agent end to end, on two CPU cores"),
    Entry("train", "sao_gym.commands.train:main", "train an agent with asynchronous SAO"),
    Entry("sft", "sao_gym.commands.sft:main", "fine-tune a policy on trajectories, action tokens only"),
    Entry("pretrain_critic", "sao_gym.commands.pretrain_critic:main", "fit a critic to a fixed policy's returns"),
    Entry("eval", "sao_gym.commands.eval:main", "sample tasks N times and report success with an interval"),
    Entry("feedback", "sao_gym.commands.feedback:main", "serve an application, and learn from what its users say"),
    Entry("study", "sao_gym.commands.study:main", "train in several ways over several seeds, and compare"),
    Entry("explain", "sao_gym.commands.explain:main", "show one trajectory of a run, token by token"),
    Entry("grade", "sao_gym.commands.grade:main", "grade an answer against the gold answer, and say why"),
    Entry("judge", "sao_gym.commands.judge:main", "hold a judge of texts against labels by hand"),
    Entry("tasks", "sao_gym.commands.tasks:main", "make a terminal task out of a folder, a check and a patch"),
    Entry("swe", "sao_gym.commands.swe:main", "fetch the images that tasks of repositories run in"),
    Entry(
        "workers", "sao_gym.commands.workers:main", "make the environments of agent programs (openhands, mini, sglang)"
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The console script. Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_listing())
        return 0
    if words[0] == "--version":
        print(f"sao-gym {__version__}")
        return 0
    name = words[0].replace("-", "_")
    for entry in COMMANDS:
        if entry.name == name:
            return entry.load()(words[1:])
    close = difflib.get_close_matches(name, [entry.name for entry in COMMANDS], n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else "sao-gym --help lists them"
    print(f"sao-gym: error: there is no command {words[0]!r}; {hint}", file=sys.stderr)
    return USER_ERROR


def _listing() -> str:
    width = max(len(entry.name) for entry in COMMANDS)
    lines = [f"  {entry.name.ljust(width)}  {entry.about}" for entry in COMMANDS]
    head = [
        "usage: sao-gym COMMAND ...   (or python -m sao_gym.COMMAND ..., but for tasks and workers)",
        "",
        "commands",
    ]
    return "\n".join([*head, *lines, "", "sao-gym COMMAND --help lists a command's settings."])


if __name__ == "__main__":
    raise SystemExit(main())
