"""Answers of an SGLang server put together from chunks, whichever way they are cut (case EG-03)."""

import base64
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sao_gym.engines.sglang_answer import Answer, read_chunk, routed_rows, scored_tokens
from sao_gym.errors import EngineError

SIZES = [1, 30, 30, 29]
IDS = [(7 * i) % 61 for i in range(sum(SIZES))]
LOGPROBS = [-0.01 * (i + 1) for i in range(sum(SIZES))]
VERSIONS = {"run-0": 0, "run-1": 1}


def chunk(
    total: int,
    new: int,
    *,
    ids: str = "new",
    logprobs: str = "new",
    finish: str | None = None,
    label: str | None = "run-0",
    spans: list[tuple[str, int, int]] | None = None,
) -> bytes:
    first = {"new": total - new, "all": 0}
    scored = [[LOGPROBS[i], IDS[i], None] for i in range(first[logprobs], total)]
    meta: dict[str, Any] = {
        "id": "r",
        "finish_reason": {"type": finish, "length": total} if finish else None,
        "completion_tokens": total,
        "weight_version": label,
        "output_token_logprobs": scored,
    }
    if spans is not None:
        meta["weight_versions"] = [{"version": v, "start": a, "end": b} for v, a, b in spans]
    return msgspec.json.encode({"output_ids": IDS[first[ids] : total], "meta_info": meta})


def chunks(ids: str, logprobs: str, *, repeats: bool = False, sizes: list[int] = SIZES) -> list[bytes]:
    made, total = [], 0
    for index, size in enumerate(sizes):
        total += size
        is_last = index == len(sizes) - 1
        end: dict[str, Any] = {"finish": "length", "spans": [("run-0", 0, total)]} if is_last else {}
        made.append(chunk(total, size, ids=ids, logprobs=logprobs, **({} if repeats else end)))
        if is_last and repeats:
            made.append(chunk(total, size, ids=ids, logprobs=logprobs, **end))
    return made


FORMS: dict[str, Callable[[], list[bytes]]] = {
    "both cumulative": lambda: chunks("all", "all"),
    "ids new, log-probs cumulative": lambda: chunks("new", "all"),
    "both new": lambda: chunks("new", "new"),
    "the last chunk repeated with its reason": lambda: chunks("new", "new", repeats=True),
    "the last chunk repeated, all in it": lambda: chunks("all", "all", repeats=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_stream_gives_the_same_tokens(form: str) -> None:
    answer = Answer("run-0")
    for data in FORMS[form]():
        answer.add(read_chunk(data))
    got = answer.tokens(VERSIONS)
    assert got.ids == IDS
    assert got.logprobs == LOGPROBS
    assert got.versions == [0] * 90


@pytest.mark.parametrize("form", FORMS)
def test_what_came_before_a_loss_is_kept_once(form: str) -> None:
    answer = Answer("run-0")
    for data in FORMS[form]()[:2]:
        answer.add(read_chunk(data))
    assert answer.tokens(VERSIONS).ids == IDS[:31]


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    forms=st.lists(
        st.tuples(st.sampled_from(["new", "all"]), st.sampled_from(["new", "all"])), min_size=12, max_size=12
    ),
)
def test_forms_may_change_from_chunk_to_chunk(sizes: list[int], forms: list[tuple[str, str]]) -> None:
    answer, total = Answer("run-0"), 0
    for size, (ids, logprobs) in zip(sizes, forms, strict=False):
        total += size
        answer.add(read_chunk(chunk(total, size, ids=ids, logprobs=logprobs)))
    assert answer.tokens(VERSIONS).ids == IDS[:total]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"output_ids": [1], "meta_info": {}}', "does not say how many tokens"),
        (msgspec.json.encode({"output_ids": [1, 2], "meta_info": {"completion_tokens": 5}}), "neither all of them"),
        (chunk(1, 1).replace(b"-0.01", b"null"), "not finite"),
        (b'{"output_ids": "none"}', "cannot be read"),
        (
            b'{"output_ids": [1], "meta_info": {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 2, null]]}}',
            "other tokens",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        Answer("run-0").add(read_chunk(data))


def test_spans_give_each_token_its_version() -> None:
    answer = Answer("run-0")
    answer.add(read_chunk(chunk(20, 20)))
    answer.add(read_chunk(chunk(50, 30, label="run-1", finish="length", spans=[("run-0", 0, 25), ("run-1", 25, 50)])))
    assert answer.tokens(VERSIONS).versions == [0] * 25 + [1] * 25


def test_of_a_lost_answer_only_tokens_of_its_first_version_are_known() -> None:
    answer = Answer("run-0")
    for total, label in ((10, "run-0"), (20, "run-0"), (30, "run-1"), (40, "run-0")):
        answer.add(read_chunk(chunk(total, 10, label=label)))
    assert len(answer.ids) == 40
    assert answer.tokens(VERSIONS).ids == IDS[:20]


def test_a_version_that_nobody_here_published_is_refused() -> None:
    answer = Answer("run-0")
    answer.add(read_chunk(chunk(3, 3, finish="length", spans=[("default", 0, 3)])))
    with pytest.raises(EngineError, match="'default' that this engine did not publish"):
        answer.tokens(VERSIONS)


def test_spans_with_a_hole_are_refused() -> None:
    answer = Answer("run-0")
    answer.add(read_chunk(chunk(9, 9, finish="length", spans=[("run-0", 0, 3), ("run-1", 5, 9)])))
    with pytest.raises(EngineError, match="version of 3 tokens and sent 9"):
        answer.tokens(VERSIONS)


def test_the_last_chunk_of_an_abort_may_repeat_a_token() -> None:
    answer = Answer("run-0")
    answer.add(read_chunk(chunk(10, 10)))
    last = msgspec.json.decode(chunk(12, 2, finish="abort", spans=[("run-0", 0, 12)]))
    last["output_ids"].append(last["output_ids"][-1])
    answer.add(read_chunk(msgspec.json.encode(last)))
    assert answer.tokens(VERSIONS).ids == IDS[:10]


def test_scored_tokens_are_those_that_were_asked_for() -> None:
    data = b'{"output_ids": [], "meta_info": {"input_token_logprobs": [[null, 4, null], [-1.5, 5, null]]}}'
    assert scored_tokens(read_chunk(data), [4, 5], vocab_size=9).tolist() == [0.0, -1.5]
    with pytest.raises(EngineError, match="not the 2 it was given"):
        scored_tokens(read_chunk(data), [4, 6], vocab_size=9)


def test_the_last_id_of_a_prompt_is_named_0() -> None:
    data = b'{"output_ids": [], "meta_info": {"input_token_logprobs": [[null, 4, null], [-1.5, 0, null]]}}'
    assert scored_tokens(read_chunk(data), [4, 8], vocab_size=9).tolist() == [0.0, -1.5]
    with pytest.raises(EngineError, match="not the 2 it was given"):
        scored_tokens(read_chunk(data), [4, 7], vocab_size=9)


def test_routed_experts_are_those_of_the_positions_that_were_sampled_at() -> None:
    positions = np.arange(6 * 2 * 2, dtype="<i4").reshape(6, 2, 2)  # prompt 4, completion 3
    rows = routed_rows(base64.b64encode(positions.tobytes()).decode(), layers=2, top_k=2, n=3)
    assert rows.tolist() == positions[3:].tolist()
    with pytest.raises(EngineError, match="no whole number"):
        routed_rows(base64.b64encode(positions.tobytes()).decode(), layers=5, top_k=2, n=3)
