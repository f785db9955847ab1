"""A terminal inside a sandbox for OpenHands' terminal tool.

OpenHands' session logic (soft timeouts, input to a running command, resets, the text of every answer) is used as it is; it
drives a `TerminalInterface`, and this is one: bash on a pseudoterminal inside, its keys through a pipe, its screen a file of
which new bytes are fetched. A command goes in as a file that bash evaluates, so that no length or control character of it
meets the terminal; typed input goes in as keys.
"""

import re
import shlex
from typing import Any

from openhands.tools.terminal import impl
from openhands.tools.terminal.constants import CMD_OUTPUT_PS1_BEGIN, CMD_OUTPUT_PS1_END
from openhands.tools.terminal.metadata import CmdOutputMetadata
from openhands.tools.terminal.terminal.interface import TerminalInterface, parse_ctrl_key
from openhands.tools.terminal.terminal.terminal_session import TerminalSession

START = r"""
d=$(mktemp -d /tmp/.terminal-XXXXXXXX) && mkfifo "$d/in" && : >"$d/out" || exit 1
if command -v script >/dev/null; then run=(script -qfc 'exec bash --noediting -i' /dev/null)
elif command -v python3 >/dev/null; then run=(python3 -c 'import pty; pty.spawn(["bash", "--noediting", "-i"])')
else echo "the sandbox has neither script nor python3, one of which a terminal needs" >&2; exit 3; fi
export TERM=dumb PAGER=cat GIT_PAGER=cat MANPAGER=cat GIT_TERMINAL_PROMPT=0
set -m  # else what runs in the background is deaf to control-C
"${run[@]}" <>"$d/in" >>"$d/out" 2>&1 &
echo $! >"$d/pid"; echo "$d"
"""
READ = r"""
size=$(wc -c <"$d/out"); from={offset}
(( size - from > {most} )) && from=$(( size - {most} ))
kill -0 "$(<"$d/pid")" 2>/dev/null && echo alive || echo ended
echo "$from $size"
tail -c +$(( from + 1 )) "$d/out" | head -c $(( size - from ))
(( size > {full} )) && : >"$d/out"
exit 0
"""
FULL = 8 << 20
KEPT = 400_000
KEYS = {
    "ENTER": "\n",
    "TAB": "\t",
    "BS": "\x7f",
    "ESC": "\x1b",
    "UP": "\x1b[A",
    "DOWN": "\x1b[B",
    "RIGHT": "\x1b[C",
    "LEFT": "\x1b[D",
    "HOME": "\x1b[H",
    "END": "\x1b[F",
    "PGUP": "\x1b[5~",
    "PGDN": "\x1b[6~",
}
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
PROMPT_END = CMD_OUTPUT_PS1_END.rstrip()


class SandboxTerminal(TerminalInterface):
    """See the module. `lines` reaches the sandbox; `output_bytes` bounds what one command there may show."""

    def __init__(self, lines: Any, workdir: str, output_bytes: int) -> None:
        super().__init__(workdir)
        self._lines = lines
        self._most = max(4096, min(output_bytes - 4096, 200_000))
        self._folder, self._offset, self._screen = "", 0, ""
        self._at_prompt = False
        self.session: Any = None

    def _exec(self, script: str, **more: Any) -> dict[str, Any]:
        done: dict[str, Any] = self._lines.ask("exec", command=script, cwd="/", timeout_s=60.0, **more)
        return done

    def initialize(self) -> None:
        """Start the shell, in the work folder, with the prompt by which OpenHands knows that a command has ended."""
        done = self._lines.ask("exec", command=START, cwd=self.work_dir, timeout_s=60.0, entered=True)
        if done["exit_code"]:
            raise RuntimeError(f"no terminal could be started in the sandbox: {done['stderr'].strip()[-300:]}")
        self._folder = done["stdout"].strip()
        self._initialized = True
        prompt = CmdOutputMetadata.to_ps1_prompt()
        setup = f"set +H; PROMPT_COMMAND='export PS1=\"{prompt}\"'; PS2=''; stty -echo cols 256 rows 200\n"
        self._put("setup", setup)
        self._type(f". {self._folder}/setup; rm -f {self._folder}/setup\n")
        for _ in range(200):
            if self.read_screen().rstrip().endswith(PROMPT_END):
                break
            self._exec("sleep 0.05")
        else:
            raise RuntimeError(f"the sandbox's shell gave no prompt: {self._screen[-300:]!r}")
        self.clear_screen()

    def _put(self, name: str, text: str) -> None:
        self._lines.ask("write", path=f"{self._folder}/{name}", text=text)

    def _type(self, text: str) -> None:
        self._exec(f"cat >{shlex.quote(self._folder + '/in')}", stdin=text)

    def send_keys(self, text: str, enter: bool = True) -> None:
        """A command if the shell is at its prompt, else what somebody types."""
        name = text.strip().upper()
        control = None if name in KEYS else parse_ctrl_key(text)
        if name in KEYS:
            self._type(KEYS[name])
        elif control is not None:
            self._type(chr(ord(control[-1].upper()) & 0x1F))
        else:
            end = "\n" if enter else ""
            self._screen += text + end  # as a terminal's echo: a screen that ends in a prompt is one where nothing runs
            if self._at_prompt and enter:
                self._at_prompt = False
                self._put("command", text)
                text = f'eval -- "$(<{self._folder}/command)"'
            self._type(text + end)

    def read_screen(self) -> str:
        """What stands on the screen since it was cleared, without carriage returns and colours."""
        if self._closed:
            return self._screen
        script = f"d={shlex.quote(self._folder)}" + READ.format(offset=self._offset, most=self._most, full=FULL)
        state, place, new = [*self._exec(script)["stdout"].split("\n", 2), "", "", ""][:3]
        start, size = (int(word) for word in (place or "0 0").split())
        if start > self._offset:  # so much came that its beginning is gone
            self._screen = ""
        self._offset = 0 if size > FULL else size
        self._screen = (self._screen + ESCAPES.sub("", new.replace("\r", "")))[-KEPT:]
        self._at_prompt = self._screen.rstrip().endswith(PROMPT_END)
        if state != "alive":
            self._end()
        return self._screen

    def _end(self) -> None:
        """The shell has ended, by `exit` perhaps: the next command gets a new one."""
        self._closed = True
        if self.session is not None:
            self.session._closed = True

    def clear_screen(self) -> None:
        """Keep the last prompt alone."""
        start = self._screen.rfind(CMD_OUTPUT_PS1_BEGIN)
        self._screen = self._screen[start:] if start >= 0 else ""

    def interrupt(self) -> bool:
        """Control-C."""
        self._type("\x03")
        return True

    def is_running(self) -> bool:
        """Whether a command runs."""
        return not self.read_screen().rstrip().endswith(PROMPT_END)

    def close(self) -> None:
        """End the shell and what it runs in the foreground."""
        if self._folder and not self._closed:
            self._closed = True
            self._exec(f"kill -HUP $(<{self._folder}/pid); rm -rf {self._folder}")


def use_terminal(lines: Any, workdir: str, output_bytes: int) -> None:
    """From now on OpenHands' terminal tool opens its sessions in the sandbox. Raises AttributeError for another OpenHands."""
    for name in ("_is_tmux_available", "create_terminal_session"):
        getattr(impl, name)

    def create(*, no_change_timeout_seconds: int | None = None, **_: Any) -> Any:
        terminal = SandboxTerminal(lines, workdir, output_bytes)
        terminal.session = TerminalSession(terminal, no_change_timeout_seconds)
        return terminal.session

    setattr(impl, "_is_tmux_available", lambda: False)  # noqa: B010 - its pool of panes is of this machine
    setattr(impl, "create_terminal_session", create)  # noqa: B010
