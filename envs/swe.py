"""Mend a repository: the issue as it was written, the repository as it was then, and the project's own later tests.

Invariants: an agent sees no commit later than the issue's, and nothing of the tests that will judge it. However an
episode ends, by an answer, a budget or the clock, what the work tree then is becomes a patch, with a time of its own,
and the patch alone is judged, in a sandbox in which no agent was. A sandbox that failed is an error and never 0.

Example:
    env = SweEnv(tasks, backend="docker")
    (system, user), info = env.reset(seed=0)
    env.step(Message.assistant(tool_calls=(ToolCall(id="c0", name="bash", arguments={"command": "git log -1"}),)))
    *_, info = env.step("Done.")
    env.patch.text, env.episode_info["swe"]["signals"]
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sao_gym.core import Reply
from sao_gym.envs.sandboxes.finish import finish
from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.sandboxes.spec import MIB, ShellLimits, ShellSandbox
from sao_gym.envs.scaffolds.names import SHELL
from sao_gym.envs.scaffolds.shell import ShellView
from sao_gym.envs.shell_env import END_ALL, SandboxSource, ShellEnv, last_words
from sao_gym.envs.swe_files import FILES_S, FilesError
from sao_gym.envs.swe_grading import METHOD, TIMEOUT_S, judge_patch
from sao_gym.envs.swe_patch import Patch, PatchLimits, Work, take_work, tests_of, write_patch
from sao_gym.envs.swe_repository import KIND, PREPARE_S, Repository, prepare
from sao_gym.envs.swe_signals import edit_signals, signals
from sao_gym.envs.swe_task import SweTask
from sao_gym.envs.terminal import apply_patch_command
from sao_gym.errors import ConfigError, SandboxError, TaskFileError
from sao_gym.loops import Caller, on_background
from sao_gym.messages import Message, ToolCall
from sao_gym.protocols import Scaffold, Task, TaskSet
from sao_gym.stream import Score

SYSTEM_PROMPT = (
    "You mend a software project. Its repository is at {workdir} in a Linux sandbox without network, as it was when the "
    "issue below was written, and what it needs is installed. You work through two tools, bash and edit. Find out why it "
    "happens, change the project's own code so that what the issue asks for holds, and check it. Tests of the project "
    "that you cannot see will judge your work; files of those tests are set back first, so changing them gains nothing. "
    "Nothing has to be committed: when you answer without a tool call, the work tree as it then is counts, and your work "
    "ends."
)
MAX_TURNS = 300
LIMITS = ShellLimits(
    memory_bytes=8192 * MIB, processes=2048, cpus=2.0, disk_bytes=8192 * MIB, output_bytes=MIB, startup_timeout_s=600.0
)
_ACTIVATES = re.compile(r"(?:source|\.) \S*activate\S*|conda activate \S+")


class SweEnv(ShellEnv):
    """A `ToolEnv` over a task's repository, see `SweTask`; `patch` holds what the last episode's agent made.

    `backend` is docker, local, e2b or `package.module:function`; `sandboxes` is shared and outlives the environment.
    `limits` bound the agent's sandbox, `patch_limits` what is taken out of it. With `fractions` the score is the share
    of tests that pass. `scaffold` names who works: shell, openhands or mini; see `ShellEnv`.
    """

    grades_apart = True

    def __init__(
        self,
        tasks: TaskSet | Sequence[Task],
        *,
        backend: str = "docker",
        scaffold: str | Scaffold = SHELL,
        max_turns: int | None = MAX_TURNS,
        system_prompt: str = SYSTEM_PROMPT,
        sandboxes: SandboxSource | None = None,
        limits: ShellLimits | None = None,
        view: ShellView | None = None,
        patch_limits: PatchLimits | None = None,
        eval_timeout_s: float = TIMEOUT_S,
        fractions: bool = False,
    ) -> None:
        if not eval_timeout_s > 0:
            raise ConfigError(f"eval_timeout_s is {eval_timeout_s!r}; give seconds above 0")
        super().__init__(
            tasks,
            backend=backend,
            max_turns=max_turns,
            system_prompt=system_prompt,
            sandboxes=sandboxes,
            limits=limits or LIMITS,
            view=view,
            scaffold=scaffold,
        )
        self._patch_limits, self._eval_timeout_s, self._fractions = patch_limits, eval_timeout_s, fractions
        self._clear()

    def _clear(self) -> None:
        self._said: SweTask | None = None
        self._repository: Repository | None = None
        self._work: Work | None = None
        self._tests: frozenset[str] = frozenset()
        self._verdict: Mapping[str, Any] = {}
        self.patch: Patch | None = None
        self.signals: Counter[str] = Counter()

    @classmethod
    def make_sandboxes(cls, size: int, *, backend: str = "docker") -> SharedSandboxes:
        """Sandboxes for `size` agents and as many grades beside them; none in readiness, as each task has its own image."""
        return SharedSandboxes(2 * size, backend=backend)

    @property
    def grading_s(self) -> float:
        """Most seconds that a grade may take: the patch, then the tests."""
        return self._eval_timeout_s + 2 * PREPARE_S

    @property
    def sandbox(self) -> ShellSandbox | None:
        """The episode's sandbox, for a scaffold that works in it by itself; None between episodes."""
        return self._box

    @property
    def episode_info(self) -> Mapping[str, Any]:
        """What is kept with the episode, as JSON values, under `swe`: its patch, signs, repository and report."""
        if self._said is None:
            return {}
        said: dict[str, Any] = {"instance_id": self._said.instance_id, "signals": dict(self.signals)}
        if self._repository is not None:
            names = ("head", "objects", "removed", "tags", "has_old_fix")
            said["repository"] = {name: getattr(self._repository, name) for name in names}
        if self.patch is not None:
            said |= {"patch": self.patch.text, "files": self.patch.files, "left_out": dict(self.patch.left_out)}
        return {"swe": {**said, **({"grade": dict(self._verdict)} if self._verdict else {})}}

    # ---- the beginning

    async def setup(self, task: Task) -> None:
        """Start a sandbox of the task's image and take the future out of it. Raises TaskFileError, SandboxError."""
        super().setup(task)
        self._clear()
        self._said = SweTask.of(task)
        self._tests = tests_of(self._said)
        await on_background(self._begin(self._said))

    async def _begin(self, said: SweTask) -> None:
        self._box = await self._lease(said, "agent")
        self._repository = await prepare(self._box, said)
        if command := activation(said.eval_script):
            done = await self._shell.source(command)
            if done.exit_code or done.timed_out:
                raise SandboxError(f"the environment of {said.instance_id} cannot be entered: {last_words(done)}", KIND)

    async def _lease(self, said: SweTask, role: str) -> ShellSandbox:
        return await self._sandboxes.lease(self._spec(said.image, said.workdir, f"{said.instance_id[:50]}-{role}"))

    def opening(self, task: Task) -> tuple[Message, ...]:
        """The system prompt, which says where the repository is, and the issue."""
        system = self.system_prompt.replace("{workdir}", SweTask.of(task).workdir)
        return (*((Message.system(system),) if system else ()), Message.user(task.prompt))

    @staticmethod
    def demonstrate(task: Task) -> tuple[Message, ...]:
        """What a policy that knows the answer says: the gold patch through bash, then the end. Raises TaskFileError."""
        if not task.answer:
            raise TaskFileError(f"task {task.id!r} has no answer (a gold patch), so it cannot be demonstrated")
        call = ToolCall(id="call_0", name="bash", arguments={"command": apply_patch_command(task.answer)})
        return Message.assistant(tool_calls=(call,)), Message.assistant("Done.")

    # ---- the work

    async def _respond(self, call: Caller, message: Message) -> Reply:
        reply = await super()._respond(call, message)
        found: Counter[str] = Counter()
        for tool_call, answer in zip(message.tool_calls, reply.messages, strict=False):
            found += self._signs(tool_call, answer.content)
        self.signals += found
        return replace(reply, info={**reply.info, "signals": dict(found)})

    def _signs(self, call: ToolCall, output: str) -> Counter[str]:
        command = call.arguments.get("command")
        if call.problem is not None or self._said is None or not isinstance(command, str):
            return Counter()
        if call.name == "bash":
            return signals(command, output, project=self._said.repo, tests=self._tests)
        return edit_signals(call.arguments, tests=self._tests)

    # ---- the end

    async def grade(self) -> Score:
        """Take the patch and judge it: 1 where it resolves the issue, else 0. Raises SandboxError, GradingError."""
        return await on_background(self._grade())

    async def _grade(self) -> Score:
        if self._said is None or self._repository is None:
            raise ConfigError("there is no episode to grade; call reset() first")
        try:
            if self.patch is None:
                self.patch = await self._take(self._said, self._repository)
        except FilesError as error:
            return Score(value=0.0, passed=False, detail=f"no patch: {error}", method=METHOD)
        graded = await judge_patch(
            self._said,
            self.patch.data,
            self._sandboxes,
            timeout_s=self._eval_timeout_s,
            fractions=self._fractions,
            prepare=partial(prepare, said=self._said) if self._repository.removed else None,
        )
        self._verdict = graded.info
        return graded.score

    async def _take(self, said: SweTask, repository: Repository) -> Patch:
        """The patch. Its parts are kept: a budget may cut a grade short and ask again."""
        if self._work is None:
            box = await self._get_box()
            await box.exec(END_ALL, timeout_s=FILES_S, cwd="/")  # what still runs would go on changing files
            self._work = await take_work(box, said, repository, self._patch_limits)
        await self._end()  # first, so that one place is enough
        if not self._work.tree and not self._work.gone:
            return Patch(left_out=self._work.left_out)
        fresh = await self._lease(said, "patch")
        try:
            return await write_patch(fresh, said, self._work)
        finally:
            await finish(fresh.close())


def activation(eval_script: str) -> str:
    """The commands by which an evaluation script enters the project's environment, before it does anything else."""
    lines = []
    for line in eval_script.splitlines():
        if line.startswith("cd "):
            break
        if _ACTIVATES.fullmatch(line.strip()):
            lines.append(line.strip())
    return " && ".join(lines)
