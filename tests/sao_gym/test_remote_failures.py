"""What a failed request means, in the words of many servers."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.remote_failures import Meaning, failure_in, read_failure


def said(status: int, message: Any, **more: Any) -> Meaning:
    return read_failure(status, {}, json.dumps({"error": {"message": message, **more}}).encode()).meaning


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens."),
        (400, "'max_tokens' is too large: 4000. This model's maximum context length is 2048 tokens"),
        (400, "prompt is too long: 210000 tokens > 200000 maximum"),
        (400, "The input (9000 tokens) is longer than the model's context length (8192 tokens)."),
        (400, "Requested token count exceeds the model's maximum context length of 4096 tokens."),
        (400, "The input token count (1048577) exceeds the maximum number of tokens allowed"),
        (500, "the request exceeds the available context size, try increasing it"),
        (413, "Please reduce the length of the messages"),
    ],
)
def test_many_servers_say_that_the_context_is_full(status: int, message: str) -> None:
    assert said(status, message) is Meaning.OVERFLOW


@pytest.mark.parametrize(
    ("status", "message", "meaning"),
    [
        (429, "Too many tokens per minute", Meaning.RETRY),
        (429, "You exceeded your current quota", Meaning.RETRY),
        (500, "oops", Meaning.RETRY),
        (529, "overloaded", Meaning.RETRY),
        (408, "", Meaning.RETRY),
        (409, "", Meaning.RETRY),
        (400, "max_tokens is too large: 200000. This model supports at most 16384 completion tokens", Meaning.UNCLEAR),
        (400, "Unsupported value: 'temperature' does not support 0.5", Meaning.UNCLEAR),
        (422, "bad field", Meaning.UNCLEAR),
        (401, "invalid key", Meaning.REFUSED),
        (404, "The model `context length` does not exist", Meaning.REFUSED),
        (403, "country not supported", Meaning.REFUSED),
        (403, "Your input was flagged", Meaning.FILTERED),
        (400, "triggering Azure OpenAI's content management policy", Meaning.FILTERED),
        (302, "", Meaning.REFUSED),
    ],
)
def test_what_to_do_after_a_status(status: int, message: str, meaning: Meaning) -> None:
    assert said(status, message) is meaning


def test_codes_count_as_much_as_words() -> None:
    assert said(429, "no", code="insufficient_quota") is Meaning.REFUSED
    assert said(400, "no", code="context_length_exceeded") is Meaning.OVERFLOW
    assert said(400, "no", code="content_filter") is Meaning.FILTERED


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error": {"message": "a\\n b"}}', "a b"),
        (b'{"error": "plain"}', "plain"),
        (b'{"object": "error", "message": "older"}', "older"),
        (b'{"detail": "framework"}', "framework"),
        (b'[{"error": {"message": "listed"}}]', "listed"),
        (b"<html><h1>Bad Gateway</h1></html>", "Bad Gateway"),
        (b"", ""),
        (b"\xff", "\ufffd"),
        (b"x" * 10_000, "x" * 297 + "..."),
    ],
)
def test_bodies_of_any_shape_are_one_line(body: bytes, text: str) -> None:
    assert read_failure(500, {}, body).text == text


@given(st.integers(300, 599), st.binary(max_size=50) | st.text(max_size=20).map(lambda text: json.dumps(text).encode()))
def test_every_failure_has_one_meaning(status: int, body: bytes) -> None:
    assert read_failure(status, {}, body).meaning in Meaning


def test_a_failure_may_come_with_a_good_status() -> None:
    limited = failure_in({"error": {"message": "slow down", "code": 429}})
    assert limited is not None
    assert (limited.meaning, limited.kind, limited.text) == (Meaning.RETRY, "rate_limited", "slow down")
    broken = failure_in({"error": {"message": "x", "code": "internal"}})
    assert broken is not None
    assert broken.kind == "server_error"
    for fine in ({"error": None, "choices": [1]}, {"choices": []}, [], 7, None):
        assert failure_in(fine) is None
