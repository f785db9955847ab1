"""The benchmark of the pool runs and its verdict follows its figures."""

import argparse

from sandbox_pool import report


def test_warm_waits_are_short() -> None:
    made = report(argparse.Namespace(backend="local", image="", leases=3, pause=0.5))
    assert made["cold_ms"] > 0
    assert made["metrics"]["leases"] == 3
    assert made["metrics"]["leaks"] == 0
    assert made["ok"] == (made["warm_ms"] < 50 and made["metrics"]["warm_leases"] >= 2)
