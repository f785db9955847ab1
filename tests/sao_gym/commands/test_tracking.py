"""Trackers: which one is in force is said and seen (trap 35)."""

import importlib.machinery
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from sao_gym.commands import tracking
from sao_gym.commands.tracking import Tracking, chosen, opened_tracking, scalars
from sao_gym.errors import ConfigError, InvariantError
from sao_gym.trainer.metrics import Histogram


class Lines(GeneralTracker):
    """A tracker of our own, as Accelerate lets people write them: a text file."""

    name = "lines"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.path = Path(logging_dir) / f"{run_name}.txt"
        self.is_finished = False

    def start(self) -> None:
        self.path.parent.mkdir(parents=True)
        self.path.write_text("")

    @property
    def tracker(self) -> Path:
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {values}\n")

    def finish(self) -> None:
        self.is_finished = True


class Silent(Lines):
    """One that never begins."""

    def start(self) -> None: ...


def known(monkeypatch: pytest.MonkeyPatch, *installed: str) -> None:
    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, None) if name in installed else None

    monkeypatch.setattr(tracking, "find_spec", find)


def test_the_default_is_tensorboard_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch, "tensorboard", "wandb")
    assert chosen("auto") == ("tensorboard", "trackers: tensorboard")
    assert chosen("wandb") == ("wandb", "trackers: wandb, scalars alone; histograms stand in metrics.parquet")
    assert chosen("none")[0] is None


def test_a_missing_default_is_said_and_a_missing_one_by_name_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known(monkeypatch)
    name, said = chosen("auto")
    assert name is None
    assert "tensorboard is not installed" in said
    with pytest.raises(ConfigError, match="the package trackio is not installed: pip install trackio"):
        chosen("trackio")


def test_numbers_alone_are_tracked() -> None:
    record = {"step": 3, "reward": 0.5, "loss": None, "hash": "ab", "list": [1], "lost": {"sandbox": 2}, "flag": True}
    assert scalars(record) == {"step": 3, "reward": 0.5, "lost/sandbox": 2}


def test_a_tracker_in_force_gets_each_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "lines", Lines)
    with opened_tracking("lines", tmp_path / "r") as made:
        made.step({"step": 1, "reward": 0.5, "hash": "x"})
        made.step({"step": 2, "reward": 0.75})
    assert made.tracker is not None
    assert made.tracker.is_finished
    assert (tmp_path / "r" / "tracking" / "r.txt").read_text() == (
        "1 {'step': 1, 'reward': 0.5}\n2 {'step': 2, 'reward': 0.75}\n"
    )


def test_tensorboard_gets_scalars_and_histograms(tmp_path: Path) -> None:
    """Read back with TensorBoard's own reader."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    made = Histogram(step=3, name="tokens_action", edges=(1.0, 2.0, 4.0, 8.0), counts=(0, 5, 2, 0, 1))
    empty = Histogram(step=3, name="log_ratio", edges=(0.0, 1.0), counts=(0, 0, 0))
    with opened_tracking("tensorboard", tmp_path / "r") as tracking:
        tracking.step({"step": 3, "reward_mean": 0.5})
        tracking.histograms((made, empty))
    (folder,) = {path.parent for path in (tmp_path / "r").rglob("*tfevents*")}
    read = EventAccumulator(str(folder), size_guidance={"histograms": 0})
    read.Reload()
    assert [(event.step, event.value) for event in scalars_of(read, "reward_mean", make_ndarray)] == [(3, 0.5)]
    assert read.Tags()["histograms"] == ["tokens_action"], "a step without ratios has no histogram of them"
    (event,) = read.Histograms("tokens_action")
    seen = event.histogram_value
    assert (event.step, seen.num) == (3, 8)
    counted = {limit: count for limit, count in zip(seen.bucket_limit, seen.bucket, strict=True) if count}
    assert counted == {2.0: 5, 4.0: 2, 12.0: 1}
    assert seen.sum == 5 * 1.5 + 2 * 3 + 10


def scalars_of(read: Any, tag: str, as_array: Any) -> list[Any]:
    """Scalars by their tag, however this release of the writer stores them."""
    if tag in read.Tags()["scalars"]:
        return list(read.Scalars(tag))
    return [SimpleNamespace(step=e.step, value=float(as_array(e.tensor_proto))) for e in read.Tensors(tag)]


def test_a_tracker_that_takes_no_counts_gets_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "lines", Lines)
    with opened_tracking("lines", tmp_path / "r") as tracking:
        tracking.histograms((Histogram(step=1, name="h", edges=(0.0, 1.0), counts=(1, 1, 1)),))
    assert (tmp_path / "r" / "tracking" / "r.txt").read_text() == ""


def test_a_tracker_that_is_not_in_force_ends_the_run_at_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "lines", Silent)
    with pytest.raises(InvariantError, match="lines was asked for and is not in force"):
        opened_tracking("lines", tmp_path / "r").__enter__()


def test_no_tracker_takes_every_step() -> None:
    Tracking(None).step({"step": 1})


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_accelerate_knows_every_name(name: str) -> None:
    assert LOGGER_TYPE_TO_CLASS[name].name == name
