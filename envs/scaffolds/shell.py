r"""Tools `bash` and `edit` over a sandbox: the smallest agent that can do real work, for any environment with a sandbox.

Invariants: whatever a policy asks for is answered by text that says what to do next, and only a sandbox that failed
raises; nothing that a command prints or leaves running holds up an answer; `edit` changes no byte that it was not asked
to change.

Example:
    shell = Shell(get_box)                       # async function that returns the episode's sandbox
    env = ToolEnv(tasks, tools=shell.tools)
"""

import re
import shlex
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from sao_gym.envs.sandboxes.spec import ShellSandbox
from sao_gym.envs.scaffolds.editing import edited, numbered
from sao_gym.errors import ConfigError, SandboxError
from sao_gym.loops import on_background
from sao_gym.protocols import ExecResult

STATE = "/tmp/.sao-gym-bash"
"""File inside that carries the folder and the exported variables from one command to the next."""
QUIET = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "GIT_EDITOR": "true",
    "GIT_TERMINAL_PROMPT": "0",
    "PIP_NO_INPUT": "1",
    "DEBIAN_FRONTEND": "noninteractive",
}
"""What keeps common programs from waiting for somebody at a terminal."""
_SCRIPT = r"""
exec 2>&1
_sg_save() {{
  {{ export -p; printf 'cd -- %q 2>/dev/null || echo "[the folder is gone; back in the first one]"\n' "$PWD"; }} >{state}
}} 2>/dev/null
[[ -f {state} ]] && . {state} 2>/dev/null
trap _sg_save EXIT
eval -- {command}
_sg_code=$?
_sg_save
exit $_sg_code
"""
_EDITORS = ("vi", "vim", "nvim", "nano", "emacs", "ed", "pico", "micro")
_PAGERS = ("less", "more", "most")
_SHELLS = ("bash", "sh", "zsh", "fish", "dash")
_INTERPRETERS = ("python", "python3", "ipython", "node", "irb", "psql", "sqlite3", "mysql", "bc", "gdb", "pdb", "R")
_SCREENS = ("top", "htop", "watch", "tmux", "screen", "ssh", "telnet", "man")
TERMINAL_S = 10.0
"""Most seconds for a program that would wait at a terminal for ever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellView:
    """How the tools answer: characters shown of one result, and the seconds a command may take (default, most)."""

    max_chars: int = 16_000
    timeout_s: float = 60.0
    max_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_chars < 200 or not 0 < self.timeout_s <= self.max_timeout_s:
            raise ConfigError(
                f"the shell shows max_chars = {self.max_chars} and waits timeout_s = {self.timeout_s} of at most "
                f"{self.max_timeout_s}; give at least 200 characters, and seconds above 0 up to the most"
            )


class Shell:
    """The two tools over whatever sandbox `get_box` returns; it is called on the background loop for every call."""

    def __init__(self, get_box: Callable[[], Awaitable[ShellSandbox]], view: ShellView | None = None) -> None:
        self._get_box = get_box
        self.view = view or ShellView()

    @property
    def tools(self) -> Sequence[Callable[..., Awaitable[str]]]:
        """What an environment hands to `ToolEnv`."""
        return (self.bash, self.edit)

    async def bash(self, command: str, timeout: float | None = None) -> str:
        """Run a bash command in the sandbox. The folder (cd) and exported variables are kept from call to call, functions and aliases are not.

        There is no terminal and no input: programs that ask or show a screen do not work. To leave something running,
        end the command with & and send its output to a file.

        Args:
            command: What to run; several lines are fine.
            timeout: Seconds that it may take. A command that takes longer is stopped with all that it started.
        """
        return await on_background(self._bash(command, timeout))

    async def edit(
        self,
        command: Literal["view", "create", "replace", "insert"],
        path: str,
        text: str | None = None,
        old: str | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> str:
        """Look at or change one text file. Lines count from 1.

        view: show lines start to end (or all; of a folder, what is in it). create: write text as the whole file.
        replace: put text in the place of old, which must stand in the file exactly once. insert: put text as new lines
        after line start (0: before the first).

        Args:
            command: What to do.
            path: An absolute path, or one below the folder that the task began in.
            text: The new text for create, replace and insert.
            old: For replace, the text to be replaced, with every space and line break.
            start: For view, the first line; for insert, the line to insert after.
            end: For view, the last line.
        """
        return await on_background(self._edit(command, path, text, old, start, end))

    async def source(self, command: str, timeout_s: float = 60.0) -> ExecResult:
        """Run a command as `bash` does, on the background loop: what it exports holds for the commands that follow."""
        box = await self._get_box()
        script = _SCRIPT.format(state=STATE, command=shlex.quote(command))
        return await box.exec(script, timeout_s=timeout_s, env=QUIET)

    async def _bash(self, command: str, timeout: float | None) -> str:
        most = self.view.max_timeout_s
        limit = self.view.timeout_s if timeout is None else float(timeout)
        if not 0 < limit <= most:
            return f"Error: timeout must be above 0 and at most {most:g} seconds, got {limit:g}"
        if not command.strip():
            return "Error: the command is empty; give one"
        if "\0" in command:
            return "Error: the command holds a NUL character, which no program can be given; leave it out"
        if _needs_terminal(command):
            limit = min(limit, TERMINAL_S)
        return answer(await self.source(command, limit), command, limit, self.view.max_chars)

    async def _edit(
        self, command: str, path: str, text: str | None, old: str | None, start: int | None, end: int | None
    ) -> str:
        if not path or "\0" in path:
            return "Error: give a path, without NUL characters"
        box = await self._get_box()
        place = path if path.startswith("/") else f"{box.spec.workdir.rstrip('/')}/{path}"
        kind, detail = await _look(box, place)
        if kind == "missing" and command != "create":
            return f"Error: there is no file {path}; create it, or look for it with bash (find . -name ...)"
        if kind == "folder":
            return detail if command == "view" else f"Error: {path} is a folder; give the path of a file"
        if kind == "other":
            return f"Error: {path} {detail}"
        try:
            if command == "create" and text is not None:
                await box.write(place, text.encode("utf-8"))
                lines = text.count("\n") + (not text.endswith("\n") and bool(text))
                return f"{'Replaced all of' if kind == 'file' else 'Created'} {path} ({lines} lines)."
            if command == "create":
                return "Error: create needs text, the whole file"
            data = await box.read(place)
            if command == "view":
                return numbered(data, path, start, end, self.view.max_chars)
            made = edited(data, path, command, text=text, old=old, line=start)
            if made.data is not None:
                await box.write(place, made.data)
            return made.said
        except UnicodeEncodeError:
            return "Error: the text holds half of a character pair, which no file can; write the character itself"
        except SandboxError as error:
            if await box.is_alive():  # it works: the file was the trouble
                return f"Error: {error}"
            raise


async def _look(box: ShellSandbox, path: str) -> tuple[str, str]:
    """What stands at a path: (missing | folder | file | other, a listing or what is wrong)."""
    place = shlex.quote(path)
    script = (
        f'p={place}; if [[ -d $p ]]; then echo folder; ls -Ap -- "$p" | head -n 200; '
        'elif [[ ! -e $p && -L $p ]]; then echo other; echo "is a link to $(readlink -- "$p"), which is not there"; '
        "elif [[ ! -e $p ]]; then echo missing; "
        'elif [[ ! -f $p ]]; then echo other; echo "is no regular file; use bash"; '
        'elif [[ ! -r $p ]]; then echo other; echo "may not be read; use bash to see why (ls -l)"; '
        "else echo file; fi"
    )
    result = await box.exec(script, timeout_s=20.0)
    kind, _, detail = result.stdout.partition("\n")
    if kind not in ("missing", "folder", "file", "other"):
        return "other", f"could not be looked at: {(result.stderr or result.stdout).strip() or 'no answer'}"
    return kind, detail.rstrip("\n") or "(an empty folder)"


def answer(result: ExecResult, command: str, timeout_s: float, max_chars: int) -> str:
    """A command's result as the policy reads it: output, its middle left out where long, exit code, a hint."""
    output = result.stdout + result.stderr
    parts = [cut_middle(output.rstrip("\n"), max_chars, result.truncated)] if output.strip("\n") else []
    if result.timed_out:
        parts.append(
            f"[stopped after {timeout_s:g} s, with all that it started; above is what was printed until then. Give a "
            "longer timeout, or run it in the background: command >log 2>&1 &]"
        )
    else:
        parts.append(f"[exit code {result.exit_code}]" if parts or result.exit_code else "[no output, exit code 0]")
    if hint := hint_for(command, result):
        parts.append(hint)
    return "\n".join(parts)


def cut_middle(text: str, max_chars: int, lost_bytes: int = 0) -> str:
    """`text`, or its first and last lines around a note of how many lines between them were left out.

    `lost_bytes` were left out before, and nobody counted their lines.
    """
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    head, tail = text[:half], text[-half:]
    head = head[: head.rfind("\n") + 1] or head
    tail = tail[tail.find("\n") + 1 :] if "\n" in tail[:-1] else tail
    middle = text[len(head) : len(text) - len(tail)]
    lines = middle.count("\n")
    if not lines:
        return f"{head}[... {len(middle)} characters of this line left out ...]{tail}"
    gap = "" if head.endswith("\n") else "\n"
    more = f" and {lost_bytes} bytes more" if lost_bytes else ""
    return f"{head}{gap}[... {lines} lines{more} left out ...]\n{tail}"


def hint_for(command: str, result: ExecResult) -> str:
    """A sentence about a program that wanted a person at a terminal; empty where there was none."""
    words = _words(command)
    if not words:
        return ""
    name, rest = words[0].rpartition("/")[2], words[1:]
    if name in _EDITORS:
        return f"[hint: {name} needs a terminal, and there is none; change files with the edit tool, or with sed]"
    if name in _PAGERS:
        return f"[hint: {name} needs a terminal to page; use the edit tool's view, head, tail or sed -n 'A,Bp']"
    if name in _SCREENS:
        return f"[hint: {name} needs a terminal, and there is none; use a form that prints and ends]"
    if name in (*_INTERPRETERS, *_SHELLS) and not rest and not result.stdout.strip():
        return f"[hint: {name} found no input and ended; give it a file, {name} -c '...', or a here-document]"
    if "EOFError" in result.stdout or "EOF when reading" in result.stdout:
        return "[hint: the program asked for input, and stdin is empty; give it with a pipe or < FILE]"
    return ""


def _needs_terminal(command: str) -> bool:
    words = _words(command)
    return bool(words) and words[0].rpartition("/")[2] in (*_EDITORS, *_SCREENS)


def _words(command: str) -> list[str]:
    """Words of the last simple command of a line, environment settings and sudo-like prefixes aside."""
    last = re.split(r"&&|\|\||;|\n", command.strip().rstrip("&"))[-1]
    if "|" in last or "<" in last or ">" in last:
        return []
    words = last.split()
    while words and ("=" in words[0] or words[0] in ("env", "sudo", "exec", "time", "nohup")):
        words = words[1:]
    return words
