"""Plain Python functions as tools: from type hints and docstring to a JSON schema, and from a call to checked arguments.

Invariant: a tool runs only with arguments of the annotated types. Whatever else a policy may write becomes a
`CallProblem` and one sentence that says what was expected.

Example:
    >>> def add(a: int, b: int = 1) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: The first one.
    ...     '''
    ...     return a + b
    >>> tool = Tool.from_function(add)
    >>> tool.spec.parameters["required"], tool.spec.parameters["properties"]["a"]["description"]
    (['a'], 'The first one.')
    >>> tool.check({"a": "5"}).detail
    "argument 'a' of tool 'add' must be an integer, got the string '5'"
"""

import dataclasses
import difflib
import enum
import functools
import inspect
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Union

from sao_gym.errors import ConfigError
from sao_gym.messages import CallProblem, ToolCall, ToolSpec

_SCALARS: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}
_ARTICLES = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "a boolean",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """A call's verdict: `arguments` ready to pass, or a `problem` with its sentence."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: CallProblem | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function and how a model is told of it."""

    spec: ToolSpec
    function: Callable[..., Any]

    @classmethod
    def from_function(cls, function: Callable[..., Any], *, name: str | None = None) -> "Tool":
        """Read a function's hints and Google-style docstring. Raises ConfigError on a signature that has no schema."""
        bare = _bare(function)
        name = name or str(getattr(_unbound(function), "__name__", type(function).__name__))
        signature, hints = _read_signature(name, function, bare)
        summary, argument_texts = _read_docstring(inspect.getdoc(bare) or inspect.getdoc(_unbound(function)) or "")
        properties: dict[str, Any] = {}
        required = []
        for parameter in signature.parameters.values():
            schema = _parameter_schema(name, parameter, hints)
            if parameter.name in argument_texts:
                schema["description"] = argument_texts[parameter.name]
            if parameter.default is inspect.Parameter.empty:
                required.append(parameter.name)
            elif _is_json(parameter.default):
                schema["default"] = parameter.default
            properties[parameter.name] = schema
        parameters = {"type": "object", "properties": properties, "required": required}
        return cls(ToolSpec(name=name, description=summary, parameters=parameters), function)

    def check(self, arguments: Any) -> Checked:
        """Hold a call's arguments against the schema."""
        name, properties = self.spec.name, self.spec.parameters["properties"]
        expected = f"tool {name!r} takes {_signature(self.spec)}"
        if not isinstance(arguments, Mapping):
            detail = f"the arguments must be a JSON object, got {_shown(arguments)}; {expected}"
            return Checked(problem=CallProblem.NOT_AN_OBJECT, detail=detail)
        missing = [key for key in self.spec.parameters["required"] if key not in arguments]
        if missing:
            detail = f"missing argument {missing[0]!r}; {expected}"
            return Checked(problem=CallProblem.MISSING_ARGUMENT, detail=detail)
        unexpected = [str(key) for key in arguments if key not in properties]
        if unexpected:
            detail = f"unexpected argument {shortened(unexpected[0], 60)!r}; {expected}"
            return Checked(problem=CallProblem.UNEXPECTED_ARGUMENT, detail=detail)
        for key, value in arguments.items():
            if not _fits(value, properties[key]):
                wanted = _wanted(properties[key])
                detail = f"argument {key!r} of tool {name!r} must be {wanted}, got {_shown(value)}"
                return Checked(problem=CallProblem.WRONG_TYPE, detail=detail)
        return Checked({key: _converted(value, properties[key]) for key, value in arguments.items()})


def check_call(call: ToolCall, tools: Mapping[str, Tool]) -> Checked:
    """Hold a parsed call against the tools there are. A problem that the parser found stands."""
    if call.problem is not None:
        return Checked(problem=call.problem, detail=call.detail or f"the call could not be read ({call.problem})")
    tool = tools.get(call.name)
    if tool is None:
        name = shortened(call.name, 60)
        detail = f"unknown tool {name!r}; {nearest(name, list(tools), what='tool')}"
        return Checked(problem=CallProblem.UNKNOWN_TOOL, detail=detail)
    return tool.check(call.arguments)


def nearest(name: str, known: Sequence[str], *, what: str) -> str:
    """Half a sentence that offers the nearest known names, or all of them."""
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(other) for other in close) + "?"
    listed = ", ".join(repr(other) for other in sorted(known)) or "none"
    return f"known {what}s: {listed}"


def result_text(result: Any) -> str:
    """A tool's return value as the model reads it: text as it is, bytes as UTF-8, anything else as JSON.

    Arrays, sets, enums and dataclasses are written as what they hold; what JSON cannot say at all, as Python prints it.
    """
    if isinstance(result, str):
        return result
    if isinstance(result, bytes | bytearray):
        return result.decode(errors="replace")
    try:
        return json.dumps(result, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        return str(result)


def error_text(error: BaseException) -> str:
    """Kind and words of an exception, also of one whose words cannot be had."""
    try:
        words = str(error)
    except Exception as second:
        words = f"(no message: {type(second).__name__})"
    return f"{type(error).__name__}: {words}"


def shortened(text: str, limit: int) -> str:
    """`text`, or its beginning and end around a note of how many characters were left out."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}[... {len(text) - 2 * half} characters left out ...]{text[-half:]}"


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, bytes | bytearray):
        return value.decode(errors="replace")
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _unbound(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _bare(function: Any) -> Any:
    """The function that has the hints and the docstring: inside a partial, or an object's `__call__`."""
    function = _unbound(function)
    has_own = inspect.isroutine(function) or inspect.isclass(function) or not callable(function)
    return function if has_own else function.__call__


def _read_signature(name: str, function: Any, bare: Any) -> tuple[inspect.Signature, dict[str, Any]]:
    if not callable(function):
        raise ConfigError(f"a tool must be a function or a Tool, got {type(function).__name__} {_shown(function)}")
    if not re.fullmatch(r"[\w.-]{1,64}", name):
        raise ConfigError(f"a tool cannot be named {name!r}; use up to 64 letters, digits, '_', '-' or '.'")
    if inspect.isgeneratorfunction(bare) or inspect.isasyncgenfunction(bare):
        raise ConfigError(f"tool {name!r} is a generator; a tool must return its whole result")
    try:
        return inspect.signature(function), typing.get_type_hints(bare)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(
            f"the signature of tool {name!r} cannot be read ({error}); wrap it in a function with type hints"
        ) from error


def _parameter_schema(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> dict[str, Any]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ConfigError(
            f"parameter {parameter.name!r} of tool {name!r} is {parameter.kind.description}; "
            "a tool's parameters must be named, so that a call can name them"
        )
    if parameter.name not in hints:
        raise ConfigError(f"parameter {parameter.name!r} of tool {name!r} has no type hint; give it one")
    try:
        return _schema(hints[parameter.name])
    except TypeError as error:
        raise ConfigError(
            f"parameter {parameter.name!r} of tool {name!r} has the type {hints[parameter.name]}, which has no JSON "
            "schema; use str, int, float, bool, list, dict, Literal or Optional"
        ) from error


def _schema(hint: Any) -> dict[str, Any]:
    if hint in _SCALARS:
        return dict(_SCALARS[hint])
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(option) for option in inner]}
    if hint is list or origin is list:
        return {"type": "array", "items": _schema(inner[0])} if inner else {"type": "array"}
    if hint is dict or (origin is dict and inner[0] is str):
        return {"type": "object", "additionalProperties": _schema(inner[1])} if inner else {"type": "object"}
    raise TypeError(f"no JSON schema for {hint}")


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema:
        return any(type(value) is type(option) and value == option for option in schema["enum"])
    if "anyOf" in schema:
        return any(_fits(value, option) for option in schema["anyOf"])
    kind = schema.get("type")
    if kind == "array":
        return isinstance(value, list) and all(_fits(item, schema.get("items", {})) for item in value)
    if kind == "object":
        inner = schema.get("additionalProperties", {})
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and _fits(item, inner) for key, item in value.items()
        )
    if (kind, _json_type(value)) == ("number", "integer"):
        return bool(abs(value) <= sys.float_info.max)  # a larger one has no float
    return kind is None or _json_type(value) == kind


def _converted(value: Any, schema: Mapping[str, Any]) -> Any:
    """`value` with integers made floats where the schema asks for a number."""
    if "anyOf" in schema:
        options = [option for option in schema["anyOf"] if _fits(value, option)]
        exact = [option for option in options if option.get("type") == _json_type(value)]
        return _converted(value, (exact or options)[0])
    kind = schema.get("type")
    if kind == "number":
        return float(value)
    if kind == "array":
        return [_converted(item, schema.get("items", {})) for item in value]
    if kind == "object":
        inner = schema.get("additionalProperties", {})
        return {key: _converted(item, inner) for key, item in value.items()}
    return value


def _json_type(value: Any) -> str:
    kinds: tuple[tuple[Any, str], ...] = (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (type(None), "null"),
        (list, "array"),
        (Mapping, "object"),
    )
    return next((kind for python_type, kind in kinds if isinstance(value, python_type)), type(value).__name__)


def _wanted(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(repr(option) for option in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_wanted(option) for option in schema["anyOf"])
    kind = schema.get("type", "anything")
    if kind == "array" and schema.get("items"):
        return f"a list whose items are each {_wanted(schema['items'])}"
    if kind == "object" and schema.get("additionalProperties"):
        return f"an object whose values are each {_wanted(schema['additionalProperties'])}"
    return _ARTICLES.get(kind, str(kind))


def _shown(value: Any) -> str:
    text = repr(value)
    return f"the {_json_type(value)} {text if len(text) <= 60 else text[:57] + '...'}"


def _signature(spec: ToolSpec) -> str:
    properties, required = spec.parameters["properties"], spec.parameters["required"]
    parts = [
        f"{key} ({_wanted(schema)}{'' if key in required else ', optional'})" for key, schema in properties.items()
    ]
    return ", ".join(parts) or "no arguments"


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and the description of each argument under `Args:`."""
    head, *sections = re.split(r"^(Args|Arguments|Returns|Raises|Yields|Example|Examples|Note):\s*$", text, flags=re.M)
    arguments: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=False):
        if title not in ("Args", "Arguments"):
            continue
        lines = inspect.cleandoc(body).splitlines()
        current = ""
        for line in lines:
            match = re.match(r"(\w+)\s*(?:\([^)]*\))?:\s*(.*)", line)
            if match and not line.startswith(" "):
                current = match[1]
                arguments[current] = match[2]
            elif current and line.strip():
                arguments[current] = f"{arguments[current]} {line.strip()}".strip()
    return " ".join(head.split()), arguments
