r"""A Python session for a policy: cells with shared state in a box, and a pool of boxes that are used again.

A box serves one session at a time. When the session closes, everything inside the box is ended and its folders are
emptied before the next session gets it; a box that cannot show that it is clean is thrown away.

Example:
    async with PythonPool(SandboxLimits(), size=8) as pool:
        session = await pool.lease()
        print((await session.run("x = 6 * 7\nx")).output)   # 42
        await session.close()
"""

import asyncio
import os
import warnings
from dataclasses import replace

from sao_gym.envs.sandboxes.box import Box, MissingModuleError, Reply
from sao_gym.envs.sandboxes.bubblewrap import BoxPlan, can_wall, find_bwrap
from sao_gym.envs.sandboxes.finish import Closing, finish
from sao_gym.envs.sandboxes.limits import CellResult, Guarantees, SandboxLimits
from sao_gym.envs.sandboxes.output import join_cut
from sao_gym.envs.sandboxes.seccomp import filter_program
from sao_gym.errors import ConfigError, SandboxError, SandboxUnavailableError

GRACE_S = 15.0
"""How much longer than its own limit the box may take to answer on a crowded machine."""


class PythonSession:
    """One episode's Python: cells share state until a time-out or a crash, which the output tells."""

    def __init__(self, pool: "PythonPool", box: Box) -> None:
        self._pool = pool
        self._box: Box | None = box
        self._is_cancelled = False
        self._turn = asyncio.Lock()

    async def run(self, code: str, timeout_s: float | None = None) -> CellResult:
        """Run one cell, at most `timeout_s` (the pool's limit by default, which also caps it).

        Cells of one session run one after another. Raises SandboxError if the sandbox itself failed, if the session
        is closed, or if an earlier cell was cancelled.
        """
        async with self._turn:
            if self._box is None or self._is_cancelled:
                raise SandboxError("this Python session is closed; lease another one")
            return await self._run_in(self._box, code, timeout_s)

    async def _run_in(self, box: Box, code: str, timeout_s: float | None) -> CellResult:
        limits = self._pool.limits
        limit_s = min(timeout_s or limits.cell_timeout_s, limits.cell_timeout_s)
        header = {"op": "run", "timeout_s": limit_s}
        try:
            reply = await box.call(header, code.encode("utf-8", "replace"), timeout_s=limit_s + GRACE_S)
        except asyncio.CancelledError:
            self._is_cancelled = True
            raise
        return read_cell(reply, limit_s)

    async def close(self) -> None:
        """End everything that the session started and give the box back; idempotent."""
        box, self._box = self._box, None
        if box is not None:
            await self._pool.give_back(box)


def read_cell(reply: Reply, limit_s: float) -> CellResult:
    """The cell's result as a model sees it; never cut inside a character."""
    try:
        head, tail = reply.body[: reply.header["head"]], reply.body[reply.header["head"] :]
        status, left_out, note = reply.header["status"], int(reply.header["truncated"]), reply.header["note"]
    except (KeyError, TypeError, ValueError) as error:
        raise SandboxError(f"a sandbox broke its protocol ({error!r})") from error
    text, left_out = join_cut(head, tail, left_out)
    if status == "timeout":
        text = _with_note(text, f"[stopped after {limit_s:g} s; the Python state is lost]")
    elif status == "died":
        text = _with_note(text, f"[the Python process ended: {note}; the Python state is lost]")
    return CellResult(text, timed_out=status == "timeout", truncated=left_out, died=status == "died")


def _with_note(text: str, note: str) -> str:
    separator = "\n" if text and not text.endswith("\n") else ""
    return f"{text}{separator}{note}\n"


class PythonPool(Closing):
    """At most `size` boxes, started when first needed and used again.

    `preload` names modules that each box imports once, so that a session has them at the price of a fork;
    `site_packages` shows the installed packages to the sandbox, read-only. All methods belong to one event loop.
    Where namespaces cannot be had, a wall without them is taken, and a warning says what
    it leaves out. Raises SandboxUnavailableError where no isolation can be had, unless `allow_unsafe`.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        size: int = 8,
        allow_unsafe: bool = False,
        *,
        preload: tuple[str, ...] = (),
        site_packages: bool = False,
    ) -> None:
        if size < 1:
            raise ConfigError(f"a pool of {size} sandboxes was asked for; give at least 1")
        self.limits = limits or SandboxLimits()
        self.size = size
        self._plan = BoxPlan(
            limits=self.limits, preload=preload, site_packages=site_packages, drops_root=os.geteuid() == 0
        )
        self._allow_unsafe = allow_unsafe
        self._free = asyncio.Semaphore(size)
        self._idle: list[Box] = []
        self._leased: set[Box] = set()
        self._is_closed = False
        try:
            find_bwrap()
        except SandboxUnavailableError:
            if not self._fall_back():
                raise

    @property
    def guarantees(self) -> Guarantees:
        """Which promises hold; final once the first session has been leased."""
        boxed = self._plan.isolated
        isolated = boxed or self._plan.walled
        has_hard_limit = boxed and (self._plan.drops_root or os.geteuid() != 0)
        return Guarantees(
            isolated=isolated,
            processes_hidden=boxed,
            disk_bounded=boxed,
            network_cut=isolated,
            host_files_hidden=isolated,
            system_calls_filtered=isolated and filter_program() is not None,
            memory="address space of each process; resident sum watched every 0.05 s",
            processes="hard limit, and counted every 0.05 s" if has_hard_limit else "counted every 0.05 s",
        )

    def _fall_back(self) -> bool:
        """Take the next weaker plan and say what no longer holds; false where there is none that is allowed."""
        if self._plan.isolated and can_wall():
            self._plan = replace(self._plan, isolated=False, drops_root=False, walled=True)
        elif self._allow_unsafe and (self._plan.isolated or self._plan.walled):
            self._plan = replace(self._plan, isolated=False, drops_root=False, walled=False)
        else:
            return False
        warnings.warn(" ".join(self.guarantees.warnings), RuntimeWarning, stacklevel=3)
        return True

    async def lease(self) -> PythonSession:
        """Wait for a free box and open a session in it. Raises SandboxError, SandboxUnavailableError."""
        if self._is_closed:
            raise SandboxError("this pool of sandboxes is closed")
        await self._free.acquire()
        try:
            box = self._idle.pop() if self._idle else await self._start()
        except BaseException:
            self._free.release()
            raise
        self._leased.add(box)
        return PythonSession(self, box)

    async def _start(self) -> Box:
        try:
            return await Box.start(self._plan)
        except MissingModuleError:
            raise
        except SandboxUnavailableError:
            if self._plan.drops_root:  # a container's root may not be allowed to change users
                self._plan = replace(self._plan, drops_root=False)
            elif not self._fall_back():
                raise
        return await self._start()

    async def give_back(self, box: Box) -> None:
        """Take a box back from a session: clean, or out of the world. Finishes even when cancelled."""
        if box in self._leased:
            await finish(self._recycle(box))

    async def _recycle(self, box: Box) -> None:
        try:
            if not self._is_closed and await box.reset() and not self._is_closed:
                self._idle.append(box)
            else:
                await box.close()
        finally:
            self._leased.discard(box)
            self._free.release()

    async def close(self) -> None:
        """End every box, leased ones too; idempotent."""
        self._is_closed = True
        boxes = [*self._idle, *self._leased]
        self._idle.clear()
        await finish(_close_all(boxes))


async def _close_all(boxes: list[Box]) -> None:
    await asyncio.gather(*(box.close() for box in boxes))
