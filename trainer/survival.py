"""Survival: of the rows that ended, how many were trained, by length, turns and environment.

A scheduler that loses slow episodes trains on another distribution than it samples from; this is where it would show.
A row ends when it is trained or lost for good; one that the gate dropped counts as lost each time, under `unfinished`.

Example:
    {"tokens": {"<=16": [31, 0], "<=32": [7, 1]}, "turns": {"2": [38, 1]}, "env": {"arithmetic": [38, 1]}}
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sao_gym.stream import Trajectory

UNFINISHED = "unfinished"


def _counts() -> dict[tuple[str, str], list[int]]:
    return defaultdict(lambda: [0, 0])


def token_bucket(n: int) -> str:
    """The power of two, from 16 on, that `n` sampled tokens do not pass."""
    return f"<={max(16, 1 << max(n - 1, 0).bit_length())}"


Table = Mapping[str, Mapping[str, Sequence[int]]]
"""[trained, lost] by kind of bucket and bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalState:
    """The counts as a checkpoint keeps them; `dropped` is how many rows of the ledger were lost for good by then."""

    table: Table = field(default_factory=dict)
    dropped: int = 0


@dataclass(slots=True)
class Survival:
    """Rows trained and rows lost, by bucket."""

    counts: dict[tuple[str, str], list[int]] = field(default_factory=_counts)

    @classmethod
    def resumed(cls, state: SurvivalState, dropped: int) -> "Survival":
        """As the checkpoint kept it. Rows lost between it and the crash stay lost: `dropped` is the ledger's number now.

        What they had sampled is not known any more, so they count as unfinished.
        """
        made = cls()
        for kind, buckets in state.table.items():
            for bucket, (trained, lost) in buckets.items():
                made.counts[kind, bucket] = [trained, lost]
        for _ in range(dropped - state.dropped):
            made.add(None, is_trained=False)
        return made

    def add(self, trajectory: Trajectory | None, *, is_trained: bool) -> None:
        """A row ended; None is one whose episode had not."""
        for kind, bucket in self._buckets(trajectory):
            self.counts[kind, bucket][not is_trained] += 1

    def _buckets(self, trajectory: Trajectory | None) -> list[tuple[str, str]]:
        if trajectory is None:
            return [("tokens", UNFINISHED), ("turns", UNFINISHED)]
        return [
            ("tokens", token_bucket(trajectory.n_action)),
            ("turns", str(trajectory.n_turns)),
            ("env", trajectory.env_id),
        ]

    def table(self) -> dict[str, dict[str, list[int]]]:
        """[trained, lost] by kind of bucket and bucket."""
        made: dict[str, dict[str, list[int]]] = {"tokens": {}, "turns": {}, "env": {}}
        for kind, bucket in sorted(self.counts, key=lambda key: (key[0], len(key[1]), key[1])):
            made[kind][bucket] = list(self.counts[kind, bucket])
        return made
