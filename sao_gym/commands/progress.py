"""What people see of a running training: a live bar on a terminal, plain lines elsewhere."""

import sys
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def _line(record: dict[str, Any]) -> str:
    def number(name: str, form: str = ".3f") -> str:
        value = record.get(name)
        return "-" if value is None else format(value, form)

    return (
        f"reward {number('reward_mean')}  stale {number('staleness_mean', '.2f')}/{record.get('staleness_max', 0)}  "
        f"ev {number('ev_pre', '+.2f')}  rejected {number('dis_reject_low', '.1%')}/{number('dis_reject_high', '.1%')}  "
        f"entropy {number('entropy')}  {number('tokens_per_s', ',.0f')} tok/s"
    )


class TrainingProgress:
    """Shows each step. A context manager; `step` takes a line of metrics."""

    def __init__(self, steps: int, done: int = 0) -> None:
        self._is_live = sys.stdout.isatty()
        self._steps = steps
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeRemainingColumn(),
            TextColumn("{task.fields[line]}"),
            console=Console(),
            disable=not self._is_live,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done, line="waiting for the first batch")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, record: dict[str, Any]) -> None:
        """Show one step."""
        if self._is_live:
            self._bar.update(self._task, completed=record["step"], line=_line(record))
            return
        eta = record.get("time_step_s", 0.0) * (self._steps - record["step"])
        print(f"step {record['step']:>4}/{self._steps}  {_line(record)}  eta {eta:.0f} s", flush=True)
