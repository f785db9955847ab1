"""`sao-gym judge calibrate`: the figures are those that can be counted by hand, and what cannot be asked is refused."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from sao_gym.commands.judge import main
from sao_gym.envs.judges.calibration import calibrate
from sao_gym.envs.judges.gold import Labelled, read_gold
from sao_gym.envs.judges.rule import RuleJudge
from sao_gym.errors import GradingError, TaskFileError
from sao_gym.jsonl import write_jsonl
from sao_gym.protocols import Verdict


def labelled(text: str, style: str, quality: bool = True) -> Labelled:
    return Labelled(request="r", text=text, style=style, quality=quality)


GOLD = (
    labelled("one", "cute"),
    labelled("two", "academic"),
    labelled("three", "plain", False),
    labelled("four", "cute"),
)


class Told:
    """A judge that says what a test tells it: `say(text, labels)` -> (style, quality)."""

    version = "told-1"

    def __init__(self, say: object) -> None:
        self.say = say

    async def judge(self, request: str, text: str, labels: Sequence[str]) -> Verdict:
        style, quality = self.say(text, labels)  # type: ignore[operator]
        return Verdict(quality=quality, label=style, judge=self.version)

    async def close(self) -> None:
        pass


async def test_a_judge_that_is_right_agrees_and_flips_nothing() -> None:
    right = {one.text: (one.style, one.quality) for one in GOLD}
    found = await calibrate(lambda: Told(lambda text, labels: right[text.split()[0]]), GOLD)
    assert (found.style.value, found.quality.value, found.kappa, found.named.n) == (1.0, 1.0, 1.0, 3)
    assert (found.flips.value, found.order_flips.value, found.padding_flips.value, found.first_excess) == (0, 0, 0, 0)
    assert (found.padding_gains.hits, found.padding_gains.n) == (0, 1)


async def test_a_judge_that_takes_the_first_style_and_length_for_merit_is_found_out() -> None:
    found = await calibrate(lambda: Told(lambda text, labels: (labels[0], len(text.split()) > 20)), GOLD)
    assert found.order_flips.value == 1.0
    assert found.first_excess == pytest.approx((3 / 4 + 4 / 4) / 2)  # one text is academic, none classical
    assert found.padding_gains.value == 1.0
    assert found.style.hits == 1


async def test_a_judge_that_wavers_is_found_out() -> None:
    asked: list[str] = []

    def say(text: str, labels: Sequence[str]) -> tuple[str, bool]:
        asked.append(text)
        return ("cute", len(asked) % 8 < 4)  # all four the same, the next time the other way

    found = await calibrate(lambda: Told(say), GOLD)
    assert found.flips.value is not None
    assert found.flips.value > 0.4


async def test_what_could_not_be_judged_enters_no_share() -> None:
    class Partly(RuleJudge):
        async def judge(self, request: str, text: str, labels: Sequence[str]) -> Verdict:
            if text.startswith("two"):
                raise GradingError("no", "judge_refused")
            return self.read(request, text, labels)

    found = await calibrate(Partly, GOLD)
    assert (found.errors, found.style.n) == ({"judge_refused": 4}, 3)


def test_the_command_shows_and_writes_the_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "judge.json"
    assert main(["calibrate", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "of the styles named" in shown
    figures = json.loads(out.read_text())
    assert (figures["judge"], figures["texts"], figures["style"]["n"]) == ("rule-1", 60, 60)
    assert f"style as labelled      {figures['style']['value']:.3f}" in shown


def test_a_file_of_one_s_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.jsonl"
    write_jsonl(path, [{"request": "r", "text": "Lo, thou art come.", "style": "classical", "quality": 0}])
    assert main(["calibrate", "--gold", str(path)]) == 0
    assert "texts                  1\n" in capsys.readouterr().out
    write_jsonl(path, [{"request": "r", "text": "t", "style": "gothic", "quality": 0}])
    with pytest.raises(TaskFileError, match="line 1: style must be one of"):
        read_gold(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["calibrat"], "knows no 'calibrat'"),
        (["calibrate", "--jugde", "rule"], "does not know '--jugde'"),
        (["calibrate", "--judge", "openai"], "--judge-model"),
        (["calibrate", "--judge-options", "{orders = 2}"], "odd"),
        (["calibrate", "--judge-options", "orders"], "TOML table"),
        (["calibrate", "--judge-options", "3"], "TOML table"),
        (["calibrate", "--gold", "nowhere.jsonl"], "cannot read nowhere.jsonl"),
        (["calibrate", "--out", "nowhere/judge.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_asked(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in capsys.readouterr().err
