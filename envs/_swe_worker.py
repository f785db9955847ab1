r"""The report server: one process that has swebench in memory and forks a child for each question.

A child has limits that end it, so that a log made to be slow to read costs its own question alone. Questions and
answers are lines of JSON:

    {"id": 1, "row": {...}, "log": "...", "seen": "", "cpu_s": 30, "memory_bytes": 2000000000}
    {"id": 1, "report": {...}, "statuses": {"tests/test_m.py::test_add": "PASSED"}, "seen": {}}
    {"id": 2, "limit": true}
    {"id": 3, "error": "KeyError: 'parse_log_none'"}
"""

import contextlib
import importlib
import importlib.util
import json
import os
import resource
import signal
import sys
import tempfile
import types
from collections.abc import Mapping
from typing import Any


def load() -> None:
    """Make swebench's reader importable without the rest of its harness, whose import takes seconds and 170 MB."""
    spec = importlib.util.find_spec("swebench")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("No module named 'swebench'")
    package = types.ModuleType("swebench.harness")
    package.__path__ = [f"{folder}/harness" for folder in spec.submodule_search_locations]
    sys.modules.setdefault("swebench.harness", package)
    importlib.import_module("swebench.harness.grading")


def report(question: Mapping[str, Any]) -> dict[str, Any]:
    """What swebench says of one log. Raises what it raises."""
    from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT
    from swebench.harness.grading import get_eval_report
    from swebench.harness.log_parsers import PARSER_REGISTRY
    from swebench.types import TestSpec

    row = question["row"]
    log = str(question["log"])
    spec = TestSpec(**row, eval_script_list=[])  # as make_test_spec reads a row; a log alone is read here
    with tempfile.NamedTemporaryFile("w", suffix=".log", encoding="utf-8", errors="replace") as file:
        file.write(log)
        file.flush()
        whole = get_eval_report(
            test_spec=spec,
            prediction={"instance_id": spec.instance_id, "model_name_or_path": "policy", "model_patch": "x"},
            test_log_path=file.name,
            include_tests_status=True,
        )
    section = log.split(START_TEST_OUTPUT)[-1].split(END_TEST_OUTPUT)[0]
    read = PARSER_REGISTRY[spec.log_parser]
    return {"report": whole[spec.instance_id], "statuses": read(section, spec), "seen": read(question["seen"], spec)}


def answer(question: Mapping[str, Any]) -> dict[str, Any]:
    """`report` in a child with limits."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(ours)
            resource.setrlimit(resource.RLIMIT_AS, (question["memory_bytes"],) * 2)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, question["cpu_s"])
            try:
                said = report(question)
            except MemoryError:
                said = {"limit": True}
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            with open(theirs, "wb") as pipe:  # noqa: PTH123
                pipe.write(json.dumps(said).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    with open(ours, "rb") as pipe:  # noqa: PTH123
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == -signal.SIGPROF:
        return {"limit": True}
    if status or not data:
        return {"error": f"the reader of a log ended with status {status}"}
    said = json.loads(data)
    return said if isinstance(said, dict) else {"error": "the reader of a log broke its protocol"}


def main() -> None:
    """Import, then answer until stdin ends."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        load()
    except ImportError as error:
        out.write(json.dumps({"id": 0, "missing": str(error)}).encode() + b"\n")
        out.flush()
        return
    with contextlib.suppress(BrokenPipeError):
        for line in sys.stdin.buffer:
            question = json.loads(line)
            out.write(json.dumps({"id": question["id"], **answer(question)}).encode() + b"\n")
            out.flush()


if __name__ == "__main__":
    main()
