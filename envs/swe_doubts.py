"""What speaks against a verdict that swebench read from a log: signs that the log does not tell what happened.

Each doubt makes a resolved instance unresolved. None arises from an honest patch: they are about the script's own
marks, about what no installation changes, and about tests that the log says passed and the witness did not see pass.
"""

from sao_gym.envs.swe_report import FAIL_TO_PASS, PASS_TO_PASS, SweReport
from sao_gym.envs.swe_script import END, EXIT_CODE, START, Cut, meddled
from sao_gym.envs.swe_task import SweTask
from sao_gym.envs.swe_witness import Seen


def doubts(
    said: SweTask, cut: Cut, report: SweReport, seen: Seen | None, *, is_runner: bool = False
) -> tuple[str, ...]:
    """Sentences, the gravest first; nothing where the verdict stands."""
    found = []
    if not cut.is_whole:
        found.append("the script did not come to the end of the tests")
    if cut.changed is None:
        found.append("what the installation changed could not be looked at")
    elif path := meddled(cut.changed, said.workdir, is_runner=is_runner):
        found.append(f"the installation changed {path}")
    if any(word in cut.section for word in (START, END, EXIT_CODE)):
        found.append("the tests' output holds marks of the evaluation")
    if seen is not None:
        passed = [name for kind in (FAIL_TO_PASS, PASS_TO_PASS) for name in report.passed(kind)]
        found += seen.against(passed, report)
    return tuple(found)
