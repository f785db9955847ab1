"""Text stays text whatever it spells; histograms hold every value."""

import itertools
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.commands.html_markup import Markup, escape, join, tag
from sao_gym.commands.svg_histogram import bin_values, histogram


class Reader(HTMLParser):
    """Elements that a parser starts, and the text it finds."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.started: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.started.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def read(markup: str) -> Reader:
    reader = Reader()
    reader.feed(markup)
    reader.close()
    return reader


@given(st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"])) | st.just("</p><script>&amp;&lt;\"'"))
def test_any_text_comes_back_as_text(text: str) -> None:
    found = read(tag("p", text, title=text))
    assert (found.started, found.text, found.attributes) == (["p"], text, {"title": text})


@given(st.text(st.characters()))
def test_any_text_makes_one_element_and_can_be_encoded(text: str) -> None:
    """Control characters and lone surrogates included."""
    made = tag("p", text)
    assert read(made).started == ["p"]
    made.encode()


def test_what_has_no_picture_is_shown() -> None:
    assert escape("a\x00\x1b[31m\r\n\tb\x7f") == "a␀␛[31m␍\n\tb␡"
    assert escape("\u2028\u202e\ud800\x85\ufeff") == "\\u2028\\u202e\\ud800\\u0085\\ufeff"
    assert escape("π 😀 שלום") == "π 😀 שלום"


def test_only_tags_make_markup() -> None:
    inner = tag("b", "x")
    assert tag("p", inner) == "<p><b>x</b></p>"
    for joined in (inner + "", f"{inner}", "".join([inner]), inner.upper()):
        assert type(joined) is str
        assert read(tag("p", joined)).started == ["p"]
    assert join([inner, "<", None, 3]) == "<b>x</b>&lt;3"
    assert isinstance(join([]), Markup)


def test_attributes_and_void_elements() -> None:
    assert tag("a", "t", class_="x", data_value=1.5, hidden=True, id=None, open=False) == (
        '<a class="x" data-value="1.5" hidden>t</a>'
    )
    assert tag("meta", name="viewport", http_equiv="x") == '<meta name="viewport" http-equiv="x">'
    assert tag("rect", x=1) == '<rect x="1"></rect>', "in SVG nothing ends by itself"
    assert tag("pre", "\nfirst") == "<pre>\n\nfirst</pre>", "a parser drops one line end"


@given(st.lists(st.lists(st.integers(0, 200_000), max_size=30), min_size=1, max_size=3))
def test_bins_hold_every_value_once(rows: list[list[int]]) -> None:
    series = [(f"s{i}", values) for i, values in enumerate(rows)]
    bins = bin_values(series)
    every = [value for values in rows for value in values]
    assert [sum(one.counts[i] for one in bins) for i in range(len(rows) if bins else 0)] == [
        len(values) for values in rows if every
    ]
    for one in bins:
        assert sum(one.counts) == sum(one.low <= value <= one.high for value in every)
    assert len(bins) <= 25
    assert all(after.low == before.high + 1 for before, after in itertools.pairwise(bins))


def test_a_histogram_draws_a_bar_per_full_bin() -> None:
    found = read(histogram([("right", [1, 1, 2]), ("wrong", [1])], unit="turns"))
    assert found.started.count("g") == 2
    assert found.started.count("rect") == 3
    assert "1 turns: right 2, wrong 1" in found.text
    assert "no turns to show" in histogram([("right", [])], unit="turns")


@pytest.mark.parametrize("values", [[0], [7] * 5, [131_072], [0, 131_072]])
def test_one_value_is_drawn_too(values: list[int]) -> None:
    assert histogram([("all", values)], unit="tokens").count("<rect") == len(set(values))
