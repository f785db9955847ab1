"""An explanation as people and programs read it: a rich table, aligned text, JSON."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from types import MappingProxyType
from typing import Any

from sao_gym.commands.recorded_run import Found, Networks
from sao_gym.text_codec import TextCodec
from sao_gym.trainer.explanation import ActionFigures, ExplainedToken, Explanation, Fate
from sao_gym.transcript import headline

COLUMNS = (
    "pos",
    "turn",
    "kind",
    "text",
    "version",
    "logp then",
    "logp now",
    "ratio",
    "fate",
    "V",
    "delta",
    "A",
    "reward",
)
_LEFT = frozenset({"kind", "text", "fate"})
_TEXT_WIDTH = 40
_STYLES: Mapping[str, str] = MappingProxyType({"": "dim", "kept": "", "low": "red", "high": "red", "stale": "yellow"})

Row = tuple[str, ...]


def heading(explanation: Explanation, found: Found, networks: Networks) -> list[str]:
    """What the table is about, and what its columns mean."""
    trained = "ready, not trained yet" if found.step is None else f"trained at step {found.step}"
    only = "" if found.trains_actor else "; such a batch trains the critic alone"
    lambdas = ", ".join(f"{lam:.5g}" for lam in explanation.lambdas)
    fates = ", ".join(f"{explanation.count(fate)} {fate.value}" for fate in Fate)
    return [
        headline(explanation.trajectory),
        f"{trained} by policy version {found.version}{only}; figures of {networks.origin}",
        f"lambda {lambdas} · reward placed {explanation.reward_sum:g} · action tokens: {fates}",
        "logp then: when sampled; logp now, V, delta, A: with these weights; fate: what the policy loss does with it",
    ]


def rows(explanation: Explanation, codec: TextCodec, *, every_token: bool) -> Iterator[Row]:
    """Cells of the table; without `every_token` an observation is one row."""
    for _, group in groupby(explanation.tokens, key=lambda token: (token.stream, token.segment)):
        tokens = list(group)
        if tokens[0].figures is None and not every_token:
            yield _folded(tokens, codec)
            continue
        for token in tokens:
            lead = (str(token.position), str(token.turn), token.kind.value, _cell(token.text))
            yield (*lead, *_figures(token.figures))


def _folded(tokens: Sequence[ExplainedToken], codec: TextCodec) -> Row:
    first, last = tokens[0], tokens[-1]
    place = str(first.position) if len(tokens) == 1 else f"{first.position}-{last.position}"
    text = _cell(codec.decode([token.token_id for token in tokens]))
    return (place, str(first.turn), first.kind.value, text, *_figures(None))


def _figures(figures: ActionFigures | None) -> Row:
    if figures is None:
        return ("",) * 9
    return (
        str(figures.version),
        f"{figures.behavior_logprob:.4f}",
        f"{figures.current_logprob:.4f}",
        f"{figures.ratio:.4g}",
        figures.fate.value,
        f"{figures.value:.4f}",
        f"{figures.delta:+.4f}",
        f"{figures.advantage:+.4f}",
        f"{figures.reward:g}",
    )


def _cell(text: str) -> str:
    """Text on one line, quoted so that spaces show, cut in the middle where it is long."""
    shown = repr(text)
    if len(shown) <= _TEXT_WIDTH:
        return shown
    half = (_TEXT_WIDTH - 3) // 2
    return f"{shown[:half]}...{shown[-half:]}"


def plain(explanation: Explanation, found: Found, networks: Networks, *, every_token: bool) -> str:
    """Heading and aligned text."""
    cells = [COLUMNS, *rows(explanation, TextCodec.of(networks.tokenizer), every_token=every_token)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for cell, width, name in zip(row, widths, COLUMNS, strict=True)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([*heading(explanation, found, networks), "", *lines])


def show(explanation: Explanation, found: Found, networks: Networks, *, every_token: bool) -> None:
    """Print a table for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in _LEFT else "right", overflow="fold", no_wrap=name != "text")
    for row in rows(explanation, TextCodec.of(networks.tokenizer), every_token=every_token):
        table.add_row(*(Text(cell) for cell in row), style=_STYLES[row[COLUMNS.index("fate")]])
    console = Console()
    console.print("\n".join(heading(explanation, found, networks)), markup=False, highlight=False)
    console.print(table)


def as_json(explanation: Explanation, found: Found, networks: Networks) -> str:
    """Everything, one object; every token is there, a figure that JSON lacks is null."""
    trajectory = explanation.trajectory
    record = {
        "uid": trajectory.uid,
        "task_id": trajectory.task_id,
        "outcome": trajectory.outcome.status.value,
        "reason": trajectory.outcome.reason,
        "score": trajectory.score.value if trajectory.score else None,
        "step": found.step,
        "policy_version": found.version,
        "trains_actor": found.trains_actor,
        "weights": networks.origin,
        "lambdas": list(explanation.lambdas),
        "reward_sum": explanation.reward_sum,
        "tokens": [_token_record(token) for token in explanation.tokens],
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _token_record(token: ExplainedToken) -> dict[str, Any]:
    record = asdict(token)
    figures = record.pop("figures") or {}
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
    return {**record, **finite}
