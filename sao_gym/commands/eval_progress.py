"""How far an evaluation is: a live bar with the time left on a terminal, else a plain line at each tenth."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sao_gym.evaluation import EpisodeResult


class EvalProgress:
    """Counts the episodes of one benchmark, and shows them on standard error. A context manager."""

    def __init__(self, name: str, total: int, kept: int = 0) -> None:
        self._name, self._total, self._kept, self._done = name, total, kept, kept
        self._scored, self._passed, self._errors = 0, 0, 0
        self._tenth = 10 * kept // total
        self._start = time.monotonic()
        self._is_live = sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=Console(stderr=True),
            disable=not self._is_live,
        )
        self._task = self._bar.add_task(name, total=total, completed=kept, line="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, result: EpisodeResult) -> None:
        """Take note of one episode."""
        self._done += 1
        self._scored += result.is_scored
        self._passed += bool(result.passed)
        self._errors += result.stage is not None
        line = f"{self._passed} passed of {self._scored} scored, {self._errors} errors"
        if self._is_live:
            self._bar.update(self._task, completed=self._done, line=line)
        elif 10 * self._done // self._total > self._tenth:
            self._tenth = 10 * self._done // self._total
            print(
                f"{self._name}: {self._done}/{self._total} episodes, {line}, eta {self._eta():.0f} s",
                file=sys.stderr,
                flush=True,
            )

    def _eta(self) -> float:
        each = (time.monotonic() - self._start) / max(self._done - self._kept, 1)
        return each * (self._total - self._done)
