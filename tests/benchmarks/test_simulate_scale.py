"""What the simulation says from its sweeps, and how it is held against measurements."""

import importlib
from dataclasses import replace
from typing import Any

import pytest

scale: Any = importlib.import_module("scale_world")
simulation: Any = importlib.import_module("simulate_scale")


def result(speed: float, idle: float = 0.0, masked: float = 0.0) -> Any:
    return scale.Result(
        trajectories_per_s=speed,
        learner_idle=idle,
        environments_idle=0.75,
        slots_idle=0.0,
        staleness_mean=1.0,
        staleness_max=1,
        masked_share=masked,
    )


def test_advice_names_the_least_that_is_enough() -> None:
    load, machine = scale.Load(batch=64), scale.Machine()
    environments = [
        simulation.Run(machine, replace(load, environments=n), result(speed))
        for n, speed in ((10, 1.0), (100, 9.6), (1000, 10.0))
    ]
    engines = [
        simulation.Run(replace(machine, engines=n), replace(load, environments=1000), result(speed))
        for n, speed in ((1, 2.0), (5, 9.9), (50, 10.0))
    ]
    bounds = [
        simulation.Run(machine, replace(load, max_staleness=m, on_stale=how), result(speed, idle, masked))
        for m, how, speed, idle, masked in (
            (0, "wait", 2.0, 0.8, 0.0),
            (1, "wait", 3.0, 0.04, 0.0),
            (1, "mask", 4.0, 0.3, 0.1),
            (2, "mask", 9.0, 0.05, 0.02),
            (4, "mask", 9.9, 0.01, 0.01),
        )
    ]
    found = simulation.advice(environments, engines, bounds)
    assert found["environments"] == 100
    assert found["environments_most_used"] == 5 * 64
    assert found["engines"] == 5
    assert found["running_episodes_per_engine"] == 50.0, "a quarter of 1000 run, on 5 engines"
    assert (found["m"], found["on_stale"], found["speedup_over_sync"]) == (2, "mask", 4.5)
    assert found["masked_share"] == 0.02


def test_a_token_that_is_too_old_under_wait_breaks_the_bound() -> None:
    mask = simulation.Run(scale.Machine(), scale.Load(on_stale="mask"), result(1.0, masked=0.1))
    kept = simulation.Run(scale.Machine(), scale.Load(on_stale="wait"), result(1.0))
    broken = simulation.Run(scale.Machine(), scale.Load(on_stale="wait"), result(1.0, masked=0.001))
    assert simulation.is_bound_kept([mask, kept])
    assert not simulation.is_bound_kept([mask, kept, broken])


@pytest.mark.parametrize(
    ("arm", "m", "how", "group"),
    [
        ("sync", 0, "wait", 1),
        ("grpo", 0, "wait", 8),
        ("one_step_off", 1, "wait", 1),
        ("m4_mask", 4, "mask", 1),
        ("m16_wait", 16, "wait", 1),
    ],
)
def test_an_arms_name_says_how_it_is_scheduled(arm: str, m: int, how: str, group: int) -> None:
    found = simulation.scheduling(arm)
    assert (found["max_staleness"], found["on_stale"], found.get("group_size", 1)) == (m, how, group)


def test_arms_of_the_measurement_are_known_to_the_simulation() -> None:
    measurement: Any = importlib.import_module("async_vs_sync")
    for arm in measurement.arms_of(full=True):
        found = simulation.scheduling(arm.name)
        settings = dict(zip(arm.settings[::2], arm.settings[1::2], strict=True))
        assert settings["--staleness.max-staleness"] == str(found["max_staleness"])
        assert settings.get("--staleness.on-stale", "wait") == found["on_stale"]
        assert settings.get("--group-size", "1") == str(found.get("group_size", 1))


def made_up_measurement(arms: dict[str, float]) -> dict[str, Any]:
    sync = {"arm": "sync", "tokens": 20.0, "publish_s": 0.02, "learn_s": 0.5, "turns": 2.6}
    sync |= {"base_s": 0.008, "each_s": 0.001, "engine_share": 0.7, "learn_token_s": 0.0001}
    window = {"seed": 0, "warm_up": 5, "batches": 25}
    wrong = dict.fromkeys(sync, 1e6) | {"arm": "m4_mask"} | window
    sync |= window
    points = [{"arm": arm, "trajectories_per_s": speed, "learner_idle": 0.0} for arm, speed in arms.items()]
    return {
        "slots": 32,
        "in_flight": 64,
        "batch": 8,
        "median_s": 0.05,
        "tail": 50.0,
        "grace_s": 0.05,
        "runs": [sync, sync, wrong],
        "points": points,
    }


def test_only_the_synchronous_arm_is_fitted() -> None:
    machine, load = simulation.fitted(made_up_measurement({}))
    assert machine == scale.Machine(
        engines=1,
        slots=32,
        token_s=0.008,
        each_token_s=0.001,
        lag_s=0.02,
        learn_s=0.5,
        learn_token_s=0.0001,
        engine_share=0.7,
    )
    assert (load.environments, load.batch, load.turns, load.waits, load.tokens) == (64, 8, 3, 1, 20.0)


def test_a_prediction_is_held_against_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    first = simulation.predict(made_up_measurement({"sync": 1.0, "m4_mask": 1.0}))
    speeds = {p.arm: p.predicted for p in first}
    assert speeds["m4_mask"] > 1.5 * speeds["sync"]
    again = simulation.predict(made_up_measurement({"sync": speeds["sync"], "m4_mask": speeds["m4_mask"] / 2}))
    assert [p.error for p in again] == pytest.approx([0.0, 1.0])
    simulation.show_predictions(again)
    assert "+100.0%" in capsys.readouterr().out
