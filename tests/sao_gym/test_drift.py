"""Phases of a preference: when they begin, how they blend, what cannot be said."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.clock import VirtualClock
from sao_gym.drift import DEFAULT_PHASES, Drift, Phase, Progress, read_phases
from sao_gym.errors import ConfigError

A, B, C = ("academic", "cute"), ("cute", "classical"), ("chuunibyou", "classical")


def three(blend: float = 0.0) -> Drift:
    return Drift(
        phases=(
            Phase(target="academic", candidates=A, lasts=100),
            Phase(target="cute", candidates=B, lasts=50),
            Phase(target="classical", candidates=C),
        ),
        blend=blend,
    )


def test_the_paper_s_targets_and_candidates() -> None:
    assert [phase.target for phase in DEFAULT_PHASES] == ["cute", "chuunibyou", "classical"]
    assert ["classical" in phase.candidates for phase in DEFAULT_PHASES] == [False, False, True]
    assert ["academic" in phase.candidates for phase in DEFAULT_PHASES] == [True, True, False]


@pytest.mark.parametrize(("position", "phase"), [(0, 0), (99, 0), (100, 1), (149.9, 1), (150, 2), (10**9, 2)])
def test_a_sudden_change_is_at_once(position: float, phase: int) -> None:
    assert {three().phase_at(position, draw=draw) for draw in (0.0, 0.5, 0.999)} == {phase}


def test_a_blend_rises_evenly_over_the_first_of_a_phase() -> None:
    drift, rng = three(blend=40), random.Random(0)
    for position, share in ((99, 0.0), (100, 0.0), (110, 0.25), (120, 0.5), (130, 0.75), (140, 1.0)):
        drawn = [drift.phase_at(position, draw=rng.random()) for _ in range(4000)]
        assert set(drawn) <= {0, 1}
        assert sum(drawn) / 4000 == pytest.approx(share, abs=0.03)
    assert {drift.phase_at(160, draw=draw) for draw in (0.1, 0.9)} == {1, 2}


@given(st.floats(0, 400), st.floats(0, 400), st.floats(0, 0.999), st.floats(0, 50))
def test_phases_never_go_back_for_one_draw(one: float, two: float, draw: float, blend: float) -> None:
    drift = three(blend)
    first, last = sorted((one, two))
    assert drift.phase_at(first, draw=draw) <= drift.phase_at(last, draw=draw)


@pytest.mark.parametrize(
    ("given_phases", "said"),
    [
        ([], "at least one phase"),
        ([{"target": "cute", "candidates": ["cute"]}], "two or more"),
        ([{"target": "cute", "candidates": ["cute", "cute"]}], "two or more"),
        ([{"target": "cute", "candidates": ["academic", "classical"]}], "among them"),
        ([{"target": "cuet", "candidates": ["academic", "cute"]}], "did you mean 'cute'"),
        ([{"target": "cute", "candidates": ["academic", "cute"], "last": 3}], "did you mean 'lasts'"),
        ([{"target": "cute", "candidates": ["academic", "cute"], "lasts": 3}], "last phase"),
        ([{"target": "cute", "candidates": ["academic", "cute"]}] * 2, "how long it lasts"),
        ([{"target": "cute", "candidates": "academic"}], "a list of styles"),
        ([{"target": "cute", "candidates": ["academic", "cute"], "lasts": "3"}], "a number above 0"),
        ([{"target": "cute", "candidates": ["academic", "cute"], "lasts": 0}], "a number above 0"),
        (["cute"], "a phase is a table"),
    ],
)
def test_phases_that_cannot_be(given_phases: list[object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Drift(phases=read_phases(given_phases))


def test_other_things_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="shortest phase"):
        three(blend=51)
    with pytest.raises(ConfigError, match="samples or seconds"):
        Drift(unit="rows")  # type: ignore[arg-type]


async def test_progress_counts_rows_and_seconds() -> None:
    clock = VirtualClock()
    progress = Progress(clock)
    progress.note_trained(640)
    assert (progress.position("samples"), progress.position("seconds")) == (640.0, 0.0)
    progress.note_spent(30.0)
    assert progress.position("seconds") == 30.0
