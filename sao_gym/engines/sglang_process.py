"""SGLang servers that a run starts itself, in an environment of their own, and that end with it whatever happens."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sao_gym.engines.sglang_http import Http
from sao_gym.errors import ConfigError, EngineError
from sao_gym.protocols import Clock

_log = logging.getLogger(__name__)
POLL_S = 0.5
END_S = 40.0
RESTARTS, BACK_OFF_S = 5, 1.0
"""How often a server that ends by itself is started again, and the wait before the first time, doubled each time."""
LOG_LINES = 15
ALWAYS = (
    "--skip-tokenizer-init",  # ids in, ids out
    "--skip-server-warmup",
    "--incremental-streaming-output",  # else a stream repeats itself with every chunk
    "--sampling-defaults",
    "openai",  # a checkpoint's own generation config is never inherited
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """What one server is started with. `gpus` are those it sees, one a tensor-parallel rank; none: what it finds."""

    python: str
    model: Path
    log: Path
    args: Sequence[str] = ()
    gpus: Sequence[int] = ()

    def words(self, port: int) -> list[str]:
        """The command line."""
        ranks = ["--tp-size", str(len(self.gpus))] if len(self.gpus) > 1 else []
        place = ["--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(port)]
        return [self.python, "-m", "sglang.launch_server", *place, *ALWAYS, *ranks, *self.args]


class OwnServer:
    """A server of this run at `url`. Its keeper ends it when this process ends, however that comes about."""

    def __init__(self, command: ServerCommand) -> None:
        self._port = _free_port()
        self._command = command
        self.url = f"http://127.0.0.1:{self._port}"
        self.log = command.log
        self.restarts = 0
        self._is_closed = False
        command.log.parent.mkdir(parents=True, exist_ok=True)
        self._keeper = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        environment = dict(os.environ)
        if self._command.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._command.gpus))
        keeper = Path(__file__).with_name("sglang_keeper.py")
        try:
            return subprocess.Popen(
                [sys.executable, str(keeper), str(self.log), *self._command.words(self._port)],
                stdin=subprocess.PIPE,
                start_new_session=True,
                env=environment,
            )
        except OSError as error:
            raise ConfigError(f"no SGLang server could be started: {error}") from error

    async def watch(self, clock: Clock) -> None:
        """Start the server again, at the same address, whenever it ends by itself; returns when that was too often.

        What it then holds is its checkpoint: the engine gives it the weights before it serves.
        """
        while self.restarts < RESTARTS:
            while self._keeper.poll() is None:
                await clock.sleep(POLL_S)
            if self._is_closed:
                return
            self.restarts += 1
            _log.warning("the server %s ended by itself and is started again (%d)", self.url, self.restarts)
            await clock.sleep(BACK_OFF_S * 2 ** (self.restarts - 1))
            if not self._is_closed:
                self._release()
                self._keeper = self._start()

    async def wait_ready(self, timeout_s: float, clock: Clock) -> None:
        """Raises ConfigError, with the end of the log, for a server that ends or is not ready in time."""
        http = Http(clock)
        until = clock.now() + timeout_s
        try:
            while not await _is_ready(self.url, http):
                if self._keeper.poll() is not None:
                    raise ConfigError(
                        f"the SGLang server ended while it started; its log is {self.log}:\n{self.tail()}"
                    )
                if clock.now() > until:
                    raise ConfigError(f"waited {timeout_s:g} s for an SGLang server; see {self.log}:\n{self.tail()}")
                await clock.sleep(POLL_S)
        finally:
            await http.close()

    def tail(self) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:])
        except OSError:
            return ""

    async def close(self) -> None:
        """End the server; idempotent."""
        self._is_closed = True
        self._release()
        try:
            await asyncio.to_thread(self._keeper.wait, END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()

    def _release(self) -> None:
        """Let go of the keeper, which ends the server where it still lives."""
        if self._keeper.stdin is not None and not self._keeper.stdin.closed:
            self._keeper.stdin.close()


async def _is_ready(url: str, http: Http) -> bool:
    try:
        await http.call(f"{url}/ready", timeout_s=10.0)
    except (EngineError, TimeoutError):
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
