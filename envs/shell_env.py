"""What environments with a shell in a sandbox share: one leased sandbox per episode, the tools over it, its end.

Example:
    class MyEnv(ShellEnv):
        async def _begin(self, task):
            self._box = await self._sandboxes.lease(self._spec("my-image", "/work"))
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from sao_gym.budgets import Budgets
from sao_gym.envs.leased import LeasedEnv
from sao_gym.envs.sandboxes.shared import SharedSandboxes
from sao_gym.envs.sandboxes.spec import MIB, SandboxSpec, ShellLimits, ShellSandbox
from sao_gym.envs.scaffolds.names import SHELL, make_scaffold
from sao_gym.envs.scaffolds.shell import Shell, ShellView
from sao_gym.errors import ConfigError, SandboxError
from sao_gym.loops import on_background, run_blocking
from sao_gym.protocols import ExecResult, Scaffold, Task, TaskSet
from sao_gym.stream import Outcome

LIMITS = ShellLimits(output_bytes=MIB)
END_ALL = r"""
[[ $(</proc/$PPID/stat) =~ \)\ .\ 1\  ]] || exit 0
SECONDS=0
for (( pass = 0; SECONDS < 30; pass++ )); do
  victims=()
  for p in /proc/[0-9]*; do
    p=${p#/proc/}
    [[ $p == 1 || $p == "$$" || $p == "$PPID" ]] && continue
    [[ $(<"/proc/$p/stat") =~ \)\ [ZX]\  ]] || victims+=("$p")
  done 2>/dev/null
  (( ${#victims[@]} )) || exit 0
  kill -STOP "${victims[@]}" 2>/dev/null
  (( pass % 3 == 2 )) && kill -KILL "${victims[@]}" 2>/dev/null
done
exit 1
"""
"""Ends all that runs in a sandbox but the shell that takes commands, where that is process 1 of the sandbox.

By time and not by passes: a killed process is there until it is scheduled once more, however long that takes."""


class SandboxSource(Protocol):
    """Where an environment gets its sandboxes. Both methods run on the background loop."""

    async def lease(self, spec: SandboxSpec | None = None) -> ShellSandbox:
        """Wait for a place and start a sandbox."""
        ...

    async def close(self) -> None:
        """End every sandbox; idempotent."""
        ...


class ShellEnv(LeasedEnv):
    """A `LeasedEnv` with the tools `bash` and `edit` over a sandbox of its own, which a subclass leases in `setup`.

    `backend` is local, docker, e2b or `package.module:function`; `sandboxes` is shared and outlives the environment.
    `scaffold` names who works: `shell`, the tools of this environment, which is then stepped; or an agent program that
    drives the episode itself, by its name (openhands, mini, `package.module:Class`) or one that is shared and outlives this.
    """

    _sandboxes: SandboxSource

    def __init__(
        self,
        tasks: TaskSet | Sequence[Task],
        *,
        backend: str,
        max_turns: int | None,
        system_prompt: str,
        sandboxes: SandboxSource | None,
        limits: ShellLimits | None,
        view: ShellView | None,
        scaffold: str | Scaffold = SHELL,
    ) -> None:
        self._owns_program = isinstance(scaffold, str)
        self._program = make_scaffold(scaffold, 1) if isinstance(scaffold, str) else scaffold
        self._shell = Shell(self._get_box, view)
        super().__init__(tasks, tools=self._shell.tools, max_turns=max_turns, system_prompt=system_prompt)
        self._limits = limits or LIMITS
        self._box: ShellSandbox | None = None
        self._hold(sandboxes, lambda: self.make_sandboxes(1, backend=backend))

    @classmethod
    def make_sandboxes(cls, size: int, *, backend: str = "local") -> SharedSandboxes:
        """Sandboxes to be shared by many environments of this kind, at most `size` in use and one more in readiness."""
        return SharedSandboxes(size, backend=backend, warm=int(size > 1))

    @classmethod
    def make_scaffold(cls, name: str, size: int) -> Scaffold | None:
        """An agent program to be shared by many environments of this kind; None for `shell`. Raises ConfigError."""
        return make_scaffold(name, size)

    @property
    def drives_itself(self) -> bool:
        """Whether an agent program drives the episodes. See `SelfDriven`."""
        return self._program is not None

    async def play(self, base_url: str, budgets: Budgets) -> Outcome:
        """Let the agent program work on the episode's task in its sandbox. See `Scaffold.run`."""
        if self._program is None:
            raise ConfigError(f"{type(self).__name__} has no agent program; step it, or give scaffold=")
        turns = min((n for n in (self.max_turns, budgets.max_turns) if n is not None), default=None)
        box = await self._get_box()
        return await self._program.run(self.task, box, base_url, replace(budgets, max_turns=turns))

    def close(self) -> None:
        """As any environment's, and the agent program if it is this environment's own; idempotent."""
        super().close()
        if self._program is not None and self._owns_program:
            run_blocking(self._program.close())

    async def close_async(self) -> None:
        """`close` for a caller that has other episodes to go on with."""
        await super().close_async()
        if self._program is not None and self._owns_program:
            await on_background(self._program.close())

    async def _get_box(self) -> ShellSandbox:
        if self._box is None:
            raise SandboxError("the sandbox of this episode is gone")
        return self._box

    def _spec(self, image: str, workdir: str, label: str) -> SandboxSpec:
        name = re.sub(r"[^A-Za-z0-9_.-]", "-", label)[:60]
        return SandboxSpec(image=image, workdir=workdir, label=name, limits=self._limits)

    async def _end(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()


def last_words(result: ExecResult) -> str:
    """The end of what a command said, on one line."""
    if result.timed_out:
        return "it took too long"
    return " ".join((result.stderr or result.stdout).split())[-300:] or f"exit code {result.exit_code}"
