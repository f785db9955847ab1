r"""The answer grader.

Rule: the answer is the last balanced box of the final turn, `\boxed{...}`, `\boxed x` or `\fbox{...}`; boxes joined
only by a comma, "and", "or" or spaces are one list. Integers are compared exactly, digit by digit; everything else by
math-verify, boxed against boxed, with the same verdict whichever side is gold, in a worker process that is ended at
its limits. What is not decided within them scores 0 and says so.

Example:
    >>> grade_answer("70", r"So the answer is $\boxed{070}$.").value
    1.0
"""

import asyncio
from functools import cache

from sao_gym.stream import Score
from sao_gym.tasks._answers import as_integer, space_commas, spelling
from sao_gym.tasks._boxes import extract_boxed
from sao_gym.tasks._grading_pool import GradingLimits, SharedPool
from sao_gym.tasks._grading_worker import Verdict

__all__ = [
    "GRADER_VERSION",
    "GradingLimits",
    "close_graders",
    "extract_boxed",
    "grade_answer",
    "grade_answer_async",
    "score_response",
    "score_response_async",
]

MAX_ANSWER_LENGTH = 20_000
GRADER_VERSION = "1"
"""Changes whenever any verdict may change."""


@cache
def _shared_pool() -> SharedPool:
    return SharedPool()


def close_graders() -> None:
    """End the grading workers of this process; the next grade starts new ones."""
    _shared_pool().close()


def grade_answer(gold: str, response: str, limits: GradingLimits | None = None) -> Score:
    """Score a response against the gold answer; either may be boxed or bare. Blocks for milliseconds.

    Raises GradingError if the grader itself failed.
    """
    pair = _as_pair(gold, response)
    return _early_score(*pair) or _score(_shared_pool().get().ask(*pair, limits or GradingLimits()), pair[1])


async def grade_answer_async(gold: str, response: str, limits: GradingLimits | None = None) -> Score:
    """Asynchronous twin of `grade_answer`; at most as many comparisons run at once as there are workers."""
    pair = _as_pair(gold, response)
    early = _early_score(*pair)
    if early is not None:
        return early
    pool = _shared_pool().get()
    loop = asyncio.get_running_loop()
    verdict = await loop.run_in_executor(pool.executor, pool.ask, *pair, limits or GradingLimits())
    return _score(verdict, pair[1])


def score_response(gold: str, final_text: str, limits: GradingLimits | None = None) -> Score:
    """Score an episode's final turn: no box is no answer, and no answer is 0. Raises GradingError."""
    answer = extract_boxed(final_text)
    return _no_answer("no box in the final turn") if answer is None else grade_answer(gold, answer, limits)


async def score_response_async(gold: str, final_text: str, limits: GradingLimits | None = None) -> Score:
    """Asynchronous twin of `score_response`."""
    answer = extract_boxed(final_text)
    if answer is None:
        return _no_answer("no box in the final turn")
    return await grade_answer_async(gold, answer, limits)


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
        return _score(Verdict.DIFFERENT, answer, "spelling")
    gold_integer, integer = as_integer(gold), as_integer(answer)
    if gold_integer is not None and integer is not None:
        return _score(Verdict.EQUAL if gold_integer == integer else Verdict.DIFFERENT, answer, "integer")
    if gold.strip() and spelling(gold) == spelling(answer):
        return _score(Verdict.EQUAL, answer, "spelling")
    return None


def _score(verdict: Verdict, answer: str, method: str = "symbolic") -> Score:
    shown = answer if len(answer) <= 80 else answer[:77] + "..."
    if verdict is Verdict.UNDECIDED:
        return _score_of(0.0, f"undecided within the grader's limits: {shown}", "undecided")
    return _score_of(float(verdict is Verdict.EQUAL), f"{verdict}: {shown}", method)


def _no_answer(reason: str) -> Score:
    return _score_of(0.0, f"no answer: {reason}", "none")


def _score_of(value: float, detail: str, method: str) -> Score:
    return Score(value=value, passed=value == 1.0, detail=detail, grader_version=GRADER_VERSION, method=method)
