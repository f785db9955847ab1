"""Survival: of the rows that ended, how many were trained, by length, turns and environment.

A scheduler that loses slow episodes trains on another distribution than it samples from; this is where it would show.
A row ends when it is trained or lost for good; one that the gate dropped counts as lost each time, under `unfinished`.

Example:
    {"tokens": {"<=16": [31, 0], "<=32": [7, 1]}, "turns": {"2": [38, 1]}, "env": {"arithmetic": [38, 1]}}
"""

from collections import defaultdict
from dataclasses import dataclass, field

from sao_gym.stream import Trajectory

UNFINISHED = "unfinished"


def _counts() -> dict[tuple[str, str], list[int]]:
    return defaultdict(lambda: [0, 0])


def token_bucket(n: int) -> str:
    """The power of two, from 16 on, that `n` sampled tokens do not pass."""
    return f"<={max(16, 1 << max(n - 1, 0).bit_length())}"


@dataclass(slots=True)
class Survival:
    """Rows trained and rows lost, by bucket."""

    counts: dict[tuple[str, str], list[int]] = field(default_factory=_counts)

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
