r"""The answer grader.

Rule: the answer is the last balanced box of the final turn, `\boxed{...}`, `\boxed x` or `\fbox{...}`; boxes joined
only by a comma, "and", "or" or spaces are one list. Integers are compared exactly, digit by digit; everything else by
what it is (docs/grading.md), exactly, with the same verdict whichever side is gold, in a child process that is ended
at its limits. What is not decided scores 0 and says so; a judge may be asked for it.

Example:
    >>> grade_answer("70", r"So the answer is $\boxed{070}$.").value
    1.0
"""

import asyncio
import inspect
from collections.abc import Awaitable
from functools import cache
from typing import Protocol

from sao_gym.stream import Score
from sao_gym.tasks._answers import as_integer, space_commas, spelling
from sao_gym.tasks._boxes import extract_boxed
from sao_gym.tasks._grading_pool import Answer, GradingLimits, SharedServer

__all__ = [
    "GRADER_VERSION",
    "AnswerJudge",
    "GradingLimits",
    "close_graders",
    "extract_boxed",
    "grade_answer",
    "grade_answer_async",
    "score_response",
    "score_response_async",
]

MAX_ANSWER_LENGTH = 20_000
GRADER_VERSION = "2"
"""Changes whenever any verdict may change."""


class AnswerJudge(Protocol):
    """Decides what no rule does: whether `answer` says the same as `gold`, as an answer to `problem`."""

    def __call__(self, gold: str, answer: str, problem: str) -> bool | Awaitable[bool]:
        """The judgement. A plain function is called in a thread of its own."""
        ...


@cache
def _shared_server() -> SharedServer:
    return SharedServer()


def close_graders() -> None:
    """End the grading server of this process; the next grade starts a new one."""
    _shared_server().close()


def grade_answer(gold: str, response: str, limits: GradingLimits | None = None) -> Score:
    """Score a response against the gold answer; either may be boxed or bare. Blocks for milliseconds.

    Raises GradingError if the grader itself failed.
    """
    pair = _as_pair(gold, response)
    return _early_score(*pair) or _score(_shared_server().ask(*pair, limits or GradingLimits()), pair[1])


async def grade_answer_async(
    gold: str,
    response: str,
    limits: GradingLimits | None = None,
    *,
    judge: AnswerJudge | None = None,
    problem: str = "",
) -> Score:
    """Asynchronous twin of `grade_answer`. Pairs that no rule decides go to the judge, if there is one."""
    pair = _as_pair(gold, response)
    score = _early_score(*pair)
    if score is None:
        score = _score(await _shared_server().ask_async(*pair, limits or GradingLimits()), pair[1])
    if judge is None or score.method != "undecided":
        return score
    return await _judged(judge, *pair, problem)


def score_response(gold: str, final_text: str, limits: GradingLimits | None = None) -> Score:
    """Score an episode's final turn: no box is no answer, and no answer is 0. Raises GradingError."""
    answer = extract_boxed(final_text)
    return _no_answer("no box in the final turn") if answer is None else grade_answer(gold, answer, limits)


async def score_response_async(
    gold: str,
    final_text: str,
    limits: GradingLimits | None = None,
    *,
    judge: AnswerJudge | None = None,
    problem: str = "",
) -> Score:
    """Asynchronous twin of `score_response`, with the judge of `grade_answer_async`."""
    answer = extract_boxed(final_text)
    if answer is None:
        return _no_answer("no box in the final turn")
    return await grade_answer_async(gold, answer, limits, judge=judge, problem=problem)


async def _judged(judge: AnswerJudge, gold: str, answer: str, problem: str) -> Score:
    if inspect.iscoroutinefunction(judge) or inspect.iscoroutinefunction(getattr(judge, "__call__", None)):  # noqa: B004
        said = judge(gold, answer, problem)
    else:
        said = await asyncio.to_thread(judge, gold, answer, problem)
    is_right = bool(await said if inspect.isawaitable(said) else said)
    return _score_of(float(is_right), f"{'equal' if is_right else 'different'} by the judge: {_shown(answer)}", "judge")


def _as_pair(gold: str, response: str) -> tuple[str, str]:
    """(gold, answer) without boxes."""
    boxed_gold, boxed_response = extract_boxed(gold), extract_boxed(response)
    gold = gold.strip() if boxed_gold is None else boxed_gold
    answer = response.strip() if boxed_response is None else boxed_response
    return space_commas(gold, answer), space_commas(answer, gold)


def _early_score(gold: str, answer: str) -> Score | None:
    """The score where no algebra is needed."""
    if not answer.strip():
        return _no_answer("empty answer")
    if len(answer) > MAX_ANSWER_LENGTH and answer != gold:
        return _score(Answer("different", "spelling"), answer)
    gold_integer, integer = as_integer(gold), as_integer(answer)
    if gold_integer is not None and integer is not None:
        return _score(Answer("equal" if gold_integer == integer else "different", "integer"), answer)
    if gold.strip() and spelling(gold) == spelling(answer):
        return _score(Answer("equal", "spelling"), answer)
    return None


def _score(found: Answer, answer: str) -> Score:
    if found.verdict != "undecided":
        return _score_of(float(found.verdict == "equal"), f"{found.verdict}: {_shown(answer)}", found.method)
    reason = "undecided within the grader's limits" if found.method == "limit" else "undecided by any rule"
    return _score_of(0.0, f"{reason}: {_shown(answer)}", "undecided")


def _shown(answer: str) -> str:
    return answer if len(answer) <= 80 else answer[:77] + "..."


def _no_answer(reason: str) -> Score:
    return _score_of(0.0, f"no answer: {reason}", "none")


def _score_of(value: float, detail: str, method: str) -> Score:
    return Score(value=value, passed=value == 1.0, detail=detail, grader_version=GRADER_VERSION, method=method)
