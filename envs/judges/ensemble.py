"""EnsembleJudge: several judges, and what most of them say.

Invariant: a member that fails is a failure of the whole, for a verdict of some would be that of another judge.

Example:
    judge = EnsembleJudge([RuleJudge(), OpenAIJudge(options)])
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from sao_gym.errors import ConfigError
from sao_gym.protocols import CountsWork, Judge, Verdict
from sao_gym.writing_styles import PLAIN


class EnsembleJudge:
    """Good is what more than half find good; the style is the one that more than half name, else none."""

    def __init__(self, members: Sequence[Judge]) -> None:
        if not members:
            raise ConfigError("an ensemble needs at least one judge")
        self.members = tuple(members)

    @property
    def version(self) -> str:
        """Those of its members."""
        return "ensemble(" + ", ".join(member.version for member in self.members) + ")"

    async def judge(self, request: str, text: str, labels: Sequence[str]) -> Verdict:
        """Raises what a member raises."""
        verdicts = await asyncio.gather(*(member.judge(request, text, labels) for member in self.members))
        label, votes = Counter(verdict.label for verdict in verdicts).most_common(1)[0]
        quality = 2 * sum(verdict.quality for verdict in verdicts) > len(verdicts)
        problems = {name for verdict in verdicts for name in verdict.problems}
        return Verdict(
            quality=quality,
            label=label if 2 * votes > len(verdicts) else PLAIN,
            judge=self.version,
            problems=() if quality else tuple(sorted(problems)),
            detail="; ".join(f"{verdict.label} {int(verdict.quality)}" for verdict in verdicts),
        )

    def counters(self) -> Mapping[str, float]:
        """The sums over the members that count."""
        total: dict[str, float] = {}
        for member in self.members:
            for name, count in member.counters().items() if isinstance(member, CountsWork) else ():
                total[name] = total.get(name, 0) + count
        return total

    async def close(self) -> None:
        """Close every member; idempotent."""
        await asyncio.gather(*(member.close() for member in self.members))
