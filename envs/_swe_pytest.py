"""The witness: a pytest plugin that notes what became of each test, put into the sandbox as text; see `swe_witness`.

It is loaded before any code under test, keeps what it needs to itself, and notes for each phase of a test whether an
exception came out of it, whatever later becomes of the report. Every record carries a code that chains it to the one
before, under a key that its own file held only until it was loaded. It runs on every Python from 3.6 and pytest from 3.
"""

import hashlib
import hmac
import json
import os
import sys
import unittest
from types import FunctionType
from typing import Any, Dict, List, Optional, Tuple

import pytest

KEY, OUT = b"@KEY@", "@OUT@"
RUNNER = ("_pytest.", "pluggy.", "unittest.case", "unittest.suite", "unittest.result")


def _functions() -> Dict[Tuple[str, str], Tuple[Any, FunctionType, Any]]:
    """(owner, name) -> function, for the functions and methods that make up the test runner."""
    found: Dict[Tuple[str, str], Tuple[Any, FunctionType, Any]] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(RUNNER):
            continue
        for key, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value.__module__ == name:
                found[(name, key)] = (module, value, value.__code__)
            elif isinstance(value, type) and value.__module__ == name:
                for part, method in list(vars(value).items()):
                    if isinstance(method, FunctionType):
                        found[(name + "." + key, part)] = (value, method, method.__code__)
    return found


class Notes:
    """Records, each chained to the one before."""

    def __init__(self) -> None:
        self._key, self._last, self._pid = KEY, b"", os.getpid()
        self._digest, self._write, self._dumps, self._getpid = hmac.new, os.write, json.dumps, os.getpid
        self._open, self._close = os.open, os.close
        self._hash = hashlib.sha256

    def add(self, **record: Any) -> None:
        if self._getpid() != self._pid:
            return
        text = self._dumps(record, sort_keys=True).encode()
        code = self._digest(self._key, self._last + text, self._hash).hexdigest().encode()
        self._last = code
        fd = self._open(OUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # a test may close all that is open
        self._write(fd, code + b" " + text + b"\n")
        self._close(fd)


class Witness:
    """The plugin."""

    def __init__(self, notes: Notes) -> None:
        self._notes, self._before = notes, _functions()
        self._skips = (pytest.skip.Exception, unittest.SkipTest)
        self._xfail = pytest.xfail.Exception
        self._here = os.getcwd() + os.sep

    def _is_ours(self, path: str) -> bool:
        """Whether a file is code under test: in the tree, and neither a test nor a helper of tests."""
        path = os.path.realpath(path)
        inside = path[len(self._here) :] if path.startswith(self._here) else ""
        return bool(inside) and "test" not in inside and "site-packages" not in inside

    def _kind(self, call: Any) -> str:
        info = call.excinfo
        if info is None:
            return "ok"
        if not issubclass(info.type, (self._xfail,) + self._skips):
            return "failed"
        frames, trace = [], info.tb
        while trace is not None:
            frames.append(trace.tb_frame.f_code.co_filename)
            trace = trace.tb_next
        own = [name for name in frames if os.sep + "_pytest" + os.sep not in name]
        if own and self._is_ours(own[-1]):
            return "failed"
        return "xfail" if issubclass(info.type, self._xfail) else "skipped"

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        kind = self._kind(call)
        outcome = yield
        if kind == "ok":
            kind = self._kind(call)  # a unittest's exception is put there by pytest itself
        if kind == "failed" and call.excinfo is not None:
            marked = getattr(item, "get_closest_marker", getattr(item, "get_marker", lambda name: None))("xfail")
            if marked is not None and hasattr(outcome.get_result(), "wasxfail"):
                kind = "xfail"
        self._notes.add(at=call.when, kind=kind, test=self._name(item))

    @staticmethod
    def _name(item: Any) -> str:
        relative = getattr(item.config, "cwd_relative_nodeid", None)
        return str(relative(item.nodeid) if relative else item.nodeid)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> Any:
        yield
        self._notes.add(at="end", exit=int(exitstatus), changed=self._changed(session.config)[:5])

    def _changed(self, config: Any) -> List[str]:
        found = []
        for (owner, name), (holder, function, code) in self._before.items():
            now = vars(holder).get(name)
            if now is function and function.__code__ is code:
                continue
            inner = getattr(now, "__code__", None)
            if inner is None or self._is_ours(inner.co_filename):
                found.append(owner + "." + name)
        for name in ("protocol", "makereport", "call", "setup", "teardown", "logreport"):
            found += self._hooks(config, "pytest_runtest_" + name)
        for name in ("pytest_pyfunc_call", "pytest_collection_modifyitems", "pytest_report_teststatus"):
            found += self._hooks(config, name)
        return found

    def _hooks(self, config: Any, name: str) -> List[str]:
        caller: Any = getattr(config.hook, name, None)
        listed = caller.get_hookimpls() if hasattr(caller, "get_hookimpls") else []
        codes = [getattr(entry.function, "__code__", None) for entry in listed]
        return [name for code in codes if code is not None and self._is_ours(code.co_filename)]


_witness: Optional[Witness] = None


def pytest_configure(config: Any) -> None:
    """Begin, in the first session of the process alone: tests of a runner start others inside it."""
    global _witness, KEY
    if _witness is None and KEY and NOTES is not None:
        os.environ.pop("PYTEST_ADDOPTS", None)
        _witness = Witness(NOTES)
        is_spread = getattr(config.option, "dist", "no") not in ("no", None) or hasattr(config, "workerinput")
        NOTES.add(at="begin", spread=bool(is_spread))
        if not is_spread:
            for path in (__file__, globals().get("__cached__")):
                if path and os.path.exists(path):
                    os.unlink(path)
        KEY = b""
        config.pluginmanager.register(_witness)


NOTES: Optional[Notes] = None if OUT.startswith("@") else Notes()
