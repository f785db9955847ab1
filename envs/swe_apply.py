"""A patch is put into the sandbox in which it will be judged: as SWE-Bench applies it, less what the rules leave out.

Example:
    applied = await apply_patch(box, said, patch, folder="/tmp/.sao-gym-1f")
    applied.problem, applied.left_out
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from sao_gym.envs.sandboxes.spec import ShellSandbox
from sao_gym.envs.swe_rules import SETTINGS, changes_the_tests, left_out, modules_of, named_by
from sao_gym.envs.swe_task import SweTask
from sao_gym.errors import GradingError
from sao_gym.protocols import ExecResult

APPLY_S = 300.0
APPLY = r"""
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
cd PLACE && git cat-file -e BASE^{commit} || exit 90
git grep -q pytest11 HEAD -- setup.py setup.cfg pyproject.toml && echo plugin
: >FOLDER/stamp
read -rt 0.02 <> <(:)
tries=("git apply --verbose" "git apply --verbose --3way" "git apply --verbose --reject" "patch --batch --forward --fuzz=5 -p1 -i")
for try in "${!tries[@]}"; do
  (( try )) && { git checkout -- . ; git clean -fdq; } >&2
  if (( try == 3 )) && grep -qE '^(---|\+\+\+|rename to|copy to) .*(\.\./|\.git/)' FOLDER/patch.diff; then continue; fi
  if ${tries[try]} FOLDER/patch.diff >&2; then echo applied; break; fi
done
if (( try == 3 )) && git apply --check --reverse FOLDER/patch.diff 2>/dev/null; then echo applied; fi
printf '%s\0' ''
find . -path ./.git/objects -prune -o -cnewer FOLDER/stamp -not -type d -printf '%P\0'
git ls-files -d -z
"""
"""The commands, their order and what is done between them are those of swebench 5.0.2."""
BASE_NAMES = "git ls-tree -r -z --name-only HEAD"
PUT_BACK = r"""
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*' GIT_LITERAL_PATHSPECS=1
mapfile -d '' -t paths
for path in "${paths[@]}"; do rm -rf -- "$path" || exit 1; done
for path in "${paths[@]}"; do
  if git cat-file -e "HEAD:$path" 2>/dev/null; then git checkout -q HEAD -- "$path" || exit 1; fi
done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What became of a patch: why it was not applied, or nothing; what was put back; whether the base has a plugin.

    `is_runner` says that the repository is a test runner, or a plugin of one.
    """

    problem: str = ""
    left_out: tuple[str, ...] = ()
    is_runner: bool = False


async def apply_patch(box: ShellSandbox, said: SweTask, patch: bytes, folder: str) -> Applied:
    """Apply a patch and put back what it is applied without.

    Raises SandboxError, and GradingError where the sandbox does not hold the instance's repository.
    """
    if not patch.endswith(b"\n"):
        patch += b"\n"  # a client's strip() takes it, and git refuses such a patch
    await box.write(f"{folder}/patch.diff", patch)
    command = APPLY.replace("PLACE", shlex.quote(said.workdir)).replace("FOLDER", folder)
    done = await box.exec(command.replace("BASE", shlex.quote(said.base_commit)), cwd="/", timeout_s=APPLY_S)
    if done.exit_code == 90:
        raise GradingError(
            f"the image of {said.instance_id} has no commit {said.base_commit[:12]} in {said.workdir}: {_end(done)}"
        )
    head, _, listed = done.stdout.partition("\0")
    if "applied" not in head.split():
        why = f"not done within {APPLY_S:g} s" if done.timed_out else _end(done)
        return Applied(problem=f"the patch does not apply: {why}")
    if done.truncated or "\ufffd" in listed:
        return Applied(problem="the patch changes too many files, or files whose names are no text")
    names = [name for name in listed.split("\0") if name]
    if any(name.startswith(".git/") and name != ".git/index" for name in names):
        return Applied(problem="the patch changes the repository's own records")
    base = await _base_modules(box, said)
    is_runner = bool({"src/_pytest", "_pytest"} & base) or "plugin" in head.split()
    named = named_by(said.eval_script, said.test_patch)
    reasons = {name: left_out(name, named, base) for name in names if not name.startswith(".git/")}
    back = [name for name, why in reasons.items() if why]
    back += [name for name in SETTINGS if name in names and await _is_about_tests(box, said, name)]
    if back:
        data = "\0".join(back).encode() + b"\0"
        undone = await box.exec(PUT_BACK, cwd=said.workdir, stdin=data, timeout_s=APPLY_S)
        if undone.exit_code:
            return Applied(problem=f"what a patch is applied without could not be put back: {_end(undone)}")
    return Applied(left_out=tuple(sorted(back)), is_runner=is_runner)


async def _base_modules(box: ShellSandbox, said: SweTask) -> set[str]:
    listed = await box.exec(_in_git(BASE_NAMES), cwd=said.workdir, timeout_s=APPLY_S)
    if listed.exit_code:
        raise GradingError(f"the files of {said.instance_id} could not be listed: {_end(listed)}")
    return modules_of(listed.stdout.split("\0"))


async def _is_about_tests(box: ShellSandbox, said: SweTask, name: str) -> bool:
    """Whether a settings file's part about tests was changed."""
    before = await box.exec(_in_git(f"git show HEAD:{name}"), cwd=said.workdir, timeout_s=APPLY_S)
    after = await box.exec(["cat", name], cwd=said.workdir, timeout_s=APPLY_S)
    texts: Sequence[str] = [each.stdout if each.exit_code == 0 else "" for each in (before, after)]
    return changes_the_tests(*texts)


def _in_git(command: str) -> str:
    return f"git -c safe.directory='*' {command.removeprefix('git ')}"


def _end(done: ExecResult) -> str:
    """The last lines of what went wrong, on one line."""
    return " ".join(done.stderr.split())[-300:] or f"exit code {done.exit_code}"
