"""Work in a terminal: a folder in a sandbox, an instruction, and a command that says whether the work is done.

Invariants: the verdict is the check's exit code, 1 for 0 and else 0; a sandbox that failed is an error and never 0. The
check runs after the agent has stopped, by default in a fresh sandbox to which the work folder alone is carried: its
processes, its PATH, its profile and the programs that it changed stay behind. The check's own files are put in then,
and files that decide how tests run are put back as the task has them.

Example:
    env = make("terminal", backend="local")
    (system, user), info = env.reset(seed=0)
    env.step(Message.assistant(tool_calls=(ToolCall(id="c0", name="bash", arguments={"command": "ls"}),)))
"""

import asyncio
import hashlib
import re
import secrets
import shlex
import tarfile
from collections.abc import Sequence
from pathlib import Path

from sao_gym.envs.sandboxes.spec import ShellLimits, ShellSandbox
from sao_gym.envs.sandboxes.tree import Tree, laid_over, matches, read_tar, tar_of
from sao_gym.envs.scaffolds.names import SHELL
from sao_gym.envs.scaffolds.shell import ShellView
from sao_gym.envs.shell_env import END_ALL, SandboxSource, ShellEnv, last_words
from sao_gym.envs.terminal_task import COMPILED, TerminalTask
from sao_gym.errors import ConfigError, SandboxError, TaskFileError
from sao_gym.loops import on_background
from sao_gym.messages import Message, ToolCall
from sao_gym.protocols import ExecResult, Scaffold, Task, TaskSet
from sao_gym.stream import Score

SYSTEM_PROMPT = (
    "You work in a Linux sandbox without network through two tools, bash and edit. Look before you change, check what "
    "you did, and answer without a tool call when the task is done: that ends your work."
)
MAX_TURNS = 50
PACK_S = 120.0
SHOWN_CHARS = 2000
CHECK_ENV = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONNOUSERSITE": "1", "PYTHONHASHSEED": "0", "CI": "1"}
UNPACK = "tar -xf - --no-same-owner"


class TerminalEnv(ShellEnv):
    """A `ToolEnv` with the tools `bash` and `edit` over a sandbox of its own; see `TerminalTask` for what a task says.

    `backend` is local, docker, e2b or `package.module:function`; `sandboxes` is shared and outlives the environment.
    `image` stands in for tasks that name none. `folders` is where packed folders of tasks are, if they were moved.
    `scaffold`: see `ShellEnv`.
    """

    def __init__(
        self,
        tasks: TaskSet | Sequence[Task],
        *,
        backend: str = "local",
        image: str = "",
        max_turns: int | None = MAX_TURNS,
        system_prompt: str = SYSTEM_PROMPT,
        sandboxes: SandboxSource | None = None,
        limits: ShellLimits | None = None,
        view: ShellView | None = None,
        folders: str | None = None,
        scaffold: str | Scaffold = SHELL,
    ) -> None:
        super().__init__(
            tasks,
            backend=backend,
            max_turns=max_turns,
            system_prompt=system_prompt,
            sandboxes=sandboxes,
            limits=limits,
            view=view,
            scaffold=scaffold,
        )
        self._image = image
        self._folders = Path(folders) if folders else None
        self._said: TerminalTask | None = None
        self._carried: Tree | None = None

    async def setup(self, task: Task) -> None:
        """Start the episode's sandbox and put the task's folder in. Raises TaskFileError, SandboxError."""
        super().setup(task)
        self._said, self._carried = TerminalTask.of(task, self._folders), None
        await on_background(self._begin(self._said))

    async def _begin(self, said: TerminalTask) -> None:
        self._box = await self._sandboxes.lease(self._spec(said.image or self._image, said.workdir, self.task.id))
        if problem := await self._put(self._box, said.tree, said.workdir):
            raise SandboxError(f"a task's files could not be put into a sandbox: {problem}")

    async def _put(self, box: ShellSandbox, tree: Tree, workdir: str) -> str:
        """Unpack a tree in the work folder; says why it cannot be there, or nothing. Raises SandboxError."""
        data = await asyncio.to_thread(tar_of, tree)
        done = await box.exec(UNPACK, cwd=workdir, timeout_s=PACK_S, stdin=data)
        return last_words(done) if done.exit_code else ""

    @staticmethod
    def demonstrate(task: Task) -> tuple[Message, ...]:
        """What a policy that knows the answer says: the patch through bash, then the end. Raises TaskFileError."""
        if not task.answer:
            raise TaskFileError(f"task {task.id!r} has no answer (a patch), so it cannot be demonstrated")
        call = ToolCall(id="call_0", name="bash", arguments={"command": apply_patch_command(task.answer)})
        return Message.assistant(tool_calls=(call,)), Message.assistant("Done.")

    async def grade(self) -> Score:
        """Check the work as it stands: 1 or 0. Raises SandboxError where no verdict can be had."""
        return await on_background(self._grade())

    async def _grade(self) -> Score:
        said, box = self._said, self._box
        if said is None:
            raise ConfigError("there is no episode to grade; call reset() first")
        carried = await self._carry(said)
        if isinstance(carried, str):
            return Score(value=0.0, passed=False, detail=carried, method="check")
        if box is None or not said.check.in_place:
            await self._end()  # first, so that one place is enough
            box = self._box = await self._sandboxes.lease(
                self._spec(said.image or self._image, said.workdir, f"{self.task.id}-check")
            )
        if problem := await self._put(box, carried, said.workdir):  # the task's own files could be put in
            return Score(
                value=0.0, passed=False, detail=f"the work folder cannot be carried: {problem}", method="check"
            )
        result = await box.exec(
            said.check.command,
            cwd=said.workdir,
            timeout_s=said.check.timeout_s,
            env=CHECK_ENV,
            stdin=said.check.stdin.encode("utf-8", "surrogateescape"),
        )
        return verdict(result, said)

    async def _carry(self, said: TerminalTask) -> Tree | str:
        """What is checked, or why there is nothing; kept, as a budget may cut a check short and ask again."""
        if self._carried is None:
            packed = await self._packed(await self._get_box(), said)
            made = packed if isinstance(packed, str) else await asyncio.to_thread(prepared, packed, said)
            if isinstance(made, str):
                return made
            self._carried = made
        return self._carried

    async def _packed(self, box: ShellSandbox, said: TerminalTask) -> bytes | str:
        """The work folder as an archive, or why the agent left none; everything that it left running is ended."""
        name = f"/tmp/.sao-gym-{secrets.token_hex(8)}"
        if said.check.in_place:
            ended = await box.exec(END_ALL, timeout_s=PACK_S, cwd="/")
            if ended.exit_code:
                return "what the agent left running could not be ended"
        place = shlex.quote(said.workdir)
        clear = f" && find {place} -mindepth 1 -delete" if said.check.in_place else ""
        pack = f"tar -C {place} --hard-dereference -cf {name} . && chmod 600 {name}{clear}"
        done = await box.exec(pack, timeout_s=PACK_S, cwd="/")
        if done.exit_code:
            return f"the work folder could not be packed: {last_words(done)}"
        try:
            return await box.read(name)
        except SandboxError as error:
            if await box.is_alive():
                return f"the work folder could not be packed: {error}"
            raise


def prepared(packed: bytes, said: TerminalTask) -> Tree | str:
    """What the check sees of an agent's work folder; a sentence for an archive that is none."""
    try:
        work = read_tar(packed)
    except (tarfile.TarError, ValueError, OSError, EOFError):
        return "the work folder could not be unpacked"
    dropped = (*said.protect, *COMPILED)
    original = {place: entry for place, entry in said.tree.items() if matches(place, said.protect)}
    put = laid_over(original, said.check.tree)
    stems = {place.removesuffix(".py") for place in put if place.endswith(".py")}
    own = {
        place: entry
        for place, entry in work.items()
        if not matches(place, dropped) and not any(up in stems for up in modules_above(place))
    }
    return laid_over(own, put)


def modules_above(place: str) -> list[str]:
    """What a path, or a folder above it, would be imported as: a package or a compiled module goes before `name.py`."""
    parts = place.split("/")
    stems = [*parts[:-1], parts[-1].partition(".")[0]]
    return ["/".join([*parts[:count], stems[count]]) for count in range(len(parts))]


def verdict(result: ExecResult, said: TerminalTask) -> Score:
    """The check's result as a score."""
    output = result.stdout + result.stderr
    shown = output.strip()[-SHOWN_CHARS:]
    if result.timed_out:
        why = f"the check did not end within {said.check.timeout_s:g} s"
    elif result.exit_code:
        why = f"the check failed with exit code {result.exit_code}"
    elif said.check.expect and not re.search(said.check.expect, output, re.M):
        why = f"the check ended with 0, but its output lacks {said.check.expect!r}"
    else:
        return Score(value=1.0, passed=True, detail=f"the check passed: {shown}", method="check")
    return Score(value=0.0, passed=False, detail=f"{why}: {shown}", method="check")


def apply_patch_command(patch: str) -> str:
    """A bash command that applies a unified diff in the folder that it runs in, with git or patch."""
    name = f"/tmp/.sao-gym-{hashlib.sha256(patch.encode()).hexdigest()[:8]}.diff"
    body = shlex.quote(patch if patch.endswith("\n") else patch + "\n")
    return (
        f"printf %s {body} >{name}; if command -v patch >/dev/null; then patch -p1 --batch <{name}; "
        f"else git apply -p1 {name}; fi; code=$?; rm -f {name}; exit $code"
    )
