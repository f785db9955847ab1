"""Time of GAE over 128 rows of 131072 action tokens (best of three), against the limit of 2 s.

Ends in one JSON line.
"""

import json
import time

import numpy as np

from sao_gym.trainer.advantages import compute_gae, length_adaptive_lambda

ROWS, TOKENS, LIMIT_S = 128, 131072, 2.0


def main() -> None:
    rng = np.random.default_rng(0)
    lengths = np.full(ROWS, TOKENS)
    values = rng.random(ROWS * TOKENS, dtype=np.float32)
    rewards = np.zeros(ROWS * TOKENS, dtype=np.float32)
    rewards[np.cumsum(lengths) - 1] = rng.integers(0, 2, ROWS)
    lam = length_adaptive_lambda(lengths)
    compute_gae(values[:TOKENS], rewards[:TOKENS], lengths[:1], lam=lam[:1])
    seconds = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        got = compute_gae(values, rewards, lengths, lam=lam)
        seconds = min(seconds, time.perf_counter() - start)
    row = slice(0, TOKENS)
    expected, after, following = np.empty(TOKENS), 0.0, 0.0
    for t in reversed(range(TOKENS)):
        delta = float(rewards[row][t]) + following - float(values[row][t])
        after = expected[t] = delta + lam[0] * after
        following = float(values[row][t])
    error = float(np.abs(expected - got.advantages[row]).max())
    print(
        json.dumps(
            {
                "benchmark": "gae",
                "ok": seconds < LIMIT_S and error < 1e-9,
                "rows": ROWS,
                "tokens_per_row": TOKENS,
                "seconds": round(seconds, 3),
                "limit_s": LIMIT_S,
                "max_error_against_loop": error,
            }
        )
    )


if __name__ == "__main__":
    main()
