"""A patch judged as SWE-Bench judges it: in a fresh sandbox, by the instance's own script, read by swebench.

Resolved is 1, else 0. What the patch did is never more than 0: one that does not apply, tests that hang, that end the
shell, or whose output was meddled with. What the sandbox, the image or the reader did is an error and never 0.

swebench reads what the tests printed, and code under test can print. So a verdict counts only if nothing speaks against
it (`swe_doubts`): its output is cut by marks that no code has seen, what decides how tests run is as the base commit
has it, and where pytest runs the tests, a witness of ours saw them pass.

Example:
    graded = await judge_patch(SweTask.of(task), patch, sandboxes)
    graded.score.passed, graded.report.statuses
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sao_gym.envs.sandboxes.finish import finish
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits, ShellSandbox
from sao_gym.envs.swe_apply import Applied, apply_patch
from sao_gym.envs.swe_doubts import doubts
from sao_gym.envs.swe_report import FAIL_TO_PASS, PASS_TO_PASS, REPORTS, SweReport, ask_report
from sao_gym.envs.swe_script import Cut, EvalScript
from sao_gym.envs.swe_task import SweTask
from sao_gym.envs.swe_witness import Seen, Witness
from sao_gym.errors import GradingError
from sao_gym.stream import Score

METHOD = "swebench"
TIMEOUT_S = 1800.0
"""How long an evaluation may take; swebench's own limit."""
LIMITS = ShellLimits(memory_bytes=8192 * MIB, processes=4096, cpus=2.0, disk_bytes=8192 * MIB, output_bytes=32 * MIB)
LOG_BYTES = 256 * 1024
PATCH_BYTES = 32 * MIB
RUN = 'cp -- "$BASH" FOLDER/shell; chmod 0111 FOLDER/shell; exec FOLDER/shell -c ". FOLDER/eval.sh" bash 2>&1'
"""A bash that nobody may read: the kernel then lets no code under test look into its memory, where the marks are."""


class SandboxSource(Protocol):
    """Where sandboxes come from."""

    async def lease(self, spec: SandboxSpec | None = None) -> ShellSandbox:
        """Wait for a place and start a sandbox."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SweGrade:
    """A verdict with all that it rests on.

    `report` is swebench's, `log` what the script printed, at most `LOG_BYTES` of it. `left_out` are files of the patch
    that it was applied without, `doubts` what speaks against a verdict of swebench's.
    """

    score: Score
    report: SweReport = field(default_factory=SweReport)
    log: str = ""
    left_out: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def info(self) -> Mapping[str, Any]:
        """All of it as JSON values, for an episode's `info`."""
        return {
            "resolved": self.score.passed,
            "report": dict(self.report.whole),
            "log": self.log,
            "left_out": list(self.left_out),
            "doubts": list(self.doubts),
        }


async def grade_patch(
    said: SweTask,
    patch: bytes,
    sandboxes: SandboxSource,
    *,
    limits: ShellLimits = LIMITS,
    timeout_s: float = TIMEOUT_S,
    fractions: bool = False,
) -> Score:
    """The score of `judge_patch` alone."""
    graded = await judge_patch(said, patch, sandboxes, limits=limits, timeout_s=timeout_s, fractions=fractions)
    return graded.score


async def judge_patch(
    said: SweTask,
    patch: bytes,
    sandboxes: SandboxSource,
    *,
    limits: ShellLimits = LIMITS,
    timeout_s: float = TIMEOUT_S,
    fractions: bool = False,
    prepare: Callable[[ShellSandbox], Awaitable[object]] | None = None,
) -> SweGrade:
    """Apply a patch (a diff from the base commit, bytes as they are) in a sandbox of its own and run the tests.

    `prepare` makes the sandbox what the agent's was, for images whose repository holds later commits: code under test
    could take the fix from there. With `fractions` the value is the mean of the parts of FAIL_TO_PASS and PASS_TO_PASS that pass, 0 where doubted.
    Raises SandboxError and GradingError where no verdict can be had, ConfigError without swebench.
    """
    if not patch.strip():
        return refused("the patch is empty")
    if len(patch) > PATCH_BYTES:
        return refused(f"the patch has {len(patch)} bytes; at most {PATCH_BYTES} are applied")
    spec = SandboxSpec(image=said.image, workdir=said.workdir, label=f"{said.instance_id[:50]}-grade", limits=limits)
    starting = asyncio.ensure_future(asyncio.to_thread(REPORTS.get))  # it imports while the tests run
    box = await sandboxes.lease(spec)
    try:
        if prepare is not None:
            await prepare(box)
        folder = f"/tmp/.sao-gym-{secrets.token_hex(8)}"
        applied = await apply_patch(box, said, patch, folder)
        if applied.problem:
            return refused(applied.problem, applied)
        cut, log, seen = await _run(box, said, folder, timeout_s, applied)
    finally:
        await finish(box.close())
    await starting
    return await _judged(said, cut, log, seen, applied, fractions)


async def _run(
    box: ShellSandbox, said: SweTask, folder: str, timeout_s: float, applied: Applied
) -> tuple[Cut | str, str, Seen | None]:
    """What the script printed, cut, or why it says nothing; the whole; and what the witness saw."""
    witness = Witness.of(said.eval_script, folder) if not applied.is_runner else None
    before = witness.lines if witness else ""
    script = EvalScript.of(
        said.eval_script, secrets.token_hex(16), place=said.workdir, folder=folder, before_tests=before
    )
    if witness:
        await box.write(f"{folder}/witness.py", witness.program.encode())
    await box.write(f"{folder}/eval.sh", script.text.encode())
    done = await box.exec(RUN.replace("FOLDER", folder), cwd=said.workdir, timeout_s=timeout_s)
    log = bounded(done.stdout + done.stderr)
    cut = script.cut(done.stdout)
    if not cut.began:
        raise GradingError(f"the evaluation script of {said.instance_id} did not start: {log[-300:]}")
    if done.timed_out:
        return f"the tests did not end within {timeout_s:g} s", log, None
    if done.truncated:
        return f"the tests printed {done.truncated} bytes more than are read", log, None
    return cut, log, (await witness.read(box) if witness else None)


async def _judged(
    said: SweTask, cut: Cut | str, log: str, seen: Seen | None, applied: Applied, fractions: bool
) -> SweGrade:
    if isinstance(cut, str):
        return refused(cut, applied, log)
    report = await ask_report(spec_fields(said), cut.log, seen.log if seen else "")
    if not report.is_read:
        return refused("the tests' output takes too long to read", applied, log)
    against = doubts(said, cut, report, seen, is_runner=applied.is_runner)
    resolved = report.resolved and not against
    parts = {
        kind: (len(report.passed(kind)), len(names))
        for kind, names in ((FAIL_TO_PASS, said.fail_to_pass), (PASS_TO_PASS, said.pass_to_pass))
    }
    value = float(resolved)
    if fractions and not against:
        value = sum(passed / total if total else 1.0 for passed, total in parts.values()) / len(parts)
    shown = ", ".join(f"{passed} of {total} {kind}" for kind, (passed, total) in parts.items())
    detail = f"{'resolved' if resolved else 'not resolved'}: {shown} pass"
    if against:
        detail = f"not resolved: {against[0]} (swebench reads {shown})"
    elif not report.is_parsed:
        detail = f"not resolved: the tests left no results; {' '.join(cut.prelude.split())[-200:]}"
    if applied.left_out:
        detail += f"; applied without {', '.join(applied.left_out[:5])}"
    score = Score(value=value, passed=resolved, detail=detail, method=METHOD, grader_version=METHOD)
    return SweGrade(score=score, report=report, log=log, left_out=applied.left_out, doubts=against)


def refused(why: str, applied: Applied | None = None, log: str = "") -> SweGrade:
    """A patch that cannot be resolved, and why."""
    score = Score(value=0.0, passed=False, detail=f"not resolved: {why}", method=METHOD, grader_version=METHOD)
    return SweGrade(score=score, log=log, left_out=applied.left_out if applied else ())


def spec_fields(said: SweTask) -> Mapping[str, Any]:
    """What swebench's TestSpec says of an instance, but its script."""
    return {
        "instance_id": said.instance_id,
        "image": said.image,
        "repo": said.repo,
        "version": said.version,
        "FAIL_TO_PASS": list(said.fail_to_pass),
        "PASS_TO_PASS": list(said.pass_to_pass),
        "log_parser": said.log_parser,
        "eval_type": said.eval_type,
    }


def bounded(log: str) -> str:
    """The beginning and the end of a log."""
    if len(log) <= LOG_BYTES:
        return log
    half = LOG_BYTES // 2
    return f"{log[:half]}\n[{len(log) - 2 * half} characters left out]\n{log[-half:]}"
