"""Environments of one kind for many episodes: they share their tasks, and their sandboxes where they have any."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from sao_gym.errors import ConfigError
from sao_gym.loops import on_background
from sao_gym.messages import ToolSpec
from sao_gym.protocols import Task, TaskSet
from sao_gym.registry import make, resolve, spec


class Environments:
    """Makes environments by name. `size`: how many episodes run at a time, hence how many sandboxes they share.

    `judging` is what environments with a judge share: it, and how far training has come; None for others.
    One is made at once, to see that it can be: raises RegistryError, ConfigError, SandboxUnavailableError, TaskFileError.
    """

    def __init__(self, name: str, options: dict[str, Any], *, size: int) -> None:
        self.name = name
        self._options = dict(options)
        entry = spec(name).entry_point
        kind = resolve(entry) if isinstance(entry, str) else entry
        make_sandboxes = getattr(kind, "make_sandboxes", None)
        self._sandboxes: Any = None
        if make_sandboxes is not None and "sandboxes" not in options and _accepts(kind, "sandboxes"):
            self._sandboxes = make_sandboxes(size, **_taken(make_sandboxes, options))
            self._options["sandboxes"] = self._sandboxes
        self._program: Any = None
        if (make_program := getattr(kind, "make_scaffold", None)) is not None:
            name = options.get("scaffold", inspect.signature(kind).parameters["scaffold"].default)
            self._program = make_program(name, size) if isinstance(name, str) else None
        if self._program is not None:
            self._options["scaffold"] = self._program
        make_judging = getattr(kind, "make_judging", None)
        self.judging: Any = None if make_judging is None else options.get("judging")
        self._owns_judging = make_judging is not None and self.judging is None
        if make_judging is not None and self._owns_judging:
            self.judging = self._options["judging"] = make_judging(size, **_taken(make_judging, options))
        self.tasks, self.tools = self._read()

    def make(self) -> gymnasium.Env[Any, Any]:
        """One more environment."""
        return make(self.name, **self._options)

    def _read(self) -> tuple[TaskSet, tuple[ToolSpec, ...]]:
        probe = self.make()
        tasks: TaskSet | Sequence[Task] | None = getattr(probe.unwrapped, "tasks", None)
        tools: tuple[ToolSpec, ...] = tuple(getattr(probe.unwrapped, "tools", ()))
        probe.close()
        if not tasks:
            raise ConfigError(f"environment {self.name!r} holds no tasks; give --tasks FILE")
        if isinstance(tasks, Sequence):
            return resolve("sao_gym.tasks.base:ListTaskSet")(self.name, tasks), tools
        return tasks, tools

    async def check(self, task: Task | None = None) -> None:
        """Lease one sandbox and give it back. Raises SandboxUnavailableError where isolation cannot be had.

        An agent program's environment is made where there is none, which takes minutes; ConfigError if it cannot be.

        It is one for `task`, else for the first task, where tasks name images: there may be no other image.
        """
        if self._sandboxes is not None:
            await on_background(self._lease_once((task or self.tasks[0]).info))
        if self._program is not None and hasattr(self._program, "prepare"):
            await self._program.prepare()

    async def _lease_once(self, info: Mapping[str, Any]) -> None:
        image = str((info.get("swe") or info).get("image") or self._options.get("image") or "")
        takes = "spec" in inspect.signature(self._sandboxes.lease).parameters
        wanted = [resolve("sao_gym.envs.sandboxes.spec:SandboxSpec")(image=image)] if image and takes else []
        session = await self._sandboxes.lease(*wanted)
        await session.close()

    async def close(self) -> None:
        """End the shared sandboxes and judge; idempotent. The environments themselves are closed by who made them."""
        if self._program is not None:
            await self._program.close()
        if self._sandboxes is not None:
            await on_background(self._sandboxes.close())
        if self._owns_judging:
            await on_background(self.judging.close())


def _taken(make_shared: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the environment's options that decide what its environments share."""
    return {
        name: options[name] for name in inspect.signature(make_shared).parameters if name != "size" and name in options
    }


def _accepts(kind: Any, name: str) -> bool:
    parameters = inspect.signature(kind).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
