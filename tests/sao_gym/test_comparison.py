"""Two evaluations compared: what is refused, what is left out and said, what people read."""

import dataclasses

import pytest

from sao_gym.comparison import Flip, ResultSet, compare, compare_text
from sao_gym.errors import ConfigError
from sao_gym.paired import compare_paired, detectable_difference

SETTINGS = {"sampling.temperature": "1.0", "protocol": "paper_math", "grader": "3"}


def run(name: str, solved: int, *, tasks: int = 30, n: int = 2) -> ResultSet:
    """The first `solved` tasks pass every sample."""
    passed = {f"t{i}": [float(i < solved)] * n for i in range(tasks)}
    return ResultSet(name=name, benchmark="aime2025", content_hash="c0ffee" * 10, passed=passed, settings=SETTINGS)


def test_figures_are_those_of_the_paired_test() -> None:
    before, after = run("before", 10), run("after", 19)
    found = compare(before, after)
    assert found.paired == compare_paired(before.passed, after.passed)
    assert found.detectable == detectable_difference(before.passed, after.passed)
    assert (found.mean_first, found.mean_second) == pytest.approx((10 / 30, 19 / 30))
    assert found.mean_second - found.mean_first == pytest.approx(found.paired.difference)
    assert [flip.task_id for flip in found.flips] == [f"t{i}" for i in range(10, 19)]
    assert (found.n_left_out, found.warnings) == (0, ())


def test_other_tasks_are_refused() -> None:
    before, after = run("before", 10), run("after", 12)
    other = dataclasses.replace(after, content_hash="beef" * 16)
    with pytest.raises(
        ConfigError, match=r"before was run on aime2025 with content hash c0ffeec0ffee and after .* beef"
    ):
        compare(before, other)
    with pytest.raises(ConfigError, match="not the same tasks"):
        compare(before, dataclasses.replace(after, benchmark="aime2024"))
    with pytest.raises(ConfigError, match="no scored task of aime2025 in common"):
        compare(before, dataclasses.replace(after, passed={"t0": [], "x": [1.0]}))


def test_only_common_tasks_count_and_the_rest_is_said() -> None:
    """One run stopped early; in the other a task lost all samples to errors."""
    before = run("before", 10, tasks=20)
    after = run("after", 15)
    after = dataclasses.replace(after, passed={**after.passed, "t3": []})
    found = compare(before, after)
    assert (found.paired.n_tasks, found.n_only_first, found.n_only_second) == (19, 1, 10)
    assert found.mean_first == pytest.approx(9 / 19)
    assert "19 in both: 5 better, 0 worse; left out 1 of the first alone, 10 of the second alone" in compare_text(found)


def test_what_else_differs_is_a_warning() -> None:
    after = dataclasses.replace(
        run("after", 19, n=3), settings={**SETTINGS, "sampling.temperature": "0.6", "top_p": "0.9"}
    )
    found = compare(run("before", 10), after)
    assert found.warnings == (
        "sampling.temperature differs: 1.0 and 0.6",
        "top_p differs: not said and 0.9",
        "60 and 90 scored samples on the 30 common tasks",
    )
    assert compare_text(found).splitlines()[-3:] == [f"warning: {text}" for text in found.warnings]


def test_flips_cross_the_middle_and_the_largest_come_first() -> None:
    shares = {"up": (1, 3), "down": (4, 0), "more": (3, 4), "half": (2, 3), "still": (0, 2)}
    sets = [
        dataclasses.replace(
            run(name, 0), passed={task: [1.0] * k[side] + [0.0] * (4 - k[side]) for task, k in shares.items()}
        )
        for side, name in enumerate(("before", "after"))
    ]
    assert compare(*sets).flips == (
        Flip(task_id="down", first=1.0, second=0.0),
        Flip(task_id="up", first=0.25, second=0.75),
        Flip(task_id="half", first=0.5, second=0.75),
    )


@pytest.mark.parametrize(
    ("solved", "verdict"),
    [(10, "chance alone"), (13, "chance alone"), (22, "the second is better"), (1, "the second is worse")],
)
def test_the_text_says_what_follows(solved: int, verdict: str) -> None:
    text = compare_text(compare(run("runs/a", 10), run("runs/b", solved)))
    assert verdict in text
    assert "0.333  runs/a" in text
    assert f"{solved / 30:.3f}  runs/b" in text


def test_the_text_is_bounded_and_says_what_is_unknown() -> None:
    lines = compare_text(compare(run("a", 0), run("b", 30)), most_flips=4).splitlines()
    assert sum("->" in line for line in lines) == 4
    assert lines[-1] == "  and 26 more"
    few = compare_text(compare(run("a", 1, tasks=3), run("b", 2, tasks=3)))
    assert "unknown: with 3 tasks no difference is significant at 95%; 6 are needed" in few
