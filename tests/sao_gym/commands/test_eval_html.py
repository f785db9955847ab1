"""The page of an evaluation: its counts are those handed in, its texts are text, every episode is there."""

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sao_gym.commands.eval_html import (
    HtmlReport,
    benchmark_view,
    flat_facts,
    render_html,
    segment_limit,
    segments_of,
    write_html,
)
from sao_gym.commands.eval_html_records import BenchmarkView, Excerpt, SegmentView, shorten
from sao_gym.conversation import MESSAGES, message_to_record
from sao_gym.evaluation_results import EpisodeResult, Usage
from sao_gym.evaluation_summary import Evaluation
from sao_gym.messages import Message, ToolCall
from sao_gym.policy_loading import byte_tokenizer
from sao_gym.stream import Outcome, OutcomeStatus, Segment, StopReason, TokenStream, Trajectory

VOID = {"meta", "link", "br", "hr", "input"}


class Page(HTMLParser):
    """Elements with their attributes and text; complains about what is not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {"figures": [], "problems": []}
        self.pre: list[str] = []
        self.text = ""
        self._table = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._table = dict(attrs)["class"] or ""
        if tag == "tr":
            self.tables[self._table].append([])
        if tag in ("td", "th"):
            self.tables[self._table][-1].append("")
        if tag == "pre":
            self.pre.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "script" in self.open:
            return
        self.text += data
        if "pre" in self.open:
            self.pre[-1] += data
        if "td" in self.open or "th" in self.open:
            self.tables[self._table][-1][-1] += data

    def figures(self) -> dict[str, list[str]]:
        return {row[0]: row[1:] for row in self.tables["figures"]}

    def count(self, name: str) -> int:
        return sum(tag == name for tag, _ in self.elements)


def result(task: str, attempt: int, **changes: object) -> EpisodeResult:
    made = EpisodeResult(
        uid=f"eval-{task}-{attempt}",
        task_id=task,
        attempt=attempt,
        outcome=OutcomeStatus.TERMINATED,
        value=0.0,
        passed=False,
        method="integer",
        answer="7",
        turns=2,
        n_action=100,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


ERROR = {"outcome": OutcomeStatus.ERROR, "value": None, "passed": None, "method": "", "answer": None}
RESULTS = (
    result("a", 0, value=1.0, passed=True, answer="5"),
    result("a", 1, value=1.0, passed=True, answer="5", outcome=OutcomeStatus.TRUNCATED, reason="turns"),
    result("a", 2),
    result("a", 3, method="none", answer=None),
    result("b", 0, method="symbolic", n_action=400),
    result("b", 1, outcome=OutcomeStatus.TRUNCATED, reason="context", method="none", answer=None, turns=9),
    result("b", 2, **ERROR, stage="reset", reason="sandbox"),
    result("b", 3, **ERROR, stage="grade", reason="grading"),
)
SAID = (
    SegmentView(is_action=False, title="observation", text=Excerpt("What is 2+3?")),
    SegmentView(is_action=True, title="action 0", text=Excerpt("\n\n5")),
)


def view(results: tuple[EpisodeResult, ...] = RESULTS, said: tuple[SegmentView, ...] = SAID) -> BenchmarkView:
    evaluation = Evaluation(results=results, samples=4, seconds=2.5, version_first=0, version_last=0)
    return benchmark_view("aime2025", evaluation, {one.uid: said for one in results})


def page(*views: BenchmarkView, facts: tuple[tuple[str, str], ...] = ()) -> Page:
    return Page(render_html(HtmlReport(title="step 1000", benchmarks=views or (view(),), facts=facts)))


def test_counts_are_those_handed_in_and_add_up() -> None:
    """Case EV-04: scored, wrong, no answer, truncated and errors by stage stand apart, each with its denominator."""
    figures = page().figures()
    kinds = ("right", "wrong", "no answer", "truncated", "error", "no verdict")
    assert [figures[name][0] for name in kinds] == ["2", "2", "1", "1", "2", "0"]
    assert sum(int(figures[name][0]) for name in kinds) == len(RESULTS)
    assert figures["error"][1] == "reset: sandbox 1, grade: grading 1"
    assert figures["scored"][0] == "6 of 8"
    assert figures["truncated in all"] == ["2", "turns 1, context 1"]
    assert figures["success (avg@n)"] == ["0.333", "2 of 6 scored samples"]
    assert figures["with errors as 0"] == ["0.250", "2 of 8 samples: a lower bound"]
    assert figures["judged by"] == ["6 scored", "integer 3, none 2, symbolic 1"]
    assert figures["pass@4"] == ["1.000", "over 1 of 2 problems: 1 of 2 tasks have fewer than 4 scored samples"]
    assert figures["maj@4"][0] == "1.000"
    assert figures["tokens"][0] == "150.0"
    assert figures["aime2025"][1] == "2 of 6 scored, 2 errors, 8 samples"
    assert figures["smallest difference"][1] == "with 2 tasks no difference is significant at 95%; 6 are needed"


def test_intervals_are_the_summarys() -> None:
    shown, summary = page().figures(), view().summary
    assert summary.interval is not None
    assert summary.interval_bootstrap is not None
    assert shown["interval, 95%"][0] == f"[{summary.interval.low:.3f}, {summary.interval.high:.3f}]"
    assert shown["bootstrap"][0] == f"[{summary.interval_bootstrap.low:.3f}, {summary.interval_bootstrap.high:.3f}]"


def test_nothing_scored_is_unknown_and_never_a_figure() -> None:
    lost = tuple(result("a", i, **ERROR, stage="generate", reason="engine") for i in range(3))
    found = page(view(lost))
    assert found.figures()["success"] == ["unknown", "none of 3 samples was scored"]
    assert found.figures()["pass@2"][0] == "unknown"
    assert "nan" not in found.text
    assert found.tables["problems"][1] == ["a", "0", "0", "0", "0", "3", "0", "0", "–", "100.0", "2.0"]


def test_a_row_per_problem() -> None:
    head, *rows = page().tables["problems"]
    assert head[:7] == ["problem", "right", "wrong", "no answer", "truncated", "error", "no verdict"]
    assert rows == [
        ["a", "2", "1", "1", "0", "0", "0", "4", "0.50", "100.0", "2.0"],
        ["b", "0", "1", "0", "1", "2", "0", "2", "0.00", "175.0", "3.8"],
    ]


def test_every_episode_can_be_read() -> None:
    found = page()
    episodes = [attributes["class"] for tag, attributes in found.elements if tag == "details" and "class" in attributes]
    assert episodes.count("problem") == 2
    assert episodes.count("episode right") == 2
    assert episodes.count("episode no-answer") == episodes.count("episode truncated") == 1
    assert found.pre == ["\nWhat is 2+3?", "\n\n\n5"] * 8, "each after the one line end that a parser drops"
    for one in RESULTS:
        assert one.uid in found.text
    assert "sample 2 · reset: sandbox" in found.text
    assert "nothing of this episode was recorded" in page(view(said=())).text


NASTY = (
    "</script><script>alert(1)</script>",
    "</pre></details><img src=x onerror=alert(1)>",
    "\" onmouseover='alert(1)' x=\"",
    "<!-- <![CDATA[ ]]> --> &lt;b&gt; &amp; &#x3c;script&#x3e;",
    "a\u2028b\u2029c\x85d",
    "nul \x00 escape \x1b[31m bell \x07",
    "lone \ud800 and \udfff",
    "\u202egnp.exe",
    "</style></title></textarea></noscript>",
    "javascript:alert(1)",
    "</SCRIPT\t>",
)


@pytest.mark.parametrize("text", NASTY)
def test_what_was_said_is_never_markup(text: str) -> None:
    """Wherever foreign text stands: episode, problem's name, detail, answer, reason, facts, title."""
    tame = Page(_everywhere("tame"))
    found = Page(_everywhere(text))
    assert [tag for tag, _ in found.elements] == [tag for tag, _ in tame.elements]
    names = [sorted(attributes) for _, attributes in tame.elements]
    assert [sorted(attributes) for _, attributes in found.elements] == names
    links = [attributes["href"] or "" for tag, attributes in found.elements if tag == "a"]
    assert all(link.startswith("#") for link in links)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e\ud800-\udfff]", _everywhere(text))


def _everywhere(text: str) -> str:
    results = (
        result(f"{text}0", 0, uid=f"{text}0", detail=text, answer=text, method=text),
        result(f"{text}1", 0, uid=f"{text}1", outcome=OutcomeStatus.TRUNCATED, reason=text),
        result("x", 0, uid=f"{text}2", **ERROR, stage=text, reason=text),
    )
    evaluation = Evaluation(results=results, samples=1, seconds=1.0, version_first=0, version_last=0)
    said = (SegmentView(is_action=True, title=text, text=Excerpt(text, text, 3), facts=(text,)),)
    made = benchmark_view(text, evaluation, {one.uid: said for one in results}, notes=[text])
    return render_html(HtmlReport(title=text, benchmarks=(made,), facts=((text, text),), notes=(text,)))


def test_the_page_asks_for_nothing_and_runs_its_own_script_alone() -> None:
    text = render_html(HtmlReport(title="t", benchmarks=(view(),)))
    assert not re.search(r"(src|href)=\"(?!#)|url\(|@import|https?:", text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for tag, a in Page(text).elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_several_benchmarks_have_places_of_their_own() -> None:
    other = replace(view(), name="arithmetic", notes=("3 problems are in the training tasks.",))
    found = page(view(), other)
    ids = [attributes["id"] for _, attributes in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids)) == 2 + 4
    for tag, attributes in found.elements:
        if tag == "a":
            assert (attributes["href"] or "")[1:] in ids
    assert "3 problems are in the training tasks." in found.text
    assert found.count("svg") == 4


def test_manifest_facts_are_shown_flat() -> None:
    manifest = {
        "model": {"path": "runs/x", "hash": None},
        "seed": 0,
        "stop": [1, 2],
        "notes": [],
        "env": {"options": {}},
    }
    facts = tuple(flat_facts(manifest))
    assert facts == (("model.path", "runs/x"), ("seed", "0"), ("stop", "[1, 2]"))
    assert page(facts=facts).figures()["model.path"] == ["runs/x"]


def test_a_cost_is_shown_with_what_is_unknown_of_it() -> None:
    usage = Usage(prompt_tokens=1000, completion_tokens=50, requests=3, retries=1, cost=0.5, unmetered=1)
    shown = page(view((result("a", 0, usage=usage), result("a", 1)))).figures()
    assert shown["cost"][0] == "0.5000"
    assert shown["paid tokens"] == [
        "1,000 in, 50 out",
        "3 requests, 1 retries; 1 answers did not say, so at least that",
    ]
    assert "cost" not in page().figures()


def test_long_texts_lose_their_middle_and_say_how_much() -> None:
    assert shorten("abcdef", 6) == Excerpt("abcdef")
    assert shorten("abcdef", 5) == Excerpt("abc", "ef", 1)
    long = SegmentView(is_action=True, title="action 0", text=shorten("x" * 500 + "y" * 9_500, 4_000))
    assert page(view((result("a", 0),), (long,))).pre == [
        "\n" + "x" * 500 + "y" * 1_500 + "\n[… 6,000 characters left out …]\n" + "y" * 2_000
    ]


def test_many_long_texts_share_the_room_of_the_page() -> None:
    """Short texts stay whole; the long ones are cut alike, those that were cut before once more."""
    short = SegmentView(is_action=False, title="short", text=Excerpt("s" * 1_200))
    long = SegmentView(is_action=True, title="long", text=Excerpt("l" * 9_000))
    cut = SegmentView(is_action=True, title="cut", text=shorten("c" * 50_000, 10_000))
    report = HtmlReport(title="t", benchmarks=(view((result("a", 0),), (short, long, cut)),))
    assert segment_limit(report, 1_000_000) == 40_000
    assert segment_limit(report, 5_200) == 2_000
    assert segment_limit(report, 10) == 1_000
    found = Page(render_html(report, budget_chars=5_200))
    assert [len(re.sub(r"\s*\[.*\]\s*", "", text).strip()) for text in found.pre] == [1_200, 2_000, 2_000]
    assert "7,000 characters left out" in found.pre[1]
    assert "48,000 characters left out" in found.pre[2]
    assert "more than 2,000 characters" in found.text


def test_segments_of_an_episode_with_ids() -> None:
    tokenizer = byte_tokenizer()
    prompt = Segment.observation(tokenizer.encode("2+3? <b>"))
    ids = tokenizer.encode("5")
    said = Segment.action(
        ids, logprobs=[-0.1] * len(ids), versions=[4] * len(ids), temperature=1.0, stop=StopReason.STOP
    )
    stream = TokenStream(segments=(prompt, said, prompt, said))
    made = Trajectory(
        uid="u", task_id="t", env_id="e", attempt=0, streams=(stream, stream), outcome=Outcome.terminated()
    )
    views = segments_of(made, tokenizer)
    assert [one.text.head for one in views] == ["2+3? <b>", "5"] * 4
    assert [one.is_action for one in views] == [False, True] * 4
    assert [one.title for one in views][1::2] == [f"stream {i // 2} · action {i}" for i in range(4)]
    assert views[1].facts == (f"{len(ids)} token", "version 4", "stop")
    assert segments_of(made, tokenizer, most=4)[0].text == Excerpt("2+", "b>", 4)


def test_segments_of_an_episode_with_messages() -> None:
    call = ToolCall(id="c0", name="python", arguments={"code": "1<2"}, raw="")
    said = (
        Message.user("2+3?"),
        Message(role="assistant", content="Let me see.", reasoning="hm", tool_calls=(call,), is_truncated=True),
        Message.tool("True", call=call),
    )
    info = {MESSAGES: [message_to_record(message) for message in said]}
    made = Trajectory(uid="u", task_id="t", env_id="e", attempt=0, streams=(), outcome=Outcome.terminated(), info=info)
    user, assistant, tool = segments_of(made, None)
    assert (user.title, user.text.head, user.is_action) == ("user", "2+3?", False)
    assert assistant.is_action
    assert assistant.text.head == '[reasoning]\nhm\n[end of reasoning]\nLet me see.\npython({"code": "1<2"})'
    assert assistant.facts == ("1 call", "cut by a length limit")
    assert (tool.title, tool.text.head) == ("tool python", "True")


def test_the_file_is_written_whole(tmp_path: Path) -> None:
    report = HtmlReport(
        title="lone \ud800 \x00", benchmarks=(view(said=tuple(replace(s, title="\udfff") for s in SAID)),)
    )
    write_html(tmp_path / "report.html", report)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render_html(report)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_hundreds_of_episodes_render_in_seconds() -> None:
    said = tuple(replace(SAID[i % 2], text=Excerpt("<b> & text\n" * 90)) for i in range(8))
    results = tuple(result(f"t{i}", k) for i in range(30) for k in range(16))
    found = render_html(HtmlReport(title="t", benchmarks=(view(results, said),)))
    assert found.count('<details class="episode') == 480
    assert len(found) > 480 * 8 * 990
