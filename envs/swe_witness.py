"""What was seen of the tests from inside the test runner, by a plugin of our own: a second account beside the log.

Where pytest runs the tests (also below tox), a plugin from outside the tree writes to a file of its own what came out
of each test, so a test that never passed cannot be said to have passed by printing that it did. The records are
chained by a key; see `_swe_pytest` for how far that reaches. Other runners have no witness: their log stands alone.

Example:
    witness = Witness.of(said.eval_script, "/tmp/.sao-gym-1f")
    witness.lines, witness.program          # bash before the test command, and the plugin's text
    seen = await witness.read(box)
    seen.against(("tests/test_m.py::test_add",), report)
"""

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sao_gym.envs.sandboxes.spec import ShellSandbox
from sao_gym.envs.swe_report import SweReport
from sao_gym.errors import SandboxError

LINES = r"""
for sao_site in "$(dirname -- "$(command -v python)")"/../lib/python3*/site-packages; do
  cp -- FOLDER/witness.py "$sao_site/NAME.py"
done
rm -f FOLDER/witness.py
export PYTEST_ADDOPTS="-p NAME ${PYTEST_ADDOPTS:-}"
"""
COMMAND = re.compile(r"^(?:\w+=\S+ +)*(?:python\S* +-m +)?(pytest|py\.test|tox)\b", re.M)
ORDER = ("PASSED", "SKIPPED", "XFAIL", "FAILED")
"""Which of several lines about one name counts: the last, as in pytest's own summary."""
STATUS = {"ok": "PASSED", "skipped": "SKIPPED", "xfail": "XFAIL", "failed": "FAILED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What the witness noted: `statuses` name -> PASSED, SKIPPED, XFAIL or FAILED.

    `problem` says why its account cannot be used against it, or what it lacks; `is_silent` that it is not to be asked.
    """

    statuses: tuple[tuple[str, str], ...] = ()
    problem: str = ""
    is_silent: bool = False

    @property
    def log(self) -> str:
        """The same in the form of pytest's summary, for the same parser that reads the log."""
        rank = {status: at for at, status in enumerate(ORDER)}
        lines = sorted(self.statuses, key=lambda pair: rank[pair[1]])
        return "".join(f"{status} {name}\n" for name, status in lines)

    def against(self, passed: Sequence[str], report: SweReport) -> tuple[str, ...]:
        """Doubts about tests that the log says passed. Names that are no test's (`[100%]`) are passed over."""
        if self.is_silent:
            return ()
        if self.problem:
            return (self.problem,)
        missed = [name for name in passed if "::" in name and not _is_seen(name, report)]
        return (f"{missed[0]} passed in the log, but was not seen to pass ({len(missed)} such)",) if missed else ()


def _is_seen(name: str, report: SweReport) -> bool:
    good = ("PASSED", "XFAIL", "SKIPPED")
    if name in report.seen:
        return report.seen[name] in good
    is_cut = name.count("[") > name.count("]")  # swebench takes such names for beginnings
    return is_cut and any(key.startswith(name) and status in good for key, status in report.seen.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A plugin to put in, and the lines that make the test command load it."""

    lines: str
    program: str
    path: str
    key: bytes
    is_direct: bool

    @classmethod
    def of(cls, script: str, folder: str) -> "Witness | None":
        """For a script whose test command is pytest, by itself or through tox; else None."""
        commands = COMMAND.findall(script)
        if not commands:
            return None
        name, key, path = f"_{secrets.token_hex(8)}", secrets.token_hex(24), f"{folder}/{secrets.token_hex(8)}"
        text = Path(__file__).with_name("_swe_pytest.py").read_text(encoding="utf-8")
        return cls(
            lines=LINES.replace("FOLDER", folder).replace("NAME", name),
            program=text.replace("@KEY@", key).replace("@OUT@", path),
            path=path,
            key=key.encode(),
            is_direct=commands[-1] != "tox",
        )

    async def read(self, box: ShellSandbox) -> Seen:
        """What was noted. Raises SandboxError where the sandbox is gone."""
        try:
            data = await box.read(self.path)
        except SandboxError:
            if not await box.is_alive():
                raise
            data = b""
        return self.seen(data)

    def seen(self, data: bytes) -> Seen:
        """Records, checked; whatever stands there never raises."""
        found: dict[str, str] = {}
        last, begun, ended = b"", False, False
        for line in data.split(b"\n")[:-1]:
            code, _, text = line.partition(b" ")
            if not hmac.compare_digest(code, hmac.new(self.key, last + text, hashlib.sha256).hexdigest().encode()):
                return Seen(problem="the witness's notes of the tests were changed")
            last = code
            record = json.loads(text)
            if record["at"] == "begin":
                begun = True
                if record["spread"]:
                    return Seen(is_silent=True)
            elif record["at"] == "end":
                ended = True
                if record["changed"]:
                    return Seen(problem=f"the test runner was changed while it ran: {record['changed'][0]}")
            else:
                _add(found, record["test"], record["kind"], record["at"])
        if not begun:
            return Seen(problem="pytest was not seen to run", is_silent=not self.is_direct)
        if not ended:
            return Seen(problem="the test run was not seen to end")
        return Seen(statuses=tuple(found.items()))


def _add(found: dict[str, str], test: str, kind: str, at: str) -> None:
    """One phase of a test: it passed if its call did, unless nothing was called because the set-up ended it."""
    status = STATUS.get(kind, "FAILED")
    counts = at == "call" or status in ("SKIPPED", "XFAIL") or (status == "FAILED" and test not in found)
    if counts and found.get(test) != "PASSED":
        found[test] = status
