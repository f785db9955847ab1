"""Conversations of protocols whose tool results may stand among other things, put into turns.

After a turn with calls come the results, in the order of the calls, then all texts up to the next turn as one user
turn, in their order (case GW-07). Nothing is dropped, and nothing stands between a call and its result.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sao_gym.gateway.echo import content_text
from sao_gym.gateway.history import in_call_order

Record = Mapping[str, Any]
BETWEEN = "\n\n"


def results_first(records: Sequence[Record]) -> tuple[Record, ...]:
    """`records` (OpenAI's form) in that order. Raises ConfigError for contents that cannot be read."""
    ordered: list[Record] = []
    run: list[Record] = []
    calls: list[str] = []
    for record in [*records, None]:
        if record is not None and record.get("role") != "assistant":
            run.append(record)
            continue
        ordered += _after_calls(run, calls) if calls else run
        run = []
        if record is not None:
            ordered.append(record)
            calls = [str(call["id"]) for call in record.get("tool_calls") or ()]
    return tuple(ordered)


def _after_calls(run: Sequence[Record], calls: Sequence[str]) -> list[Record]:
    results = [record for record in run if record["role"] == "tool"]
    if not results:
        return list(run)
    others = [record for record in run if record["role"] not in ("tool", "user")]
    texts = [content_text(record) for record in run if record["role"] == "user"]
    user = [{"role": "user", "content": BETWEEN.join(texts)}] if texts else []
    return [*in_call_order(results, calls), *others, *user]
