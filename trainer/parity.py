"""How far apart engine and learner are on the same tokens with the same weights: the parity report.

d = learner's log-prob - engine's, of each token. The KL estimate is the mean of exp(d) - 1 - d over sampled tokens, which
estimates KL(engine || learner) and is never negative. The *canary* is one row of the run, kept for its whole length and
scored by both after every publication; beside it stand the tokens of each batch that the learner's own version sampled.

Example:
    >>> found = Parity.of(np.array([-1.0, -2.0]), np.array([-1.0, -2.02]))
    >>> (found.n, round(found.mean, 3), round(found.max, 3))
    (2, 0.01, 0.02)
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sao_gym.stream import Ids, Trajectory

PARITY = "parity.parquet"
CANARY = "canary.npy"
POSITION_EDGES = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
"""A position belongs to the bucket of the last edge that is not above it."""
_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("version", pa.int64()),
        ("source", pa.string()),
        ("position", pa.int64()),
        ("n", pa.int64()),
    ]
    + [(name, pa.float64()) for name in ("mean", "p99", "max", "kl")]
)
Floats = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """|d| of `n` tokens: mean, 99th percentile and maximum; and the KL estimate. None without tokens."""

    n: int
    mean: float | None = None
    p99: float | None = None
    max: float | None = None
    kl: float | None = None

    @classmethod
    def of(cls, engine: npt.ArrayLike, learner: npt.ArrayLike) -> "Parity":
        """From the log-probs [n] of both. A difference that is no number makes every figure infinite."""
        d = np.asarray(learner, dtype=np.float64) - np.asarray(engine, dtype=np.float64)
        if not d.size:
            return cls(n=0)
        if not np.isfinite(d).all():
            return cls(n=d.size, mean=np.inf, p99=np.inf, max=np.inf, kl=np.inf)
        size = np.abs(d)
        kl = float(np.mean(np.expm1(np.minimum(d, 700.0)) - d))
        return cls(n=d.size, mean=float(size.mean()), p99=float(np.quantile(size, 0.99)), max=float(size.max()), kl=kl)

    def metrics(self, prefix: str) -> dict[str, float | int | None]:
        """The figures under names of their own."""
        return {f"{prefix}_{name}": value for name, value in asdict(self).items()}


@dataclass(frozen=True, eq=False, slots=True)
class TokenPairs:
    """Log-probs of engine and learner [n], and each token's position in its stream [n]."""

    engine: Floats
    learner: Floats
    positions: npt.NDArray[np.integer[Any]]

    def __add__(self, other: "TokenPairs") -> "TokenPairs":
        pairs = zip(
            (self.engine, self.learner, self.positions), (other.engine, other.learner, other.positions), strict=True
        )
        return TokenPairs(*(np.concatenate(pair) for pair in pairs))

    @classmethod
    def none(cls) -> "TokenPairs":
        """Of no token."""
        return cls(np.zeros(0), np.zeros(0), np.zeros(0, dtype=np.int64))

    @property
    def parity(self) -> Parity:
        """Over all tokens."""
        return Parity.of(self.engine, self.learner)

    def by_position(self) -> Iterator[tuple[int, Parity]]:
        """(lower edge, parity) of each bucket that has tokens."""
        places = np.searchsorted(np.asarray(POSITION_EDGES), self.positions, side="right") - 1
        for place, edge in enumerate(POSITION_EDGES):
            chosen = places == place
            if chosen.any():
                yield edge, Parity.of(self.engine[chosen], self.learner[chosen])


class ParityLog:
    """Parity by position since the last checkpoint, a line for each bucket of each measurement."""

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, step: int, version: int, source: str, pairs: TokenPairs) -> None:
        """Note one measurement of a policy version; `source` is `canary` or `batch`."""
        where = {"step": step, "version": version, "source": source}
        self._rows += [{**where, "position": edge, **asdict(found)} for edge, found in pairs.by_position()]

    def take(self) -> pa.Table:
        """The lines so far as a table; they are forgotten here."""
        rows, self._rows = self._rows, []
        return pa.Table.from_pylist(rows, schema=_SCHEMA)


def canary_of(run: Path, trajectories: Sequence[Trajectory], most: int) -> Ids:
    """The canary's ids [n]: those that the run keeps, else the first `most` of the longest stream, kept from now on."""
    path = run / CANARY
    if path.is_file():
        kept: Ids = np.load(path)
        return kept
    streams = [stream for trajectory in trajectories for stream in trajectory.streams]
    ids = np.asarray(max(streams, key=len).token_ids[:most], dtype=np.int32)
    draft = path.with_name(f".{path.name}")
    with draft.open("wb") as file:
        np.save(file, ids)
    draft.replace(path)
    return ids


def advice(found: Parity, *, engine: str, precision: str) -> str:
    """What to do about a difference, in a sentence or two. `precision` is the learner's compute type."""
    said = f"engine and learner differ by {found.mean:.1e} a token on the canary (largest {found.max:.1e}, KL {found.kl:.1e})"
    if engine != "sglang":
        return f"{said}: they run the same code, so compute both in float32 (learner.precision = no) and set engine.deterministic"
    kind = "bfloat16" if precision == "bf16" else "float32"
    return (
        f"{said}: start the servers with --dtype {kind}, as the learner computes, and --enable-deterministic-inference; where "
        "SGLang has the trainer's kernels, --rl-on-policy-target makes them the same"
    )
