r"""`sao-gym tasks new`: a terminal task out of a folder, a check command and a patch, tried before it is written.

Example:
    $ sao-gym tasks new --from ./project --check 'python3 -m unittest' --patch fix.diff \
          --instruction 'Mend the parser: it drops the last line.' --out tasks.jsonl
"""

import hashlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sao_gym.commands.base import Options, run_command, take_options
from sao_gym.envs.sandboxes.backends import check_backend
from sao_gym.envs.sandboxes.tree import Tree, matches, tar_of, tree_of_folder
from sao_gym.envs.terminal import TerminalEnv, apply_patch_command
from sao_gym.envs.terminal_task import COMPILED, WORKDIR, TerminalTask
from sao_gym.errors import ConfigError, SandboxError, SandboxUnavailableError, TaskFileError
from sao_gym.messages import Message, ToolCall
from sao_gym.protocols import Task
from sao_gym.stream import Score
from sao_gym.tasks.base import load_tasks, save_jsonl

USAGE = """usage: sao-gym tasks new --from FOLDER --check COMMAND --patch FILE --instruction TEXT --out FILE.jsonl

Make a task for the terminal environment out of a folder of yours. The check is a command that exits with 0 when the work is
done. Before anything is written, a sandbox shows that it fails on the folder as it is and passes once the patch is applied.
The task is appended to FILE.jsonl, and the folder is packed beside it (FILE.files/ID.tar.gz).

  --from FOLDER        the folder that the agent is given (.git and compiled Python stay behind)
  --check COMMAND      runs in the folder, without network, after the agent has stopped
  --patch FILE         unified diff (git diff, diff -u) that does the work; it becomes the task's answer
  --instruction TEXT   what the agent is told; @FILE reads it from a file
  --out FILE.jsonl     the task file; one that is there gets one more line
  --hidden PATTERN     files of the folder that only the check sees, e.g. 'tests/hidden/*' (may be repeated)
  --expect REGEX       what the check's output must hold beside exit code 0, e.g. '^OK$'; code under test that ends its own
                       process with 0 would pass without it
  --id ID              the task's name (default: the folder's, with a number if it is taken)
  --timeout SECONDS    what one check may take (default 200)
  --backend NAME       local (default), docker, e2b or package.module:function
  --image NAME         image, template or root folder that has what the check needs (default: the backend's own)

Test files, conftest.py, pytest.ini and the like are put back as they are here before every check, so that the agent cannot
change them; everything that decides and should not be seen belongs under --hidden.

examples
  sao-gym tasks new --from . --check 'python3 -m unittest' --expect '^OK$' --patch fix.diff --instruction @issue.txt --out my.jsonl
  sao-gym tasks new --from app --check 'pytest -q' --hidden 'tests/test_new.py' --patch fix.diff --instruction 'Add --json.' \\
      --backend docker --image my-app:dev --out my.jsonl
  sao-gym train --env terminal --tasks my.jsonl --model FOLDER
"""
NEEDED = ("from", "check", "patch", "instruction", "out")
OPTIONAL = ("expect", "id", "timeout", "backend", "image", "hidden")
LEFT_BEHIND = (".git", ".hg", ".svn", ".venv", "*.egg-info", ".mypy_cache", ".ruff_cache", *COMPILED)
MOST_BYTES = 200 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for, read and checked."""

    task_id: str
    prompt: str
    patch: str
    out: Path
    backend: str
    seen: Tree
    hidden: Tree
    check: dict[str, Any]
    image: str


@run_command
def main(argv: list[str]) -> int:
    """Entry point of `sao-gym tasks`."""
    if not argv or argv[0] in ("-h", "--help") or argv[1:] in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if argv[0] != "new":
        raise ConfigError(
            f"sao-gym tasks knows no {argv[0]!r}; the one thing that it does is: sao-gym tasks new --help"
        )
    wanted = read_wanted(take_options(argv[1:], values=(*NEEDED, *OPTIONAL), switches=("help",)))
    try:
        task = packed(wanted)
        prove(task, wanted)
        earlier = load_tasks(wanted.out) if wanted.out.exists() else ()
        save_jsonl(wanted.out, [*earlier, task])
    except BaseException:
        unpack(wanted)
        raise
    print(f"{wanted.out}: {task.id} was added; without the patch the check fails, with it it passes")
    return 0


def read_wanted(options: Options) -> Wanted:
    """The command's words. Raises ConfigError, TaskFileError."""
    if options.rest:
        raise ConfigError(
            f"sao-gym tasks new does not know {options.rest[0]!r}; sao-gym tasks new --help lists its words"
        )
    if missing := [name for name in NEEDED if options.value(name) is None]:
        raise ConfigError(f"sao-gym tasks new needs --{missing[0]}; --help shows an example")
    given = {name: options.value(name) or "" for name in (*NEEDED, *OPTIONAL)}
    folder, out = Path(given["from"]), Path(given["out"]).absolute()
    backend = given["backend"] or "local"
    check_backend(backend)
    if not folder.is_dir():
        raise ConfigError(f"--from {folder} is no folder; give the folder that the agent is to work in")
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out.name} must end in .jsonl; it is a file of tasks, one a line")
    tree = tree_of_folder(folder, LEFT_BEHIND)
    _check_tree(folder, tree)
    hidden = {place: entry for place, entry in tree.items() if matches(place, options.all("hidden"))}
    if options.all("hidden") and not hidden:
        raise ConfigError(
            f"--hidden {options.all('hidden')[0]!r} names no file of {folder}; give a pattern such as 'tests/hidden/*'"
        )
    check: dict[str, Any] = {"command": given["check"], "timeout_s": _seconds(given["timeout"] or "200")}
    return Wanted(
        task_id=_free_id(given["id"], folder, out),
        prompt=_instruction(given["instruction"]),
        patch=_text(Path(given["patch"]), "--patch"),
        out=out,
        backend=backend,
        seen={place: entry for place, entry in tree.items() if place not in hidden},
        hidden=hidden,
        check={**check, "expect": given["expect"]} if given["expect"] else check,
        image=given["image"],
    )


def packed(wanted: Wanted) -> Task:
    """The task, its folders packed beside the task file. Raises TaskFileError if it cannot be read as one."""
    store = wanted.out.with_suffix(".files")
    store.mkdir(parents=True, exist_ok=True)
    info: dict[str, Any] = {
        "workdir": WORKDIR,
        "folder": _pack(store, wanted.task_id, wanted.seen),
        "check": wanted.check,
    }
    if wanted.hidden:
        info["check"] = {**wanted.check, "folder": _pack(store, f"{wanted.task_id}.check", wanted.hidden)}
    if wanted.image:
        info["image"] = wanted.image
    task = Task(id=wanted.task_id, prompt=wanted.prompt, answer=wanted.patch, info=info)
    TerminalTask.of(task)
    return task


def unpack(wanted: Wanted) -> None:
    """Take away what `packed` has put beside the task file."""
    store = wanted.out.with_suffix(".files")
    for name in (wanted.task_id, f"{wanted.task_id}.check"):
        (store / f"{name}.tar.gz").unlink(missing_ok=True)
    with suppress(OSError):  # other tasks' folders are there
        store.rmdir()


def prove(task: Task, wanted: Wanted) -> None:
    """Raises TaskFileError unless the check fails without the patch and passes with it."""
    env = TerminalEnv([task], backend=wanted.backend)
    try:
        print("without the patch ...", flush=True)
        before = _played(env, None)
        if before.passed:
            raise TaskFileError(
                "the check passes on the folder as it is, so there would be nothing to do; give a check that fails "
                "without the patch"
            )
        print("with the patch ...", flush=True)
        after = _played(env, wanted.patch)
    except (SandboxError, SandboxUnavailableError) as error:
        raise SandboxUnavailableError(f"the task could not be tried in a sandbox: {error}") from error
    finally:
        env.close()
    if not after.passed:
        raise TaskFileError(
            f"the check does not pass with the patch: {_tail(after.detail)}; mend the patch, or give an --image that has "
            "what the check needs"
        )


def _played(env: TerminalEnv, patch: str | None) -> Score:
    """The score of an episode that applies the patch and does nothing else."""
    env.reset(seed=0)
    if patch is not None:
        command = apply_patch_command(patch)
        call = ToolCall(id="call_0", name="bash", arguments={"command": command})
        (said,), *_ = env.step(Message.assistant(tool_calls=(call,)))
        if "exit code 0]" not in said.content:
            raise TaskFileError(
                f"the patch does not apply to the folder: {_tail(said.content)}; make it with git diff inside the folder"
            )
    *_, info = env.step("Done.")
    score = info["score"]
    if not isinstance(score, Score):
        raise SandboxError("the check gave no verdict")
    return score


def _pack(store: Path, name: str, tree: Tree) -> dict[str, str]:
    data = tar_of(tree, compress=True)
    path = store / f"{name}.tar.gz"
    path.write_bytes(data)
    return {"file": str(path), "sha256": hashlib.sha256(data).hexdigest()}


def _check_tree(folder: Path, tree: Tree) -> None:
    size = sum(len(entry.data or b"") for entry in tree.values())
    if not tree:
        raise ConfigError(f"--from {folder} holds no files; give the folder that the agent is to work in")
    if size > MOST_BYTES:
        raise ConfigError(
            f"--from {folder} holds {size >> 20} MiB, more than {MOST_BYTES >> 20}; put what is large into an --image, and "
            "give the folder without it"
        )


def _free_id(asked: str, folder: Path, out: Path) -> str:
    """The task's name, as a file can be named too. Raises ConfigError if it is taken or is none."""
    taken = {task.id for task in load_tasks(out)} if out.exists() else set()
    name = asked or "".join(c if c.isalnum() or c in "-_." else "-" for c in folder.resolve().name) or "task"
    if asked in taken:
        raise ConfigError(f"--id {asked!r} is taken in {out}; choose another")
    if asked and not all(c.isalnum() or c in "-_." for c in asked):
        raise ConfigError(f"--id {asked!r} may hold letters, digits, '-', '_' and '.' alone")
    number, free = 2, name
    while free in taken:
        number, free = number + 1, f"{name}-{number}"
    return free


def _instruction(text: str) -> str:
    return _text(Path(text[1:]), "--instruction").strip() if text.startswith("@") else text


def _text(path: Path, flag: str) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"{flag} {path} cannot be read: {reason}") from error
    if not text.strip():
        raise ConfigError(f"{flag} {path} is empty")
    return text


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ConfigError(f"--timeout {text!r} is no number of seconds above 0")
    return value


def _tail(text: str) -> str:
    return " ".join(text.split())[-300:]


if __name__ == "__main__":
    sys.exit(main())
