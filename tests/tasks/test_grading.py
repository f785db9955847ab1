r"""The answer grader: the boxes it reads, the verdicts it gives, and the limits it keeps."""

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.errors import GradingError
from sao_gym.stream import Score
from sao_gym.tasks._grading_pool import Answer, GradingServer
from sao_gym.tasks.grading import (
    GRADER_VERSION,
    GradingLimits,
    close_graders,
    extract_boxed,
    grade_answer,
    grade_answer_async,
    score_response,
    score_response_async,
)

BENCHMARKS = (
    "aime2024",
    "aime2025",
    "aime2026",
    "beyond_aime",
    "hmmt_feb_2025",
    "hmmt_nov_2025",
    "imo_answerbench",
)


@pytest.fixture(scope="module", autouse=True)
def _workers() -> Iterator[None]:
    yield
    close_graders()


def boxed(answer: str) -> str:
    return rf"The answer is $\boxed{{{answer}}}$."


def assert_verdict(left: str, right: str, equal: bool) -> None:
    """The same verdict whichever side is gold."""
    for gold, answer in ((left, right), (right, left)):
        score = score_response(gold, boxed(answer))
        assert score.passed is equal, (gold, answer, score.detail)
        assert score.value == float(equal)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{1}\boxed{2}", "1, 2"),
        (r"$\boxed{1}$ and $\boxed{2}$, or \(\boxed{3}\)", "1, 2, 3"),
        ("\\boxed{4}\n\n\\boxed{4}", "4"),
        ("\\boxed{4}\n\n\\boxed{5}", "5"),
        (r"\boxed{4}, \boxed{4}", "4"),
        (r"\boxed \frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed 70.", "70"),
        (r"\fbox{7} ", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{70", None),
        (r"\boxed{3} and \boxed{70", "3"),
        (r"\boxedfoo{3}", None),
        ("no box", None),
        ("", None),
    ],
)
def test_extract_boxed(text: str, answer: str | None) -> None:
    assert extract_boxed(text) == answer


@given(st.text(alphabet=r"\{}boxed ,and$1", max_size=60))
@settings(max_examples=300, deadline=None)
def test_extract_boxed_takes_any_text(text: str) -> None:
    extract_boxed(text)
    extract_boxed(r"\boxed{" + text)
    plain = text.translate({ord(character): None for character in "\\{}"})
    assert extract_boxed(plain + r" so it is \boxed{12}") == "12"


@given(st.recursive(st.sampled_from(["", "1", "x+1", r"\}", r"\frac12"]), lambda inner: inner.map("a{{{}}}b".format)))
def test_extract_boxed_finds_every_balanced_content(content: str) -> None:
    expected = content.strip()
    assert extract_boxed(f"First \\boxed{{0}}. Then $\\boxed{{{content}}}$, so.") == expected
    assert extract_boxed(f"\\fbox{{{content}}}") == expected


@pytest.mark.parametrize(
    "text",
    [
        r"... so \(\boxed{70}\).</answer>",
        r"**\boxed{70}**",
        r"\boxed{\boxed{70}}",
        r"\boxed 70",
        r"\fbox{70}",
        r"$$\boxed{\,70\,}$$",
        r"\boxed{070}",
        r"\boxed{70^\circ}",
        r"\boxed{\$70}",
        r"\boxed{70.}",
    ],
)
def test_wrappers_are_no_part_of_the_answer(text: str) -> None:
    """Case GR-09, first half."""
    for gold in ("70", r"\boxed{70}", "070", "$70$"):
        assert score_response(gold, text).value == 1.0


@pytest.mark.parametrize(
    "text", [r"\boxed{70", r'print("\\boxed{70}") ... so the answer is \boxed{71}', r"\boxed{}", "70", "", r"\boxed{ }"]
)
def test_no_answer_scores_nothing(text: str) -> None:
    """Case GR-09, second half."""
    score = score_response("70", text)
    assert (score.value, score.passed, score.grader_version) == (0.0, False, GRADER_VERSION)


@pytest.mark.parametrize("piece", [r"\boxed{", r"\boxed{1}", "{", "\\", r"\boxed ", "\n", ", ", r"\boxed{}, "])
def test_long_texts_are_read_in_time(piece: str) -> None:
    """A policy may write anything, a hundred thousand times."""
    start = time.process_time()
    extract_boxed(piece * 100_000)
    score_response("7", piece * 100_000)
    extract_boxed(r"\boxed{1}" + piece * 100_000 + r"\boxed{2}")
    assert time.process_time() - start < 10


def test_bare_answers_on_either_side() -> None:
    """Case GR-09: a value must not be unwrapped twice."""
    assert grade_answer("70", r"\boxed{70}").passed
    assert grade_answer(r"\boxed{70}", "70").passed
    assert grade_answer("70", "70").passed
    assert not grade_answer("70", "").passed
    assert not grade_answer("", "").passed


@pytest.mark.parametrize(
    ("gold", "text", "value"),
    [
        ("1331, 1728", r"The values are \boxed{1331} and \boxed{1728}.", 1.0),
        ("1331, 1728", r"\boxed{1331}, \boxed{1728}", 1.0),
        ("1331, 1728", r"First try gave \boxed{1331}. Wait, that is wrong. \boxed{1728}", 0.0),
        ("1331, 1728", r"\boxed{1728}", 0.0),
        ("4", r"First \boxed{3}. Wait, no: \boxed{4}", 1.0),
        ("4", r"\boxed{3} or \boxed{4}", 0.0),
    ],
)
def test_boxes_that_are_one_list(gold: str, text: str, value: float) -> None:
    """Case GR-10; (d) is the last turn alone."""
    assert score_response(gold, text).value == value


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("1305", "1,305", True),
        ("1305", "1{,}305", True),
        ("4, 5", "45", False),
        ("4, 5", "45752", False),
        ("100, 200", "100,200", True),
        ("100, 200", "200, 100", True),
        ("-984", "-984", True),
        ("984", "-984", False),
        ("0", "-0", True),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "9" * 4999 + "8", False),
    ],
)
def test_integers_are_compared_exactly(left: str, right: str, equal: bool) -> None:
    assert_verdict(left, right, equal)


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (r"(-\infty,3)", "x<3", True),
        (r"[2,\infty)", r"x \ge 2", True),
        ("(0, 12.5)", "0<x<12.5", True),
        (r"m \ge \sqrt2", r"m\in[\sqrt2,+\infty)", True),
        (r"[2,\infty)", "x>2", False),
        (r"(-\infty,3)", r"x\le 3", False),
        (r"(-\infty,2)\cup(2,3)\cup(3,\infty)", r"(-\infty,\infty)", False),
        (r"(-\infty,3)", "2x+1<7", False),
    ],
)
def test_inequalities(left: str, right: str, equal: bool) -> None:
    """Case GR-03: a relation counts only when it is solved."""
    assert_verdict(left, right, equal)


@pytest.mark.parametrize("gold", [r"1331 \text{ and } 1728", "1331, 1728"])
@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("1728", 0.0),
        ("1331, 1728, 5", 0.0),
        ("1331", 0.0),
        (r"1728 \text{ and } 1331", 1.0),
        (r"\{1728, 1331\}", 1.0),
        ("1331, 1728", 1.0),
    ],
)
def test_lists_need_every_value(gold: str, answer: str, value: float) -> None:
    """Case GR-04."""
    assert score_response(gold, boxed(answer)).value == value


def test_a_list_is_not_the_date_a_spreadsheet_made_of_it() -> None:
    """Case GR-11, the grader's half: 45752 is the serial of "4, 5", and no answer."""
    assert grade_answer("4, 5", "45752").value == 0
    assert grade_answer("4, 5", r"\boxed{5, 4}").value == 1


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (r"\dfrac{\pi}{2}", "pi/2", True),
        ("e^{16}-1", "-1 + exp(16)", True),
        (r"-2\pi", "-2*pi", True),
        ("14-i", "14.0 - 1.0*I", True),
        (r"\frac{\sqrt{570}}{12}", "sqrt(570)/12", True),
        ("2^{10}", "2**10", True),
        (r"O(\log\log n)", "Theta(log log n)", False),
        (r"\frac{\pi}{2}", "pi/3", False),
        ("e^{16}-1", "exp(16)+1", False),
        (r"\frac{\pi}{2}", '__import__("os").getpid()', False),
        (r"\frac{\pi}{2}", 'open("/etc/passwd")', False),
    ],
)
def test_program_notation(left: str, right: str, equal: bool) -> None:
    """Case GR-06."""
    assert_verdict(left, right, equal)


def test_an_answer_is_never_run(tmp_path: Path) -> None:
    """Case GR-06: text that would leave a mark if anything evaluated it."""
    mark = tmp_path / "mark"
    for answer in (f"open('{mark}', 'w')", f"sqrt(open('{mark}', 'w'))", f"__import__('os').mkdir('{mark}')"):
        assert not grade_answer("2", answer).passed
    assert not mark.exists()


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("odd $n$", r"\text{all odd } n", True),
        ("odd $n$", "even $n$", False),
        ("m is prime or 1", r"m \text{ is prime or } 1", True),
        ("No positive integers", r"\text{none}", True),
        ("All positive integers", r"\mathbb{Z}^+", True),
        ("$[-6,5]$", r"-6\le x\le 5", True),
        (r"$1,2,\ldots, 1235$", r"1,2,\dots,1235", True),
        (r"$1,2,\ldots, 1235$", "1,2,1235", False),
        (r"\frac{-1+\sqrt{17}}{2}, \frac{-1-\sqrt{17}}{2}", r"\frac{-1\pm\sqrt{17}}{2}", True),
        (r"-\frac{2}{3},0,\frac{2}{3}", r"0,\pm\frac23", True),
        ("(1,2,3)", "(3,2,1)", False),
        ("f(x)=x+1", "x+1", True),
        ("8.5", r"\frac{17}{2}", True),
        ("5", r"5 \text{ cm}", True),
        (r"\frac{1}{3}", "0.33", False),
        ("2^{2024}+1", "2^{2024}", False),
        (r"2^{25} \cdot 26!", r"26! \times 33554432", True),
        ("n+1", "1+n", True),
        ("x", r"\frac{", False),
        (r"\begin{pmatrix} 1/2 \\ 2 \end{pmatrix}", r"\begin{bmatrix}\frac12\\2\end{bmatrix}", True),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
        (r"5\pi", r"5\pi \text{ inches}", True),
        ("(1,2)", "2,1", False),
        ("(1,2)", r"\{1,2\}", False),
        ("(4,3)", "(5,2)", False),
        ("(1,2),(3,4)", "(3,4),(1,2)", True),
        ("(1,2),(3,4)", "(2,1),(3,4)", False),
        ("5", "x=5", True),
        ("5", "4=5", False),
        ("x^2+y^2=1", "y^2+x^2=1", True),
        ("10^{-8}", "0.0", False),
        (r"\frac{1}{3}", "0.3333333333333333", True),
        (r"\sqrt{2}", "1.4142", False),
        ("12", "1 2", False),
        ("f(x)=2x, f(x)=3x", "f(x)=3x, f(x)=2x", True),
        ("All numbers of the form $4k+3$", "4k+3", True),
        ("1 if triangle is isoceles, otherwise 2", "1", False),
        (r"O(n)", "n", False),
    ],
)
def test_other_kinds(left: str, right: str, equal: bool) -> None:
    assert_verdict(left, right, equal)


MONSTERS = (
    "2^{4^{8^{16}}}",
    r"\log_{2^5}(\log_{2^4}(\log_{2^3}(\log_{2^2}(\log_{2^1}2^{2^{16^{8^4}}}))))",
    "(10^{9})!",
    r"\binom{10^9}{5\cdot10^8}",
)
ENDLESS = (
    r"\prod_{k=1}^{10^{9}} k",
    r"\lfloor\sqrt{10^{400000}+1}\cdot\pi^{99999}\rfloor!!",
    r"\sum_{k=1}^{10^{7}} \lfloor\sqrt{k}\rfloor",
    r"\int_0^1 \frac{\sin(x^x)}{\cos(x^x)+x^{x^x}} dx",
)
"""What the reader cannot foresee: the limits of the child end it."""


def children() -> set[str]:
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


def grandchildren(pids: set[str]) -> dict[str, str]:
    """The children of each: none, for whoever grades and has nothing to do; a container engine of other tests has some."""
    return {pid: Path(f"/proc/{pid}/task/{pid}/children").read_text() for pid in pids}


async def grade_all(answers: list[str], limits: GradingLimits) -> None:
    """All at once, with a normal pair in between that is answered long before the last of them."""
    assert (await grade_answer_async("5", r"\frac{10}{2}")).passed  # the server is up
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    idle = children()
    below = grandchildren(idle)
    start = time.monotonic()
    ends: dict[str, float] = {}

    async def grade(gold: str, answer: str) -> Score:
        score = await score_response_async(gold, boxed(answer), limits)
        ends[gold] = time.monotonic() - start
        return score

    pairs = [grade("7", answer) for answer in answers]
    pairs.insert(len(pairs) // 2, grade("5", r"\frac{10}{2}"))
    scores = await asyncio.gather(*pairs)
    assert [score.value for score in scores].count(1.0) == 1
    assert scores[len(answers) // 2].passed
    assert any("within the grader's limits" in score.detail for score in scores)
    assert {score.method for score in scores} <= {"undecided", "symbolic"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024
    assert (await grade_answer_async("5", r"\frac{10}{2}")).passed
    assert children() == idle
    assert grandchildren(idle) == below
    if answers[0] in ENDLESS:  # the others are seen to be too large before they start
        assert ends["5"] < ends["7"], "a normal pair waits for no monster"


@pytest.mark.parametrize("answers", [MONSTERS, ENDLESS])
async def test_answers_that_never_end(answers: tuple[str, ...]) -> None:
    """Case GR-08 in small."""
    await grade_all(list(answers), GradingLimits(cpu_s=0.3))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("answers", [MONSTERS, ENDLESS])
async def test_sixteen_answers_that_never_end(answers: tuple[str, ...]) -> None:
    """Case GR-08."""
    start = time.monotonic()
    await grade_all(list(answers) * 4, GradingLimits())
    assert time.monotonic() - start < 50


@pytest.mark.slow
@pytest.mark.alone
def test_sixteen_answers_that_never_end_from_threads() -> None:
    """Case GR-08, from worker threads."""
    start = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(lambda answer: grade_answer("7", boxed(answer)), MONSTERS * 4))
    assert not any(score.passed for score in scores)
    assert time.monotonic() - start < 50
    assert grade_answer("5", r"\frac{10}{2}").passed


def test_memory_is_bounded() -> None:
    score = grade_answer("7", "2^{" + "9" * 40 + "}", GradingLimits(memory_bytes=400 << 20, cpu_s=0.5))
    assert score.value == 0.0


def test_a_killed_worker_is_replaced() -> None:
    assert grade_answer("5", r"\frac{10}{2}").passed
    for pid in children():
        os.kill(int(pid), 9)
    assert grade_answer("5", r"\frac{10}{2}").passed


def test_the_grader_needs_no_torch() -> None:
    code = (
        "import sys, sao_gym.tasks.grading, sao_gym.tasks._grading_worker, sao_gym.tasks._equality\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_starts_at_import() -> None:
    code = (
        "import sys, sao_gym.tasks.grading as g\nassert 'sympy' not in sys.modules\n"
        "assert g.grade_answer('7', '\\\\boxed{7}').passed\n"
        "from pathlib import Path\nassert Path('/proc/thread-self/children').read_text() == ''"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


BURST = """
import json, sys
asked = [json.loads(sys.stdin.readline())["id"] for _ in range(20)]
lines = [json.dumps({"id": id, "verdict": "equal", "method": "table"}) for id in asked]
sys.stdout.write("\\n".join(lines)[:-3])  # all in one piece but the last
sys.stdout.flush()
sys.stdin.readline()
print(lines[-1][-3:], flush=True)
sys.stdin.read()
"""


def test_answers_that_come_in_one_piece_are_each_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers many questions in one breath; none of them waits until it says something more."""
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", BURST], **options)

    monkeypatch.setattr("sao_gym.tasks._grading_pool.subprocess.Popen", start)
    server = GradingServer()
    monkeypatch.undo()
    try:
        owed = [server.submit("1", "1", GradingLimits()) for _ in range(20)]
        assert {future.result(timeout=30).verdict for future in owed[:-1]} == {"equal"}
        assert not owed[-1].done()  # half an answer is none
        server.submit("1", "1", GradingLimits())
        assert owed[-1].result(timeout=30).verdict == "equal"
    finally:
        server.close()


def test_a_server_ends_with_its_owner() -> None:
    server = GradingServer()
    assert server.submit("5", r"\frac{10}{2}", GradingLimits()).result() == Answer("equal", "symbolic")
    server.close()
    server.close()
    assert server._process.poll() is not None
    with pytest.raises(GradingError, match="has ended"):
        server.submit("5", "6", GradingLimits()).result()


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_gold_answer_matches_itself(name: str) -> None:
    """Trap 16, first third: gold scores 1, and garbage 0."""
    folder = os.environ.get("SAO_GYM_DATA")
    if folder is None:
        pytest.skip("SAO_GYM_DATA does not name a folder with the benchmarks")
    lines = (Path(folder) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [str(json.loads(line)["answer"]) for line in lines]
    for answer in answers:
        assert score_response(answer, boxed(answer)).value == 1.0, answer
        assert score_response(answer, answer.replace("boxed", "")).value == 0.0, answer
    for answer, other in list(pairwise(answers))[:: max(len(answers) // 10, 1)]:
        if answer != other:
            assert score_response(answer, boxed(other)).value == 0.0, (answer, other)
