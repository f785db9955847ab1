"""A driver's side of the conversation with whoever started it: JSON lines, in on stdin and out on what was stdout.

Standard library alone. Whatever a library prints goes to stderr, and nothing reads our stdin but this file. Lines out:

    {"ready": FACTS}                        once, when everything is imported
    {"ask": N, "do": NAME, "with": {...}}   a call on the other side; {"answer": N, "result" | "error": ...} comes back
    {"done": {...}} | {"failed": TEXT}      the end of one {"run": {...}}

The end of stdin, which is also the death of whoever started this, ends the program at once.
"""

import itertools
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any


class AskError(Exception):
    """The other side could not do what it was asked for: the sandbox is gone, for one."""


class Lines:
    """Takes stdin and stdout for itself when it is made; make it before anything is imported that may print."""

    def __init__(self) -> None:
        self._incoming = os.fdopen(os.dup(0), "rb")
        self._outgoing = os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        self._turn = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[threading.Event, dict[str, Any]]] = {}

    def send(self, record: dict[str, Any]) -> None:
        """One line out, whole; any thread may call."""
        data = json.dumps(record).encode() + b"\n"
        with self._turn:
            self._outgoing.write(data)
            self._outgoing.flush()

    def ask(self, do: str, **given: Any) -> Any:
        """What the other side answers. Raises AskError."""
        number, event, box = next(self._numbers), threading.Event(), dict[str, Any]()
        self._waiting[number] = event, box
        self.send({"ask": number, "do": do, "with": given})
        event.wait()
        if "error" in box:
            raise AskError(box["error"])
        return box["result"]

    def serve(self, facts: dict[str, Any], run: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Say that all is ready, then run what comes, one at a time, until stdin ends."""
        self.send({"ready": facts})
        for line in self._incoming:
            record = json.loads(line)
            if "answer" in record:
                event, box = self._waiting.pop(record["answer"])
                box.update(record)
                event.set()
            elif "run" in record:
                threading.Thread(target=self._run, args=(run, record["run"]), daemon=True).start()
        os._exit(0)  # threads of libraries must not keep a program alive that nobody listens to

    def _run(self, run: Callable[[dict[str, Any]], dict[str, Any]], given: dict[str, Any]) -> None:
        try:
            self.send({"done": run(given)})
        except BaseException as error:
            import traceback

            traceback.print_exc()
            self.send({"failed": f"{type(error).__name__}: {error}"[:2000]})
