"""Keeps one SGLang server for the process that started this one: `python sglang_keeper.py LOG WORD...`.

The server lives in a process group of its own and writes to LOG. When this program's standard input ends, which it does
however the starter ends, the group is asked to end, then killed. When the server ends by itself, so does this, with its
exit code. Standard library alone.
"""

import os
import signal
import subprocess
import sys
import threading

END_S = 15.0


def _end(child: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM:
            _sweep(child.pid)
        return


def _sweep(group: int) -> None:
    """A server's own children may have outlived it."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> int:
    """Run the server until it ends or standard input does."""
    log, *command = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this in its own time
    with open(log, "ab") as out:  # noqa: PTH123
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock would be held while the interpreter ends
            pass
        _end(child)

    threading.Thread(target=watch, daemon=True).start()
    code = child.wait()
    _sweep(child.pid)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
