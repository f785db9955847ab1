"""Parsing what a policy writes: case TC-01, case TC-03, trap 21."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sao_gym.messages import CallProblem, Message
from sao_gym.own_chat import OwnChat
from sao_gym.tokenizer import train_tokenizer
from sao_gym.tool_calls import Mark, Piece, checked_call, read_call, read_message

TOKENIZER = train_tokenizer(['{"name": "python", "arguments": {"code": "print("}}'] * 4, vocab_size=300)
CHAT = OwnChat(TOKENIZER)


def python_call(arguments: str) -> str:
    return f'{{"name": "python", "arguments": {arguments}}}'


# case TC-01, letters as there; (f) and (g) are sound as JSON and fail when the tool is dispatched.
TABLE: dict[str, tuple[str, CallProblem | None, dict[str, Any]]] = {
    "a": (python_call(r'"{\"code\": \"print(1)\"}"'), None, {"code": "print(1)"}),
    "b": (python_call(json.dumps(json.dumps('{"code": "1"}'))), CallProblem.NOT_AN_OBJECT, {}),
    "c": (python_call("[1]"), CallProblem.NOT_AN_OBJECT, {}),
    "d": (python_call("7"), CallProblem.NOT_AN_OBJECT, {}),
    "e": (python_call("null"), CallProblem.NOT_AN_OBJECT, {}),
    "f": ('{"name": "python"}', None, {}),
    "g": (python_call('{"code": 5}'), None, {"code": 5}),
    "h": (python_call('{"code":"1","code":"2"}'), CallProblem.DUPLICATE_KEY, {}),
    "i": (python_call("{}") + "\n" + python_call("{}"), CallProblem.SEVERAL_OBJECTS, {}),
    "j": ('{"arguments": {"code": "1"}}', CallProblem.MISSING_NAME, {}),
    "empty": ("", CallProblem.INVALID_JSON, {}),
    "list": ("[]", CallProblem.NOT_AN_OBJECT, {}),
    "nan": (python_call('{"x": NaN}'), CallProblem.INVALID_JSON, {}),
    "huge float": (python_call('{"x": 1e999}'), CallProblem.INVALID_JSON, {}),
    "huge int": (python_call('{"x": %s}' % ("9" * 5000)), CallProblem.INVALID_JSON, {}),
    "half a pair": (python_call(r'{"x": "\ud800"}'), CallProblem.INVALID_JSON, {}),
    "deep": (python_call("[" * 500 + "]" * 500), CallProblem.INVALID_JSON, {}),
    "deeper": ("[" * 100_000, CallProblem.INVALID_JSON, {}),
    "raw line break": (python_call('{"code": "a\nb"}'), CallProblem.INVALID_JSON, {}),
    "name is a number": ('{"name": 3, "arguments": {}}', CallProblem.MISSING_NAME, {}),
    "string of no object": (python_call('"print(1)"'), CallProblem.INVALID_JSON, {}),
    "trailing words": (python_call("{}") + " then", CallProblem.INVALID_JSON, {}),
    "inner duplicate": (python_call('{"o": {"a": 1, "a": 1}}'), CallProblem.DUPLICATE_KEY, {}),
}


@pytest.mark.parametrize("name", TABLE)
def test_each_malformed_call_has_its_problem(name: str) -> None:
    raw, problem, arguments = TABLE[name]
    call = read_call(raw, "call_0")
    assert (call.problem, dict(call.arguments), call.raw) == (problem, arguments, raw)
    assert bool(call.detail) == (problem is not None)


@pytest.mark.parametrize("name", TABLE)
def test_a_malformed_call_reaches_the_message_whole(name: str) -> None:
    raw, problem, arguments = TABLE[name]
    message = CHAT.parse(sampled("<tool_call>", raw, "</tool_call>", "<|end|>"))
    assert [(c.problem, c.raw, dict(c.arguments)) for c in message.tool_calls] == [(problem, raw, arguments)]


def test_a_library_that_says_ok_is_not_believed() -> None:
    assert checked_call("python", [1], "", "c").problem is CallProblem.NOT_AN_OBJECT
    assert checked_call(None, {}, "", "c").problem is CallProblem.MISSING_NAME
    assert checked_call("python", '{"code": "1"}', "", "c").arguments == {"code": "1"}


def test_keys_keep_their_order_and_unicode_its_letters() -> None:
    call = read_call(python_call('{"q": "é", "o": {"b": 1, "a": [true, null]}}'), "c")
    assert json.dumps(dict(call.arguments), ensure_ascii=False) == '{"q": "é", "o": {"b": 1, "a": [true, null]}}'


MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|end|>")


def sampled(*parts: str) -> np.ndarray:
    """Ids of parts; the markers are control ids, all else ordinary text."""
    return CHAT.codec.join([CHAT.codec.control[part] if part in MARKERS else part for part in parts])


def call_of(code: str) -> tuple[str, str, str]:
    return "<tool_call>", python_call(json.dumps({"code": code})), "</tool_call>"


@pytest.mark.parametrize(
    ("parts", "codes"),
    [
        (("<think>", *call_of("1"), "</think>", *call_of("2"), "<|end|>"), ["2"]),
        (("<think>", *call_of("1"), "</think>", "no call", "<|end|>"), []),
        (("<think>", *call_of("1"), "<|end|>"), []),
        ((*call_of("1"), "</think>", *call_of("2"), "<|end|>"), ["2"]),  # the prompt opened the reasoning
        ((*call_of("1"), "<think>", *call_of("2"), "</think>", *call_of("3"), "<|end|>"), ["1", "3"]),
    ],
)
def test_only_calls_after_the_reasoning_run(parts: tuple[str, ...], codes: list[str]) -> None:
    """Case TC-03."""
    message = CHAT.parse(sampled(*parts))
    assert [call.arguments["code"] for call in message.tool_calls] == codes
    assert all(call.problem is None for call in message.tool_calls)
    assert "python" in (message.reasoning or "")


def test_unclosed_blocks_are_problems_and_a_new_block_starts_afresh() -> None:
    message = CHAT.parse(sampled("a", "<tool_call>", "{", *call_of("2"), "<tool_call>", "x", "<|end|>"))
    assert [call.problem for call in message.tool_calls] == [CallProblem.UNCLOSED, None, CallProblem.UNCLOSED]
    assert [call.id for call in message.tool_calls] == ["call_0", "call_1", "call_2"]
    assert message.content == "a"


def test_a_cut_message_has_no_call_that_may_run() -> None:
    message = CHAT.parse(sampled(*call_of("1"), *call_of("2")), is_truncated=True)
    assert message.is_truncated
    assert len(message.tool_calls) == 2
    assert all(call.problem for call in message.tool_calls)


def test_marker_text_spelled_by_ordinary_ids_is_text() -> None:
    text = "".join(call_of("1"))
    message = CHAT.parse(CHAT.codec.join([text, CHAT.stop_token_ids[0]]))
    assert message == Message.assistant(text)


def check(ids: np.ndarray, is_truncated: bool) -> None:
    before = ids.copy()
    message = CHAT.parse(ids, is_truncated=is_truncated)
    assert np.array_equal(ids, before)
    assert message == CHAT.parse(ids, is_truncated=is_truncated)
    assert message.role == "assistant"
    assert message.is_truncated == is_truncated
    for index, call in enumerate(message.tool_calls):
        assert call.id == f"call_{index}"
        if call.problem is None:
            assert not is_truncated
            assert call.name.strip()
            assert isinstance(call.arguments, dict)
            json.dumps(call.arguments, allow_nan=False, ensure_ascii=False).encode()
        else:
            assert call.detail
    CHAT.write(message)  # whatever was read can be written


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated_calls(draw: st.DrawFn) -> np.ndarray:
    """A sound call with some ids dropped, doubled or replaced."""
    arguments = draw(st.dictionaries(st.text(max_size=6), JSON, max_size=3))
    call = json.dumps({"name": draw(st.text(max_size=6)), "arguments": arguments})
    ids = list(sampled("<think>", "t", "</think>", "<tool_call>", call, "</tool_call>", "<|end|>"))
    for _ in range(draw(st.integers(0, 4))):
        if not ids:
            break
        spot = draw(st.integers(0, len(ids) - 1))
        ids[spot : spot + 1] = draw(st.lists(st.sampled_from([*ids, *range(12)]), max_size=2))
    return np.asarray(ids, dtype=np.int32)


IDS = st.one_of(
    mutated_calls(),
    st.lists(st.integers(-5, len(TOKENIZER) + 5), max_size=60).map(lambda ids: np.asarray(ids, dtype=np.int32)),
    st.lists(st.sampled_from([*MARKERS, "{", "}", '"', ":", '"name"', '"arguments"', "[", ",", "\\"])).map(
        lambda parts: sampled(*parts)
    ),
    st.binary(max_size=60).map(lambda data: sampled("<tool_call>", data.decode("utf-8", "replace"))),
)


@settings(max_examples=200, deadline=None)
@given(IDS, st.booleans())
def test_parsing_never_raises(ids: np.ndarray, is_truncated: bool) -> None:
    check(ids, is_truncated)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(IDS, st.booleans())
def test_parsing_never_raises_in_ten_thousand_examples(ids: np.ndarray, is_truncated: bool) -> None:
    check(ids, is_truncated)


def test_a_second_close_of_the_reasoning_takes_back_no_call() -> None:
    """Code may hold `</think>` as text: once there was reasoning, it hides nothing any more."""
    call = '{"name": "python", "arguments": {"code": "print(\'</think>\')"}}'
    before, _, after = call.partition("</think>")
    pieces = [
        Piece("", Mark.THINK_OPEN),
        Piece("hm"),
        Piece("</think>", Mark.THINK_CLOSE),
        Piece("<tool_call>", Mark.CALL_OPEN),
        Piece(before),
        Piece("</think>", Mark.THINK_CLOSE),
        Piece(after),
        Piece("</tool_call>", Mark.CALL_CLOSE),
    ]
    message = read_message(pieces)
    assert [dict(found.arguments) for found in message.tool_calls] == [{"code": "print('</think>')"}]
    assert (message.reasoning, message.content) == ("hm", "")
