"""What an agent program on this machine asks of its sandbox: commands, and files to read and write.

Invariant: nothing that is asked for touches this machine. What the sandbox refuses is told to the program; a sandbox that
is gone ends the episode.
"""

import base64
import binascii
import shlex
from collections.abc import Mapping
from typing import Any

from sao_gym.envs.sandboxes.spec import ShellSandbox
from sao_gym.envs.scaffolds.shell import STATE
from sao_gym.errors import ConfigError, SandboxError
from sao_gym.worker_process import AskRefusedError

MOST_S = 3600.0
MOST_BYTES = 32 << 20


class SandboxBridge:
    """Answers a worker's asks from one sandbox; call it with what is asked and the particulars."""

    def __init__(self, box: ShellSandbox) -> None:
        self._box = box
        self.commands = 0

    async def __call__(self, do: str, given: Mapping[str, Any]) -> Any:
        """Raises AskRefusedError, and SandboxError where the sandbox is gone."""
        try:
            if do == "exec":
                return await self._exec(given)
            if do == "read":
                data = await self._box.read(str(given["path"]))
                if len(data) > MOST_BYTES:
                    raise AskRefusedError(f"the file has {len(data)} bytes, more than {MOST_BYTES}")
                return {"data": base64.b64encode(data).decode()}
            if do == "write":
                await self._box.write(str(given["path"]), _bytes_of(given))
                return {}
        except (SandboxError, ConfigError) as error:
            if await self._box.is_alive():
                raise AskRefusedError(str(error)) from error
            raise SandboxError(str(error)) from error
        raise AskRefusedError(f"a sandbox knows no {do!r}")

    async def _exec(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """`merged`: stderr goes where stdout goes. `entered`: in the shell state that the environment has prepared."""
        self.commands += 1
        script, cwd = str(given["command"]), given.get("cwd") or self._box.spec.workdir
        if "\0" in script:
            raise AskRefusedError("a command cannot hold a NUL character")
        if given.get("entered"):
            script = f"[[ -f {STATE} ]] && . {STATE} 2>/dev/null\ncd -- {shlex.quote(cwd)}\n{script}"
        done = await self._box.exec(
            f"exec 2>&1\n{script}" if given.get("merged") else script,
            timeout_s=min(float(given.get("timeout_s", 60.0)), MOST_S),
            cwd=cwd,
            env=given.get("env") or {},
            stdin=str(given.get("stdin") or "").encode("utf-8", "replace"),
        )
        names = ("stdout", "stderr", "exit_code", "timed_out")
        return {name: getattr(done, name) for name in names}


def _bytes_of(given: Mapping[str, Any]) -> bytes:
    if "data" not in given:
        return str(given.get("text", "")).encode("utf-8", "replace")
    try:
        return base64.b64decode(str(given["data"]), validate=True)
    except binascii.Error as error:
        raise AskRefusedError("what is to be written is no base64") from error
