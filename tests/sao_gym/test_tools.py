"""Functions as tools: schema from hints and docstring, verdict on arguments."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sao_gym.errors import ConfigError
from sao_gym.messages import CallProblem, ToolCall
from sao_gym.tools import Tool, check_call, result_text


def search(
    query: str,
    limit: int = 5,
    weight: float = 1.0,
    kinds: list[Literal["paper", "code"]] | None = None,
    options: dict[str, int] | None = None,
    exact: bool = False,
) -> str:
    """Find things.

    All of them.

    Args:
        query: What to look for, in words;
            several are fine.
        limit (int): Most results.

    Returns:
        What was found.
    """
    return f"{query} {limit} {weight} {kinds} {options} {exact}"


SEARCH = Tool.from_function(search)


def test_the_schema_says_what_the_hints_and_the_docstring_say() -> None:
    assert SEARCH.spec.name == "search"
    assert SEARCH.spec.description == "Find things. All of them."
    assert SEARCH.spec.parameters == {
        "type": "object",
        "required": ["query"],
        "properties": {
            "query": {"type": "string", "description": "What to look for, in words; several are fine."},
            "limit": {"type": "integer", "default": 5, "description": "Most results."},
            "weight": {"type": "number", "default": 1.0},
            "kinds": {
                "anyOf": [{"type": "array", "items": {"enum": ["paper", "code"]}}, {"type": "null"}],
                "default": None,
            },
            "options": {
                "anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}],
                "default": None,
            },
            "exact": {"type": "boolean", "default": False},
        },
    }


@pytest.mark.parametrize(
    ("arguments", "problem", "expected"),
    [
        ([1], CallProblem.NOT_AN_OBJECT, "must be a JSON object"),
        (None, CallProblem.NOT_AN_OBJECT, "must be a JSON object"),
        ({}, CallProblem.MISSING_ARGUMENT, "missing argument 'query'; tool 'search' takes query (a string)"),
        ({"query": "a", "lmit": 1}, CallProblem.UNEXPECTED_ARGUMENT, "unexpected argument 'lmit'"),
        ({"query": 5}, CallProblem.WRONG_TYPE, "argument 'query' of tool 'search' must be a string, got the integer 5"),
        ({"query": "a", "limit": True}, CallProblem.WRONG_TYPE, "must be an integer, got the boolean True"),
        ({"query": "a", "limit": 5.0}, CallProblem.WRONG_TYPE, "must be an integer, got the number 5.0"),
        ({"query": "a", "exact": 1}, CallProblem.WRONG_TYPE, "must be a boolean"),
        ({"query": "a", "kinds": ["film"]}, CallProblem.WRONG_TYPE, "one of 'paper', 'code'"),
        ({"query": "a", "options": {"x": "y"}}, CallProblem.WRONG_TYPE, "values are each an integer or null"),
        ({"query": None}, CallProblem.WRONG_TYPE, "must be a string, got the null None"),
    ],
)
def test_what_does_not_fit_is_named(arguments: Any, problem: CallProblem, expected: str) -> None:
    checked = SEARCH.check(arguments)
    assert checked.problem is problem
    assert expected in checked.detail


def test_what_fits_is_passed_on_and_integers_become_floats() -> None:
    checked = SEARCH.check({"query": "a", "weight": 2, "kinds": ["code"], "options": {"x": 1}})
    assert checked.problem is None
    assert checked.arguments == {"query": "a", "weight": 2.0, "kinds": ["code"], "options": {"x": 1}}
    assert type(checked.arguments["weight"]) is float


def test_a_union_keeps_an_exact_type() -> None:
    def pick(x: float | int | str, y: Optional[float] = None) -> None:  # noqa: UP045 - both spellings are read
        """Pick."""

    checked = Tool.from_function(pick).check({"x": 3, "y": 4})
    assert (type(checked.arguments["x"]), type(checked.arguments["y"])) == (int, float)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
argument_names = st.sampled_from(["query", "limit", "weight", "kinds", "options", "exact", "other"])


@settings(max_examples=300, deadline=None)
@given(json_values | st.dictionaries(argument_names, json_values, max_size=5))
def test_no_arguments_raise_and_those_that_pass_are_typed(arguments: Any) -> None:
    checked = SEARCH.check(arguments)
    if checked.problem is not None:
        assert checked.detail
        return
    assert isinstance(checked.arguments["query"], str)
    assert isinstance(checked.arguments.get("limit", 1), int)
    assert not isinstance(checked.arguments.get("limit", 1), bool)
    assert isinstance(checked.arguments.get("weight", 1.0), float)
    search(**checked.arguments)


def test_an_unknown_tool_gets_the_nearest_names() -> None:
    checked = check_call(ToolCall(id="c", name="serch"), {"search": SEARCH})
    assert checked.problem is CallProblem.UNKNOWN_TOOL
    assert checked.detail == "unknown tool 'serch'; did you mean 'search'?"
    assert "known tools: none" in check_call(ToolCall(id="c", name="x"), {}).detail


def test_a_problem_found_by_the_parser_stands() -> None:
    call = ToolCall(id="c", name="search", arguments={"query": "a"}, problem=CallProblem.INVALID_JSON, detail="d")
    assert check_call(call, {"search": SEARCH}) == check_call(call, {})
    assert check_call(call, {}).detail == "d"


def star(*args: int) -> None: ...
def untyped(x) -> None: ...  # type: ignore[no-untyped-def]
def odd(x: complex) -> None: ...
def keyed(x: dict[int, str]) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [(star, "must be named"), (untyped, "no type hint"), (odd, "no JSON schema"), (keyed, "no JSON schema")],
)
def test_a_signature_without_a_schema_is_refused_when_the_tool_is_made(
    function: Callable[..., Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        Tool.from_function(function)


def test_methods_lose_self_and_results_become_text() -> None:
    class Box:
        def get(self, key: str) -> Mapping[str, str]:
            """Get."""
            return {key: "é"}

    tool = Tool.from_function(Box().get)
    assert list(tool.spec.parameters["properties"]) == ["key"]
    assert result_text(tool.function("k")) == '{"k": "é"}'
    assert result_text("as it is") == "as it is"
